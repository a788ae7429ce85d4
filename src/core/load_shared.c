/* SPDX-License-Identifier: Apache-2.0 */
#include "core/load_shared.h"

#include "base/mem.h"
#include "io/buffers.h"

#include <stdlib.h>
#include <string.h>

#define SHARE_BYTES (UINT64_C(1) << 20)    /* of a region, from which on sharing pays without being asked for */
#define PIECE_BYTES (UINT64_C(64) << 10)   /* of a region that one rank reads, at least */
#define ENTRIES_BYTES (UINT64_C(16) << 20) /* of all ranks' lists together */
#define ROUND_BYTES (UINT64_C(4) << 20)    /* from one rank to another at a time, at most */
#define MIN_ROUND_BYTES (UINT64_C(4) << 10)
#define DEFAULT_BUFFER_BYTES (UINT64_C(64) << 20)
#define ID_BYTES 16
#define SUM_BYTES sizeof(uint32_t)

typedef struct entry { /* a region that a rank wants; on the wire */
    uint8_t id[ID_BYTES];
    uint64_t bytes;
} entry;

typedef struct head { /* before a rank's entries; on the wire */
    uint32_t failed;
    uint32_t in_memory; /* the largest of them is in the page cache here */
} head;

typedef struct extent { /* of this rank's exchange; on the wire */
    uint32_t failed;
    uint32_t peers;
    uint64_t bytes;  /* the most to or from one peer */
    uint64_t budget; /* for all buffers */
} extent;

typedef struct claim { /* an entry and whose it is */
    const entry *e;
    uint32_t rank;
} claim;

typedef struct mine { /* an entry and its region */
    entry e;
    size_t part;
} mine_t;

typedef struct shared { /* a region that several ranks want */
    const lg__part *part;
    lg__wanted *wanted;
    const uint32_t *members; /* ranks, ascending */
    uint32_t n_members, me;  /* which of them this rank is */
    uint32_t n_pieces;       /* at most n_members */
    uint32_t spread;         /* see reader_of */
    uint64_t elements, each; /* of the region; of a piece, the last ones shorter or empty */
    uint32_t width;          /* bytes of an element */
} shared;

typedef struct cursor { /* how far one rank's pieces are sent to another */
    size_t region;
    uint64_t elements; /* of that piece */
} cursor;

typedef struct exchange {
    lg_load *load;
    lg_comm *comm;
    void *gathered; /* all ranks' heads and entries */
    mine_t *mine;   /* sorted as sent */
    size_t n_mine;
    claim *claims;
    size_t n_claims;
    uint32_t *members; /* of all shared regions */
    shared *all;
    size_t n;
    bool alike; /* all regions have the same members: all get the same bytes from here */
    bool *is_peer;
    uint32_t n_peers;
    uint64_t round_bytes, rounds;
    /* comm->size entries */
    cursor *out, *in;
    const void **send;
    void **recv;
    size_t *send_bytes, *recv_bytes;
    char *buffers; /* of round_bytes and the sum: one a peer, or one for all */
} exchange;

/* ------------------------------------------------------- what a rank wants */

static lg__region region_of(const lg__part *part, uint32_t ndim)
{
    lg__region r = {.ndim = ndim};
    memcpy(r.offset, part->offset, ndim * sizeof *r.offset);
    memcpy(r.size, part->size, ndim * sizeof *r.size);
    return r;
}

/* Two regions with one id are the same elements of the same tensor. */
static lg_status identify(const lg__manifest_tensor *t, const lg__region *r, uint8_t id[ID_BYTES], lg_error *err)
{
    uint8_t digest[LG__SHA256_BYTES];
    lg__sha256 *h = lg__sha256_new();
    if (h == NULL) {
        return lg__nomem(err);
    }
    bool ok = lg__sha256_add(h, t->name, strlen(t->name) + 1) && lg__sha256_add(h, &r->ndim, sizeof r->ndim) &&
              lg__sha256_add(h, r->offset, r->ndim * sizeof *r->offset) &&
              lg__sha256_add(h, r->size, r->ndim * sizeof *r->size) && lg__sha256_end(h, digest);
    lg__sha256_free(h);
    LG__RETURN_IF(!ok, err, LG_ERR_INTERNAL, "SHA-256 failed");
    memcpy(id, digest, ID_BYTES);
    return LG_OK;
}

/* Largest first: where the list must be cut, that is what stays. */
static int compare_entries(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    return x->bytes != y->bytes ? (x->bytes > y->bytes ? -1 : 1) : memcmp(x->id, y->id, ID_BYTES);
}

static lg_status list_mine(exchange *x, uint64_t at_least, lg_error *err)
{
    const lg_load *load = x->load;
    x->mine = lg__calloc(load->n_parts, sizeof *x->mine);
    if (x->mine == NULL) {
        return lg__nomem(err);
    }
    for (size_t i = 0; i < load->n_parts; i++) {
        const lg__manifest_tensor *t = load->wanted[load->parts[i].wanted].stored;
        unsigned bits = lg_dtype_bits(t->dtype);
        lg__region r = region_of(&load->parts[i], t->ndim);
        uint64_t bytes = bits % 8 == 0 ? lg__region_elements(&r) * (bits / 8) : 0;
        if (bytes >= at_least && bytes > 0 && !lg__manifest_is_copies(load->c->m, t)) {
            mine_t *m = &x->mine[x->n_mine++];
            m->e.bytes = bytes;
            m->part = i;
            LG__TRY(identify(t, &r, m->e.id, err));
        }
    }
    qsort(x->mine, x->n_mine, sizeof *x->mine, compare_entries);
    size_t n = 0; /* what is wanted twice here is received once and loaded once */
    for (size_t i = 0; i < x->n_mine; i++) {
        if (n == 0 || memcmp(x->mine[n - 1].e.id, x->mine[i].e.id, ID_BYTES) != 0) {
            x->mine[n++] = x->mine[i];
        }
    }
    const uint64_t most = ENTRIES_BYTES / sizeof(entry) / x->comm->size;
    x->n_mine = n < most ? n : (size_t)most;
    return LG_OK;
}

typedef struct first_box {
    bool found;
    uint32_t rank, number;
} first_box;

static lg_status note_first(uint32_t rank, const lg__region *box, uint32_t number, void *arg, lg_error *err)
{
    (void)box;
    (void)err;
    *(first_box *)arg = (first_box){true, rank, number};
    return LG_ERR_CANCELLED; /* no need to see the others */
}

/* Does the page cache here have the file in which the largest region begins? By
 * its first bytes: nothing is read for this. Reading is then a copy. */
static bool in_memory(const exchange *x)
{
    if (x->n_mine == 0) {
        return true;
    }
    lg_checkpoint *c = x->load->c;
    const lg__part *part = &x->load->parts[x->mine[0].part];
    const lg__manifest_tensor *t = x->load->wanted[part->wanted].stored;
    lg__region region = region_of(part, t->ndim);
    lg_error ignored = LG_ERROR_INIT;
    first_box b = {0};
    lg__rank_files *files = NULL;
    lg_group group;
    char space[LG__KEY_MAX];
    (void)lg__checkpoint_key(c, t, &group, space);
    (void)lg__checkpoint_touch(c, t, &region, UINT32_MAX, note_first, &b, &ignored);
    if (!b.found || lg__checkpoint_rank(c, b.rank, &files, &ignored) != LG_OK) {
        return false; /* whatever is wrong, loading will say */
    }
    bool cached = false;
    for (size_t i = 0; i < files->n_shards; i++) {
        const lg__shard *s = &files->shards[i];
        lg_file *file = NULL;
        if (s->group == group && s->number == b.number &&
            lg__checkpoint_open_file(c, s->name, s->bytes, &file, &ignored) == LG_OK) {
            const uint64_t bytes = s->bytes < SHARE_BYTES ? s->bytes : SHARE_BYTES;
            cached = lg__store_read_way(c->store, file, 0, (size_t)bytes) == LG_READ_AT_ONCE;
            (void)lg__store_close(c->store, file, &ignored);
        }
    }
    return cached;
}

/* ------------------------------------------------------------ who shares it */

static int compare_claims(const void *a, const void *b)
{
    const claim *x = a, *y = b;
    int c = memcmp(x->e->id, y->e->id, ID_BYTES);
    return c != 0 ? c : x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Tells all ranks what this one wants, and whether it is in trouble: then no rank
 * goes on. *go is the same on all: something may be shared. */
static lg_status tell(exchange *x, lg__share share, lg_status status, uint64_t deadline_ms, bool *go, lg_error *err)
{
    head h = {.failed = status != LG_OK, .in_memory = status == LG_OK && share == LG__SHARE_AUTO && in_memory(x)};
    const size_t n = status == LG_OK ? x->n_mine : 0;
    char *message = lg__malloc(sizeof h + n * sizeof(entry));
    size_t bytes = sizeof h;
    if (message == NULL) {
        h.failed = true;
        status = status == LG_OK ? lg__nomem(err) : status;
    } else {
        memcpy(message, &h, sizeof h);
        for (size_t i = 0; i < n; i++, bytes += sizeof(entry)) {
            memcpy(message + bytes, &x->mine[i].e, sizeof(entry));
        }
    }
    size_t *sizes = lg__calloc(x->comm->size, sizeof *sizes);
    if (sizes == NULL) {
        h.failed = true;
        status = status == LG_OK ? lg__nomem(err) : status;
    }
    lg_error own = *err;
    lg_status told = lg__comm_all_gather(x->comm, h.failed ? (void *)&h : message, h.failed ? sizeof h : bytes,
                                         &x->gathered, sizes != NULL ? sizes : x->comm->sizes, deadline_ms, err);
    lg__free(message);
    if (status != LG_OK) { /* one's own error is the better one */
        *err = own;
        lg__free(sizes);
        return status;
    }
    if (told != LG_OK) {
        lg__free(sizes);
        return told;
    }
    bool failed = false, all_in_memory = true;
    const char *at = x->gathered;
    for (uint32_t r = 0; r < x->comm->size; r++) {
        head theirs = {.failed = true};
        if (sizes[r] >= sizeof theirs && (sizes[r] - sizeof theirs) % sizeof(entry) == 0) {
            memcpy(&theirs, at, sizeof theirs);
            x->n_claims += (sizes[r] - sizeof theirs) / sizeof(entry);
        }
        failed = failed || theirs.failed != 0;
        all_in_memory = all_in_memory && theirs.in_memory != 0;
        at += sizes[r];
    }
    if (failed) { /* its error is everybody's in the end */
        lg__free(sizes);
        return lg_error_set(err, LG_ERR_PEER, "another rank cannot load");
    }
    *go = !all_in_memory && x->n_claims > 0;
    x->claims = *go ? lg__calloc(x->n_claims, sizeof *x->claims) : NULL;
    if (*go && x->claims == NULL) {
        status = lg__nomem(err); /* said in meet() */
    } else if (*go) {
        size_t k = 0;
        at = x->gathered;
        for (uint32_t r = 0; r < x->comm->size; r++) {
            for (size_t i = sizeof(head); i < sizes[r]; i += sizeof(entry)) {
                x->claims[k++] = (claim){(const entry *)(const void *)(at + i), r};
            }
            at += sizes[r];
        }
        qsort(x->claims, x->n_claims, sizeof *x->claims, compare_claims);
    }
    lg__free(sizes);
    return status;
}

static size_t run_end(const exchange *x, size_t begin)
{
    size_t end = begin + 1;
    while (end < x->n_claims && memcmp(x->claims[end].e->id, x->claims[begin].e->id, ID_BYTES) == 0) {
        end++;
    }
    return end;
}

static const mine_t *find_mine(const exchange *x, const entry *e)
{
    return bsearch(e, x->mine, x->n_mine, sizeof *x->mine, compare_entries);
}

static void cut(shared *s, const lg__region *region, const uint8_t *id)
{
    uint64_t bytes = s->elements * s->width, pieces = bytes / PIECE_BYTES;
    pieces = pieces < 1 ? 1 : pieces < s->n_members ? pieces : s->n_members;
    memcpy(&s->spread, id, sizeof s->spread);
    s->n_pieces = (uint32_t)pieces;
    s->each = s->elements / pieces + (s->elements % pieces != 0);
    if (region->ndim > 0 && region->size[0] >= pieces) { /* whole rows */
        uint64_t row = s->elements / region->size[0];
        s->each = (s->each + row - 1) / row * row;
    }
}

/* The regions that this rank shares, and with whom. */
static lg_status find_shared(exchange *x, lg_error *err)
{
    x->all = lg__calloc(x->n_mine, sizeof *x->all);
    x->members = lg__calloc(x->n_claims, sizeof *x->members);
    x->is_peer = lg__calloc(x->comm->size, sizeof *x->is_peer);
    if (x->all == NULL || x->members == NULL || x->is_peer == NULL) {
        return lg__nomem(err);
    }
    x->alike = true;
    for (size_t i = 0, end; i < x->n_claims; i = end) {
        end = run_end(x, i);
        const uint32_t n = (uint32_t)(end - i);
        const mine_t *m = n > 1 ? find_mine(x, x->claims[i].e) : NULL;
        if (m == NULL) {
            continue;
        }
        shared *s = &x->all[x->n++];
        *s = (shared){.part = &x->load->parts[m->part], .members = x->members + i, .n_members = n};
        s->wanted = &x->load->wanted[s->part->wanted];
        for (uint32_t k = 0; k < n; k++) {
            uint32_t rank = x->claims[i + k].rank;
            x->members[i + k] = rank;
            s->me = rank == x->comm->rank ? k : s->me;
            x->n_peers += rank != x->comm->rank && !x->is_peer[rank];
            x->is_peer[rank] = rank != x->comm->rank;
        }
        lg__region region = region_of(s->part, s->wanted->stored->ndim);
        s->elements = lg__region_elements(&region);
        s->width = lg_dtype_bits(s->wanted->stored->dtype) / 8;
        cut(s, &region, m->e.id);
        const shared *before = s - (x->n > 1);
        x->alike =
            x->alike && before->n_members == n && memcmp(before->members, s->members, n * sizeof *s->members) == 0;
    }
    return LG_OK;
}

/* The first of the members that may read a piece; the one that does is chosen by
 * the region's id, so that small regions have different readers. Piece p is the
 * p-th part of the rows, and rank r wrote the r-th part of them where rows were
 * cut over ranks: so each rank reads from few files, on as many ranks as saved
 * from its own alone, and each file's header is read by few. */
static uint32_t candidate(const shared *s, uint32_t piece)
{
    return (uint32_t)((uint64_t)piece * s->n_members / s->n_pieces);
}

static uint32_t reader_of(const shared *s, uint32_t piece)
{
    uint32_t first = candidate(s, piece);
    return first + s->spread % (candidate(s, piece + 1) - first);
}

/* The elements of a region, row-major, that a member reads. */
static void piece_of(const shared *s, uint32_t member, uint64_t *begin, uint64_t *end)
{
    uint32_t piece = (uint32_t)((uint64_t)member * s->n_pieces / s->n_members);
    while (candidate(s, piece + 1) <= member) {
        piece++;
    }
    *begin = *end = 0;
    if (reader_of(s, piece) == member && piece * s->each < s->elements) {
        *begin = piece * s->each;
        *end = s->elements - *begin < s->each ? s->elements : *begin + s->each;
    }
}

static bool member_index(const shared *s, uint32_t rank, uint32_t *index)
{
    uint32_t low = 0, high = s->n_members;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (s->members[mid] < rank) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    *index = low;
    return low < s->n_members && s->members[low] == rank;
}

/* ---------------------------------------------------------------- own pieces */

/* Puts this rank's pieces in the place of the shared regions. */
static lg_status replace_parts(exchange *x, lg__part **parts, size_t *n_parts, lg_error *err)
{
    lg_load *load = x->load;
    size_t cap = 0;
    bool *taken = lg__calloc(load->n_parts, sizeof *taken);
    lg_status status = taken == NULL ? lg__nomem(err) : LG_OK;
    for (size_t i = 0; i < x->n && status == LG_OK; i++) {
        const shared *s = &x->all[i];
        const uint32_t ndim = s->wanted->stored->ndim;
        taken[s->part - load->parts] = true;
        uint64_t begin, end;
        piece_of(s, s->me, &begin, &end);
        lg__region boxes[LG__MAX_FLAT_BOXES];
        size_t n = lg__region_cut_flat(ndim, s->part->size, begin, end, boxes);
        for (size_t k = 0; k < n && status == LG_OK; k++) {
            uint64_t *dims = lg__arena_array(load->arena, 2 * (size_t)ndim + 1, sizeof *dims);
            if (dims == NULL || !lg__grow((void **)parts, &cap, *n_parts, sizeof **parts)) {
                status = lg__nomem(err);
                break;
            }
            for (uint32_t d = 0; d < ndim; d++) {
                dims[d] = s->part->offset[d] + boxes[k].offset[d];
                dims[ndim + d] = boxes[k].size[d];
            }
            lg__part *p = &(*parts)[(*n_parts)++];
            *p = *s->part;
            p->offset = dims;
            p->size = dims + ndim;
        }
    }
    for (size_t i = 0; i < load->n_parts && status == LG_OK; i++) {
        if (!taken[i]) {
            if (!lg__grow((void **)parts, &cap, *n_parts, sizeof **parts)) {
                status = lg__nomem(err);
                break;
            }
            (*parts)[(*n_parts)++] = load->parts[i];
        }
    }
    lg__free(taken);
    return status;
}

static lg_status load_pieces(exchange *x, lg_error *err)
{
    lg_load *load = x->load;
    lg__part *parts = NULL, *all = load->parts;
    size_t n = 0, n_all = load->n_parts;
    lg_status status = replace_parts(x, &parts, &n, err);
    if (status == LG_OK) {
        load->parts = parts;
        load->n_parts = n;
        status = lg__load_parts(load, err);
        load->parts = all;
        load->n_parts = n_all;
    }
    lg__free(parts);
    return status;
}

/* ------------------------------------------------------------------- rounds */

typedef struct moving {
    char *memory; /* the target's */
    char *packed;
    bool out;
} moving;

static lg_status move_run(uint64_t box_byte, int64_t mem_byte, uint64_t bytes, void *arg, lg_error *err)
{
    (void)err;
    const moving *m = arg;
    if (m->out) {
        lg__copy(m->packed + box_byte, m->memory + mem_byte, (size_t)bytes);
    } else {
        lg__copy(m->memory + mem_byte, m->packed + box_byte, (size_t)bytes);
    }
    return LG_OK;
}

/* Elements [begin, end) of a region between its target and packed memory. */
static lg_status move(const shared *s, uint64_t begin, uint64_t end, char *packed, bool out, lg_error *err)
{
    const uint32_t ndim = s->wanted->stored->ndim;
    lg__region boxes[LG__MAX_FLAT_BOXES];
    size_t n = lg__region_cut_flat(ndim, s->part->size, begin, end, boxes);
    moving m = {.memory = s->part->data, .packed = packed, .out = out};
    for (size_t i = 0; i < n; i++) {
        for (uint32_t d = 0; d < ndim; d++) {
            boxes[i].offset[d] += s->part->offset[d];
        }
        const lg__run_walk walk = {.dtype = s->wanted->stored->dtype,
                                   .box = &boxes[i],
                                   .part = &boxes[i],
                                   .mem_origin = s->part->mem_origin,
                                   .mem_size = s->part->mem_size,
                                   .strides = s->part->strides};
        LG__TRY(lg__region_runs(&walk, move_run, &m, err));
        m.packed += lg__region_elements(&boxes[i]) * s->width;
    }
    return LG_OK;
}

/* The next bytes from here to `peer`, or from there to here, at most `most`;
 * packed NULL: only counted. Both ends come to the same number. */
static lg_status chunk(exchange *x, cursor *c, uint32_t peer, bool out, uint64_t most, char *packed, size_t *bytes,
                       lg_error *err)
{
    *bytes = 0;
    for (; c->region < x->n; c->region++, c->elements = 0) {
        const shared *s = &x->all[c->region];
        uint32_t index;
        uint64_t begin, end;
        if (!member_index(s, peer, &index)) {
            continue;
        }
        piece_of(s, out ? s->me : index, &begin, &end);
        begin += c->elements;
        uint64_t n = (most - *bytes) / s->width;
        n = n < end - begin ? n : end - begin;
        if (packed != NULL && n > 0) {
            LG__TRY(move(s, begin, begin + n, packed + *bytes, out, err));
            if (!out) {
                s->wanted->planned += n;
                s->wanted->done += n * s->width;
            }
        }
        *bytes += (size_t)(n * s->width);
        c->elements += n;
        if (begin + n < end) {
            break;
        }
    }
    return LG_OK;
}

/* How much this rank will exchange with one peer at most, in either direction. */
static uint64_t longest(exchange *x)
{
    uint64_t most = 0;
    lg_error ignored;
    for (uint32_t r = 0; r < x->comm->size; r++) {
        for (int out = 0; x->is_peer[r] && out < 2; out++) {
            cursor c = {0};
            size_t bytes = 0;
            (void)chunk(x, &c, r, out != 0, UINT64_MAX, NULL, &bytes, &ignored);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

/* All ranks learn how many rounds there will be, and whether one is in trouble. */
static lg_status meet(exchange *x, lg_status status, uint64_t deadline_ms, bool *go, lg_error *err)
{
    extent e = {.failed = status != LG_OK, .peers = x->n_peers, .budget = DEFAULT_BUFFER_BYTES};
    if (status == LG_OK) {
        e.bytes = longest(x);
        e.budget = x->load->buffer_bytes != 0 ? x->load->buffer_bytes : DEFAULT_BUFFER_BYTES;
    }
    void *all = NULL;
    lg_error own = *err;
    lg_status told = lg__comm_all_gather(x->comm, &e, sizeof e, &all, x->comm->sizes, deadline_ms, err);
    if (status != LG_OK) {
        *err = own;
    } else {
        status = told;
    }
    bool failed = false;
    uint64_t peers = 1, bytes = 0, budget = UINT64_MAX;
    for (uint32_t r = 0; told == LG_OK && r < x->comm->size; r++) {
        memcpy(&e, (const char *)all + r * sizeof e, sizeof e);
        failed = failed || e.failed != 0;
        peers = e.peers > peers ? e.peers : peers;
        bytes = e.bytes > bytes ? e.bytes : bytes;
        budget = e.budget < budget ? e.budget : budget;
    }
    lg_free(all);
    /* Sent and received bytes lie in memory at the same time. */
    x->round_bytes = budget / (2 * peers);
    x->round_bytes = (x->round_bytes < ROUND_BYTES ? x->round_bytes : ROUND_BYTES) / 64 * 64;
    if (failed && status == LG_OK) {
        status = lg_error_set(err, LG_ERR_PEER, "another rank cannot load");
    }
    *go = bytes > 0 && x->round_bytes >= MIN_ROUND_BYTES;
    if (*go) {
        /* A round may stop short of a whole element of up to 8 bytes. */
        x->round_bytes -= SUM_BYTES;
        x->rounds = bytes / (x->round_bytes - 8) + 1;
    }
    return status;
}

static lg_status make_buffers(exchange *x, lg_error *err)
{
    const size_t n = x->comm->size, each = (size_t)x->round_bytes + SUM_BYTES;
    x->out = lg__calloc(n, sizeof *x->out);
    x->in = lg__calloc(n, sizeof *x->in);
    x->send = lg__calloc(n, sizeof *x->send);
    x->recv = lg__calloc(n, sizeof *x->recv);
    x->send_bytes = lg__calloc(n, sizeof *x->send_bytes);
    x->recv_bytes = lg__calloc(n, sizeof *x->recv_bytes);
    x->buffers = lg__malloc(each * (x->alike ? 1 : x->n_peers));
    bool all = x->out != NULL && x->in != NULL && x->send != NULL && x->recv != NULL && x->send_bytes != NULL &&
               x->recv_bytes != NULL && x->buffers != NULL;
    return all ? LG_OK : lg__nomem(err);
}

static lg_status fill(exchange *x, lg_error *err)
{
    char *buffer = x->buffers;
    size_t bytes = 0;
    bool filled = false;
    for (uint32_t r = 0; r < x->comm->size; r++) {
        x->send[r] = NULL;
        x->send_bytes[r] = 0;
        if (!x->is_peer[r]) {
            continue;
        }
        if (!x->alike || !filled) {
            LG__TRY(chunk(x, &x->out[r], r, true, x->round_bytes, buffer, &bytes, err));
            uint32_t crc = lg__crc32c(0, buffer, bytes);
            memcpy(buffer + bytes, &crc, sizeof crc);
            filled = true;
        }
        if (bytes > 0) {
            x->send[r] = buffer;
            x->send_bytes[r] = bytes + SUM_BYTES;
        }
        buffer += x->alike ? 0 : x->round_bytes + SUM_BYTES;
    }
    return LG_OK;
}

static lg_status take(exchange *x, uint32_t r, lg_error *err)
{
    if (!x->is_peer[r]) {
        return LG_OK;
    }
    cursor next = x->in[r];
    size_t bytes = 0;
    LG__TRY(chunk(x, &next, r, false, x->round_bytes, NULL, &bytes, err));
    uint32_t crc = 0, expected = 0;
    bool right = x->recv_bytes[r] == (bytes > 0 ? bytes + SUM_BYTES : 0);
    if (right && bytes > 0) {
        memcpy(&expected, (const char *)x->recv[r] + bytes, sizeof expected);
        crc = lg__crc32c(0, x->recv[r], bytes);
        right = crc == expected;
    }
    LG__RETURN_IF(!right, err, LG_ERR_COMM,
                  "what rank %u sent did not arrive as it was: %zu bytes, crc32c 0x%08x, expected %zu, 0x%08x", r,
                  x->recv_bytes[r], crc, bytes > 0 ? bytes + SUM_BYTES : 0, expected);
    return bytes > 0 ? chunk(x, &x->in[r], r, false, x->round_bytes, x->recv[r], &bytes, err) : LG_OK;
}

static lg_status exchange_pieces(exchange *x, uint64_t deadline_ms, lg_error *err)
{
    lg_status status = LG_OK;
    for (uint64_t i = 0; i < x->rounds; i++) {
        /* After an error of one's own the others still get their bytes. */
        lg_error why = LG_ERROR_INIT;
        lg_status filled = fill(x, &why);
        if (filled != LG_OK && status == LG_OK) {
            status = filled;
            *err = why;
        }
        lg_status sent =
            lg__comm_all_to_all(x->comm, x->send, x->send_bytes, x->recv, x->recv_bytes, deadline_ms, &why);
        if (sent != LG_OK) {
            *err = status == LG_OK ? why : *err;
            return status == LG_OK ? sent : status;
        }
        for (uint32_t r = 0; r < x->comm->size; r++) {
            if (status == LG_OK) {
                status = take(x, r, err);
            }
            lg_free(x->recv[r]);
            x->recv[r] = NULL;
        }
    }
    return status;
}

/* -------------------------------------------------------------------- whole */

static void exchange_free(exchange *x)
{
    lg_free(x->gathered);
    lg__free(x->mine);
    lg__free(x->claims);
    lg__free(x->members);
    lg__free(x->all);
    lg__free(x->is_peer);
    lg__free(x->out);
    lg__free(x->in);
    lg__free(x->send);
    lg__free(x->recv);
    lg__free(x->send_bytes);
    lg__free(x->recv_bytes);
    lg__free(x->buffers);
}

static lg_status run(exchange *x, lg__share share, lg_status status, uint64_t deadline_ms, lg_error *err)
{
    if (status == LG_OK) {
        status = list_mine(x, share == LG__SHARE_ON ? 1 : SHARE_BYTES, err);
    }
    bool go = false;
    status = tell(x, share, status, deadline_ms, &go, err);
    if (go) {
        if (status == LG_OK) {
            status = find_shared(x, err);
        }
        /* The same on all ranks but for one that ran out of memory, which must
         * say so; so all meet. */
        status = meet(x, status, deadline_ms, &go, err);
    }
    LG__TRY(status);
    lg__load_reset(x->load);
    if (!go) {
        LG__TRY(lg__load_parts(x->load, err));
        return lg__load_check(x->load, err);
    }
    status = make_buffers(x, err);
    if (status == LG_OK) {
        status = load_pieces(x, err);
    }
    LG__TRY(lg__comm_agree(x->comm, status, deadline_ms, err));
    LG__TRY(exchange_pieces(x, deadline_ms, err));
    return lg__load_check(x->load, err);
}

lg_status lg__load_shared(lg_load *load, lg_comm *comm, lg__share share, lg_status mine, uint64_t deadline_ms,
                          lg_error *err)
{
    if (share == LG__SHARE_OFF || comm->size == 1) {
        return mine == LG_OK ? lg_load_run(load, err) : mine;
    }
    exchange x = {.load = load, .comm = comm};
    lg_status status = run(&x, share, mine, deadline_ms, err);
    exchange_free(&x);
    return status;
}
