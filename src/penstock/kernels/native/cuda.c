/* The few functions of the CUDA driver that a lane's thread needs, without torch and without the interpreter lock. All
 * return 0 or the driver's error (NOT_INITIALIZED before ps_cuda_bind), unless they say otherwise; ps_cuda_reason puts
 * an error into words. */
#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>

enum { FAILED = -1, NOT_INITIALIZED = 3, NOT_READY = 600 };
enum { BLOCKING_SYNC = 1, NO_TIMING = 2, NON_BLOCKING = 1, PORTABLE = 1, RELAXED = 2 };

ps_driver ps_cuda;

int ps_find(const char *path, const ps_symbol *wanted, size_t count, char *why) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(why, PS_WHY, "%s", dlerror());
        return FAILED;
    }
    for (size_t i = 0; i < count; i++) {
        *wanted[i].place = dlsym(handle, wanted[i].name);
        if (*wanted[i].place) continue;
        snprintf(why, PS_WHY, "%s has no function %s", path, wanted[i].name);
        return FAILED;
    }
    return 0;
}

/* Takes the functions from the driver's library at `path`, and begins to use it. Call before other threads use them. 0,
 * or -1 with `why` filled; the functions bound before then stay. */
int ps_cuda_bind(const char *path, char *why) {
    ps_driver found;
    const ps_symbol wanted[] = {
        {"cuInit", (void **)&found.init},
        {"cuDriverGetVersion", (void **)&found.version},
        {"cuGetErrorName", (void **)&found.error_name},
        {"cuGetErrorString", (void **)&found.error_string},
        {"cuDeviceGet", (void **)&found.device},
        {"cuDevicePrimaryCtxRetain", (void **)&found.retain},
        {"cuDevicePrimaryCtxRelease_v2", (void **)&found.release},
        {"cuCtxSetCurrent", (void **)&found.set_current},
        {"cuCtxPushCurrent_v2", (void **)&found.push},
        {"cuCtxPopCurrent_v2", (void **)&found.pop},
        {"cuThreadExchangeStreamCaptureMode", (void **)&found.capture_mode},
        {"cuStreamCreateWithPriority", (void **)&found.stream_create},
        {"cuStreamDestroy_v2", (void **)&found.stream_destroy},
        {"cuStreamSynchronize", (void **)&found.stream_synchronize},
        {"cuStreamWaitEvent", (void **)&found.stream_wait},
        {"cuEventCreate", (void **)&found.event_create},
        {"cuEventDestroy_v2", (void **)&found.event_destroy},
        {"cuEventRecord", (void **)&found.event_record},
        {"cuEventQuery", (void **)&found.event_query},
        {"cuEventSynchronize", (void **)&found.event_synchronize},
        {"cuMemcpyAsync", (void **)&found.copy},
        {"cuMemsetD32Async", (void **)&found.fill},
        {"cuMemHostRegister_v2", (void **)&found.host_register},
        {"cuMemHostUnregister", (void **)&found.host_unregister},
        {"cuMemHostAlloc", (void **)&found.host_alloc},
        {"cuMemFreeHost", (void **)&found.host_free},
        {"cuMemAlloc_v2", (void **)&found.device_alloc},
        {"cuMemFree_v2", (void **)&found.device_free},
    };
    if (ps_find(path, wanted, sizeof wanted / sizeof *wanted, why)) return FAILED;
    int error = found.init(0);
    if (error) {
        const char *text = NULL;
        found.error_string(error, &text);
        snprintf(why, PS_WHY, "the driver does not start: %s (CUDA error %d)", text ? text : "unknown error", error);
        return FAILED;
    }
    ps_cuda = found;
    return 0;
}

int ps_cuda_why(const char *what, int error, char *why) {
    const char *name = NULL, *text = NULL;
    if (ps_cuda.init) {
        ps_cuda.error_name(error, &name);
        ps_cuda.error_string(error, &text);
    }
    snprintf(why, PS_WHY, "%s: %s (%s, CUDA error %d)", what, text ? text : "unknown error", name ? name : "?", error);
    return error;
}

/* The words for an error, into `why`. */
void ps_cuda_reason(const char *what, int error, char *why) { ps_cuda_why(what, error, why); }

/* The newest CUDA version that the driver runs, as 1000 * major + 10 * minor; 0 if it does not say. */
int ps_cuda_version(void) {
    int version = 0;
    return !ps_cuda.init || ps_cuda.version(&version) ? 0 : version;
}

/* ---- a thread's device */

/* Makes the calling thread one that uses the device: in the context that torch uses too, and in a mode in which
 * neither does a graph capture in another thread refuse this thread's calls, nor do these break that capture. `*mode`
 * becomes the mode before. Keeps the context alive until ps_cuda_leave. */
int ps_cuda_enter(int ordinal, int *mode) {
    int device;
    void *context;
    int error = ps_cuda.init ? ps_cuda.device(&device, ordinal) : NOT_INITIALIZED;
    if (error || (error = ps_cuda.retain(&context, device))) return error;
    error = ps_cuda.push(context);
    *mode = RELAXED;
    if (!error && (error = ps_cuda.capture_mode(mode))) ps_cuda.pop(&context);
    if (error) ps_cuda.release(device);
    return error;
}

/* Makes the thread what it was before ps_cuda_enter. */
int ps_cuda_leave(int ordinal, int mode) {
    int device;
    void *context;
    int error = ps_cuda.capture_mode(&mode), other = ps_cuda.pop(&context);
    if (!error) error = other ? other : ps_cuda.device(&device, ordinal);
    return error ? error : ps_cuda.release(device);
}

/* ---- streams and events */

/* A stream that never waits for the default one. A lower `priority` is more urgent; the driver limits
 * it to its range. */
int ps_cuda_stream(int priority, void **stream) {
    return ps_cuda.init ? ps_cuda.stream_create(stream, NON_BLOCKING, priority) : NOT_INITIALIZED;
}

int ps_cuda_stream_close(void *stream) { return ps_cuda.stream_destroy(stream); }
int ps_cuda_stream_synchronize(void *stream) { return ps_cuda.stream_synchronize(stream); }

/* What is put on the stream from now on waits for the event. */
int ps_cuda_stream_wait(void *stream, void *event) { return ps_cuda.stream_wait(stream, event, 0); }

int ps_cuda_event(void **event) {
    return ps_cuda.init ? ps_cuda.event_create(event, BLOCKING_SYNC | NO_TIMING) : NOT_INITIALIZED;
}

int ps_cuda_event_close(void *event) { return ps_cuda.event_destroy(event); }
int ps_cuda_event_record(void *event, void *stream) { return ps_cuda.event_record(event, stream); }
int ps_cuda_event_synchronize(void *event) { return ps_cuda.event_synchronize(event); }

int ps_cuda_event_done(void *event) {
    int error = ps_cuda.event_query(event);
    return error == NOT_READY ? 0 : error ? -error : 1;
}

/* ---- memory */

/* Between any two of host and device. From and to the host it is asynchronous where that memory is registered. */
int ps_cuda_copy(ps_address to, ps_address from, int64_t bytes, void *stream) {
    return ps_cuda.copy(to, from, (size_t)bytes, stream);
}

/* Sets that many 32-bit words. */
int ps_cuda_fill(ps_address to, uint32_t word, int64_t words, void *stream) {
    return ps_cuda.fill(to, word, (size_t)words, stream);
}

/* Pins memory of this process, as a map that it shares with others; for all devices. */
int ps_cuda_register(void *start, int64_t bytes) {
    return ps_cuda.init ? ps_cuda.host_register(start, (size_t)bytes, PORTABLE) : NOT_INITIALIZED;
}

int ps_cuda_unregister(void *start) { return ps_cuda.init ? ps_cuda.host_unregister(start) : NOT_INITIALIZED; }
