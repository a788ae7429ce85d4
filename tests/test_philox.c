/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/lastgood.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* kat_vectors of the Random123 distribution, philox4x32 10. */
static void known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t out[4];
        lg_philox4x32(cases[i].counter, cases[i].key, out);
        assert_memory_equal(out, cases[i].out, sizeof out);
        /* in place */
        uint32_t c[4] = {cases[i].counter[0], cases[i].counter[1], cases[i].counter[2], cases[i].counter[3]};
        lg_philox4x32(c, cases[i].key, c);
        assert_memory_equal(c, cases[i].out, sizeof c);
    }
}

static void stream_follows_the_counter(void **state)
{
    (void)state;
    const uint64_t seed = UINT64_C(0x0123456789abcdef), stream = UINT64_C(0xfedcba9876543210);
    const uint32_t key[2] = {0x89abcdef, 0x01234567};
    const uint64_t start = (UINT64_C(1) << 36) + 6; /* block 2^34 + 1: both halves of the block count */
    lg_rng rng = {seed, stream, start};
    for (uint64_t w = start; w < start + 20; w++) {
        uint64_t block = w / 4;
        const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0x76543210, 0xfedcba98};
        uint32_t out[4];
        lg_philox4x32(counter, key, out);
        assert_int_equal(rng.position, w);
        assert_int_equal(lg_rng_u32(&rng), out[w % 4]);
    }
    assert_int_equal(rng.seed, seed);
    assert_int_equal(rng.stream, stream);
}

static void frozen_values(void **state)
{
    (void)state;
    lg_rng rng = {1, 2, 3};
    assert_int_equal(lg_rng_u32(&rng), 0x0a0afddd);
    assert_int_equal(lg_rng_u32(&rng), 0xb7b4c173);
    assert_int_equal(lg_rng_u64(&rng), UINT64_C(0x44541f91db04b052));
    rng = (lg_rng){UINT64_C(0x0123456789abcdef), UINT64_C(0xfedcba9876543210), (UINT64_C(1) << 36) + 11};
    assert_true(lg_rng_f64(&rng) == 0.61903158793137658);
}

static void wide_numbers_take_two_words(void **state)
{
    (void)state;
    for (uint64_t start = 0; start < 8; start++) { /* at 3 and 7 over a block's end */
        lg_rng words = {5, 6, start}, wide = words, real = words;
        uint64_t low = lg_rng_u32(&words), high = lg_rng_u32(&words);
        uint64_t both = low | high << 32;
        assert_int_equal(lg_rng_u64(&wide), both);
        assert_int_equal(wide.position, start + 2);
        assert_true(lg_rng_f64(&real) == (double)(both >> 11) / 9007199254740992.0);
        assert_int_equal(real.position, start + 2);
    }
}

static void a_saved_position_goes_on(void **state)
{
    (void)state;
    lg_rng rng = {77, 3, 0};
    for (int i = 0; i < 30; i++) {
        lg_rng_u32(&rng);
    }
    lg_rng resumed = {77, 3, rng.position};
    for (int i = 0; i < 30; i++) {
        assert_int_equal(lg_rng_u32(&rng), lg_rng_u32(&resumed));
    }
    rng.position = UINT64_MAX; /* wraps, does not trap */
    lg_rng_u64(&rng);
    assert_int_equal(rng.position, 1);
}

static void reals_are_uniform(void **state)
{
    (void)state;
    enum { N = 200000 };
    lg_rng rng = {2026, 1, 0};
    double sum = 0, squares = 0, lag = 0, before = 0.5;
    for (int i = 0; i < N; i++) {
        double x = lg_rng_f64(&rng);
        assert_true(x >= 0.0 && x < 1.0);
        sum += x - 0.5;
        squares += (x - 0.5) * (x - 0.5);
        lag += (x - 0.5) * (before - 0.5);
        before = x;
    }
    /* five standard deviations each */
    assert_true(fabs(sum / N) < 5 * sqrt(1.0 / 12 / N));
    assert_true(fabs(squares / N - 1.0 / 12) < 5 * sqrt(1.0 / 180 / N));
    assert_true(fabs(lag / N) < 5.0 / 12 / sqrt(N));
}

static void streams_and_seeds_are_apart(void **state)
{
    (void)state;
    lg_rng a = {1, 1, 0}, b = {1, 2, 0}, c = {2, 1, 0};
    int same = 0;
    for (int i = 0; i < 1000; i++) {
        uint32_t x = lg_rng_u32(&a), y = lg_rng_u32(&b), z = lg_rng_u32(&c);
        same += (x == y) + (x == z) + (y == z);
    }
    assert_int_equal(same, 0);
}

#define NAMED(text, fn)                   \
    {                                     \
        .name = (text), .test_func = (fn) \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        NAMED("philox4x32-10 gives the known answers of Random123", known_answers),
        NAMED("word w of a stream is word w % 4 of block w / 4, seed the key, stream the counter's upper half",
              stream_follows_the_counter),
        NAMED("the values of a stream are frozen", frozen_values),
        NAMED("64-bit integers and reals take two words, low one first", wide_numbers_take_two_words),
        NAMED("K09: a stream goes on from a saved position", a_saved_position_goes_on),
        NAMED("reals are uniform in [0, 1) and not correlated", reals_are_uniform),
        NAMED("streams and seeds are apart", streams_and_seeds_are_apart),
    };
    return cmocka_run_group_tests_name("philox", tests, NULL, NULL);
}
