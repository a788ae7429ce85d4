/* SPDX-License-Identifier: Apache-2.0 */
#include "numeric.h"
#include "tree.h"

#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* The tree's sum from the subtrees that the ranks found. */
static float join(uint32_t lo, uint32_t hi, const tree_node *nodes, const float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (nodes[i].lo == lo && nodes[i].hi == hi)
            return values[i];
    assert_true(hi - lo >= 2);
    uint32_t middle = tree_middle(lo, hi);
    return join(lo, middle, nodes, values, n) + join(middle, hi, nodes, values, n);
}

static float whole(uint32_t lo, uint32_t hi, const float *leaves)
{
    if (hi - lo == 1)
        return leaves[lo];
    uint32_t middle = tree_middle(lo, hi);
    return whole(lo, middle, leaves) + whole(middle, hi, leaves);
}

static void any_number_of_ranks(void **state)
{
    (void)state;
    int naive_differs = 0;
    for (uint32_t leaves = 1; leaves <= 40; leaves++) {
        float values[40], naive = 0;
        for (uint32_t i = 0; i < leaves; i++) {
            values[i] = (float)(random_bits() % 20000) / 777.0f - 11.0f;
            naive += values[i];
        }
        float expected = whole(0, leaves, values);
        naive_differs += naive != expected;
        for (uint32_t size = 1; size <= 45; size++) {
            tree_node nodes[45 * TREE_COVER_MAX];
            float sums[45 * TREE_COVER_MAX];
            size_t n = 0;
            uint32_t next = 0;
            for (uint32_t rank = 0; rank < size; rank++) {
                size_t mine =
                    tree_cover(leaves, tree_share(leaves, rank, size), tree_share(leaves, rank + 1, size), nodes + n);
                for (size_t i = n; i < n + mine; i++) {
                    assert_int_equal(nodes[i].lo, next);
                    next = nodes[i].hi;
                    sums[i] = whole(nodes[i].lo, nodes[i].hi, values);
                }
                n += mine;
            }
            assert_int_equal(next, leaves);
            assert_true(join(0, leaves, nodes, sums, n) == expected);
        }
    }
    assert_true(naive_differs > 10); /* else the test could not fail */
}

static void powers_of_two_need_one_subtree(void **state)
{
    (void)state;
    for (uint32_t size = 1; size <= 16; size *= 2)
        for (uint32_t rank = 0; rank < size; rank++) {
            tree_node nodes[TREE_COVER_MAX];
            assert_int_equal(tree_cover(16, tree_share(16, rank, size), tree_share(16, rank + 1, size), nodes), 1);
        }
}

static float random_float(void)
{
    uint32_t bits;
    float x;
    do {
        bits = (uint32_t)random_bits();
        memcpy(&x, &bits, sizeof x);
    } while (!isfinite(x));
    return x;
}

static void exact_sum_has_no_order(void **state)
{
    (void)state;
    enum { N = 1000 };
    for (int round = 0; round < 50; round++) {
        exact_sum forward = {{0}, 0}, parts[3] = {{{0}, 0}};
        float values[N];
        for (int i = 0; i < N; i++) {
            values[i] = random_float(); /* of any size, subnormal ones too */
            exact_add_square(&forward, values[i]);
        }
        for (int i = N; i-- > 0;)
            exact_add_square(&parts[i % 3], values[i]);
        for (int l = 0; l < EXACT_LIMBS; l++)
            parts[0].limbs[l] += parts[1].limbs[l] + parts[2].limbs[l];
        double a = exact_value(&forward), b = exact_value(&parts[0]);
        assert_memory_equal(&a, &b, sizeof a);
    }
}

static void exact_sum_is_right(void **state)
{
    (void)state;
    exact_sum sum = {{0}, 0};
    double expected = 0;
    for (int i = 1; i <= 3000; i++) {
        exact_add_square(&sum, (float)i);
        expected += (double)i * i;
    }
    assert_true(exact_value(&sum) == expected);

    exact_sum tiny = {{0}, 0};
    exact_add_square(&tiny, FLT_TRUE_MIN);
    assert_true(exact_value(&tiny) == ldexp(1, -298));
    exact_add_square(&tiny, FLT_MAX);
    assert_true(exact_value(&tiny) == (double)FLT_MAX * FLT_MAX);

    exact_add_square(&sum, INFINITY);
    assert_true(isnan(exact_value(&sum)));
}

static void functions_are_accurate(void **state)
{
    (void)state;
    for (int i = 0; i < 126278; i++) {
        const float power = (float)(-86 + 0.00137 * i); /* up to 87 */
        assert_true(fabs(num_expf(power) / exp((double)power) - 1) < 1.2e-7);
    }
    assert_true(num_expf(-1000) < 2e-38f && num_expf(1000) > 1e37f && isfinite(num_expf(1000)));
    double x = 1e-300;
    while (x < 1e300) {
        assert_true(fabs(num_log(x) - log(x)) <= 4e-16 * fabs(log(x)) + 1e-16);
        x *= 1.7;
    }
    for (int i = 0; i <= 1024; i++) {
        x = i / 1024.0;
        assert_true(fabs(num_cos_pi(x) - cos(3.14159265358979323846 * x)) < 4e-16);
    }
    assert_true(fabs(num_power(0.95, 1000) / pow(0.95, 1000) - 1) < 1e-13 && num_power(0.5, 0) == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"the tree's sum has the same bits on any number of ranks", any_number_of_ranks, NULL, NULL, NULL},
        {"powers of two of ranks each add up one subtree", powers_of_two_need_one_subtree, NULL, NULL, NULL},
        {"the exact sum of squares has neither order nor grouping", exact_sum_has_no_order, NULL, NULL, NULL},
        {"the exact sum of squares is right from the smallest to the largest", exact_sum_is_right, NULL, NULL, NULL},
        {"exp, log, cos and power are accurate", functions_are_accurate, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
