/* An engine with a paged cache on the C library of an export: prefill, append, 64 decode steps under one captured graph,
   a speculative step of several rows, and a prefix that all conversations share. Each device has an engine of its own.
   Everything is checked against plain loops in double precision.

     cutlass-py-attn export --library --arch sm_80,sm_90a -o library \
         --problem bf16_d128_n512x512,256_h32k8_causal_br_paged16 --problem bf16_d128_q1_s8192_b8_h32k8_full_paged16 \
         --problem bf16_d128_q4_s8192_b8_h32k8_causal_br_paged16 --problem append_bf16_d128 --problem merge_bf16_d128
     gcc -std=c11 -O2 -I library -I <folder of cuda.h> main.c library/attention.c -l:libcuda.so.1 -ldl -lpthread -lm -o serving_c
     ./serving_c [conversations prompt heads heads_key page_size]

   cuda.h is for this program's memory, streams and graphs; the library itself does not need it. */
#include "attention.h"

#include <cuda.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 128, STEPS = 64, GUESSES = 4, DEVICES = 2 }; /* head_dim; decode steps; rows of the speculative step */

static void expect(int code, const char *what) {
    if (!code) return;
    fprintf(stderr, "%s\n", what);
    exit(2);
}
#define CU(call) expect(call, #call " failed")

/* The engine's own kernel: one thread for each conversation makes room for its next token. PTX, for any device. */
static const char advance_ptx[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry advance(.param .u64 lengths, .param .u64 slots, .param .u64 table, .param .u32 page_size, .param .u32 max_pages)\n"
    "{\n"
    ".reg .pred %empty;\n.reg .b32 %length, %page_size, %page, %row, %max, %b;\n.reg .b64 %lengths, %slots, %table, %at, %slot;\n"
    "ld.param.u64 %lengths, [lengths];\nld.param.u64 %slots, [slots];\nld.param.u64 %table, [table];\n"
    "ld.param.u32 %page_size, [page_size];\nld.param.u32 %max, [max_pages];\n"
    "mov.u32 %b, %tid.x;\n"
    "mad.wide.u32 %lengths, %b, 4, %lengths;\nmad.wide.u32 %slots, %b, 8, %slots;\n"
    "mov.b64 %slot, -1;\n"
    "ld.global.u32 %length, [%lengths];\n"
    "setp.eq.u32 %empty, %length, 0;\n" /* a padding row stays empty */
    "@%empty bra STORE;\n"
    "div.u32 %page, %length, %page_size;\nrem.u32 %row, %length, %page_size;\n"
    "mad.lo.u32 %page, %b, %max, %page;\n"
    "mad.wide.u32 %at, %page, 4, %table;\nld.global.u32 %page, [%at];\n"
    "mul.wide.u32 %slot, %page, %page_size;\ncvt.u64.u32 %at, %row;\nadd.u64 %slot, %slot, %at;\n"
    "add.u32 %length, %length, 1;\nst.global.u32 [%lengths], %length;\n"
    "STORE:\nst.global.u64 [%slots], %slot;\nret;\n}\n";

typedef struct { double *host; uint64_t device; } rows; /* bfloat16 on the device */

typedef struct {
    int ordinal, good;
    CUcontext context;
    CUstream stream;
    CUfunction advance;
    attention_device *device;
    attention_target target;
    /* The last conversation is padding of the graph's batch: it has no keys. */
    int64_t batch, heads, heads_key, page_size, max_pages, num_pages, next_page, longest, *length;
    int32_t *table;                   /* [batch, max_pages] */
    double *keys, *values;            /* [batch, max_pages * page_size, heads_key, D]: what each conversation has cached */
    uint64_t key_pool, value_pool;    /* [num_pages, page_size, heads_key, D] */
    uint64_t page_table, lengths, slots; /* int32 [batch, max_pages], int32 [batch], int64 */
    uint64_t workspace;
    size_t workspace_bytes;
    rows query, key, value;           /* of the phase that is running */
    uint64_t output, logsumexp;
} engine;

/* Arrays: values as doubles on the host, bfloat16 on the device. */

static uint16_t to_bf16(double value) { /* to nearest, ties to even */
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static double from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static double uniform(void) { /* from -2 to 2, by a linear congruential generator */
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return 4 * ((double)(state >> 11) * 0x1p-53) - 2;
}
static uint64_t allocate(size_t bytes) {
    CUdeviceptr address = 0;
    CU(cuMemAlloc(&address, bytes + !bytes));
    return address;
}
static void *on_host(int64_t count, size_t size) {
    void *found = calloc((size_t)count + 1, size);
    expect(!found, "out of host memory");
    return found;
}
static uint64_t uploaded(const void *data, size_t bytes) {
    const uint64_t address = allocate(bytes);
    CU(cuMemcpyHtoD(address, data, bytes));
    return address;
}
static rows random_rows(int64_t count) {
    rows made = {(double *)on_host(count, sizeof(double)), 0};
    uint16_t *halves = (uint16_t *)on_host(count, 2);
    for (int64_t i = 0; i < count; i++) made.host[i] = from_bf16(halves[i] = to_bf16(uniform()));
    made.device = uploaded(halves, 2 * (size_t)count);
    free(halves);
    return made;
}
static void compare(engine *e, const char *name, const double *wanted, int64_t count) {
    uint16_t *found = (uint16_t *)on_host(count, 2);
    double worst = 0, largest = 0;
    CU(cuMemcpyDtoH(found, e->output, 2 * (size_t)count));
    for (int64_t i = 0; i < count; i++) {
        const double error = fabs(from_bf16(found[i]) - wanted[i]);
        worst = error <= worst ? worst : error; /* keeps a NaN */
        largest = fmax(largest, fabs(wanted[i]));
    }
    const int good = worst <= 0.01 * fmax(largest, 1); /* rounding of bfloat16 */
    e->good &= good;
    printf("device %d: %-12s %8lld elements, largest %7.4f, worst error %.6f: %s\n", e->ordinal, name, (long long)count, largest, worst,
           good ? "ok" : "WRONG");
    free(found);
}

/* Attention of one query row, [heads, D], to `count` rows [heads_key, D], in double precision. */

static void reference(const engine *e, const double *query, const double *keys, const double *values, int64_t count, double *output) {
    double *weights = (double *)on_host(count, sizeof(double));
    for (int64_t h = 0; h < e->heads; h++) {
        const int64_t head = h / (e->heads / e->heads_key);
        double sum = 0;
        for (int64_t j = 0; j < count; j++) {
            double score = 0;
            for (int i = 0; i < D; i++) score += query[h * D + i] * keys[(j * e->heads_key + head) * D + i];
            sum += weights[j] = exp(score / sqrt(D));
        }
        for (int64_t j = 0; j < count; j++)
            for (int i = 0; i < D; i++) output[h * D + i] += weights[j] / sum * values[(j * e->heads_key + head) * D + i];
    }
    free(weights);
}
static int64_t place_of(const engine *e, int64_t b, int64_t position) { /* of a row in keys and values */
    return (b * e->max_pages * e->page_size + position) * e->heads_key * D;
}
static int64_t slot_of(const engine *e, int64_t b, int64_t position) {
    return e->table[b * e->max_pages + position / e->page_size] * e->page_size + position % e->page_size;
}
/* Notes row `row` of the phase's key and value as the next one of a conversation. */
static void remember(engine *e, int64_t b, int64_t row) {
    const int64_t columns = e->heads_key * D, to = place_of(e, b, e->length[b]++);
    memcpy(e->keys + to, e->key.host + row * columns, (size_t)columns * sizeof(double));
    memcpy(e->values + to, e->value.host + row * columns, (size_t)columns * sizeof(double));
}

/* Calls of the library. Strides come from attention_packed, so that rows never overlap. */

static attention_call new_call(const engine *e, int32_t direction, uint32_t flags) {
    attention_call call;
    ATTENTION_CALL_INIT(&call);
    call.direction = direction;
    call.flags = flags;
    call.dtype = ATTENTION_BF16;
    call.head_dim = call.head_dim_value = D;
    call.num_heads = e->heads, call.num_heads_key = e->heads_key;
    call.scale = 1 / sqrt(D);
    return call;
}
static attention_call append_call(const engine *e, int64_t tokens) {
    attention_call call = new_call(e, ATTENTION_APPEND, 0);
    attention_error error;
    call.tokens_k = tokens;
    call.num_pages = e->num_pages, call.page_size = e->page_size;
    expect(attention_packed(&call, &error), error.text);
    call.key.address = e->key.device, call.value.address = e->value.device;
    call.key_cache.address = e->key_pool, call.value_cache.address = e->value_pool;
    call.slots = e->slots;
    return call;
}
/* Attention of all conversations to their pages; tokens: rows of packed queries, 0 for as many of each. */
static attention_call paged_call(const engine *e, int64_t num_queries, int64_t tokens) {
    attention_call call = new_call(e, ATTENTION_FORWARD, ATTENTION_PAGED | (tokens ? ATTENTION_VARLEN : 0));
    attention_error error;
    call.batch = e->batch, call.num_queries = num_queries, call.tokens_q = tokens;
    call.page_size = e->page_size, call.max_pages = e->max_pages, call.num_pages = e->num_pages;
    call.num_keys = e->max_pages * e->page_size;
    call.window_right = num_queries > 1 ? 0 : -1; /* causal: the last query sees all keys */
    expect(attention_packed(&call, &error), error.text);
    call.query.address = e->query.device;
    call.key.address = e->key_pool, call.value.address = e->value_pool;
    call.output.address = e->output, call.logsumexp = e->logsumexp;
    call.page_table = e->page_table, call.seqused_k = e->lengths;
    return call;
}
/* Makes the workspace large enough for a call, and names its kernel. */
static void reserve(engine *e, const char *what, const attention_call *call) {
    attention_error error;
    const char *symbol = "";
    size_t bytes = 0;
    expect(attention_choose(call, &e->target, &symbol, &bytes, &error), error.text);
    printf("device %d: %-12s %s, %zu bytes of workspace\n", e->ordinal, what, symbol, bytes);
    if (bytes > e->workspace_bytes) e->workspace = allocate(e->workspace_bytes = bytes);
}
static void launch(engine *e, const attention_call *call) {
    attention_error error;
    expect(attention_launch(e->device, call, e->workspace, e->workspace_bytes, e->stream, &error), error.text);
}
static void upload_lengths(engine *e) {
    int32_t *lengths = (int32_t *)on_host(e->batch, 4);
    for (int64_t b = 0; b < e->batch; b++) lengths[b] = (int32_t)e->length[b];
    CU(cuMemcpyHtoD(e->lengths, lengths, 4 * (size_t)e->batch));
    free(lengths);
}

/* The phases of an engine */

static void open_engine(engine *e, int ordinal, int64_t conversations, int64_t prompt, int64_t heads, int64_t heads_key, int64_t page_size) {
    attention_error error;
    CUdevice device;
    CUmodule module;
    memset(e, 0, sizeof *e);
    e->ordinal = ordinal, e->good = 1;
    e->batch = conversations + 1, e->heads = heads, e->heads_key = heads_key, e->page_size = page_size;
    e->longest = prompt;
    e->max_pages = (prompt + STEPS + GUESSES + page_size - 1) / page_size;
    e->num_pages = (e->batch + 1) * e->max_pages; /* also of the shared prefix */
    CU(cuDeviceGet(&device, ordinal));
    CU(cuDevicePrimaryCtxRetain(&e->context, device));
    CU(cuCtxSetCurrent(e->context));
    CU(cuStreamCreate(&e->stream, CU_STREAM_NON_BLOCKING));
    CU(cuModuleLoadData(&module, advance_ptx));
    CU(cuModuleGetFunction(&e->advance, module, "advance"));
    expect(attention_open(&e->device, NULL, 0, &error), error.text);
    expect(attention_target_of(e->device, &e->target, &error), error.text);

    const int64_t cached = e->max_pages * page_size * heads_key * D, pool = e->num_pages * page_size * heads_key * D;
    e->length = (int64_t *)on_host(e->batch, sizeof(int64_t));
    e->table = (int32_t *)on_host(e->batch * e->max_pages, 4);
    e->keys = (double *)on_host(e->batch * cached, sizeof(double));
    e->values = (double *)on_host(e->batch * cached, sizeof(double));
    for (int64_t i = 0; i < e->batch * e->max_pages; i++) e->table[i] = (int32_t)(e->num_pages - 1 - i);
    e->page_table = uploaded(e->table, 4 * (size_t)(e->batch * e->max_pages));
    e->key_pool = allocate(2 * (size_t)pool), e->value_pool = allocate(2 * (size_t)pool);
    CU(cuMemsetD16(e->key_pool, 0x7FC0, (size_t)pool)); /* NaN: rows behind the last key are never used */
    CU(cuMemsetD16(e->value_pool, 0x7FC0, (size_t)pool));
    e->lengths = allocate(4 * (size_t)e->batch);
    e->slots = allocate(8 * (size_t)(e->batch * (prompt + GUESSES)));
    const int64_t outputs = e->batch * (prompt > STEPS ? prompt : STEPS) * heads * D;
    e->output = allocate(2 * (size_t)outputs);
    e->logsumexp = allocate(4 * (size_t)(e->batch * heads * (prompt + 32)));
}
/* Stores the prompts, of different lengths, and attends to them: queries of all conversations one after another. */
static void prefill(engine *e) {
    int32_t *starts = (int32_t *)on_host(e->batch + 1, 4);
    int64_t tokens = 0, longest = 0;
    CU(cuCtxSetCurrent(e->context));
    for (int64_t b = 0; b < e->batch; b++) {
        const int64_t length = b == e->batch - 1 ? 0 : e->longest - b * e->longest / e->batch;
        starts[b + 1] = (int32_t)(tokens += length);
        longest = length > longest ? length : longest;
    }
    int64_t *slots = (int64_t *)on_host(tokens, 8);
    e->query = random_rows(tokens * e->heads * D);
    e->key = random_rows(tokens * e->heads_key * D), e->value = random_rows(tokens * e->heads_key * D);
    for (int64_t b = 0; b < e->batch; b++)
        for (int64_t i = starts[b]; i < starts[b + 1]; i++) slots[i] = slot_of(e, b, e->length[b]), remember(e, b, i);
    CU(cuMemcpyHtoD(e->slots, slots, 8 * (size_t)tokens));
    upload_lengths(e);

    attention_call append = append_call(e, tokens), forward = paged_call(e, longest, tokens);
    forward.cu_seqlens_q = uploaded(starts, 4 * (size_t)(e->batch + 1));
    reserve(e, "append", &append);
    reserve(e, "prefill", &forward);
    launch(e, &append);
    launch(e, &forward);
    CU(cuStreamSynchronize(e->stream));

    double *wanted = (double *)on_host(tokens * e->heads * D, sizeof(double));
    for (int64_t b = 0; b < e->batch; b++)
        for (int64_t i = starts[b]; i < starts[b + 1]; i++)
            reference(e, e->query.host + i * e->heads * D, e->keys + place_of(e, b, 0), e->values + place_of(e, b, 0), i - starts[b] + 1,
                      wanted + i * e->heads * D);
    compare(e, "prefill", wanted, tokens * e->heads * D);
}
/* Puts 64 steps on the stream: one graph, in which lengths grow on the device. Nothing waits in between. */
static void start_decode(engine *e) {
    CU(cuCtxSetCurrent(e->context));
    const int64_t row = e->heads * D, row_key = e->heads_key * D;
    e->query = random_rows(STEPS * e->batch * row); /* what the layers before attention would compute */
    e->key = random_rows(STEPS * e->batch * row_key), e->value = random_rows(STEPS * e->batch * row_key);
    attention_call append = append_call(e, e->batch), decode = paged_call(e, 1, 0);
    append.key.address = allocate(2 * (size_t)(e->batch * row_key)), append.value.address = allocate(2 * (size_t)(e->batch * row_key));
    decode.query.address = allocate(2 * (size_t)(e->batch * row)), decode.output.address = allocate(2 * (size_t)(e->batch * row));
    reserve(e, "decode", &decode);

    CUgraph graph;
    CUgraphExec replay;
    uint32_t page_size = (uint32_t)e->page_size, max_pages = (uint32_t)e->max_pages;
    void *parameters[] = {&e->lengths, &e->slots, &e->page_table, &page_size, &max_pages};
    CU(cuStreamBeginCapture(e->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CU(cuLaunchKernel(e->advance, 1, 1, 1, (unsigned)e->batch, 1, 1, 0, e->stream, parameters, NULL));
    launch(e, &append);
    launch(e, &decode);
    CU(cuStreamEndCapture(e->stream, &graph));
    CU(cuGraphInstantiateWithFlags(&replay, graph, 0));
    for (int64_t step = 0; step < STEPS; step++) {
        const size_t of_query = 2 * (size_t)(e->batch * row), of_key = 2 * (size_t)(e->batch * row_key);
        CU(cuMemcpyDtoDAsync(decode.query.address, e->query.device + (size_t)step * of_query, of_query, e->stream));
        CU(cuMemcpyDtoDAsync(append.key.address, e->key.device + (size_t)step * of_key, of_key, e->stream));
        CU(cuMemcpyDtoDAsync(append.value.address, e->value.device + (size_t)step * of_key, of_key, e->stream));
        CU(cuGraphLaunch(replay, e->stream));
        CU(cuMemcpyDtoDAsync(e->output + (size_t)step * of_query, decode.output.address, of_query, e->stream));
    }
}
static void finish_decode(engine *e) {
    CU(cuCtxSetCurrent(e->context));
    const int64_t row = e->heads * D;
    double *wanted = (double *)on_host(STEPS * e->batch * row, sizeof(double));
    for (int64_t i = 0; i < STEPS * e->batch; i++) {
        const int64_t b = i % e->batch;
        if (b < e->batch - 1) remember(e, b, i);
        reference(e, e->query.host + i * row, e->keys + place_of(e, b, 0), e->values + place_of(e, b, 0), e->length[b], wanted + i * row);
    }
    CU(cuStreamSynchronize(e->stream));
    compare(e, "64 decodes", wanted, STEPS * e->batch * row);
}
/* Four guessed tokens of each conversation at once: each sees those before it. */
static void speculate(engine *e) {
    CU(cuCtxSetCurrent(e->context));
    const int64_t count = e->batch * GUESSES, row = e->heads * D;
    int64_t *slots = (int64_t *)on_host(count, 8);
    double *wanted = (double *)on_host(count * row, sizeof(double));
    e->query = random_rows(count * row);
    e->key = random_rows(count * e->heads_key * D), e->value = random_rows(count * e->heads_key * D);
    for (int64_t i = 0; i < count; i++) {
        const int64_t b = i / GUESSES, is_padding = b == e->batch - 1;
        slots[i] = is_padding ? -1 : slot_of(e, b, e->length[b]);
        if (!is_padding) remember(e, b, i);
        reference(e, e->query.host + i * row, e->keys + place_of(e, b, 0), e->values + place_of(e, b, 0), e->length[b], wanted + i * row);
    }
    CU(cuMemcpyHtoD(e->slots, slots, 8 * (size_t)count));
    upload_lengths(e);
    attention_call append = append_call(e, count), forward = paged_call(e, GUESSES, 0);
    reserve(e, "speculative", &forward);
    launch(e, &append);
    launch(e, &forward);
    CU(cuStreamSynchronize(e->stream));
    compare(e, "speculative", wanted, count * row);
}
/* A prefix in pages of its own, read once for all conversations: their queries are those of one sequence. A merge joins
   the result with that of each conversation's own pages; the padding row, which has none, gets the prefix alone. */
static void share_prefix(engine *e) {
    CU(cuCtxSetCurrent(e->context));
    const int64_t prefix = e->max_pages * e->page_size - 3, row = e->heads * D, columns = e->heads_key * D;
    const int64_t padded = (e->batch + 31) / 32 * 32;
    int64_t *slots = (int64_t *)on_host(prefix, 8);
    int32_t *table = (int32_t *)on_host(e->max_pages, 4), length = (int32_t)prefix;
    e->query = random_rows(e->batch * row);
    e->key = random_rows(prefix * columns), e->value = random_rows(prefix * columns);
    for (int64_t i = 0; i < e->max_pages; i++) table[i] = (int32_t)i;
    for (int64_t i = 0; i < prefix; i++) slots[i] = i;
    const uint64_t slots_of_prefix = uploaded(slots, 8 * (size_t)prefix);
    attention_call append = append_call(e, prefix), own = paged_call(e, 1, 0), shared = own;
    append.slots = slots_of_prefix;
    own.output.address = allocate(2 * (size_t)(e->batch * row));
    shared.batch = 1, shared.num_queries = e->batch; /* without a mask: each sees all of the prefix */
    shared.query.batch = shared.output.batch = e->batch * row;
    shared.page_table = uploaded(table, 4 * (size_t)e->max_pages), shared.seqused_k = uploaded(&length, 4);
    shared.output.address = allocate(2 * (size_t)(e->batch * row));
    shared.logsumexp = allocate(4 * (size_t)(e->heads * padded));

    attention_call merge = new_call(e, ATTENTION_MERGE, 0);
    attention_error error;
    merge.batch = e->batch, merge.num_queries = 1;
    expect(attention_packed(&merge, &error), error.text);
    merge.output_a.address = shared.output.address, merge.output_b.address = own.output.address;
    merge.output.address = e->output, merge.logsumexp = e->logsumexp;
    own.logsumexp = merge.logsumexp_b = allocate(4 * (size_t)(e->batch * e->heads * 32));
    merge.logsumexp_a = allocate(4 * (size_t)(e->batch * e->heads * 32));
    reserve(e, "prefix", &shared);
    reserve(e, "merge", &merge);
    launch(e, &append);
    launch(e, &shared);
    launch(e, &own);
    for (int64_t h = 0; h < e->heads; h++) { /* logsumexp from [1, heads, queries] to [batch, heads, 1], both padded to 32 */
        CUDA_MEMCPY2D copy;
        memset(&copy, 0, sizeof copy);
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = shared.logsumexp + 4 * (size_t)(h * padded), copy.srcPitch = 4;
        copy.dstDevice = merge.logsumexp_a + 4 * (size_t)(h * 32), copy.dstPitch = 4 * 32 * (size_t)e->heads;
        copy.WidthInBytes = 4, copy.Height = (size_t)e->batch;
        CU(cuMemcpy2DAsync(&copy, e->stream));
    }
    launch(e, &merge);
    CU(cuStreamSynchronize(e->stream));

    double *wanted = (double *)on_host(e->batch * row, sizeof(double));
    for (int64_t b = 0; b < e->batch; b++) { /* the prefix, and the conversation behind it */
        const int64_t count = prefix + e->length[b];
        double *keys = (double *)on_host(count * columns, sizeof(double)), *values = (double *)on_host(count * columns, sizeof(double));
        memcpy(keys, e->key.host, (size_t)(prefix * columns) * sizeof(double));
        memcpy(values, e->value.host, (size_t)(prefix * columns) * sizeof(double));
        memcpy(keys + prefix * columns, e->keys + place_of(e, b, 0), (size_t)(e->length[b] * columns) * sizeof(double));
        memcpy(values + prefix * columns, e->values + place_of(e, b, 0), (size_t)(e->length[b] * columns) * sizeof(double));
        reference(e, e->query.host + b * row, keys, values, count, wanted + b * row);
        free(keys), free(values);
    }
    compare(e, "prefix", wanted, e->batch * row);
}

int main(int argc, char **argv) {
    expect(argc == 1 || argc == 6 ? 0 : 1, "usage: serving_c [conversations prompt heads heads_key page_size]");
    int64_t sizes[] = {5, 200, 8, 2, 16};
    for (int i = 1; i < argc; i++) sizes[i - 1] = atoll(argv[i]);
    engine engines[DEVICES];
    int count = 0, good = 1;
    CU(cuInit(0));
    CU(cuDeviceGetCount(&count));
    if (count > DEVICES) count = DEVICES;
    for (int i = 0; i < count; i++) open_engine(&engines[i], i, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
    for (int i = 0; i < count; i++) prefill(&engines[i]);
    for (int i = 0; i < count; i++) start_decode(&engines[i]); /* on all devices at once */
    for (int i = 0; i < count; i++) finish_decode(&engines[i]);
    for (int i = 0; i < count; i++) speculate(&engines[i]);
    for (int i = 0; i < count; i++) share_prefix(&engines[i]);
    for (int i = 0; i < count; i++) {
        attention_close(engines[i].device); /* all its launches are done; the other devices' handles stay open */
        good &= engines[i].good;
    }
    puts(good ? "passed" : "FAILED");
    return good ? 0 : 1;
}
