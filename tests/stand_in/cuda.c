#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stand_in.h"

/* ---- what the test sees */

static char notes[1 << 16], breaches[1024];
static size_t noted;
static char asked[64];
static int asked_error;
static int64_t work, waited;

void note(const char *format, ...) {
    va_list values;
    va_start(values, format);
    if (noted + 256 < sizeof notes) noted += (size_t)vsnprintf(notes + noted, 256, format, values);
    if (noted + 256 < sizeof notes) noted += (size_t)snprintf(notes + noted, 2, "\n");
    va_end(values);
}

void breach(const char *what) { strncat(breaches, what, sizeof breaches - 1 - strlen(breaches)); }

const char *stand_in_notes(void) { return notes; }
const char *stand_in_breaches(void) { return breaches; }

void stand_in_forget(void) {
    noted = 0;
    notes[0] = 0;
}

/* The next call of the function gives this error. */
void stand_in_ask(const char *function, int error) {
    snprintf(asked, sizeof asked, "%s", function);
    asked_error = error;
}

/* All that was begun is done. */
void stand_in_finish(void) { waited = work; }

int asked_for(const char *function) {
    if (strcmp(asked, function)) return 0;
    asked[0] = 0;
    return asked_error;
}

int64_t begun(void) { return ++work; }
int settled(int64_t number) { return number <= waited; }

/* ---- the driver */

static _Thread_local void *stack[8];
static _Thread_local int depth, mode;
static int contexts[2], kept[2];

int cuInit(unsigned flags) { return flags ? 1 : asked_for("cuInit"); }

int cuDriverGetVersion(int *version) {
    *version = 13010;
    return 0;
}

int cuGetErrorName(int error, const char **text) {
    *text = error == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_OTHER";
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == 101 ? "invalid device ordinal" : "something else";
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal > 1 ? 101 : 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = contexts + device;
    note("retain %d: %d", device, ++kept[device]);
    return asked_for("cuDevicePrimaryCtxRetain");
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    note("release %d: %d", device, --kept[device]);
    return 0;
}

int cuCtxSetCurrent(void *context) {
    stack[depth] = context;
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    stack[++depth] = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = stack[depth--];
    return 0;
}

/* The device whose context the calling thread uses; -1 for none. */
int stand_in_device(void) { return stack[depth] ? (int)((int *)stack[depth] - contexts) : -1; }
int stand_in_mode(void) { return mode; }

int cuThreadExchangeStreamCaptureMode(int *other) {
    int before = mode;
    mode = *other;
    *other = before;
    return 0;
}

typedef struct {
    int64_t stands_for;
    int name;
} event;

static int names;

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    int *made = calloc(1, sizeof *made);
    *stream = made;
    *made = ++names;
    note("stream %d: flags %u, priority %d", names, flags, priority);
    return 0;
}

int cuStreamDestroy_v2(void *stream) {
    free(stream);
    return 0;
}

int cuStreamSynchronize(void *stream) {
    note("synchronize stream %d", *(int *)stream);
    waited = work;
    return 0;
}

int cuStreamWaitEvent(void *stream, void *other, unsigned flags) {
    note("stream %d waits for event %d", *(int *)stream, ((event *)other)->name);
    return flags ? 1 : 0;
}

int cuEventCreate(void **made, unsigned flags) {
    event *own = calloc(1, sizeof *own);
    *made = own;
    own->name = ++names;
    note("event %d: flags %u", names, flags);
    return asked_for("cuEventCreate");
}

int cuEventDestroy_v2(void *own) {
    note("no event %d", ((event *)own)->name);
    free(own);
    return 0;
}

int cuEventRecord(void *own, void *stream) {
    note("record %d on %d", ((event *)own)->name, *(int *)stream);
    ((event *)own)->stands_for = work;
    return asked_for("cuEventRecord");
}

int cuEventQuery(void *own) {
    int error = asked_for("cuEventQuery");
    return error ? error : settled(((event *)own)->stands_for) ? 0 : 600;
}

int cuEventSynchronize(void *own) {
    note("wait for %d", ((event *)own)->name);
    if (((event *)own)->stands_for > waited) waited = ((event *)own)->stands_for;
    return asked_for("cuEventSynchronize");
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    note("copy %zu on %d", bytes, *(int *)stream);
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

int cuMemsetD32Async(uint64_t to, unsigned word, size_t words, void *stream) {
    note("fill %zu on %d", words, *(int *)stream);
    for (size_t i = 0; i < words; i++) memcpy((char *)(uintptr_t)to + 4 * i, &word, 4);
    return 0;
}

int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    (void)start;
    note("register %zu, flags %u", bytes, flags);
    return asked_for("cuMemHostRegister_v2");
}

int cuMemHostUnregister(void *start) {
    (void)start;
    note("unregister");
    return 0;
}

int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    *start = malloc(bytes);
    note("pin %zu, flags %u", bytes, flags);
    return 0;
}

int cuMemFreeHost(void *start) {
    free(start);
    return 0;
}

int cuMemAlloc_v2(uint64_t *start, size_t bytes) {
    *start = (uintptr_t)malloc(bytes);
    note("allocate %zu", bytes);
    return asked_for("cuMemAlloc_v2");
}

int cuMemFree_v2(uint64_t start) {
    note("free");
    free((void *)(uintptr_t)start);
    return 0;
}
