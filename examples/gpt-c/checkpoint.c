/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"

#include "fatal.h"

#include <inttypes.h>
#include <lastgood/backend.h> /* lg_error_set */
#include <lastgood/mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct checkpoint {
    train *train;
    lg_comm *comm;
    lg_session *session;
    lg_layout *replicated; /* parameters: every rank holds them, trained in step */
    lg_layout *flat;       /* moments: each rank its slice of the flat buffer */
    bool has_step;         /* a checkpoint of this run is known ... */
    uint64_t newest_step;  /* ... and this is its step */
    uint64_t removal_failures;
    lg_launch_info launched; /* --async: what was not yet reported as durable ... */
    double launched_at;      /* ... and when; folder "": nothing */
};

static const char *const HEAD = "lm_head.weight"; /* the output head's name, tied to the token embedding */

/* Ends the job after a collective call failed. All ranks have the same error,
 * so one speaks and the others wait to be stopped, unless it is the link
 * between them that broke. */
static _Noreturn void stop(const checkpoint *c, const lg_error *err)
{
    bool alone = err->status == LG_ERR_COMM || err->status == LG_ERR_TIMEOUT || err->status == LG_ERR_PEER;
    if (c->train->reducer->rank != 0 && !alone)
        MPI_Barrier(c->train->reducer->comm);
    fprintf(stderr, "gpt-c: error: %s (%s)\n", err->message, lg_status_name(err->status));
    fflush(NULL);
    MPI_Abort(c->train->reducer->comm, 1);
    exit(1);
}

/* Ends the job after a call of this rank alone failed. */
static void must(lg_status status, const char *doing, const lg_error *err)
{
    if (status != LG_OK)
        fatal("%s: %s (%s)", doing, err->message, lg_status_name(status));
}

/* Parameters and moments are about to change: what was launched must have been
 * copied by now. Most often it has, during the backward pass. */
static void before_update(void *arg)
{
    checkpoint *c = arg;
    double started = clock_now();
    lg_error err = LG_ERROR_INIT;
    must(lg_session_fence(c->session, 0, &err), "waiting for the copy of the parameters", &err);
    c->train->clock.save_seconds += clock_now() - started;
}

/* ------------------------------------------------------------------- opening */

checkpoint *checkpoint_open(train *t)
{
    checkpoint *c = allocate(1, sizeof *c);
    lg_error err = LG_ERROR_INIT;
    c->train = t;
    must(lg_mpi_comm_create(t->reducer->comm, &c->comm, &err), "lastgood's communicator", &err);

    uint32_t ranks = (uint32_t)t->reducer->size;
    lg_layout_desc d = LG_LAYOUT_DESC_INIT;
    d.mesh_ndim = 1;
    d.mesh_sizes = &ranks;
    must(lg_layout_create(&d, &c->replicated, &err), "layout of the parameters", &err);
    d.flat_length = t->model->n_parameters;
    d.flat_axis = 0;
    must(lg_layout_create(&d, &c->flat, &err), "layout of the moments", &err);

    lg_session_options o = LG_SESSION_OPTIONS_INIT;
    o.comm = c->comm;
    o.keep_last = (uint32_t)t->options.keep;
    o.flags = t->options.new_run ? LG_SESSION_NEW_RUN : 0;
    o.check_replicas = 10;
    if (lg_session_open(t->options.root, &o, &c->session, &err) != LG_OK)
        stop(c, &err);
    if (t->options.async) {
        t->before_update = before_update;
        t->before_update_arg = c;
    }
    return c;
}

void checkpoint_close(checkpoint *c)
{
    if (!c)
        return;
    lg_error err = LG_ERROR_INIT;
    if (lg_session_close(c->session, &err) != LG_OK)
        stop(c, &err);
    lg_layout_free(c->replicated);
    lg_layout_free(c->flat);
    lg_comm_free(c->comm);
    free(c);
}

/* ------------------------------------------------------------------- tensors */

static const char *const moment_names[2] = {"exp_avg", "exp_avg_sq"};

static void moment_name(char out[LG_MAX_NAME], const model_tensor *t, int moment)
{
    snprintf(out, LG_MAX_NAME, "optim.state.%s.%s", t->name, moment_names[moment]);
}

/* Where this rank's part of a tensor begins in its slice of a moment. The
 * library's idea of the slices must be the reducer's. */
static float *moment_part(const checkpoint *c, const model_tensor *t, int moment)
{
    const train *run = c->train;
    const optimizer *o = run->optimizer;
    lg_error err = LG_ERROR_INIT;
    uint64_t local_shape[2], start, elements;
    must(lg_layout_local(c->flat, (uint32_t)run->reducer->rank, t->ndim, t->shape, t->offset, local_shape, &start,
                         &elements, &err),
         t->name, &err);
    float *slice = moment ? o->exp_avg_sq : o->exp_avg;
    if (elements == 0)
        return slice;
    uint64_t first = t->offset + start;
    if (first < o->start || first + elements > o->start + o->count)
        fatal("%s: elements %" PRIu64 " to %" PRIu64 " are not in this rank's slice", t->name, first, first + elements);
    return slice + (first - o->start);
}

static void save_tensors(checkpoint *c, lg_save *save)
{
    const model *m = c->train->model;
    lg_error err = LG_ERROR_INIT;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const model_tensor *p = &m->tensors[i];
        lg_tensor t = LG_TENSOR_INIT;
        /* Only the optimizer's update changes these, behind the fence. */
        t.flags = c->train->options.async ? LG_TENSOR_LAZY : 0;
        t.name = p->name;
        t.ndim = p->ndim;
        t.shape = p->shape;
        t.layout = c->replicated;
        t.data = m->parameters + p->offset;
        must(lg_save_tensor(save, &t, &err), p->name, &err);

        t.group = LG_GROUP_OPTIM;
        t.layout = c->flat;
        t.flat_offset = p->offset;
        for (int moment = 0; moment < 2; moment++) {
            char name[LG_MAX_NAME];
            moment_name(name, p, moment);
            t.name = name;
            t.data = moment_part(c, p, moment);
            must(lg_save_tensor(save, &t, &err), name, &err);
        }
    }
    must(lg_save_alias(save, HEAD, m->tensors[m->token_embedding].name, &err), HEAD, &err);
}

static lg_status load_tensors(const checkpoint *c, lg_load *load, lg_error *err)
{
    const model *m = c->train->model;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const model_tensor *p = &m->tensors[i];
        lg_target t = LG_TARGET_INIT;
        t.name = p->name;
        t.ndim = p->ndim;
        t.shape = p->shape;
        t.data = m->parameters + p->offset;
        lg_status status = lg_load_tensor(load, &t, err);

        t.layout = c->flat;
        t.rank = (uint32_t)c->train->reducer->rank;
        t.flat_offset = p->offset;
        for (int moment = 0; moment < 2 && status == LG_OK; moment++) {
            char name[LG_MAX_NAME];
            moment_name(name, p, moment);
            t.name = name;
            t.data = moment_part(c, p, moment);
            status = lg_load_tensor(load, &t, err);
        }
        if (status != LG_OK)
            return status;
    }
    return LG_OK;
}

/* --------------------------------------------------------------------- state */

static void save_hyper(const hyper *h, lg_save *save)
{
    lg_error err = LG_ERROR_INIT;
    for (size_t i = 0; i < n_hyper_fields; i++) {
        const hyper_field *f = &hyper_fields[i];
        const void *value = (const char *)h + f->offset;
        must(f->is_double ? lg_save_global_f64(save, f->key, *(const double *)value, &err)
                          : lg_save_global_u64(save, f->key, *(const uint64_t *)value, &err),
             f->key, &err);
    }
}

/* A run that goes on with another width, batch or seed would be another run. */
static lg_status check_hyper(const hyper *h, lg_checkpoint *from, lg_error *err)
{
    for (size_t i = 0; i < n_hyper_fields; i++) {
        const hyper_field *f = &hyper_fields[i];
        const void *value = (const char *)h + f->offset;
        lg_status status;
        if (f->is_double) {
            double saved, mine = *(const double *)value;
            status = lg_checkpoint_global_f64(from, f->key, &saved, err);
            /* Bits are compared. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-exp42-c,cert-flp37-c) */
            if (status == LG_OK && memcmp(&saved, &mine, sizeof saved) != 0)
                return lg_error_set(err, LG_ERR_MISMATCH, "--%s is %.15g here and %.15g in the checkpoint (%s)",
                                    f->option, mine, saved, f->key);
        } else {
            uint64_t saved, mine = *(const uint64_t *)value;
            status = lg_checkpoint_global_u64(from, f->key, &saved, err);
            if (status == LG_OK && saved != mine)
                return lg_error_set(err, LG_ERR_MISMATCH,
                                    "--%s is %" PRIu64 " here and %" PRIu64 " in the checkpoint (%s)", f->option, mine,
                                    saved, f->key);
        }
        if (status != LG_OK)
            return status;
    }
    return LG_OK;
}

static lg_status check_data(const data *d, lg_checkpoint *from, lg_error *err)
{
    uint64_t bytes, fingerprint;
    lg_status status = lg_checkpoint_global_u64(from, "data.bytes", &bytes, err);
    if (status == LG_OK)
        status = lg_checkpoint_global_u64(from, "data.fnv1a64", &fingerprint, err);
    if (status == LG_OK && (bytes != d->size || fingerprint != d->fingerprint))
        return lg_error_set(err, LG_ERR_MISMATCH,
                            "--data is another text than the checkpoint's (%zu bytes here, %" PRIu64 " there)", d->size,
                            bytes);
    return status;
}

static void save_state(checkpoint *c, lg_save *save)
{
    const train *t = c->train;
    lg_error err = LG_ERROR_INIT;
    save_hyper(&t->options.hyper, save);
    must(lg_sampler_save(&t->sampler, save, "sampler", &err), "sampler", &err);
    must(lg_save_global_u64(save, "step", t->step, &err), "step", &err);
    must(lg_save_global_u64(save, "tokens", t->tokens, &err), "tokens", &err);
    must(lg_save_global_u64(save, "data.bytes", t->data->size, &err), "data.bytes", &err);
    must(lg_save_global_u64(save, "data.fnv1a64", t->data->fingerprint, &err), "data.fnv1a64", &err);
    must(lg_save_global_f64(save, "loss.average", t->loss_average, &err), "loss.average", &err);
    must(lg_save_global_f64(save, "loss.best", t->best_loss, &err), "loss.best", &err);

    char clock[256]; /* as text, so that a person can read it too */
    int n = snprintf(clock, sizeof clock, "steps %" PRIu64 " compute %a exchange %a save %a\n", t->clock.steps,
                     t->clock.compute_seconds, t->clock.exchange_seconds, t->clock.save_seconds);
    must(lg_save_rank_bytes(save, "clock", clock, (size_t)n, &err), "clock", &err);

    char config[1024];
    const hyper *h = &t->options.hyper;
    n = snprintf(config, sizeof config,
                 "{\n"
                 "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
                 "  \"model_type\": \"gpt2\",\n"
                 "  \"vocab_size\": %d,\n"
                 "  \"n_positions\": %" PRIu64 ",\n"
                 "  \"n_embd\": %" PRIu64 ",\n"
                 "  \"n_layer\": %" PRIu64 ",\n"
                 "  \"n_head\": %" PRIu64 ",\n"
                 "  \"n_inner\": null,\n"
                 "  \"activation_function\": \"gelu_new\",\n"
                 "  \"embd_pdrop\": %.17g,\n"
                 "  \"attn_pdrop\": %.17g,\n"
                 "  \"resid_pdrop\": %.17g,\n"
                 "  \"layer_norm_epsilon\": 1e-05,\n"
                 "  \"tie_word_embeddings\": true,\n"
                 "  \"bos_token_id\": 0,\n"
                 "  \"eos_token_id\": 0,\n"
                 "  \"dtype\": \"float32\"\n"
                 "}\n",
                 MODEL_VOCABULARY, h->context, h->width, h->layers, h->heads, h->dropout, h->dropout, h->dropout);
    must(lg_save_attach(save, "config.json", config, (size_t)n, &err), "config.json", &err);
}

static void load_clock(checkpoint *c, lg_checkpoint *from)
{
    train *t = c->train;
    lg_error err = LG_ERROR_INIT;
    void *bytes;
    size_t n;
    lg_status status = lg_checkpoint_rank_bytes(from, "clock", (uint32_t)t->reducer->rank, (uint32_t)t->reducer->size,
                                                &bytes, &n, &err);
    if (status == LG_ERR_WORLD) { /* another number of ranks: each counts from zero */
        t->clock = (rank_clock){0};
        return;
    }
    must(status, "clock", &err);
    char text[256];
    n = n < sizeof text ? n : sizeof text - 1;
    memcpy(text, bytes, n);
    text[n] = 0;
    lg_free(bytes);
    rank_clock k;
    if (sscanf(text, "steps %" SCNu64 " compute %la exchange %la save %la", &k.steps, &k.compute_seconds,
               &k.exchange_seconds, &k.save_seconds) != 4)
        fatal("clock: '%s' is not what this program saves", text);
    t->clock = k;
}

static void load_state(checkpoint *c, lg_checkpoint *from)
{
    train *t = c->train;
    lg_error err = LG_ERROR_INIT;
    must(lg_checkpoint_global_u64(from, "step", &t->step, &err), "step", &err);
    must(lg_checkpoint_global_u64(from, "tokens", &t->tokens, &err), "tokens", &err);
    must(lg_checkpoint_global_f64(from, "loss.average", &t->loss_average, &err), "loss.average", &err);
    must(lg_checkpoint_global_f64(from, "loss.best", &t->best_loss, &err), "loss.best", &err);
    must(lg_sampler_load(&t->sampler, from, "sampler", &err), "sampler", &err);
    load_clock(c, from);
}

/* -------------------------------------------------------------- resume, save */

static lg_status wanted(lg_load *load, void *arg, lg_error *err)
{
    const checkpoint *c = arg;
    lg_checkpoint *from = lg_load_checkpoint(load);
    lg_status status = check_hyper(&c->train->options.hyper, from, err);
    if (status == LG_OK)
        status = check_data(c->train->data, from, err);
    return status == LG_OK ? load_tensors(c, load, err) : status;
}

static void report_skipped(const lg_resume_result *r)
{
    for (size_t i = 0; i < r->n_skipped; i++)
        fprintf(stderr, "gpt-c: skipped step %" PRIu64 " (%s): %s\n", r->skipped[i].step, r->skipped[i].folder,
                r->skipped[i].reason);
}

bool checkpoint_resume(checkpoint *c)
{
    train *t = c->train;
    bool speaks = t->reducer->rank == 0;
    if (t->options.new_run) {
        if (speaks)
            fprintf(stderr, "gpt-c: a new run in %s, as asked\n", t->options.root);
        return false;
    }
    lg_error err = LG_ERROR_INIT;
    lg_resume_options o = LG_RESUME_OPTIONS_INIT;
    o.flags = t->options.strict ? LG_RESUME_STRICT : 0;
    lg_resume_result *r = NULL;
    lg_status status = lg_resume(c->session, &o, wanted, c, &r, &err);
    if (status == LG_ERR_EMPTY) {
        if (speaks)
            fprintf(stderr, "gpt-c: %s holds no checkpoint: a new run\n", t->options.root);
        return false;
    }
    if (status == LG_ERR_NO_GOOD && r && speaks)
        report_skipped(r);
    if (status != LG_OK)
        stop(c, &err);

    load_state(c, r->checkpoint);
    if (t->step != r->step)
        fatal("resume: the checkpoint of step %" PRIu64 " holds the state of step %" PRIu64, r->step, t->step);
    model_parameters_changed(t->model);
    c->has_step = true;
    c->newest_step = r->step;
    if (speaks) {
        report_skipped(r);
        fprintf(stderr, "gpt-c: resumed step %" PRIu64 " (%s, saved by %" PRIu32 " rank%s%s) on %d rank%s\n", r->step,
                r->folder, r->saved_world, r->saved_world == 1 ? "" : "s", r->verified ? "" : ", not verified",
                t->reducer->size, t->reducer->size == 1 ? "" : "s");
        fflush(stderr);
    }
    lg_resume_result_free(r);
    return true;
}

static void report_removals(checkpoint *c)
{
    lg_session_status s;
    lg_error err = LG_ERROR_INIT;
    must(lg_session_get_status(c->session, &s, &err), "session status", &err);
    if (s.removal_failures > c->removal_failures)
        fprintf(stderr, "gpt-c: an old checkpoint could not be removed yet: %s\n", s.last_removal_error);
    c->removal_failures = s.removal_failures;
}

static void report_committed(checkpoint *c, const char *folder, uint64_t step, double seconds, const char *how)
{
    if (c->train->reducer->rank == 0) {
        fprintf(stderr, "gpt-c: committed step %" PRIu64 " (%s, %s %.3f s)\n", step, folder, how, seconds);
        fflush(stderr);
        report_removals(c);
    }
}

void checkpoint_report(checkpoint *c)
{
    if (!c->launched.folder[0])
        return;
    lg_session_status s;
    lg_error err = LG_ERROR_INIT;
    must(lg_session_get_status(c->session, &s, &err), "session status", &err);
    /* Rank 0 makes the commit, so its word counts; others may know later. */
    if (s.phase == LG_PHASE_COMMITTED && s.phase_step == c->launched.step) {
        report_committed(c, c->launched.folder, s.phase_step, clock_now() - c->launched_at, "in the background,");
        c->launched.folder[0] = 0;
    }
}

static void commit(checkpoint *c, lg_save *save)
{
    double started = clock_now();
    lg_error err = LG_ERROR_INIT;
    lg_save_info info;
    if (lg_save_commit(save, &info, &err) != LG_OK)
        stop(c, &err);
    char how[64];
    snprintf(how, sizeof how, "%.1f MB in", (double)info.bytes_total * 1e-6);
    report_committed(c, info.folder, info.step, clock_now() - started, how);
}

static void launch(checkpoint *c, lg_save *save, bool last)
{
    checkpoint_report(c); /* the one before may be durable by now */
    double started = clock_now();
    lg_error err = LG_ERROR_INIT;
    lg_launch_info info;
    if (lg_save_launch(save, NULL, &info, &err) != LG_OK)
        stop(c, &err);
    if (c->launched.folder[0]) /* this call waited for it */
        report_committed(c, c->launched.folder, c->launched.step, clock_now() - c->launched_at, "in the background,");
    c->launched = info;
    c->launched_at = started;
    if (c->train->reducer->rank == 0) {
        fprintf(stderr, "gpt-c: launched step %" PRIu64 " (%.1f MB copied, %.1f MB lazy, in %.3f s)\n", info.step,
                (double)info.bytes_staged * 1e-6, (double)info.bytes_lazy * 1e-6, info.seconds);
        fflush(stderr);
    }
    if (last) {
        if (lg_session_wait(c->session, 0, NULL, &err) != LG_OK)
            stop(c, &err);
        checkpoint_report(c);
    }
}

void checkpoint_save(checkpoint *c, bool last)
{
    train *t = c->train;
    if (c->has_step && c->newest_step == t->step)
        return;
    double started = clock_now();
    lg_error err = LG_ERROR_INIT;
    lg_save_options o = LG_SAVE_OPTIONS_INIT;
    o.flags = LG_SAVE_FINITE;
    lg_save *save;
    must(lg_save_begin(c->session, t->step, &o, &save, &err), "save", &err);
    save_tensors(c, save);
    save_state(c, save);
    if (t->options.async)
        launch(c, save, last);
    else
        commit(c, save);
    c->has_step = true;
    c->newest_step = t->step;
    t->clock.save_seconds += clock_now() - started;
}
