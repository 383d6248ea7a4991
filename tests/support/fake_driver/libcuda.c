/* Fake libcuda: device memory is host memory, kernels do nothing, and every call is logged.
   A "cubin" is text with one line per kernel: its symbol, then the size of each parameter in bytes.
   The file declares every type that it needs, so that compiling it needs no CUDA toolkit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
enum { NOT_FOUND = 500, INVALID_CONTEXT = 201, INVALID_VALUE = 1, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, RECORDS = 1 << 16, NUMBERS = 18, BYTES = 2048, PARAMETERS = 8 };
enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* capture modes */

typedef struct { char call[40], text[192]; u64 numbers[NUMBERS]; int byte_count; unsigned char bytes[BYTES]; } Record;
typedef struct { char symbol[192]; int count; size_t sizes[PARAMETERS]; } Kernel;
typedef struct { int id; char pad[4]; unsigned cluster[3]; char rest[52]; } LaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], shared_memory;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;

static Record *records;
static int record_count, fail_code, has_no_memory, is_busy;
static char fail_name[40];
static __thread void *current, *previous;
static __thread int thread_mode; /* GLOBAL, as in the driver */
typedef struct Graph Graph;
static struct { void *stream; int mode, is_invalid; pthread_t thread; Graph *graph; } capture; /* one at a time; stream NULL for none */
static pthread_mutex_t log_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; /* launches of several threads */

Record *fake_driver_records(void) { return records; }
int fake_driver_count(void) { return record_count; }
void fake_driver_clear(void) { record_count = 0; fail_name[0] = 0; is_busy = 0; }
void fake_driver_busy(int busy) { is_busy = busy; }
void fake_driver_clear_context(void) { current = NULL; capture.stream = NULL; }
void fake_driver_without_memory(int without) { has_no_memory = without; }
void fake_driver_fail(const char *name, int code) { snprintf(fail_name, sizeof fail_name, "%s", name); fail_code = code; }

static int note(const char *call, const char *text, const u64 *numbers, int count) {
    pthread_mutex_lock(&log_lock);
    if (!records) records = calloc(RECORDS, sizeof(Record));
    Record *r = &records[record_count < RECORDS - 1 ? record_count++ : record_count];
    memset(r, 0, sizeof *r);
    snprintf(r->call, sizeof r->call, "%s", call);
    snprintf(r->text, sizeof r->text, "%s", text);
    memcpy(r->numbers, numbers, count * sizeof(u64));
    int fails = !strcmp(call, fail_name);
    if (fails) fail_name[0] = 0;
    pthread_mutex_unlock(&log_lock);
    return fails ? fail_code : 0;
}
#define NOTE(text, ...) \
    do { u64 noted[] = {__VA_ARGS__}; int e = note(__func__, text, noted, sizeof noted / sizeof *noted); if (e) return e; } while (0)
#define N(x) ((u64)(size_t)(x))

/* A test may take over the work of streams (simulated_gpu.py): it gets each call of the functions with STEP or TAKE, and
   returns its CUresult, or -1 to leave it to this file. */
typedef int (*Taker)(const char *call, const char *text, const u64 *numbers, const unsigned char *bytes, int byte_count);
static Taker taker;
void fake_driver_take(Taker given) { taker = given; }
static int taken(const char *call, const char *text, const u64 *numbers, const unsigned char *bytes, int byte_count) {
    return taker ? taker(call, text, numbers, bytes, byte_count) : -1;
}
#define TAKE(...) \
    do { u64 told[] = {__VA_ARGS__}; int t = taken(__func__, "", told, NULL, 0); if (t >= 0) return t; } while (0)
#define STEP(...) do { NOTE("", __VA_ARGS__); TAKE(__VA_ARGS__); } while (0)

/* Returns an error and invalidates the capture if this thread may make no unsafe call now: the rules of
   cuThreadExchangeStreamCaptureMode. */
static int unsafe_call(void) {
    if (!capture.stream || thread_mode == RELAXED || capture.mode == RELAXED) return 0;
    int is_own = pthread_equal(capture.thread, pthread_self());
    if (!is_own && (thread_mode == THREAD_LOCAL || capture.mode == THREAD_LOCAL)) return 0;
    capture.is_invalid = 1;
    return CAPTURE_UNSUPPORTED;
}
#define UNSAFE do { int e = unsafe_call(); if (e) return e; } while (0)

static void *memory(size_t size) {
    void *p = aligned_alloc(256, (size + 255) / 256 * 256);
    memset(p, 0xCD, size);
    return p;
}

int cuInit(unsigned flags) { NOTE("", flags); return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "fake GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *v, int attribute, int device) {
    /* 75, 76: compute capability; 16: multiprocessors; 97: opt-in shared memory. Device 1 is an sm_86 part. */
    switch (attribute) {
    case 75: *v = device ? 8 : 9; break;
    case 76: *v = device ? 6 : 0; break;
    case 16: *v = device ? 84 : 132; break;
    case 97: *v = device ? 101376 : 232448; break;
    default: return INVALID_VALUE;
    }
    return 0;
}
int cuDevicePrimaryCtxRelease(int device) { return 0; } /* cuda.core calls it when the process exits */
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(0xC0 + device); return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { NOTE("", N(context)); current = context; return 0; }
int cuCtxPushCurrent(void *context) { previous = current; current = context; return 0; }
int cuCtxPopCurrent(void **context) { *context = current; current = previous; return 0; }
int cuCtxGetDevice(int *device) { *device = (int)(size_t)current - 0xC0; return 0; }
int cuCtxSynchronize(void) { STEP(0); return 0; }

int cuPointerGetAttribute(void *value, int attribute, void *p) {
    if (attribute != 9) return INVALID_VALUE; /* 9: device ordinal */
    *(int *)value = 0;
    return 0;
}
int cuMemAllocAsync(void **p, size_t size, void *stream) {
    NOTE("", size, N(stream));
    *p = memory(size);
    TAKE(N(*p), size, N(stream));
    return 0;
}
int cuMemFreeAsync(void *p, void *stream) { STEP(N(p), N(stream)); free(p); return 0; }
int cuMemAlloc(void **p, size_t size) { NOTE("", size); UNSAFE; *p = memory(size); TAKE(N(*p), size); return 0; }
int cuMemFree(void *p) { NOTE("", N(p)); UNSAFE; TAKE(N(p)); free(p); return 0; }
/* cuda.h maps the names above to these names for C programs; cuda-python looks up the names above. */
int cuMemAlloc_v2(void **p, size_t size) { return cuMemAlloc(p, size); }
int cuMemFree_v2(void *p) { return cuMemFree(p); }
int cuMemcpyHtoD_v2(void *d, const void *s, size_t n) { NOTE("", N(d), N(s), n); memcpy(d, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, const void *s, size_t n) { NOTE("", N(d), N(s), n); memcpy(d, s, n); return 0; }
int cuMemcpyHtoDAsync(void *d, const void *s, size_t n, void *stream) { STEP(N(d), N(s), n, N(stream)); memcpy(d, s, n); return 0; }
int cuMemcpyDtoHAsync(void *d, const void *s, size_t n, void *stream) { STEP(N(d), N(s), n, N(stream)); memcpy(d, s, n); return 0; }
int cuMemcpyDtoDAsync(void *d, const void *s, size_t n, void *stream) { STEP(N(d), N(s), n, N(stream)); memcpy(d, s, n); return 0; }
int cuMemcpyDtoDAsync_v2(void *d, const void *s, size_t n, void *stream) { return cuMemcpyDtoDAsync(d, s, n, stream); }
typedef struct { size_t x, y; int kind; void *host; char *device; void *array; size_t pitch; } Rows;
typedef struct { Rows source, target; size_t width, height; } RowsCopy;
int cuMemcpy2DAsync(const RowsCopy *c, void *stream) {
    NOTE("", N(c->target.device), c->target.pitch, N(c->source.device), c->source.pitch, c->width, c->height, N(stream));
    if (c->target.pitch < c->width || c->source.pitch < c->width) return INVALID_VALUE;
    for (size_t i = 0; i < c->height; i++)
        memcpy(c->target.device + i * c->target.pitch, c->source.device + i * c->source.pitch, c->width);
    return 0;
}
int cuMemcpy2DAsync_v2(const RowsCopy *c, void *stream) { return cuMemcpy2DAsync(c, stream); }
int cuMemsetD32Async(unsigned *p, unsigned word, size_t n, void *stream) {
    STEP(N(p), word, n, N(stream));
    for (size_t i = 0; i < n && !has_no_memory; i++) p[i] = word;
    return 0;
}
int cuMemsetD16_v2(unsigned short *p, unsigned short word, size_t n) {
    NOTE("", N(p), word, n);
    for (size_t i = 0; i < n && !has_no_memory; i++) p[i] = word;
    return 0;
}
int cuMemsetD8Async(void *p, unsigned char byte, size_t n, void *stream) {
    if (!current) return INVALID_CONTEXT;
    STEP(N(p), byte, n, N(stream));
    if (!has_no_memory) memset(p, byte, n);
    return 0;
}
int cuMemsetD2D8Async(char *p, size_t pitch, unsigned char byte, size_t width, size_t height, void *stream) {
    STEP(N(p), pitch, byte, width, height, N(stream));
    for (size_t y = 0; y < height && !has_no_memory; y++) memset(p + y * pitch, byte, width);
    return 0;
}
int cuMemsetD2D32Async(char *p, size_t pitch, unsigned word, size_t width, size_t height, void *stream) {
    STEP(N(p), pitch, word, width, height, N(stream));
    for (size_t y = 0; y < height && !has_no_memory; y++)
        for (size_t x = 0; x < width; x++) ((unsigned *)(p + y * pitch))[x] = word;
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) { NOTE("", flags); *stream = malloc(8); return 0; }
int cuStreamGetCtx(void *stream, void **context) { /* made-up streams of the second device are at 2^32 */
    NOTE("", N(stream));
    *context = (void *)(size_t)(N(stream) >> 32 == 1 ? 0xC1 : 0xC0);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int given = *mode;
    NOTE("", given);
    *mode = thread_mode;
    thread_mode = given;
    return 0;
}
int cuStreamDestroy(void *stream) { NOTE("", N(stream)); free(stream); return 0; }
int cuStreamSynchronize(void *stream) {
    NOTE("", N(stream));
    if (!capture.stream || stream != capture.stream) {
        TAKE(N(stream));
        return 0;
    }
    capture.is_invalid = 1;
    return CAPTURE_UNSUPPORTED;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { STEP(N(stream), N(event), flags); return 0; }
int cuEventCreate(void **event, unsigned flags) { NOTE("", flags); *event = malloc(8); return 0; }
int cuEventRecord(void *event, void *stream) { STEP(N(event), N(stream)); return 0; }
int cuEventQuery(void *event) { NOTE("", N(event)); UNSAFE; TAKE(N(event)); return is_busy ? NOT_READY : 0; }
int cuEventSynchronize(void *event) { NOTE("", N(event)); return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { NOTE("", N(a), N(b)); *ms = 1.25f; return 0; }
int cuEventDestroy(void *event) { NOTE("", N(event)); TAKE(N(event)); free(event); return 0; }

int cuLibraryLoadData(char **library, const char *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    NOTE(code, N(code));
    UNSAFE;
    *library = strdup(code);
    return 0;
}
int cuLibraryUnload(char *library) { NOTE("", N(library)); UNSAFE; free(library); return 0; }
int cuLibraryGetKernel(Kernel **kernel, const char *library, const char *symbol) {
    NOTE(symbol, N(library));
    const char *line = library;
    size_t length = strlen(symbol);
    while (line && (strncmp(line, symbol, length) || line[length] != ' ')) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    if (!line) return NOT_FOUND;
    Kernel *k = calloc(1, sizeof *k);
    snprintf(k->symbol, sizeof k->symbol, "%s", symbol);
    char *rest = (char *)line + length;
    while (*rest == ' ') k->sizes[k->count++] = strtoul(rest, &rest, 10);
    *kernel = k;
    return 0;
}
/* A program may define these: then launches compute, and a captured graph has its launches (serving_kernels.c). */
__attribute__((weak)) void fake_driver_run(const char *symbol, const unsigned char *parameters, int maps);
__attribute__((weak)) void fake_driver_run_ptx(unsigned threads, const u64 *parameters);
static void copy_words(void **parameters, u64 *to) { /* of the examples' kernel: three addresses and two numbers */
    for (int i = 0; i < 5; i++) to[i] = i < 3 ? *(u64 *)parameters[i] : *(unsigned *)parameters[i];
}
static int is_recorded(void *stream, Kernel *k, void **parameters, unsigned threads);

/* Modules: kernels that a program has as PTX. Their names are not looked up. */
int cuModuleLoadData(void **module, const char *ptx) { NOTE("", N(ptx)); UNSAFE; *module = (void *)ptx; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *symbol) { NOTE(symbol, N(module)); *function = module; return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    if (!current) return INVALID_CONTEXT;
    NOTE("", N(function), x, y, z, bx, by, bz, shared, N(stream));
    u64 words[5];
    if (!fake_driver_run_ptx || is_recorded(stream, NULL, parameters, bx)) return 0;
    copy_words(parameters, words);
    fake_driver_run_ptx(bx, words);
    return 0;
}
int cuKernelGetFunction(Kernel **function, Kernel *k) { NOTE(k->symbol, N(k)); *function = k; return 0; }
int cuKernelGetParamInfo(Kernel *k, size_t i, size_t *offset, size_t *size) {
    if (i >= (size_t)k->count) return INVALID_VALUE;
    *offset = 0;
    for (size_t j = 0; j < i; j++) *offset += k->sizes[j];
    *size = k->sizes[i];
    return 0;
}
int cuKernelSetAttribute(int attribute, int value, Kernel *k, int device) { NOTE(k->symbol, attribute, value, device); return 0; }
static int copy_parameters(Kernel *k, void **parameters, unsigned char *to) {
    int count = 0;
    for (int i = 0; i < k->count; count += k->sizes[i++]) memcpy(to + count, parameters[i], k->sizes[i]);
    return count;
}
/* Returns the blocks of a cluster; 0 if an attribute is neither a cluster (n, 1, 1) nor a dependent launch. */
static unsigned cluster_of(const LaunchConfig *c) {
    unsigned found = 1;
    for (unsigned i = 0; i < c->attribute_count; i++) {
        const LaunchAttribute *a = &c->attributes[i];
        if (a->id == 4 && a->cluster[1] == 1 && a->cluster[2] == 1) found = a->cluster[0];
        else if (a->id != 6) return 0;
    }
    return found;
}
/* Returns whether a launch may start before the one ahead of it ends: programmatic stream serialization. */
static unsigned is_dependent(const LaunchConfig *c) {
    for (unsigned i = 0; i < c->attribute_count; i++)
        if (c->attributes[i].id == 6) return c->attributes[i].cluster[0];
    return 0;
}
/* Locks the log, adds the record of a launch and returns it; NULL if the launch must fail. The caller unlocks. */
static Record *launched(Kernel *k, const u64 *numbers, int *error) {
    pthread_mutex_lock(&log_lock);
    *error = note("cuLaunchKernelEx", k->symbol, numbers, 11);
    return *error ? NULL : &records[record_count - 1];
}
/* The limits of a launch: blocks of a grid, threads of a block, whole clusters. */
static int is_launch(const LaunchConfig *c) {
    const unsigned *grid = c->grid, *block = c->block, cluster = cluster_of(c);
    if (!grid[0] || grid[0] > 0x7FFFFFFF || !grid[1] || grid[1] > 65535 || !grid[2] || grid[2] > 65535) return 0;
    return block[0] && block[0] <= 1024 && block[1] == 1 && block[2] == 1 && cluster && grid[0] % cluster == 0;
}
int cuLaunchKernelEx(const LaunchConfig *c, Kernel *k, void **parameters, void **extra) {
    if (!current) return INVALID_CONTEXT;
    if (!is_launch(c)) return INVALID_VALUE;
    u64 numbers[] = {c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared_memory,
                     N(c->stream), cluster_of(c), N(current), is_dependent(c)};
    int error;
    Record *r = launched(k, numbers, &error);
    if (r) r->byte_count = copy_parameters(k, parameters, r->bytes);
    if (r && fake_driver_run && !is_recorded(c->stream, k, parameters, 0)) fake_driver_run(k->symbol, r->bytes, k->count - 1);
    pthread_mutex_unlock(&log_lock);
    if (!error && taker) {
        unsigned char bytes[BYTES];
        taken(__func__, k->symbol, numbers, bytes, copy_parameters(k, parameters, bytes));
    }
    return error;
}

/* Graphs: cuGraphLaunch logs itself and one call per node. A graph and its executable form are the same object,
   because no caller changes one of them and uses the other. */
typedef struct {
    Kernel *kernel;
    unsigned grid[3], block[3], shared_memory;
    void **parameters, **extra;
} KernelNode;
typedef struct { void *start; size_t pitch; unsigned value, item_bytes; size_t width, height; } MemsetNode;
typedef struct Node {
    struct Node *next;
    KernelNode kernel;
    MemsetNode memset;
    unsigned cluster, is_dependent;
    int byte_count;
    unsigned char bytes[BYTES];
    unsigned ptx_threads; /* of a recorded launch of a module's kernel */
    u64 words[5];
} Node;
struct Graph { Node *first, *last; void *context; };
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } EdgeData;

/* Aborts if an executable graph is used without its context: the real driver crashes in a thread without one. */
static void needs_context(const char *call, const Graph *graph) {
    if (current && current == graph->context) return;
    fprintf(stderr, "fake driver: %s under context %p of a graph of context %p\n", call, current, graph->context);
    abort();
}

static Node *append(Graph *graph) {
    Node *node = calloc(1, sizeof *node);
    if (graph->last) graph->last->next = node;
    else graph->first = node;
    return graph->last = node;
}
/* Adds a launch of a program whose launches compute to the graph that its stream captures. */
static int is_recorded(void *stream, Kernel *k, void **parameters, unsigned threads) {
    if (!capture.stream || stream != capture.stream) return 0;
    Node *node = append(capture.graph);
    node->kernel.kernel = k;
    node->ptx_threads = threads;
    if (k) node->byte_count = copy_parameters(k, parameters, node->bytes);
    else copy_words(parameters, node->words);
    return 1;
}
int cuStreamIsCapturing(void *stream, int *status) { /* not logged: every call asks */
    if (!strcmp(fail_name, __func__)) return fail_name[0] = 0, fail_code;
    *status = !capture.stream || stream != capture.stream ? 0 : 1 + capture.is_invalid;
    return 0;
}
int cuGraphCreate(Graph **graph, unsigned flags) { NOTE("", flags); *graph = calloc(1, sizeof **graph); return 0; }
int cuStreamBeginCapture(void *stream, int mode) {
    NOTE("", N(stream), mode);
    if (taker) taken(__func__, "", (u64[]){N(stream)}, NULL, 0);
    capture.stream = stream, capture.mode = mode, capture.is_invalid = 0, capture.thread = pthread_self();
    capture.graph = calloc(1, sizeof *capture.graph);
    return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { return cuStreamBeginCapture(stream, mode); } /* cuda.h's name */
int cuStreamEndCapture(void *stream, Graph **graph) {
    NOTE("", N(stream));
    capture.stream = NULL;
    if (capture.is_invalid) return CAPTURE_INVALIDATED;
    *graph = capture.graph;
    TAKE(N(stream), N(*graph));
    return 0;
}
int cuGraphExecKernelNodeSetParams(Graph *graph, Node *node, const KernelNode *given) {
    needs_context(__func__, graph);
    NOTE(given->kernel->symbol, N(given->grid[0]));
    node->kernel = *given;
    node->byte_count = copy_parameters(given->kernel, given->parameters, node->bytes);
    return 0;
}
int cuGraphExecMemsetNodeSetParams(Graph *graph, Node *node, const MemsetNode *given, void *context) {
    needs_context(__func__, graph);
    NOTE("", N(given->start));
    node->memset = *given;
    return 0;
}
int cuGraphAddKernelNode(Node **node, Graph *graph, Node **before, size_t count, const KernelNode *given) {
    NOTE(given->kernel->symbol, count, count ? before[0] == graph->last : !graph->last);
    *node = append(graph);
    (*node)->kernel = *given;
    (*node)->cluster = 1;
    return 0;
}
int cuGraphAddDependencies(Graph *graph, Node **from, Node **to, const EdgeData *data, size_t count) {
    int is_last = count == 1 && from[0]->next == to[0] && to[0] == graph->last;
    NOTE("", count, is_last, data->from_port, data->type);
    to[0]->is_dependent = is_last && from[0]->kernel.kernel && data->from_port == 1 && data->type == 1;
    return 0;
}
int cuGraphKernelNodeSetAttribute(Node *node, int id, const unsigned *value) {
    NOTE(node->kernel.kernel->symbol, id, value[0]);
    node->cluster = id == 4 && value[1] == 1 && value[2] == 1 ? value[0] : 0;
    return 0;
}
int cuGraphAddMemsetNode(Node **node, Graph *graph, Node **before, size_t count, const MemsetNode *given, void *context) {
    NOTE("", count);
    *node = append(graph);
    (*node)->memset = *given;
    return 0;
}
int cuGraphInstantiateWithFlags(Graph **made, Graph *graph, u64 flags) {
    NOTE("", flags);
    graph->context = current;
    *made = graph;
    return 0;
}
int cuGraphDestroy(Graph *graph) { NOTE("", N(graph)); return 0; }
int cuGraphExecDestroy(Graph *graph) { needs_context(__func__, graph); NOTE("", N(graph)); return 0; }
int cuGraphLaunch(Graph *graph, void *stream) {
    needs_context(__func__, graph);
    NOTE("", N(stream));
    TAKE(N(graph), N(stream));
    for (Node *node = graph->first; node; node = node->next) {
        const KernelNode *k = &node->kernel;
        if (node->ptx_threads) {
            fake_driver_run_ptx(node->ptx_threads, node->words);
            continue;
        }
        if (!k->kernel) {
            cuMemsetD8Async(node->memset.start, node->memset.value, node->memset.width, stream);
            continue;
        }
        u64 noted[] = {k->grid[0], k->grid[1], k->grid[2], k->block[0], k->block[1], k->block[2], k->shared_memory,
                       N(stream), node->cluster, N(current), node->is_dependent};
        int error;
        Record *r = launched(k->kernel, noted, &error);
        if (r) memcpy(r->bytes, node->bytes, r->byte_count = node->byte_count);
        if (r && fake_driver_run) fake_driver_run(k->kernel->symbol, r->bytes, k->kernel->count - 1);
        pthread_mutex_unlock(&log_lock);
        if (error) return error;
        if (taker) taken("cuLaunchKernelEx", k->kernel->symbol, noted, node->bytes, node->byte_count);
    }
    return 0;
}

/* The bytes of all arguments: sizes, strides, box, steps, each with as many numbers as the map has axes. */
static u64 copy_map(unsigned rank, const u64 *dims, const u64 *strides, const unsigned *box, const unsigned *steps, u64 *to) {
    memset(to, 0, 4 * 5 * sizeof *to);
    for (unsigned i = 0; i < rank; i++) to[i] = dims[i], to[5 + i] = i + 1 < rank ? strides[i] : 0, to[10 + i] = box[i], to[15 + i] = steps[i];
    u64 digest = 14695981039346656037u; /* FNV-1a of the words */
    for (int i = 0; i < 20; i++) digest = (digest ^ to[i]) * 1099511628211u;
    return digest;
}
/* The limits of cuTensorMapEncodeTiled without interleaving. */
static int is_map(u64 map, int type, unsigned rank, u64 address, const u64 *dims, const u64 *strides, const unsigned *box,
                  const unsigned *steps, int swizzle) {
    const u64 item = type == 7 ? 4 : type ? 2 : 1; /* 7: float32, 0: bytes */
    if (map % 64 || address % 16 || rank < 1 || rank > 5 || box[0] * item % 16) return 0;
    if (swizzle && box[0] * item > 16u << swizzle) return 0;
    for (unsigned i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8) return 0;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return 0;
    }
    return 1;
}
int cuTensorMapEncodeTiled(u64 *map, int type, unsigned rank, void *address, const u64 *dims, const u64 *strides,
                           const unsigned *box, const unsigned *steps, int interleave, int swizzle, int l2, int fill) {
    int deep = rank == 4; /* only maps of rank 4 have these sizes and strides among their numbers */
    u64 words[20];
    pthread_mutex_lock(&log_lock);
    u64 noted[] = {N(map), type, rank, N(address), dims[0], dims[1], strides[0], box[0], box[1], swizzle, l2, fill,
                   deep ? dims[2] : 0, deep ? dims[3] : 0, deep ? strides[1] : 0, deep ? strides[2] : 0, deep ? box[2] : 0, deep ? box[3] : 0};
    int error = note(__func__, "", noted, sizeof noted / sizeof *noted);
    Record *r = &records[record_count - 1];
    memset(map, 0xAB, 128);
    map[0] = N(address);
    map[1] = copy_map(rank, dims, strides, box, steps, words) ^ (u64)(fill << 24 | l2 << 16 | type << 8 | interleave << 4 | swizzle);
    memcpy(r->bytes, words, r->byte_count = sizeof words);
    pthread_mutex_unlock(&log_lock);
    if (error) return error;
    return interleave || !is_map(N(map), type, rank, N(address), dims, strides, box, steps, swizzle) ? INVALID_VALUE : 0;
}

static const struct { int code; const char *name, *text; } errors[] = {
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {0, "CUDA_ERROR_UNKNOWN", "unknown error"}, /* any other */
};
static int row_of(int code) {
    int row = 0;
    while (errors[row].code && errors[row].code != code) row++;
    return row;
}
int cuGetErrorName(int code, const char **name) { *name = errors[row_of(code)].name; return 0; }
int cuGetErrorString(int code, const char **text) { *text = errors[row_of(code)].text; return 0; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, u64 flags, int *status) {
    static void *self;
    Dl_info here;
    if (!self && dladdr((void *)cuGetProcAddress_v2, &here)) self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = strcmp(symbol, "cuGetProcAddress") ? dlsym(self, symbol) : (void *)cuGetProcAddress_v2;
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}
