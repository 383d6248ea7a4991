/* A causal attention whose rows are split over several GPUs, forward and backward, on the C library of an export: a ring,
   in which keys and values travel by ncclSend and ncclRecv. Each GPU has a thread. Every result is checked against plain
   loops in double precision.

     cutlass-py-attn export --library --arch sm_80,sm_90a -o library \
         --problem bf16_d128_s4096_b1_h32k8_causal --problem bf16_d128_s4096_b1_h32k8_full --problem merge_bf16_d128
     gcc -std=c11 -O2 -I library -I <folder of cuda.h> -I <folder of nccl.h> main.c library/attention.c \
         -l:libcuda.so.1 -l:libnccl.so.2 -ldl -lpthread -lm -o context_parallel_c
     ./context_parallel_c [ranks rows heads heads_key]

   The sequence is cut into two chunks for each rank, of `rows` rows. Rank r has chunks r and 2 ranks - 1 - r (zigzag order),
   so that all ranks have the same work under the causal mask. A tile is one call of the library: the queries of one chunk
   and the keys that they see of one rank. Tiles of a chunk are merged by their logsumexp. Their backward needs the output and
   the logsumexp of all keys, and gradients are added in float32.

   A program with a process for each GPU calls ncclCommInitRank in place of ncclCommInitAll; the rest is the same. */
#include "attention.h"

#include <cuda.h>
#include <math.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 128, MAX_RANKS = 16, CHUNKS = 2 /* of a rank: an early one and a late one */ };

static void expect(int code, const char *what) {
    if (!code) return;
    fprintf(stderr, "%s\n", what);
    exit(2);
}
#define CU(call) expect(call, #call " failed")
#define NCCL(call) do { const ncclResult_t nccl_code = (call); if (nccl_code) expect(1, ncclGetErrorString(nccl_code)); } while (0)

/* The program's own kernel: to[i] = from[i] + part[i], or part[i] alone if is_new. float32; part is bfloat16. PTX, for any device. */
static const char add_ptx[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry add(.param .u64 to, .param .u64 from, .param .u64 part, .param .u32 count, .param .u32 is_new)\n"
    "{\n"
    ".reg .pred %outside, %new;\n.reg .b16 %half;\n.reg .b32 %i, %block, %thread, %count, %flag, %bits;\n"
    ".reg .f32 %sum, %x;\n.reg .b64 %to, %from, %part;\n"
    "ld.param.u64 %to, [to];\nld.param.u64 %from, [from];\nld.param.u64 %part, [part];\n"
    "ld.param.u32 %count, [count];\nld.param.u32 %flag, [is_new];\n"
    "mov.u32 %block, %ctaid.x;\nmov.u32 %i, %ntid.x;\nmov.u32 %thread, %tid.x;\n"
    "mad.lo.u32 %i, %block, %i, %thread;\n"
    "setp.ge.u32 %outside, %i, %count;\n@%outside bra END;\n"
    "mad.wide.u32 %to, %i, 4, %to;\nmad.wide.u32 %from, %i, 4, %from;\nmad.wide.u32 %part, %i, 2, %part;\n"
    "setp.ne.u32 %new, %flag, 0;\n"
    "mov.f32 %sum, 0f00000000;\n@!%new ld.global.f32 %sum, [%from];\n"
    "ld.global.b16 %half, [%part];\ncvt.u32.u16 %bits, %half;\nshl.b32 %bits, %bits, 16;\nmov.b32 %x, %bits;\n"
    "add.f32 %sum, %sum, %x;\nst.global.f32 [%to], %sum;\n"
    "END:\nret;\n}\n";

/* The problem, which all threads read: rows in natural order, as doubles that bfloat16 holds. */
static int64_t ranks, rows, heads, heads_key, tokens; /* rows: of a chunk */
static double *query, *key, *value, *grad_output;
static double *output, *grad_query, *grad_key, *grad_value; /* of the plain loops */
static double *found[4];                                    /* of the ranks: output, and the gradients */

/* Keys and values of one rank, which travel together; behind them the float32 sums of their gradients, if any. */
typedef struct { uint64_t keys, values, grad_keys, grad_values; } block;

typedef struct {
    int64_t rank;
    ncclComm_t comm;
    CUcontext context;
    CUstream stream;
    CUfunction add;
    attention_device *device;
    attention_target target;
    uint64_t workspace;
    size_t workspace_bytes;
    /* [CHUNKS, rows, heads, D], and logsumexps [CHUNKS, heads, rows rounded up to 32]: merged tiles. A merge does not write
       what it reads, so there are two of each. */
    uint64_t query, grad_output, total[2], logsumexp[2], grad_query;
    int current[CHUNKS]; /* which of both has the total; -1 before the first tile */
    uint64_t part, part_logsumexp, part_query, part_keys, part_values; /* results of one tile */
    block blocks[2];
} worker;

/* Arrays: values as doubles on the host, bfloat16 on the device. */

static uint16_t to_bf16(double number) { /* to nearest, ties to even */
    float narrow = (float)number;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static double from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
static double uniform(void) { /* from -2 to 2, by a linear congruential generator */
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return 4 * ((double)(state >> 11) * 0x1p-53) - 2;
}
static void *on_host(int64_t count, size_t size) {
    void *made = calloc((size_t)count + 1, size);
    expect(!made, "out of host memory");
    return made;
}
static double *random_rows(int64_t count) {
    double *made = (double *)on_host(count, sizeof(double));
    for (int64_t i = 0; i < count; i++) made[i] = from_bf16(to_bf16(uniform()));
    return made;
}
static uint64_t allocate(int64_t count, size_t size) {
    CUdeviceptr address = 0;
    CU(cuMemAlloc(&address, (size_t)count * size));
    return address;
}
/* The first row, in natural order, of one of a rank's chunks. */
static int64_t start_of(int64_t rank, int64_t chunk) { return rows * (chunk ? 2 * ranks - 1 - rank : rank); }
/* Copies the rows of a rank, of `width` numbers each, to the device. */
static void upload(const worker *w, uint64_t address, const double *all, int64_t width) {
    uint16_t *halves = (uint16_t *)on_host(CHUNKS * rows * width, 2);
    for (int64_t chunk = 0, n = 0; chunk < CHUNKS; chunk++)
        for (int64_t i = 0; i < rows * width; i++) halves[n++] = to_bf16(all[start_of(w->rank, chunk) * width + i]);
    CU(cuMemcpyHtoD(address, halves, 2 * (size_t)(CHUNKS * rows * width)));
    free(halves);
}
/* Notes rows [rows, width] on the device, bfloat16 (size 2) or float32 (size 4), as those of a chunk. */
static void download(const worker *w, int64_t chunk, uint64_t address, double *all, int64_t width, int size) {
    double *to = all + start_of(w->rank, chunk) * width;
    char *data = (char *)on_host(rows * width, (size_t)size);
    CU(cuMemcpyDtoH(data, address, (size_t)(rows * width * size)));
    for (int64_t i = 0; i < rows * width; i++) {
        if (size == 2) {
            uint16_t half;
            memcpy(&half, data + i * 2, 2), to[i] = from_bf16(half);
        } else {
            float number;
            memcpy(&number, data + i * 4, 4), to[i] = number;
        }
    }
    free(data);
}

/* Calls of the library. Strides come from attention_packed, so that rows never overlap. */

static int64_t of_chunk(int64_t chunk, int64_t width, int64_t size) { return chunk * rows * width * size; } /* bytes before it */
static int64_t padded(void) { return (rows + 31) / 32 * 32; }
static attention_call new_call(int32_t direction) {
    attention_call call;
    ATTENTION_CALL_INIT(&call);
    call.direction = direction;
    call.dtype = ATTENTION_BF16;
    call.head_dim = call.head_dim_value = D;
    call.batch = 1, call.num_queries = rows;
    call.num_heads = heads, call.num_heads_key = heads_key;
    call.scale = 1 / sqrt(D);
    return call;
}
/* The queries of a chunk, and the first `num_keys` keys of a block. is_diagonal: the last query is at the last key. */
static attention_call tile(const worker *w, int32_t direction, int64_t chunk, const block *keys, int64_t num_keys, int is_diagonal) {
    attention_call call = new_call(direction);
    attention_error error;
    call.num_keys = num_keys;
    call.window_right = is_diagonal ? 0 : -1, call.bottom_right = is_diagonal;
    expect(attention_packed(&call, &error), error.text);
    call.query.address = w->query + (uint64_t)of_chunk(chunk, heads * D, 2);
    call.key.address = keys->keys, call.value.address = keys->values;
    return call;
}
/* Makes the workspace large enough for a call. */
static void reserve(worker *w, const char *what, const attention_call *call) {
    attention_error error;
    const char *symbol = "";
    size_t bytes = 0;
    expect(attention_choose(call, &w->target, &symbol, &bytes, &error), error.text);
    if (!w->rank) printf("%-9s %s\n", what, symbol);
    if (bytes <= w->workspace_bytes) return;
    if (w->workspace) CU(cuMemFree(w->workspace));
    w->workspace = allocate((int64_t)bytes, 1), w->workspace_bytes = bytes;
}
static void launch(const worker *w, const attention_call *call) {
    attention_error error;
    expect(attention_launch(w->device, call, w->workspace, w->workspace_bytes, w->stream, &error), error.text);
}
static void add(const worker *w, uint64_t to, uint64_t from, uint64_t part, int64_t numbers, int is_new) {
    uint32_t count = (uint32_t)numbers, flag = (uint32_t)is_new;
    void *parameters[] = {&to, &from, &part, &count, &flag};
    CU(cuLaunchKernel(w->add, (count + 255) / 256, 1, 1, 256, 1, 1, 0, w->stream, parameters, NULL));
}

static void forward_tile(worker *w, int64_t chunk, const block *keys, int64_t num_keys, int is_diagonal) {
    attention_call call = tile(w, ATTENTION_FORWARD, chunk, keys, num_keys, is_diagonal);
    const uint64_t to = (uint64_t)of_chunk(chunk, heads * D, 2), line = (uint64_t)(chunk * heads * padded() * 4);
    const int from = w->current[chunk];
    if (from < 0) { /* the first tile needs no merge */
        call.output.address = w->total[0] + to, call.logsumexp = w->logsumexp[0] + line;
        launch(w, &call);
        w->current[chunk] = 0;
        return;
    }
    call.output.address = w->part, call.logsumexp = w->part_logsumexp;
    launch(w, &call);
    attention_call merge = new_call(ATTENTION_MERGE);
    attention_error error;
    expect(attention_packed(&merge, &error), error.text);
    merge.output_a.address = w->total[from] + to, merge.logsumexp_a = w->logsumexp[from] + line;
    merge.output_b.address = w->part, merge.logsumexp_b = w->part_logsumexp;
    merge.output.address = w->total[!from] + to, merge.logsumexp = w->logsumexp[!from] + line;
    launch(w, &merge);
    w->current[chunk] = !from;
}
/* Adds the gradients of a tile to those of its queries and to the sums that travel with its keys. */
static void backward_tile(worker *w, int64_t chunk, const block *keys, int64_t num_keys, int is_diagonal) {
    attention_call call = tile(w, ATTENTION_BACKWARD, chunk, keys, num_keys, is_diagonal);
    const int64_t of_query = rows * heads * D, of_keys = num_keys * heads_key * D;
    const uint64_t from = (uint64_t)of_chunk(chunk, heads * D, 2), sums = w->grad_query + (uint64_t)of_chunk(chunk, heads * D, 4);
    call.output.address = w->total[w->current[chunk]] + from;
    call.logsumexp = w->logsumexp[w->current[chunk]] + (uint64_t)(chunk * heads * padded() * 4);
    call.grad_output.address = w->grad_output + from;
    call.grad_query.address = w->part_query, call.grad_key.address = w->part_keys, call.grad_value.address = w->part_values;
    launch(w, &call);
    const int is_new = is_diagonal; /* a chunk's first tile */
    add(w, sums, sums, w->part_query, of_query, is_new);
    add(w, keys->grad_keys, keys->grad_keys, w->part_keys, of_keys, 0);
    add(w, keys->grad_values, keys->grad_values, w->part_values, of_keys, 0);
}
/* Runs the tiles of this rank's queries and the keys of rank `source`. */
static void tiles(worker *w, void (*run)(worker *, int64_t, const block *, int64_t, int), const block *keys, int64_t source) {
    if (source == w->rank) {
        run(w, 0, keys, rows, 1);
        run(w, 1, keys, CHUNKS * rows, 1); /* all of the early chunk, and the diagonal of the late one */
    } else if (source < w->rank) {
        run(w, 0, keys, rows, 0); /* its late chunk is behind both of ours */
        run(w, 1, keys, rows, 0);
    } else {
        run(w, 1, keys, CHUNKS * rows, 0); /* our early chunk is ahead of both of its chunks */
    }
}
/* Sends a block to the next rank and receives another from the rank before. All exchanges are one group, on the stream of the
   kernels: NCCL's kernels beside ours would take multiprocessors from them. */
static void pass_on(const worker *w, const block *from, const block *to, int has_keys, int has_gradients) {
    const int next = (int)((w->rank + 1) % ranks), before = (int)((w->rank + ranks - 1) % ranks);
    const size_t numbers = (size_t)(CHUNKS * rows * heads_key * D);
    const uint64_t sent[] = {from->keys, from->values, from->grad_keys, from->grad_values};
    const uint64_t received[] = {to->keys, to->values, to->grad_keys, to->grad_values};
    NCCL(ncclGroupStart());
    for (int i = has_keys ? 0 : 2; i < (has_gradients ? 4 : 2); i++) {
        const size_t bytes = numbers * (i < 2 ? 2 : 4);
        NCCL(ncclSend((const void *)(uintptr_t)sent[i], bytes, ncclInt8, next, w->comm, w->stream));
        NCCL(ncclRecv((void *)(uintptr_t)received[i], bytes, ncclInt8, before, w->comm, w->stream));
    }
    NCCL(ncclGroupEnd());
}

static void open_worker(worker *w) {
    attention_error error;
    CUmodule module;
    CUdevice device;
    int count = 0;
    CU(cuDeviceGetCount(&count));
    CU(cuDeviceGet(&device, (int)w->rank % count));
    CU(cuDevicePrimaryCtxRetain(&w->context, device));
    CU(cuCtxSetCurrent(w->context));
    CU(cuStreamCreate(&w->stream, CU_STREAM_NON_BLOCKING));
    CU(cuModuleLoadData(&module, add_ptx));
    CU(cuModuleGetFunction(&w->add, module, "add"));
    expect(attention_open(&w->device, NULL, 0, &error), error.text);
    expect(attention_target_of(w->device, &w->target, &error), error.text);

    const int64_t of_query = CHUNKS * rows * heads * D, of_keys = CHUNKS * rows * heads_key * D, lines = CHUNKS * heads * padded();
    w->query = allocate(of_query, 2), w->grad_output = allocate(of_query, 2), w->grad_query = allocate(of_query, 4);
    for (int i = 0; i < 2; i++) {
        w->total[i] = allocate(of_query, 2), w->logsumexp[i] = allocate(lines, 4);
        w->blocks[i].keys = allocate(of_keys, 2), w->blocks[i].values = allocate(of_keys, 2);
        w->blocks[i].grad_keys = allocate(of_keys, 4), w->blocks[i].grad_values = allocate(of_keys, 4);
    }
    w->part = allocate(of_query, 2), w->part_logsumexp = allocate(lines, 4);
    w->part_query = allocate(of_query, 2), w->part_keys = allocate(of_keys, 2), w->part_values = allocate(of_keys, 2);
    upload(w, w->query, query, heads * D);
    upload(w, w->grad_output, grad_output, heads * D);
    for (int is_diagonal = 0; is_diagonal < 2; is_diagonal++) {
        const attention_call forward = tile(w, ATTENTION_FORWARD, 0, &w->blocks[0], CHUNKS * rows, is_diagonal);
        const attention_call backward = tile(w, ATTENTION_BACKWARD, 0, &w->blocks[0], CHUNKS * rows, is_diagonal);
        reserve(w, "forward", &forward);
        reserve(w, "backward", &backward);
    }
}
static void load_keys(const worker *w) {
    upload(w, w->blocks[0].keys, key, heads_key * D);
    upload(w, w->blocks[0].values, value, heads_key * D);
}
static void *work(void *argument) {
    worker *w = (worker *)argument;
    const int64_t of_keys = CHUNKS * rows * heads_key * D;
    open_worker(w);

    load_keys(w);
    w->current[0] = w->current[1] = -1;
    for (int64_t step = 0; step < ranks; step++) {
        const block *have = &w->blocks[step % 2], *other = &w->blocks[(step + 1) % 2];
        tiles(w, forward_tile, have, (w->rank + ranks - step) % ranks);
        if (step + 1 < ranks) pass_on(w, have, other, 1, 0);
    }
    CU(cuStreamSynchronize(w->stream));
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++)
        download(w, chunk, w->total[w->current[chunk]] + (uint64_t)of_chunk(chunk, heads * D, 2), found[0], heads * D, 2);

    load_keys(w);
    CU(cuMemsetD32Async(w->blocks[0].grad_keys, 0, (size_t)of_keys, w->stream));
    CU(cuMemsetD32Async(w->blocks[0].grad_values, 0, (size_t)of_keys, w->stream));
    for (int64_t step = 0; step < ranks; step++) {
        const block *have = &w->blocks[step % 2], *other = &w->blocks[(step + 1) % 2];
        tiles(w, backward_tile, have, (w->rank + ranks - step) % ranks);
        pass_on(w, have, other, step + 1 < ranks, 1); /* the last time, the sums go home */
    }
    CU(cuStreamSynchronize(w->stream));
    const block *home = &w->blocks[ranks % 2];
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
        const uint64_t from = (uint64_t)of_chunk(chunk, heads_key * D, 4);
        download(w, chunk, w->grad_query + (uint64_t)of_chunk(chunk, heads * D, 4), found[1], heads * D, 4);
        download(w, chunk, home->grad_keys + from, found[2], heads_key * D, 4);
        download(w, chunk, home->grad_values + from, found[3], heads_key * D, 4);
    }
    attention_close(w->device);
    return NULL;
}

/* Causal attention of all rows and its gradients, in double precision. */
static void reference(void) {
    double *weights = (double *)on_host(tokens, sizeof(double));
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < tokens; i++) {
            const int64_t row = (i * heads + h) * D;
            double sum = 0, delta = 0;
            for (int64_t j = 0; j <= i; j++) {
                const double *k = key + (j * heads_key + h / (heads / heads_key)) * D;
                double score = 0;
                for (int c = 0; c < D; c++) score += query[row + c] * k[c];
                sum += weights[j] = exp(score / sqrt(D));
            }
            for (int64_t j = 0; j <= i; j++) {
                const double *v = value + (j * heads_key + h / (heads / heads_key)) * D;
                for (int c = 0; c < D; c++) output[row + c] += weights[j] / sum * v[c];
            }
            for (int c = 0; c < D; c++) delta += output[row + c] * grad_output[row + c];
            for (int64_t j = 0; j <= i; j++) {
                const int64_t of_key = (j * heads_key + h / (heads / heads_key)) * D;
                const double weight = weights[j] / sum;
                double grad = 0;
                for (int c = 0; c < D; c++) grad += grad_output[row + c] * value[of_key + c];
                grad = weight * (grad - delta) / sqrt(D);
                for (int c = 0; c < D; c++) {
                    grad_query[row + c] += grad * key[of_key + c];
                    grad_key[of_key + c] += grad * query[row + c];
                    grad_value[of_key + c] += weight * grad_output[row + c];
                }
            }
        }
    free(weights);
}
static int compare(const char *name, const double *results, const double *wanted, int64_t count) {
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const double error = fabs(results[i] - wanted[i]);
        worst = error <= worst ? worst : error; /* keeps a NaN */
        largest = fmax(largest, fabs(wanted[i]));
    }
    const int good = worst <= 0.01 * fmax(largest, 1); /* rounding of bfloat16 */
    printf("%-10s %8lld elements, largest %8.4f, worst error %.6f: %s\n", name, (long long)count, largest, worst, good ? "ok" : "WRONG");
    return good;
}

int main(int argc, char **argv) {
    expect(argc == 1 || argc == 5 ? 0 : 1, "usage: context_parallel_c [ranks rows heads heads_key]");
    int count = 0, ordinals[MAX_RANKS];
    CU(cuInit(0));
    CU(cuDeviceGetCount(&count));
    int64_t sizes[] = {count < MAX_RANKS ? count : MAX_RANKS, 200, 4, 2};
    for (int i = 1; i < argc; i++) sizes[i - 1] = atoll(argv[i]);
    ranks = sizes[0], rows = sizes[1], heads = sizes[2], heads_key = sizes[3], tokens = CHUNKS * ranks * rows;
    expect(ranks < 1 || ranks > MAX_RANKS || rows < 1 || heads_key < 1 || heads % heads_key, "ranks: 1 to 16; heads: a multiple of heads_key");

    query = random_rows(tokens * heads * D), grad_output = random_rows(tokens * heads * D);
    key = random_rows(tokens * heads_key * D), value = random_rows(tokens * heads_key * D);
    const int64_t numbers[] = {tokens * heads * D, tokens * heads * D, tokens * heads_key * D, tokens * heads_key * D};
    double **wanted[] = {&output, &grad_query, &grad_key, &grad_value};
    for (int i = 0; i < 4; i++) {
        *wanted[i] = (double *)on_host(numbers[i], sizeof(double));
        found[i] = (double *)on_host(numbers[i], sizeof(double));
    }

    worker workers[MAX_RANKS];
    ncclComm_t comms[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    memset(workers, 0, sizeof workers);
    for (int i = 0; i < ranks; i++) ordinals[i] = i % count;
    NCCL(ncclCommInitAll(comms, (int)ranks, ordinals));
    for (int i = 0; i < ranks; i++) {
        workers[i].rank = i, workers[i].comm = comms[i];
        expect(pthread_create(&threads[i], NULL, work, &workers[i]), "no thread");
    }
    reference();
    for (int i = 0; i < ranks; i++) expect(pthread_join(threads[i], NULL), "no thread");
    for (int i = 0; i < ranks; i++) NCCL(ncclCommDestroy(comms[i]));

    const char *names[] = {"output", "grad_query", "grad_key", "grad_value"};
    int good = 1;
    for (int i = 0; i < 4; i++) good &= compare(names[i], found[i], *wanted[i], numbers[i]);
    puts(good ? "passed" : "FAILED");
    return good ? 0 : 1;
}
