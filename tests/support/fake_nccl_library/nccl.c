/* Sends and receives between the threads of a process, by copies on the device. A group ends when all of its receives are
   done. So several ranks may share a GPU, which NCCL refuses. */
#include "nccl.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum { MAX_RANKS = 16, MAX_CALLS = 16 };

typedef struct message { const void *from; size_t bytes; int is_read; struct message *next; } message;
typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int count; message *sent[MAX_RANKS][MAX_RANKS]; } world;
struct ncclComm { world *world; int rank; };
typedef struct { ncclComm_t comm; const void *from; void *to; size_t bytes; int peer; CUstream stream; message *message; } operation;

static __thread operation group[MAX_CALLS];
static __thread int calls, is_open;

const char *ncclGetErrorString(ncclResult_t result) { return result ? "the fake NCCL refuses this call" : "no error"; }

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    world *all = calloc(1, sizeof *all);
    if (count > MAX_RANKS || !devices || !all) return ncclInvalidUsage;
    pthread_mutex_init(&all->lock, NULL), pthread_cond_init(&all->changed, NULL);
    all->count = count;
    for (int i = 0; i < count; i++) {
        comms[i] = calloc(1, sizeof *comms[i]);
        if (!comms[i]) return ncclInvalidUsage;
        comms[i]->world = all, comms[i]->rank = i;
    }
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!--comm->world->count) free(comm->world);
    free(comm);
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) { is_open = 1, calls = 0; return ncclSuccess; }

static ncclResult_t note(operation one) {
    if (!is_open || calls == MAX_CALLS || one.peer < 0 || one.peer >= one.comm->world->count) return ncclInvalidUsage;
    group[calls++] = one;
    return ncclSuccess;
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream) {
    return type == ncclInt8 ? note((operation){comm, from, NULL, count, peer, stream, NULL}) : ncclInvalidUsage;
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream) {
    return type == ncclInt8 ? note((operation){comm, NULL, to, count, peer, stream, NULL}) : ncclInvalidUsage;
}
static ncclResult_t receive(const operation *one) {
    world *all = one->comm->world;
    message **first = &all->sent[one->peer][one->comm->rank], *found;
    pthread_mutex_lock(&all->lock);
    while (!*first) pthread_cond_wait(&all->changed, &all->lock);
    found = *first, *first = found->next;
    pthread_mutex_unlock(&all->lock);
    if (found->bytes != one->bytes) return ncclInvalidUsage;
    if (cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)one->to, (CUdeviceptr)(uintptr_t)found->from, one->bytes, one->stream)) return ncclInvalidUsage;
    if (cuStreamSynchronize(one->stream)) return ncclInvalidUsage;
    pthread_mutex_lock(&all->lock);
    found->is_read = 1;
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (!is_open) return ncclInvalidUsage;
    is_open = 0;
    for (int i = 0; i < calls; i++) {
        operation *one = &group[i];
        world *all = one->comm->world;
        if (!one->from) continue;
        if (cuStreamSynchronize(one->stream)) return ncclInvalidUsage; /* what is sent has been computed */
        one->message = calloc(1, sizeof *one->message);
        if (!one->message) return ncclInvalidUsage;
        one->message->from = one->from, one->message->bytes = one->bytes;
        pthread_mutex_lock(&all->lock);
        message **last = &all->sent[one->comm->rank][one->peer];
        while (*last) last = &(*last)->next;
        *last = one->message;
        pthread_cond_broadcast(&all->changed);
        pthread_mutex_unlock(&all->lock);
    }
    for (int i = 0; i < calls; i++)
        if (group[i].to && receive(&group[i])) return ncclInvalidUsage;
    for (int i = 0; i < calls; i++) { /* what was sent may be written again */
        world *all = group[i].comm->world;
        if (!group[i].message) continue;
        pthread_mutex_lock(&all->lock);
        while (!group[i].message->is_read) pthread_cond_wait(&all->changed, &all->lock);
        pthread_mutex_unlock(&all->lock);
        free(group[i].message);
    }
    return ncclSuccess;
}
