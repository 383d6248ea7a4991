/* XLA FFI handler that launches the kernels of a call without Python, so without its global interpreter lock.

   native_library.py compiles this file with XLA's C header of the installed jaxlib. A call whose program is not in the
   table goes to the handler in Python (handler.py), which loads the kernels, launches them and adds the program
   (native_program.py). Later calls are launched here. A program never changes and is never freed: a call copies its
   kernel parameters to the stack, writes the addresses of its buffers there, and launches.

   A program is an array of 64-bit words. `decode` refuses one that is not exactly of this form:

       FORMAT, context, buffers
       struct bytes, the struct's words
       number of addresses; for each: buffer, bytes from its start, offset in the struct, alignment (0: not checked)
       number of tensor maps; for each: buffer, the 16 words of a CUtensorMap, whose first word becomes the address
       number of steps; for each its kind, then
           CLEAR: buffer, bytes from its start, bytes to set to 0
           FILL: buffer, bytes from its start, pitch (bytes), 32-bit value, width (values), height
           LAUNCH: function, grid (3), block (3), shared memory (bytes), cluster, is dependent, first tensor map, number
               of tensor maps, number of overrides; for each: offset in the struct, 32-bit value;
               bytes of the symbol, its words */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define PUBLIC __attribute__((visibility("default")))
#define TARGET "cutlass_py_attn"

enum {
    MAX_BUFFERS = 256,
    MAX_ADDRESSES = 256,
    MAX_MAPS = 256,
    MAX_STEPS = 1 << 20,
    MAX_OVERRIDES = 16,
    MAX_STRUCT_BYTES = 4096,
    MAX_SYMBOL_BYTES = 4096,
    MAX_CLUSTER = 16,
    MAP_WORDS = 16,
    MAP_BYTES = 128,
    BUCKETS = 1024,
};
static const uint64_t FORMAT = 0x31676f7270617063; /* "cpaprog1" */

/* What this file needs of cuda.h. */

typedef int CUresult;
typedef struct {
    int id;
    char pad[4];
    union {
        char bytes[64];
        struct { unsigned x, y, z; } cluster;
        int is_dependent;
    } value;
} LaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], shared_memory;
    void *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;
enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

/* The driver's functions; native.py passes their addresses in this order, and has their names in it. */
static struct {
    CUresult (*get_current)(void **context);
    CUresult (*set_current)(void *context);
    CUresult (*stream_context)(void *stream, void **context);
    CUresult (*clear)(uint64_t address, unsigned char value, size_t bytes, void *stream);
    CUresult (*fill)(uint64_t address, size_t pitch, unsigned value, size_t width, size_t height, void *stream);
    CUresult (*launch)(const LaunchConfig *config, void *function, void **parameters, void **extra);
} driver;
enum { GET_CURRENT, SET_CURRENT, STREAM_CONTEXT, CLEAR_CALL, FILL_CALL, LAUNCH_CALL }; /* the last three as in Kind */

/* Programs */

typedef struct { uint32_t buffer, field; uint64_t offset, alignment; } Address;
typedef struct { uint32_t buffer; uint64_t words[MAP_WORDS]; } Map;
typedef struct { uint32_t field, value; } Override;
typedef enum { CLEAR, FILL, LAUNCH } Kind;
typedef struct {
    Kind kind;
    uint32_t buffer; /* of a memset, and all up to height */
    uint64_t offset, width, pitch, height;
    uint32_t value;
    void *function; /* of a launch, and all that follow */
    uint32_t grid[3], block[3], shared_memory, cluster, is_dependent, first_map, map_count, override_count;
    Override overrides[MAX_OVERRIDES];
    char *symbol;
} Step;
typedef struct Program {
    struct Program *next;
    uint64_t key, place; /* place: what `add` was given as the place of the key */
    void *context;
    uint32_t buffer_count, struct_bytes, address_count, map_count, step_count;
    uint64_t values[MAX_STRUCT_BYTES / 8];
    Address *addresses;
    Map *maps;
    Step *steps;
} Program;

typedef struct { const uint64_t *words; size_t count, next; const char *wrong; } Reader;

/* Returns the next word, which must be at most `most`; 0 if it is not, and from then on. */
static uint64_t number(Reader *r, uint64_t most, const char *what) {
    if (r->wrong) return 0;
    if (r->next >= r->count || r->words[r->next] > most) {
        r->wrong = what;
        return 0;
    }
    return r->words[r->next++];
}
/* Copies `bytes` bytes of whole words; the bytes up to the last word's end must be 0. */
static void copied(Reader *r, void *to, uint64_t bytes, const char *what) {
    const uint64_t count = (bytes + 7) / 8;
    if (r->wrong) return;
    if (count > r->count - r->next) {
        r->wrong = what;
        return;
    }
    const unsigned char *from = (const unsigned char *)(r->words + r->next);
    for (uint64_t i = bytes; i < 8 * count; i++)
        if (from[i]) r->wrong = what;
    if (bytes) memcpy(to, from, bytes);
    r->next += count;
}
/* Returns the offset of a field of `bytes` bytes in the struct. */
static uint32_t field(Reader *r, const Program *p, uint32_t bytes) {
    if (p->struct_bytes < bytes) r->wrong = "offset in the struct";
    return (uint32_t)number(r, p->struct_bytes < bytes ? 0 : p->struct_bytes - bytes, "offset in the struct");
}
static uint32_t buffer(Reader *r, const Program *p) {
    if (!p->buffer_count) r->wrong = "buffer";
    return (uint32_t)number(r, p->buffer_count ? p->buffer_count - 1 : 0, "buffer");
}
/* Returns a word of a launch that is from 1 to `most`. */
static uint32_t positive(Reader *r, uint64_t most, const char *what) {
    const uint64_t found = number(r, most, what);
    if (!found && !r->wrong) r->wrong = what;
    return (uint32_t)found;
}
static void *zeros(Reader *r, uint64_t count, size_t size) {
    void *made = r->wrong ? NULL : calloc(count ? count : 1, size);
    if (!made && !r->wrong) r->wrong = "size: no host memory for it";
    return made;
}

static void read_launch(Reader *r, const Program *p, Step *s) {
    s->function = (void *)(uintptr_t)number(r, UINT64_MAX, "function");
    if (!s->function && !r->wrong) r->wrong = "function";
    for (int i = 0; i < 3; i++) s->grid[i] = positive(r, INT32_MAX, "grid");
    for (int i = 0; i < 3; i++) s->block[i] = positive(r, 1024, "block");
    s->shared_memory = (uint32_t)number(r, INT32_MAX, "shared memory");
    s->cluster = positive(r, MAX_CLUSTER, "cluster");
    s->is_dependent = (uint32_t)number(r, 1, "dependent launch");
    s->first_map = (uint32_t)number(r, p->map_count, "first tensor map");
    s->map_count = (uint32_t)number(r, p->map_count - s->first_map, "number of a launch's tensor maps");
    s->override_count = (uint32_t)number(r, MAX_OVERRIDES, "number of overrides");
    for (uint32_t i = 0; i < s->override_count; i++) {
        s->overrides[i].field = field(r, p, 4);
        s->overrides[i].value = (uint32_t)number(r, UINT32_MAX, "override");
    }
    const uint64_t length = number(r, MAX_SYMBOL_BYTES, "bytes of the symbol");
    s->symbol = zeros(r, length + 1, 1);
    copied(r, s->symbol, length, "symbol");
}
static void read_step(Reader *r, const Program *p, Step *s) {
    s->kind = (Kind)number(r, LAUNCH, "kind of a step");
    if (s->kind == LAUNCH) {
        read_launch(r, p, s);
        return;
    }
    s->buffer = buffer(r, p);
    s->offset = number(r, INT64_MAX, "offset of a memset");
    if (s->kind == FILL) {
        s->pitch = number(r, INT64_MAX, "pitch");
        s->value = (uint32_t)number(r, UINT32_MAX, "value");
    }
    s->width = number(r, INT64_MAX, "width");
    if (s->kind == FILL) s->height = number(r, INT64_MAX, "height");
}

static void freed(Program *p) {
    for (uint32_t i = 0; p->steps && i < p->step_count; i++) free(p->steps[i].symbol);
    free(p->addresses);
    free(p->maps);
    free(p->steps);
    free(p);
}
static Program *decode(Reader *r) {
    Program *p = zeros(r, 1, sizeof *p);
    if (!p) return NULL;
    if (number(r, UINT64_MAX, "format") != FORMAT) r->wrong = "format";
    p->context = (void *)(uintptr_t)number(r, UINT64_MAX, "context");
    p->buffer_count = (uint32_t)number(r, MAX_BUFFERS, "number of buffers");
    p->struct_bytes = (uint32_t)number(r, MAX_STRUCT_BYTES, "bytes of the struct");
    copied(r, p->values, p->struct_bytes, "struct");
    p->address_count = (uint32_t)number(r, MAX_ADDRESSES, "number of addresses");
    p->addresses = zeros(r, p->address_count, sizeof *p->addresses);
    for (uint32_t i = 0; i < p->address_count && !r->wrong; i++) {
        Address *a = &p->addresses[i];
        a->buffer = buffer(r, p);
        a->offset = number(r, INT64_MAX, "offset of an address");
        a->field = field(r, p, 8);
        a->alignment = number(r, 4096, "alignment");
        if (a->alignment & (a->alignment - 1)) r->wrong = "alignment";
    }
    p->map_count = (uint32_t)number(r, MAX_MAPS, "number of tensor maps");
    p->maps = zeros(r, p->map_count, sizeof *p->maps);
    for (uint32_t i = 0; i < p->map_count && !r->wrong; i++) {
        p->maps[i].buffer = buffer(r, p);
        copied(r, p->maps[i].words, MAP_BYTES, "tensor map");
    }
    p->step_count = (uint32_t)number(r, MAX_STEPS, "number of steps");
    if (p->step_count > r->count) r->wrong = "number of steps"; /* before memory is allocated for them */
    p->steps = zeros(r, p->step_count, sizeof *p->steps);
    for (uint32_t i = 0; i < p->step_count && !r->wrong; i++) read_step(r, p, &p->steps[i]);
    if (!r->wrong && r->next != r->count) r->wrong = "number of words";
    if (!r->wrong) return p;
    freed(p);
    return NULL;
}

/* The table: lists that only grow at their heads, so that a call reads them without a lock. */

static _Atomic(Program *) buckets[BUCKETS];
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
static atomic_int devices; /* 0 until `open` */

static _Atomic(Program *) *bucket(uint64_t key) { return &buckets[(key ^ key >> 32) % BUCKETS]; }
static Program *found(uint64_t key, uint64_t place) {
    Program *p = atomic_load_explicit(bucket(key), memory_order_acquire);
    while (p && (p->key != key || p->place != place)) p = p->next;
    return p;
}

/* Functions in Python. launch_in_python: an XLA_FFI_Handler. describe: returns the XLA_FFI_Error of a driver function that
   returned an error; symbol: of the kernel, "" for none. */
static XLA_FFI_Error *(*launch_in_python)(XLA_FFI_CallFrame *frame);
static XLA_FFI_Error *(*describe)(const XLA_FFI_Api *api, int function, CUresult code, const char *symbol);

/* Sets the functions in Python, before the first call. */
PUBLIC void cutlass_py_attn_set_python(void *launch, void *report) {
    memcpy(&launch_in_python, &launch, sizeof launch);
    memcpy(&describe, &report, sizeof report);
}
/* Sets the driver's functions, before the first program is added. count: of the GPUs. */
PUBLIC void cutlass_py_attn_open(void *const *functions, int count) {
    pthread_mutex_lock(&adding);
    if (!atomic_load(&devices)) {
        memcpy(&driver, functions, sizeof driver);
        atomic_store_explicit(&devices, count, memory_order_release);
    }
    pthread_mutex_unlock(&adding);
}
/* Adds the program of a key. place: the context of the calls, 0 on a machine with one GPU. Returns 1, or 0 with the
   reason in `why` if the program is refused. The program of an earlier call stays. */
PUBLIC int cutlass_py_attn_add(uint64_t key, uint64_t place, const uint64_t *words, size_t count, char *why, size_t size) {
    Reader r = {words, count, 0, NULL};
    Program *p = decode(&r);
    if (!p) {
        snprintf(why, size, "%s at word %zu of %zu", r.wrong, r.next, count);
        return 0;
    }
    p->key = key;
    p->place = place;
    pthread_mutex_lock(&adding);
    if (found(key, place)) {
        freed(p);
    } else {
        p->next = atomic_load_explicit(bucket(key), memory_order_relaxed);
        atomic_store_explicit(bucket(key), p, memory_order_release);
    }
    pthread_mutex_unlock(&adding);
    return 1;
}
/* Empties the table, so that later calls go to Python. Takes no lock: a forked child calls it. */
PUBLIC void cutlass_py_attn_forget(void) {
    for (int i = 0; i < BUCKETS; i++) atomic_store(&buckets[i], NULL);
}

/* Calls */

static XLA_FFI_Error *error(const XLA_FFI_Api *api, const char *format, ...) {
    char text[256];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    XLA_FFI_Error_Create_Args made = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, text, XLA_FFI_Error_Code_INTERNAL};
    return api->XLA_FFI_Error_Create(&made);
}

static XLA_FFI_Error *failed(const XLA_FFI_Api *api, int function, CUresult code, const char *symbol) {
    XLA_FFI_Error *found = describe(api, function, code, symbol);
    return found ? found : error(api, TARGET ": CUresult %d for %s", code, symbol); /* Python could not say more */
}

/* Answers XLA's question for the handler's metadata. Returns whether it was asked. XLA's header renamed the type of an
   extension, but not its members. */
static int is_described(XLA_FFI_CallFrame *frame) {
    for (__typeof__(frame->extension_start) each = frame->extension_start; each; each = each->next) {
        if (each->type != XLA_FFI_Extension_Metadata) continue;
        XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)each)->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE; /* every call launches the same */
        return 1;
    }
    return 0;
}

/* Finds the call's key among its attributes; returns 0 if there is none. */
static int has_key(const XLA_FFI_Attrs *attributes, uint64_t *key) {
    for (int64_t i = 0; i < attributes->size; i++) {
        const XLA_FFI_ByteSpan *name = attributes->names[i];
        if (name->len != 3 || memcmp(name->ptr, "key", 3)) continue;
        const XLA_FFI_Scalar *scalar = attributes->attrs[i];
        if (attributes->types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != XLA_FFI_DataType_S64) return 0;
        memcpy(key, scalar->value, sizeof *key);
        return 1;
    }
    return 0;
}

/* Writes the addresses of the call's buffers, results after operands; returns 0 if they are not `count` buffers. */
static int read_buffers(const XLA_FFI_CallFrame *frame, uint32_t count, uint64_t *addresses) {
    const XLA_FFI_Args *a = &frame->args;
    const XLA_FFI_Rets *r = &frame->rets;
    if (a->size < 0 || r->size < 0 || a->size > count || r->size != (int64_t)count - a->size) return 0;
    for (int64_t i = 0; i < a->size; i++) {
        if (a->types[i] != XLA_FFI_ArgType_BUFFER) return 0;
        *addresses++ = (uint64_t)(uintptr_t)((const XLA_FFI_Buffer *)a->args[i])->data;
    }
    for (int64_t i = 0; i < r->size; i++) {
        if (r->types[i] != XLA_FFI_RetType_BUFFER) return 0;
        *addresses++ = (uint64_t)(uintptr_t)((const XLA_FFI_Buffer *)r->rets[i])->data;
    }
    return 1;
}

/* The kernel parameters of one call. cuda.h wants tensor maps on 64 bytes. */
typedef struct {
    _Alignas(MAP_BYTES) uint64_t maps[MAX_MAPS][MAP_WORDS];
    uint64_t values[MAX_STRUCT_BYTES / 8];
} Parameters;

static CUresult launched(const Step *s, Parameters *parameters, void *stream) {
    void *pointers[MAX_MAPS + 1];
    LaunchAttribute attributes[2] = {{0}};
    LaunchConfig config = {.shared_memory = s->shared_memory, .stream = stream};
    memcpy(config.grid, s->grid, sizeof config.grid);
    memcpy(config.block, s->block, sizeof config.block);
    if (s->cluster > 1) {
        LaunchAttribute *a = &attributes[config.attribute_count++];
        a->id = CLUSTER_DIMENSION;
        a->value.cluster.x = s->cluster;
        a->value.cluster.y = a->value.cluster.z = 1;
    }
    if (s->is_dependent) {
        LaunchAttribute *a = &attributes[config.attribute_count++];
        a->id = PROGRAMMATIC_STREAM_SERIALIZATION;
        a->value.is_dependent = 1;
    }
    config.attributes = config.attribute_count ? attributes : NULL;
    for (uint32_t i = 0; i < s->override_count; i++)
        memcpy((char *)parameters->values + s->overrides[i].field, &s->overrides[i].value, 4);
    for (uint32_t i = 0; i < s->map_count; i++) pointers[i] = parameters->maps[s->first_map + i];
    pointers[s->map_count] = parameters->values;
    return driver.launch(&config, s->function, pointers, NULL);
}

/* Runs the steps of a program; the context is current. */
static XLA_FFI_Error *run(const XLA_FFI_CallFrame *frame, const Program *p, void *stream) {
    uint64_t buffers[MAX_BUFFERS];
    Parameters parameters;
    if (!read_buffers(frame, p->buffer_count, buffers))
        return error(frame->api, TARGET ": %lld operands and %lld results: must be %u buffers; trace the program again",
                     (long long)frame->args.size, (long long)frame->rets.size, p->buffer_count);
    memcpy(parameters.values, p->values, p->struct_bytes);
    for (uint32_t i = 0; i < p->address_count; i++) {
        const Address *a = &p->addresses[i];
        const uint64_t address = buffers[a->buffer] + a->offset;
        if (a->alignment && (!buffers[a->buffer] || address & (a->alignment - 1)))
            return error(frame->api, TARGET ": buffer %u is at 0x%llx: must be a device address, %llu-byte aligned",
                         a->buffer, (unsigned long long)address, (unsigned long long)a->alignment);
        memcpy((char *)parameters.values + a->field, &address, sizeof address);
    }
    for (uint32_t i = 0; i < p->map_count; i++) {
        memcpy(parameters.maps[i], p->maps[i].words, MAP_BYTES);
        parameters.maps[i][0] = buffers[p->maps[i].buffer];
    }
    for (uint32_t i = 0; i < p->step_count; i++) {
        const Step *s = &p->steps[i];
        CUresult code;
        if (s->kind == LAUNCH) code = launched(s, &parameters, stream);
        else if (s->kind == CLEAR) code = driver.clear(buffers[s->buffer] + s->offset, 0, s->width, stream);
        else code = driver.fill(buffers[s->buffer] + s->offset, s->pitch, s->value, s->width, s->height, stream);
        if (code) return failed(frame->api, CLEAR_CALL + (int)s->kind, code, s->symbol ? s->symbol : "");
    }
    return NULL;
}

/* XLA_FFI_Handler for CUDA. */
PUBLIC XLA_FFI_Error *cutlass_py_attn_execute(XLA_FFI_CallFrame *frame) {
    if (is_described(frame)) return NULL;
    const XLA_FFI_Api *api = frame->api;
    const int count = atomic_load_explicit(&devices, memory_order_acquire);
    XLA_FFI_Stream_Get_Args given = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx, NULL};
    XLA_FFI_Error *none = api->XLA_FFI_Stream_Get(&given);
    if (none) return none;
    uint64_t key;
    if (!has_key(&frame->attrs, &key)) return error(api, TARGET ": the call has no key; trace the program again");
    void *place = NULL, *previous = NULL;
    CUresult code = count > 1 ? driver.stream_context(given.stream, &place) : 0;
    if (code) return failed(api, STREAM_CONTEXT, code, "");
    const Program *p = found(key, (uint64_t)(uintptr_t)place);
    if (!p) return launch_in_python(frame);
    if ((code = driver.get_current(&previous))) return failed(api, GET_CURRENT, code, "");
    if (previous != p->context && (code = driver.set_current(p->context))) return failed(api, SET_CURRENT, code, "");
    XLA_FFI_Error *result = run(frame, p, given.stream);
    if (previous != p->context && (code = driver.set_current(previous)) && !result) return failed(api, SET_CURRENT, code, "");
    return result;
}
