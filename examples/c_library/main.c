/* Prefill, decode and backward with the C library of an export, checked against plain loops in double precision: without
   Python and without the CUDA runtime. The decode step is captured into a CUDA graph, and two threads share the library.

     cutlass-py-attn export --library --problem bf16_d128_s512_b2_h4k2_causal --problem bf16_d128_q1_s512_b2_h4k2_full \
         --arch sm_80,sm_90a -o library
     gcc -std=c11 -O2 -I library -I <folder of cuda.h> main.c library/attention.c -l:libcuda.so.1 -ldl -lpthread -lm -o c_library
     ./c_library [batch prompt cached heads heads_key]

   cuda.h is for this program's memory and streams; the library itself does not need it. */
#define _POSIX_C_SOURCE 200809L
#include "attention.h"

#include <cuda.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 128 }; /* head_dim of the exported kernels */

static void expect(int code, const char *what) {
    if (!code) return;
    fprintf(stderr, "%s\n", what);
    exit(2);
}
#define CU(call) expect(call, #call " failed")

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
static double normal(void) { /* the sum of twelve uniform numbers, from a linear congruential generator */
    static uint64_t state = 1;
    double sum = -6;
    for (int i = 0; i < 12; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(state >> 11) * 0x1p-53;
    }
    return sum;
}
static uint64_t allocate(size_t bytes) {
    CUdeviceptr address = 0;
    if (bytes) CU(cuMemAlloc(&address, bytes));
    return address;
}
static double *doubles(int64_t count) {
    double *values = (double *)calloc((size_t)count, sizeof *values);
    expect(!values, "out of host memory");
    return values;
}
static double *random_array(int64_t count, uint64_t *address) {
    double *values = doubles(count);
    uint16_t *halves = (uint16_t *)malloc(2 * (size_t)count);
    expect(!halves, "out of host memory");
    for (int64_t i = 0; i < count; i++) values[i] = from_bf16(halves[i] = to_bf16(normal()));
    *address = allocate(2 * (size_t)count);
    CU(cuMemcpyHtoD(*address, halves, 2 * (size_t)count));
    free(halves);
    return values;
}
static int is_close(const char *name, uint64_t address, const double *wanted, int64_t count) {
    uint16_t *found = (uint16_t *)malloc(2 * (size_t)count);
    double worst = 0, largest = 0;
    expect(!found, "out of host memory");
    CU(cuMemcpyDtoH(found, address, 2 * (size_t)count));
    for (int64_t i = 0; i < count; i++) {
        double error = fabs(from_bf16(found[i]) - wanted[i]);
        worst = error <= worst ? worst : error; /* keeps a NaN */
        largest = fmax(largest, fabs(wanted[i]));
    }
    int good = worst <= 0.01 * fmax(largest, 1); /* rounding of bfloat16 sums of that magnitude */
    printf("%-18s %8lld elements, largest %8.4f, worst error %.6f: %s\n", name, (long long)count, largest, worst, good ? "ok" : "WRONG");
    free(found);
    return good;
}

/* Attention in double precision. Arrays are [batch, rows, heads, D]; `stored` is the rows of key and value in memory. */

typedef struct { int64_t batch, queries, keys, stored, heads, heads_key; int is_causal; double scale; } sizes;

static double dot(const double *a, const double *b) {
    double sum = 0;
    for (int i = 0; i < D; i++) sum += a[i] * b[i];
    return sum;
}
static void add(double *a, double factor, const double *b) {
    for (int i = 0; i < D; i++) a[i] += factor * b[i];
}
/* out, and with grad_out the gradients too. */
static void reference(const sizes *s, const double *q, const double *k, const double *v, double *out, const double *grad_out,
                      double *grad_q, double *grad_k, double *grad_v) {
    double *p = doubles(2 * s->keys), *dp = p + s->keys;
    for (int64_t b = 0; b < s->batch; b++) for (int64_t h = 0; h < s->heads; h++) for (int64_t i = 0; i < s->queries; i++) {
        const int64_t row = ((b * s->queries + i) * s->heads + h) * D;
        const int64_t first = (b * s->stored * s->heads_key + h / (s->heads / s->heads_key)) * D, step = s->heads_key * D;
        const int64_t end = s->is_causal ? i + s->keys - s->queries + 1 : s->keys; /* keys that the query sees */
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < end; j++) sum += p[j] = exp(s->scale * dot(q + row, k + first + j * step));
        for (int64_t j = 0; j < end; j++) add(out + row, p[j] /= sum, v + first + j * step);
        for (int64_t j = 0; grad_out && j < end; j++) delta += p[j] * (dp[j] = dot(grad_out + row, v + first + j * step));
        for (int64_t j = 0; grad_out && j < end; j++) {
            const double ds = s->scale * p[j] * (dp[j] - delta);
            add(grad_v + first + j * step, p[j], grad_out + row);
            add(grad_k + first + j * step, ds, q + row);
            add(grad_q + row, ds, k + first + j * step);
        }
    }
    free(p);
}

/* Calls of the library */

static attention_call call_of(const sizes *s) {
    attention_call call;
    attention_error error;
    ATTENTION_CALL_INIT(&call);
    call.dtype = ATTENTION_BF16;
    call.head_dim = call.head_dim_value = D;
    call.batch = s->batch, call.num_heads = s->heads, call.num_heads_key = s->heads_key;
    call.num_queries = s->queries, call.num_keys = s->stored;
    call.window_right = s->is_causal ? 0 : -1;
    call.scale = s->scale;
    expect(attention_packed(&call, &error), error.text);
    call.num_keys = s->keys; /* of the stored ones; the strides stay */
    call.logsumexp = allocate(4 * (size_t)(s->batch * s->heads * ((s->queries + 31) / 32 * 32)));
    return call;
}
static void launch(const attention_device *device, const attention_call *call, uint64_t workspace, size_t bytes, CUstream stream) {
    attention_error error;
    expect(attention_launch(device, call, workspace, bytes, stream, &error), error.text);
}
/* The device memory that a call needs, and the name of its kernel. */
static uint64_t workspace_of(const attention_device *device, const attention_call *call, const char *what, size_t *bytes) {
    attention_target target;
    attention_error error;
    const char *symbol = "";
    expect(attention_target_of(device, &target, &error), error.text);
    expect(attention_choose(call, &target, &symbol, bytes, &error), error.text);
    printf("%-10s %s, %zu bytes of workspace\n", what, symbol, *bytes);
    return allocate(*bytes);
}

typedef struct { const attention_device *device; attention_call call; size_t bytes; CUcontext context; } worker;

/* A thread with a stream, a workspace and an output of its own; the library is shared. */
static void *repeat(void *given) {
    worker *w = (worker *)given;
    CUstream stream;
    CU(cuCtxSetCurrent(w->context));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    uint64_t workspace = allocate(w->bytes);
    for (int i = 0; i < 100; i++) launch(w->device, &w->call, workspace, w->bytes, stream);
    CU(cuStreamSynchronize(stream));
    return NULL;
}

int main(int argc, char **argv) {
    expect(argc == 1 || argc == 6 ? 0 : 1, "usage: c_library [batch prompt cached heads heads_key]");
    const int64_t batch = argc == 6 ? atoll(argv[1]) : 2, prompt = argc == 6 ? atoll(argv[2]) : 300;
    const int64_t cached = argc == 6 ? atoll(argv[3]) : 700, heads = argc == 6 ? atoll(argv[4]) : 4;
    const int64_t heads_key = argc == 6 ? atoll(argv[5]) : 2;
    const double scale = 1 / sqrt(D);
    const int64_t query_count = batch * prompt * heads * D, key_count = batch * prompt * heads_key * D;
    attention_device *device = NULL;
    attention_error error;
    CUdevice ordinal;
    CUcontext context;
    CUstream stream;
    size_t bytes = 0;
    CU(cuInit(0));
    CU(cuDeviceGet(&ordinal, 0));
    CU(cuDevicePrimaryCtxRetain(&context, ordinal));
    CU(cuCtxSetCurrent(context));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    expect(attention_open(&device, NULL, 0, &error), error.text);

    /* Prefill: the prompts, causal */
    const sizes all = {batch, prompt, prompt, prompt, heads, heads_key, 1, scale};
    attention_call prefill = call_of(&all);
    double *q = random_array(query_count, &prefill.query.address);
    double *k = random_array(key_count, &prefill.key.address);
    double *v = random_array(key_count, &prefill.value.address);
    prefill.output.address = allocate(2 * (size_t)query_count);
    uint64_t workspace = workspace_of(device, &prefill, "prefill", &bytes);
    launch(device, &prefill, workspace, bytes, stream);

    /* Backward of the prefill */
    attention_call backward = prefill;
    backward.direction = ATTENTION_BACKWARD;
    double *grad_out = random_array(query_count, &backward.grad_output.address);
    backward.grad_query.address = allocate(2 * (size_t)query_count);
    backward.grad_key.address = allocate(2 * (size_t)key_count);
    backward.grad_value.address = allocate(2 * (size_t)key_count);
    workspace = workspace_of(device, &backward, "backward", &bytes);
    launch(device, &backward, workspace, bytes, stream);
    CU(cuStreamSynchronize(stream));

    /* Decode: a query against a cache with room for more keys, as a CUDA graph that is replayed */
    const sizes step = {batch, 1, cached, cached + 100, heads, heads_key, 0, scale};
    attention_call decode = call_of(&step);
    double *step_q = random_array(batch * heads * D, &decode.query.address);
    double *cache_k = random_array(batch * step.stored * heads_key * D, &decode.key.address);
    double *cache_v = random_array(batch * step.stored * heads_key * D, &decode.value.address);
    decode.output.address = allocate(2 * (size_t)(batch * heads * D));
    workspace = workspace_of(device, &decode, "decode", &bytes);
    CUgraph graph;
    CUgraphExec replay;
    CU(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    launch(device, &decode, workspace, bytes, stream);
    CU(cuStreamEndCapture(stream, &graph));
    CU(cuGraphInstantiateWithFlags(&replay, graph, 0));
    for (int i = 0; i < 3; i++) CU(cuGraphLaunch(replay, stream));
    CU(cuStreamSynchronize(stream));

    /* Two threads */
    pthread_t threads[2];
    worker workers[2];
    for (int i = 0; i < 2; i++) {
        workers[i].device = device, workers[i].call = decode, workers[i].bytes = bytes, workers[i].context = context;
        workers[i].call.output.address = allocate(2 * (size_t)(batch * heads * D));
        workers[i].call.logsumexp = allocate(4 * (size_t)(batch * heads * 32));
        expect(pthread_create(&threads[i], NULL, repeat, &workers[i]), "no thread");
    }
    for (int i = 0; i < 2; i++) expect(pthread_join(threads[i], NULL), "no thread");

    double *out = doubles(query_count), *grad_q = doubles(query_count), *grad_k = doubles(key_count), *grad_v = doubles(key_count);
    double *step_out = doubles(batch * heads * D);
    reference(&all, q, k, v, out, grad_out, grad_q, grad_k, grad_v);
    reference(&step, step_q, cache_k, cache_v, step_out, NULL, NULL, NULL, NULL);
    int good = is_close("prefill output", prefill.output.address, out, query_count);
    good &= is_close("grad_query", backward.grad_query.address, grad_q, query_count);
    good &= is_close("grad_key", backward.grad_key.address, grad_k, key_count);
    good &= is_close("grad_value", backward.grad_value.address, grad_v, key_count);
    good &= is_close("decode, by graph", decode.output.address, step_out, batch * heads * D);
    good &= is_close("decode, thread 0", workers[0].call.output.address, step_out, batch * heads * D);
    good &= is_close("decode, thread 1", workers[1].call.output.address, step_out, batch * heads * D);
    attention_close(device);
    puts(good ? "passed" : "FAILED");
    return good ? 0 : 1;
}
