/* SPDX-License-Identifier: Apache-2.0 */
#include <lastgood/lastgood.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static lg_sampler make(uint64_t samples, uint64_t seed)
{
    lg_sampler s;
    assert_int_equal(lg_sampler_init(&s, samples, seed, 0, NULL), LG_OK);
    return s;
}

/* ------------------------------------------------------------------ the order */

static void check_bijection(uint64_t samples, uint64_t seed, uint64_t epoch)
{
    lg_sampler s = make(samples, seed);
    uint8_t *seen = calloc(samples, 1);
    for (uint64_t i = 0; i < samples; i++) {
        uint64_t x = lg_sampler_at(&s, epoch, i);
        if (x >= samples || seen[x]) {
            print_error("samples %llu seed %llu epoch %llu position %llu\n", (unsigned long long)samples,
                        (unsigned long long)seed, (unsigned long long)epoch, (unsigned long long)i);
            fail();
        }
        seen[x] = 1;
    }
    free(seen);
}

static void every_sample_comes_once(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 600; n++) {
        check_bijection(n, n, 0);
        check_bijection(n, UINT64_MAX - n, UINT64_MAX);
    }
    const uint64_t seeds[] = {0, 1, UINT64_C(1) << 32, UINT64_C(0x8000000000000000)};
    for (size_t i = 0; i < 4; i++) {
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            check_bijection(97, seeds[i], epoch);
            check_bijection(1 << 12, seeds[i], epoch);
            check_bijection((1 << 12) + 1, seeds[i], epoch);
        }
    }
    check_bijection(100003, 5, 5);
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void no_two_positions_share_a_sample(void **state)
{
    (void)state;
    enum { N = 20000 };
    const uint64_t seed = 4711;
    uint64_t *got = malloc(N * sizeof *got);
    lg_rng rng = {seed, 0, 0};
    for (int round = 0; round < 8; round++) {
        uint64_t samples = (lg_rng_u64(&rng) >> (16 + 2 * round)) + N * 4; /* up to 2^48, down to 2^34 */
        samples = samples > LG_SAMPLER_MAX ? LG_SAMPLER_MAX : samples;
        lg_sampler s = make(samples, lg_rng_u64(&rng));
        uint64_t start = lg_rng_u64(&rng) % (samples - N), stride = 1 + (uint64_t)(round % 2) * 3;
        start = start / 4;
        for (uint64_t i = 0; i < N; i++) {
            got[i] = lg_sampler_at(&s, (uint64_t)round, start + i * stride);
            if (got[i] >= samples) {
                print_error("round %d of seed %llu\n", round, (unsigned long long)seed);
                fail();
            }
        }
        qsort(got, N, sizeof *got, compare_u64);
        for (int i = 1; i < N; i++) {
            assert_true(got[i - 1] != got[i]);
        }
    }
    free(got);
}

/* Values at 0, n/3, n/2, n-1, from an implementation in another language. */
static void the_order_is_frozen(void **state)
{
    (void)state;
    static const struct {
        uint64_t samples, seed, epoch, at[4];
    } golden[] = {
        {1, 0, 0, {0, 0, 0, 0}},
        {2, 1, 0, {1, 1, 0, 0}},
        {5, 7, 3, {2, 3, 0, 4}},
        {10, 42, 0, {5, 8, 7, 9}},
        {10, 42, 1, {2, 8, 1, 4}},
        {600, 3735928559, 2, {320, 427, 177, 228}},
        {4096, 1, 1, {2368, 2305, 3786, 649}},
        {4097, 1, 1, {1900, 1244, 3731, 1427}},
        {1000000, 1234, 0, {760628, 793663, 690134, 861099}},
        {UINT64_C(1) << 32, UINT64_MAX, 5, {1678668384, 4238611012, 3216446889, 1022199916}},
        {(UINT64_C(1) << 47) + 1, 99, UINT64_MAX, {63135508418816, 20592596227900, 49010338739756, 50859103043155}},
        {UINT64_C(1) << 48, 0, 1, {33722429520396, 26406832547094, 72257766654489, 148328493644604}},
    };
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
        uint64_t n = golden[i].samples;
        lg_sampler s = make(n, golden[i].seed);
        const uint64_t at[4] = {0, n / 3, n / 2, n - 1};
        for (int j = 0; j < 4; j++) {
            assert_int_equal(lg_sampler_at(&s, golden[i].epoch, at[j]), golden[i].at[j]);
        }
    }
}

/* ----------------------------------------------------------------- statistics */

/* (chi-square - degrees) / standard deviation; beyond 6 is no chance. */
static double chi(const uint32_t *count, size_t n, double expected, double degrees)
{
    double x = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)count[i] - expected;
        x += d * d / expected;
    }
    return (x - degrees) / sqrt(2 * degrees);
}

static void all_orders_of_few_samples_are_alike_likely(void **state)
{
    (void)state;
    for (uint64_t n = 2; n <= 6; n++) {
        size_t orders = 1;
        for (size_t i = 2; i <= n; i++) {
            orders *= i;
        }
        uint32_t count[720] = {0};
        const uint32_t each = 150;
        for (uint64_t seed = 0; seed < each * orders; seed++) {
            lg_sampler s = make(n, seed);
            uint64_t order[6], id = 0;
            for (uint64_t i = 0; i < n; i++) {
                order[i] = lg_sampler_at(&s, 1, i);
            }
            for (uint64_t i = 0; i < n; i++) { /* Lehmer code */
                uint64_t smaller = 0;
                for (uint64_t j = i + 1; j < n; j++) {
                    smaller += order[j] < order[i];
                }
                id = id * (n - i) + smaller;
            }
            count[id]++;
        }
        double z = chi(count, orders, each, (double)orders - 1);
        if (fabs(z) > 6) {
            print_error("%d samples: %.1f\n", (int)n, z);
        }
        assert_true(fabs(z) < 6);
    }
}

static void every_place_sees_every_sample_alike(void **state)
{
    (void)state;
    const uint64_t sizes[] = {7, 16, 20, 33, 64};
    for (size_t k = 0; k < 5; k++) {
        uint64_t n = sizes[k];
        uint32_t place[64 * 64] = {0}, step[64] = {0};
        const uint32_t seeds = 6400;
        for (uint64_t seed = 0; seed < seeds; seed++) {
            lg_sampler s = make(n, seed << 20);
            uint64_t before = 0;
            for (uint64_t i = 0; i < n; i++) {
                uint64_t x = lg_sampler_at(&s, 0, i);
                place[i * n + x]++;
                if (i > 0) {
                    step[(x + n - before) % n]++;
                }
                before = x;
            }
        }
        double z = chi(place, n * n, (double)seeds / (double)n, (double)((n - 1) * (n - 1)));
        /* Distances of neighbours: never 0, else alike. */
        double pairs = (double)seeds * (double)(n - 1);
        double zs = chi(step + 1, n - 1, pairs / (double)(n - 1), (double)(n - 2));
        if (fabs(z) > 6 || fabs(zs) > 6) {
            print_error("%d samples: places %.1f, steps %.1f\n", (int)n, z, zs);
        }
        assert_int_equal(step[0], 0);
        assert_true(fabs(z) < 6 && fabs(zs) < 6);
    }
}

static void places_have_the_mean_of_all_samples(void **state)
{
    (void)state;
    enum { N = 1000, SEEDS = 400 };
    double limit = 6 * sqrt(((double)N * N - 1) / 12 / SEEDS);
    for (uint64_t i = 0; i < N; i++) {
        double sum = 0;
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            lg_sampler s = make(N, seed);
            sum += (double)lg_sampler_at(&s, 3, i);
        }
        assert_true(fabs(sum / SEEDS - (N - 1) / 2.0) < limit);
    }
}

static void a_bit_of_seed_or_epoch_changes_all(void **state)
{
    (void)state;
    enum { N = 5000 };
    /* Independent orders agree in one place on average, Poisson. */
    uint64_t agree = 0, pairs = 0;
    lg_sampler a = make(N, 12345);
    for (int bit = 0; bit < 64; bit++) {
        lg_sampler b = make(N, 12345 ^ (UINT64_C(1) << bit));
        for (uint64_t i = 0; i < N; i++) {
            uint64_t x = lg_sampler_at(&a, 6, i);
            agree += x == lg_sampler_at(&b, 6, i);
            agree += x == lg_sampler_at(&a, 6 ^ (UINT64_C(1) << bit), i);
        }
        pairs += 2;
    }
    assert_true(fabs((double)agree - (double)pairs) < 6 * sqrt((double)pairs));
}

/* ------------------------------------------------------------- ranks and batches */

/* One step of `ranks` ranks with `micro` samples a rank and pass: where each
 * sample that is used lies in the global order. */
static void take_step(const lg_sampler *s, uint64_t batch, uint64_t ranks, uint64_t micro, uint64_t *out)
{
    for (uint64_t pass = 0; pass < batch / (ranks * micro); pass++) {
        for (uint64_t r = 0; r < ranks; r++) {
            for (uint64_t i = 0; i < micro; i++) {
                uint64_t ahead = (pass * ranks + r) * micro + i;
                out[ahead] = lg_sampler_peek(s, ahead);
            }
        }
    }
}

static void any_split_sees_the_same_batches(void **state)
{
    (void)state;
    enum { BATCH = 840, STEPS = 5 };
    uint64_t want[STEPS][BATCH], got[BATCH];
    lg_sampler s = make(1700, 9); /* ends of epochs inside of batches */
    for (int k = 0; k < STEPS; k++) {
        take_step(&s, BATCH, 1, BATCH, want[k]);
        lg_sampler_advance(&s, BATCH);
    }
    for (uint64_t ranks = 1; ranks <= 8; ranks++) {
        for (uint64_t micro = 1; micro <= BATCH / ranks; micro++) {
            if (BATCH % (ranks * micro) != 0) {
                continue;
            }
            s = make(1700, 9);
            for (int k = 0; k < STEPS; k++) {
                take_step(&s, BATCH, ranks, micro, got);
                assert_memory_equal(got, want[k], sizeof got);
                lg_sampler_advance(&s, BATCH);
            }
            assert_int_equal(s.epoch, 2);
            assert_int_equal(s.consumed, 800);
        }
    }
}

static void ranks_may_change_on_the_way(void **state)
{
    (void)state;
    lg_sampler whole = make(1000, 3), run = whole;
    lg_rng rng = {8, 0, 0};
    uint64_t total = 0;
    while (total < 5000) {
        uint64_t ranks = 1 + lg_rng_u32(&rng) % 8, micro = 1 + lg_rng_u32(&rng) % 8;
        uint64_t batch[64];
        take_step(&run, ranks * micro, ranks, micro, batch);
        for (uint64_t i = 0; i < ranks * micro; i++) {
            assert_int_equal(batch[i], lg_sampler_peek(&whole, total + i));
        }
        total += ranks * micro;
        lg_sampler_advance(&run, ranks * micro);
        assert_int_equal(run.epoch * 1000 + run.consumed, total);
    }
}

/* ------------------------------------------------------------------- positions */

static void peeking_moves_nothing(void **state)
{
    (void)state;
    lg_sampler s = make(10, 1), before = s;
    for (uint64_t i = 0; i < 40; i++) {
        lg_sampler_peek(&s, i);
        lg_sampler_at(&s, i, i % 10);
    }
    assert_memory_equal(&s, &before, sizeof s);
}

static void advancing_crosses_epochs(void **state)
{
    (void)state;
    static const struct {
        uint64_t samples, epoch, consumed, n, epoch_after, consumed_after;
    } cases[] = {
        {10, 0, 0, 0, 0, 0},
        {10, 0, 0, 9, 0, 9},
        {10, 0, 0, 10, 1, 0},
        {10, 0, 9, 1, 1, 0},
        {10, 2, 5, 27, 5, 2},
        {1, 0, 0, 7, 7, 0},
        {10, 0, 10, 0, 1, 0}, /* set by hand to an epoch's end */
        {10, 3, 37, 4, 7, 1},
        {10, 0, 0, UINT64_MAX, UINT64_MAX / 10, 5},
        {7, 1, UINT64_MAX, UINT64_MAX, 1 + 2 * (UINT64_MAX / 7), 2}, /* 2^64 - 1 = 7q + 1 */
        {1, UINT64_MAX, 0, 5, UINT64_MAX, 0},
        {10, UINT64_MAX - 1, 9, 11, UINT64_MAX, 0},
        {10, UINT64_MAX, 9, 3, UINT64_MAX, 2},
        {UINT64_C(1) << 48, 0, (UINT64_C(1) << 48) - 1, UINT64_MAX, 65536, (UINT64_C(1) << 48) - 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lg_sampler s = make(cases[i].samples, 1);
        s.epoch = cases[i].epoch;
        s.consumed = cases[i].consumed;
        uint64_t next = lg_sampler_peek(&s, cases[i].n);
        lg_sampler_advance(&s, cases[i].n);
        assert_int_equal(s.epoch, cases[i].epoch_after);
        assert_int_equal(s.consumed, cases[i].consumed_after);
        assert_int_equal(next, lg_sampler_at(&s, s.epoch, s.consumed));
        assert_int_equal(next, lg_sampler_peek(&s, 0));
    }
}

static void peek_equals_advance(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 12; n++) {
        lg_sampler s = make(n, n), start = s;
        for (uint64_t k = 0; k < 4 * n; k++) {
            assert_int_equal(lg_sampler_peek(&start, k), lg_sampler_at(&s, k / n, k % n));
            assert_int_equal(lg_sampler_peek(&start, k), lg_sampler_peek(&s, 0));
            lg_sampler_advance(&s, 1);
            assert_true(s.consumed < s.samples);
        }
    }
}

static void epochs_have_their_own_orders(void **state)
{
    (void)state;
    lg_sampler s = make(1000, 2), other = make(1000, 2);
    uint64_t first[1000];
    for (uint64_t i = 0; i < 1000; i++) {
        first[i] = lg_sampler_peek(&s, i);
    }
    uint64_t same = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same += first[i] == lg_sampler_peek(&s, 1000 + i);
    }
    assert_true(same < 12);
    /* Three epochs in one go are three resumes. */
    for (uint64_t e = 0; e < 3; e++) {
        lg_sampler resumed = make(1000, 2);
        resumed.epoch = e;
        for (uint64_t i = 0; i < 1000; i++) {
            assert_int_equal(lg_sampler_peek(&resumed, i), lg_sampler_peek(&other, e * 1000 + i));
        }
    }
}

static void seeking_is_instant(void **state)
{
    (void)state;
    lg_sampler s = make(10000000, 1), huge = make(LG_SAMPLER_MAX, 1);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 1000; i++) { /* step by step the second one would never come to its end */
        lg_sampler_advance(&s, 7654321 + i);
        sum += lg_sampler_peek(&s, 0);
        lg_sampler_advance(&huge, UINT64_C(123456789012345) + i);
        sum += lg_sampler_peek(&huge, LG_SAMPLER_MAX - 1);
    }
    assert_true(sum > 0);
}

static void sequential_counts_up(void **state)
{
    (void)state;
    lg_sampler s;
    assert_int_equal(lg_sampler_init(&s, 5, 1, LG_SAMPLER_SEQUENTIAL, NULL), LG_OK);
    for (uint64_t i = 0; i < 20; i++) {
        assert_int_equal(lg_sampler_peek(&s, i), i % 5);
    }
}

static void wrong_arguments_are_refused(void **state)
{
    (void)state;
    lg_sampler s = make(3, 1), before = s;
    lg_error err;
    assert_int_equal(lg_sampler_init(&s, 0, 1, 0, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "0 samples; it takes 1 to 2^48"));
    assert_int_equal(lg_sampler_init(&s, LG_SAMPLER_MAX + 1, 1, 0, &err), LG_ERR_INVALID);
    assert_int_equal(lg_sampler_init(&s, 1, 1, 2, &err), LG_ERR_INVALID);
    assert_non_null(strstr(err.message, "unknown flags 0x2"));
    assert_int_equal(lg_sampler_init(NULL, 1, 1, 0, NULL), LG_ERR_INVALID);
    assert_memory_equal(&s, &before, sizeof s);
    /* A place that is not there is no sample. */
    assert_int_equal(lg_sampler_at(&s, 0, 3), UINT64_MAX);
    lg_sampler never = {0};
    assert_int_equal(lg_sampler_at(&never, 0, 0), UINT64_MAX);
    assert_int_equal(lg_sampler_peek(&never, 5), UINT64_MAX);
    lg_sampler_advance(&never, 5);
    assert_int_equal(never.consumed, 0);
}

#define NAMED(text, fn)                   \
    {                                     \
        .name = (text), .test_func = (fn) \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        NAMED("every sample comes exactly once in an epoch, for 1 to 600 samples and more", every_sample_comes_once),
        NAMED("no two positions of a large epoch share a sample", no_two_positions_share_a_sample),
        NAMED("the order is frozen", the_order_is_frozen),
        NAMED("all orders of few samples are alike likely", all_orders_of_few_samples_are_alike_likely),
        NAMED("every place sees every sample alike often, and neighbours are unrelated",
              every_place_sees_every_sample_alike),
        NAMED("places have the mean of all samples", places_have_the_mean_of_all_samples),
        NAMED("one bit of seed or epoch changes the whole order", a_bit_of_seed_or_epoch_changes_all),
        NAMED("K10 F176: 1 to 8 ranks with any micro-batch see the same global batches",
              any_split_sees_the_same_batches),
        NAMED("K10 F185: ranks and batch size may change on the way", ranks_may_change_on_the_way),
        NAMED("K10 F173: looking ahead moves nothing", peeking_moves_nothing),
        NAMED("K10 F187: the position is always inside of an epoch, whatever was consumed", advancing_crosses_epochs),
        NAMED("looking ahead finds what advancing finds", peek_equals_advance),
        NAMED("K09 F143: each epoch has its own order, in one run or over resumes", epochs_have_their_own_orders),
        NAMED("K10 F179: seeking takes no time, in 10^7 and in 2^48 samples", seeking_is_instant),
        NAMED("a sequential sampler counts up", sequential_counts_up),
        NAMED("wrong arguments are refused, and a place that is not there is no sample", wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("sampler", tests, NULL, NULL);
}
