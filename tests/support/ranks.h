/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TEST_RANKS_H
#define LG_TEST_RANKS_H

/* Ranks as threads, and a small model whose values are a function of the step,
 * so that what was loaded can be told right from wrong anywhere. */

#include <lastgood/backend.h>
#include <stdbool.h>

typedef struct ranks ranks;

typedef struct rank_env {
    uint32_t rank, world;
    lg_comm *comm;
    lg_store *store; /* shared by all ranks */
    void *arg;
    lg_status status; /* set by the function; LG_OK at the start */
    lg_error err;
} rank_env;

/* Runs fn on `world` threads and waits for all. env (world entries) gets their
 * results; status and err are the function's. */
void run_ranks(uint32_t world, lg_store *store, void (*fn)(rank_env *env), void *arg, rank_env *env);

#define RANKS_MAX 8
/* The same; a rank's failure fails the test. */
void run_all(uint32_t world, lg_store *store, void (*fn)(rank_env *env), void *arg);

/* cmocka's assertions do not work in threads: a rank says here what it found
 * wrong, and its status becomes LG_ERR_INTERNAL. */
#define RANK_CHECK(env, cond)                                                                                 \
    do {                                                                                                      \
        if (!(cond)) {                                                                                        \
            (env)->status =                                                                                   \
                lg_error_set(&(env)->err, LG_ERR_INTERNAL, "%s:%d: not true: %s", __FILE__, __LINE__, #cond); \
            return;                                                                                           \
        }                                                                                                     \
    } while (0)
#define RANK_TRY(env, expr)           \
    do {                              \
        (env)->status = (expr);       \
        if ((env)->status != LG_OK) { \
            return;                   \
        }                             \
    } while (0)

/* ---- the model: "w" [13, 6] F32 cut by rows; "m" its two moments in a flat
 * buffer (optim); "b" [7] BF16 replicated, declared; "stats" [5] F64, a buffer
 * that nobody declared; "count" 0-d I64; "none" [0, 3] F32. Global state and a
 * blob for each rank. */
typedef struct model {
    uint32_t rank, world;
    bool stats_differ; /* each rank has its own */
    bool lazy;         /* "w", "b" and the moments are added as LG_TENSOR_LAZY */
    float w[13 * 6];
    float moments[2][13 * 6]; /* this rank's range of each, packed */
    uint16_t b[7];
    double stats[5];
    int64_t count;
    uint64_t step; /* as loaded from global state */
    double lr;
    char blob[64];
    size_t blob_bytes;
} model;

void model_init(model *m, uint32_t rank, uint32_t world);
void model_fill(model *m, uint64_t step); /* the values of this step */
void model_clear(model *m);
/* NULL if all values are those of `step`, else what is not. */
const char *model_wrong(const model *m, uint64_t step);
lg_status model_add(lg_save *save, const model *m, lg_error *err);
lg_status model_save(lg_session *s, const model *m, uint64_t step, lg_save_info *info, lg_error *err);
lg_status model_launch(lg_session *s, const model *m, uint64_t step, const lg_launch_options *o, lg_launch_info *info,
                       lg_error *err);
lg_status model_targets(lg_load *load, void *m, lg_error *err); /* lg_targets_fn */
lg_status model_load_state(model *m, lg_checkpoint *c, lg_error *err);

/* A session of this rank on env's store; o's comm and store are set. */
lg_status begin_session(rank_env *env, lg_session_options o, lg_session **out);
/* The same, resumed or fresh. */
lg_status open_session(rank_env *env, lg_session_options o, lg_session **out);
/* The same in this process alone; NULL: it failed. */
lg_session *open_alone(const char *path, lg_error *err);
/* A session of one rank that cannot save; fails the test if there is none. */
lg_session *open_to_read(lg_store *store);
/* The newest good step there, loaded by one rank and compared; 0 if none. Fails
 * the test on any other error. */
uint64_t newest(lg_store *store);

/* ---- roots: a fresh one of each kind */
enum { ROOT_POSIX, ROOT_MEMORY, ROOT_NO_RENAME, ROOT_KINDS };
typedef struct test_root {
    int kind;
    char path[256]; /* posix: the folder; memory: "mem:…" */
    lg_store *store;
    lg_store *inner;
} test_root;
const char *root_kind_name(int kind);
void root_make(test_root *r, int kind);
void root_drop(test_root *r);

/* A whole run on fresh threads: opens, resumes (LG_ERR_EMPTY is fine), saves
 * the given steps, closes. Fails the test on any error. */
typedef struct run_spec {
    uint32_t world;
    const uint64_t *steps;
    size_t n_steps;
    uint32_t keep_last;
    uint64_t keep_every;
    uint64_t resumed_from; /* out: step, UINT64_MAX for a fresh start */
    size_t skipped;        /* out */
} run_spec;
void root_run(test_root *r, run_spec *spec);

/* A test that runs on a fresh root of each kind (with cmocka.h included). */
#define ON_ROOTS_BELOW(name, end)                             \
    static void name##_on(test_root *root);                   \
    static void name(void **state)                            \
    {                                                         \
        (void)state;                                          \
        for (int kind = 0; kind < (end); kind++) {            \
            test_root root;                                   \
            print_message("# on %s\n", root_kind_name(kind)); \
            root_make(&root, kind);                           \
            name##_on(&root);                                 \
            root_drop(&root);                                 \
        }                                                     \
    }                                                         \
    static void name##_on(test_root *root)
#define ON_EVERY_ROOT(name) ON_ROOTS_BELOW(name, ROOT_KINDS)
#define ON_ROOTS_WITH_RENAME(name) ON_ROOTS_BELOW(name, ROOT_NO_RENAME)

/* An array of steps and its length, for run_spec. */
#define STEPS(...) ((const uint64_t[]){__VA_ARGS__}), (sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))

/* Names of step folders in the root, newest step last; returns how many. */
size_t root_folders(test_root *r, char (*names)[64], size_t max);
/* Flips one byte of a file in a posix root or a memory root. */
void root_flip(test_root *r, const char *folder, const char *file, uint64_t offset);

#endif
