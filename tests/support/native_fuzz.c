/* Adds programs to the native handler and calls each: a program for sanitizers, compiled with native_frames.c and
   native_handler.c. Reads from stdin, for each program, the number of its words and the words. Writes a line for each:
   "1 " and the error of the call, or "0 " and why the program is refused. With an argument, four threads call the
   programs while others are added. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { BUFFERS = 256, THREADS = 4, ROUNDS = 300, WHY = 256 };

void cutlass_py_attn_set_python(void *launch, void *report);
void cutlass_py_attn_open(void *const *functions, int count);
int cutlass_py_attn_add(uint64_t key, uint64_t place, const uint64_t *words, size_t count, char *why, size_t size);
XLA_FFI_Error *cutlass_py_attn_execute(XLA_FFI_CallFrame *frame);
int frames_call(XLA_FFI_Handler *handler, int64_t key, const uint64_t *addresses, int operands, int results, int what,
                uint64_t stream, char *text, size_t size);

typedef void Function(void);

/* What the handler asks of the driver and of Python. */
static _Thread_local volatile uint64_t seen;
static int get_current(void **context) { return *context = (void *)0xC0, 0; }
static int set_current(void *context) { return seen = (uint64_t)(uintptr_t)context, 0; }
static int stream_context(void *stream, void **context) { return *context = stream, 1; }
static int clear(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    seen = seen + address + value + bytes + (uint64_t)(uintptr_t)stream;
    return 0;
}
static int fill(uint64_t address, size_t pitch, unsigned value, size_t width, size_t height, void *stream) {
    return clear(address + pitch, (unsigned char)value, width + height, stream);
}
static int launch(const void *config, void *function, void **parameters, void **extra) {
    (void)extra;
    unsigned char first;
    memcpy(&first, config, 1);
    seen = first + (uint64_t)(uintptr_t)function + (uint64_t)(uintptr_t)parameters[0];
    return 0;
}
static XLA_FFI_Error *launch_in_python(XLA_FFI_CallFrame *frame) { return (void)frame, NULL; }
static XLA_FFI_Error *describe(const XLA_FFI_Api *api, int function, int code, const char *symbol) {
    (void)api, (void)function, (void)code, (void)symbol;
    return NULL;
}

typedef struct { uint64_t *words, count; } Program;
static Program *programs;
static int64_t program_count;

static int added(int64_t key, char *why) {
    const Program *p = &programs[key];
    return cutlass_py_attn_add((uint64_t)key, 0, p->words, p->count, why, WHY);
}
static int called(int64_t key, uint64_t first, char *text) {
    uint64_t addresses[BUFFERS];
    const Program *p = &programs[key];
    const int count = p->count > 2 && p->words[2] <= BUFFERS ? (int)p->words[2] : 1;
    for (int i = 0; i < count; i++) addresses[i] = first + 4096 * (uint64_t)i;
    return frames_call(cutlass_py_attn_execute, key, addresses, count / 2, count - count / 2, 0, 0x77, text, WHY);
}
static void *calls(void *given) {
    char text[WHY];
    for (int i = 0; i < ROUNDS; i++)
        if (called(i % program_count, (uint64_t)(uintptr_t)given << 40, text)) abort();
    return NULL;
}

int main(int argc, char **argv) {
    (void)argv;
    Function *functions[] = {(Function *)get_current, (Function *)set_current, (Function *)stream_context,
                             (Function *)clear, (Function *)fill, (Function *)launch};
    Function *handlers[] = {(Function *)launch_in_python, (Function *)describe};
    void *places[6], *python[2];
    memcpy(places, functions, sizeof places);
    memcpy(python, handlers, sizeof python);
    cutlass_py_attn_set_python(python[0], python[1]);
    cutlass_py_attn_open(places, 1);
    uint64_t count;
    while (fread(&count, sizeof count, 1, stdin) == 1) {
        programs = realloc(programs, (size_t)(program_count + 1) * sizeof *programs);
        Program *p = &programs[program_count++];
        p->count = count;
        p->words = malloc(count * sizeof *p->words); /* of this size, so that a sanitizer sees a read behind it */
        if (fread(p->words, sizeof *p->words, count, stdin) != count) return 2;
    }
    char text[WHY] = "";
    if (argc > 1) {
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, calls, (void *)(uintptr_t)(i + 1));
        for (int64_t i = 0; i < program_count; i++)
            if (!added(i, text)) return 3;
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        return 0;
    }
    for (int64_t i = 0; i < program_count; i++) {
        const int is_added = added(i, text);
        if (is_added && !called(i, 1ull << 40, text)) text[0] = 0;
        printf("%d %s\n", is_added, text);
    }
    return 0;
}
