/* Frames for the native handler: made-up ones, and XLA's own frames of the CPU with a made-up stream.
   A test compiles this file with XLA's C header. No function of it calls Python. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "xla/ffi/api/c_api.h"

enum { STREAM = 0x77, MAX_BUFFERS = 300 };
static _Thread_local void *made_up_stream;
struct XLA_FFI_Error { char text[4096]; };

static XLA_FFI_Error *create(XLA_FFI_Error_Create_Args *given) {
    XLA_FFI_Error *made = malloc(sizeof *made);
    snprintf(made->text, sizeof made->text, "%s", given->message);
    return made;
}
static XLA_FFI_Error *stream_get(XLA_FFI_Stream_Get_Args *given) {
    given->stream = made_up_stream;
    return NULL;
}
static XLA_FFI_Error *no_stream(XLA_FFI_Stream_Get_Args *given) {
    XLA_FFI_Error_Create_Args made = {.message = given->ctx ? "a context" : "no stream"};
    return create(&made);
}

/* Calls a handler with a made-up frame: buffers at these addresses, and the attributes key and payload. what: 0 for a
   right frame; 1: no key; 2: a key of another type; 3: an operand that is no buffer; 4: a negative number of results;
   5: no stream. Returns 0, or 1 with the error's text. */
int frames_call(XLA_FFI_Handler *handler, int64_t key, const uint64_t *addresses, int operands, int results, int what,
                uint64_t stream, char *text, size_t size) {
    XLA_FFI_Api api = {.struct_size = sizeof api, .XLA_FFI_Error_Create = create};
    api.XLA_FFI_Stream_Get = what == 5 ? no_stream : stream_get;
    made_up_stream = (void *)(uintptr_t)stream;
    XLA_FFI_Buffer buffers[MAX_BUFFERS];
    void *places[MAX_BUFFERS + 1];
    XLA_FFI_ArgType arguments[MAX_BUFFERS + 1];
    XLA_FFI_RetType returned[MAX_BUFFERS + 1];
    for (int i = 0; i < operands + results; i++) {
        buffers[i] = (XLA_FFI_Buffer){.struct_size = sizeof *buffers, .dtype = XLA_FFI_DataType_U8, .data = (void *)(uintptr_t)addresses[i]};
        places[i] = &buffers[i];
        arguments[i] = what == 3 ? (XLA_FFI_ArgType)99 : XLA_FFI_ArgType_BUFFER;
        returned[i] = XLA_FFI_RetType_BUFFER;
    }
    unsigned char payload[8] = {0};
    XLA_FFI_Scalar scalar = {what == 2 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_S64, &key};
    XLA_FFI_Array array = {XLA_FFI_DataType_U8, sizeof payload, payload};
    XLA_FFI_ByteSpan names[] = {{what == 1 ? "kex" : "key", 3}, {"payload", 7}}, *spans[] = {&names[0], &names[1]};
    XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_ARRAY};
    void *attributes[] = {&scalar, &array};
    XLA_FFI_CallFrame frame = {
        .struct_size = sizeof frame,
        .api = &api,
        .stage = XLA_FFI_ExecutionStage_EXECUTE,
        .args = {.size = operands, .types = arguments, .args = places},
        .rets = {.size = what == 4 ? -1 : results, .types = returned, .rets = places + operands},
        .attrs = {.size = 2, .types = types, .names = spans, .attrs = attributes},
    };
    XLA_FFI_Error *error = handler(&frame);
    if (!error) return 0;
    snprintf(text, size, "%s", error->text);
    free(error);
    return 1;
}

/* XLA's frames. A frame enters the gate, if it is closed, before its handler is called. */

static XLA_FFI_Handler *on_stream_handlers[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_closed, waiting, done;

void frames_set_handlers(XLA_FFI_Handler *native, XLA_FFI_Handler *python) {
    on_stream_handlers[0] = native;
    on_stream_handlers[1] = python;
}
static XLA_FFI_Error *on_stream(XLA_FFI_CallFrame *frame, int number) {
    if (frame->extension_start) return on_stream_handlers[number](frame);
    const XLA_FFI_Api *real = frame->api;
    XLA_FFI_Api api = *real;
    api.XLA_FFI_Stream_Get = stream_get;
    made_up_stream = (void *)STREAM;
    frame->api = &api;
    pthread_mutex_lock(&lock);
    waiting++;
    pthread_cond_broadcast(&changed);
    while (is_closed) pthread_cond_wait(&changed, &lock);
    waiting--;
    pthread_mutex_unlock(&lock);
    XLA_FFI_Error *error = on_stream_handlers[number](frame);
    pthread_mutex_lock(&lock);
    done++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    frame->api = real;
    return error;
}
/* XLA_FFI_Handlers of the CPU. */
XLA_FFI_Error *frames_native(XLA_FFI_CallFrame *frame) { return on_stream(frame, 0); }
XLA_FFI_Error *frames_python(XLA_FFI_CallFrame *frame) { return on_stream(frame, 1); }

/* Waits until a number reaches `least`, at most that many milliseconds; the caller holds the lock. */
static int reached(const int *number, int least, int milliseconds) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += milliseconds % 1000 * 1000000L;
    if (end.tv_nsec >= 1000000000L) end.tv_sec++, end.tv_nsec -= 1000000000L;
    while (*number < least)
        if (pthread_cond_timedwait(&changed, &lock, &end)) break;
    return *number >= least;
}
/* Closes the gate for the frames to come. */
void frames_close(void) {
    pthread_mutex_lock(&lock);
    is_closed = 1;
    pthread_mutex_unlock(&lock);
}
/* Returns whether a frame waits at the gate in time. */
int frames_wait(int milliseconds) {
    pthread_mutex_lock(&lock);
    const int is_there = reached(&waiting, 1, milliseconds);
    pthread_mutex_unlock(&lock);
    return is_there;
}
/* Opens the gate, and returns whether a frame's handler returned in time. */
int frames_pass(int milliseconds) {
    pthread_mutex_lock(&lock);
    const int before = done;
    is_closed = 0;
    pthread_cond_broadcast(&changed);
    const int has_passed = reached(&done, before + 1, milliseconds);
    pthread_mutex_unlock(&lock);
    return has_passed;
}
