/* nvJPEG on a GPU: its functions, its memory, and what it says of itself. decoder.c decodes with it. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>

enum { CUDA_NO_MEMORY = 2, PORTABLE = 1 };

ps_nvjpeg_functions ps_nvjpeg;

/* ---- nvJPEG's memory: every allocation is counted, for nvJPEG allocates when images outgrow its buffers, and freeing
 * makes the whole device wait. Ordering by a stream is of no use: the engine does not follow its stream. */

static void count(ps_engine *own, _Atomic int64_t *bytes, int64_t more) {
    atomic_fetch_add(more > 0 ? &own->allocations : &own->frees, 1);
    int64_t now = atomic_fetch_add(bytes, more) + more, most = atomic_load(&own->most_device_bytes);
    if (bytes != &own->device_bytes) return;
    while (now > most && !atomic_compare_exchange_weak(&own->most_device_bytes, &most, now)) continue;
}

static int alloc_device(void *owner, void **start, size_t bytes, void *stream) {
    (void)stream;
    ps_engine *own = owner;
    ps_address address;
    if (atomic_load(&own->device_bytes) + (int64_t)bytes > own->limit) return CUDA_NO_MEMORY;
    int error = ps_cuda.device_alloc(&address, bytes);
    if (error) return error;
    *start = (void *)(uintptr_t)address;
    count(own, &own->device_bytes, (int64_t)bytes);
    return 0;
}

static int free_device(void *owner, void *start, size_t bytes, void *stream) {
    (void)stream;
    ps_engine *own = owner;
    if (!start) return 0;
    count(own, &own->device_bytes, -(int64_t)bytes);
    return ps_cuda.device_free((ps_address)(uintptr_t)start);
}

static int alloc_pinned(void *owner, void **start, size_t bytes, void *stream) {
    (void)stream;
    ps_engine *own = owner;
    int error = ps_cuda.host_alloc(start, bytes, PORTABLE);
    if (!error) count(own, &own->pinned_bytes, (int64_t)bytes);
    return error;
}

static int free_pinned(void *owner, void *start, size_t bytes, void *stream) {
    (void)stream;
    ps_engine *own = owner;
    if (!start) return 0;
    count(own, &own->pinned_bytes, -(int64_t)bytes);
    return ps_cuda.host_free(start);
}

/* ---- the library */

/* Takes nvJPEG's functions from the library at `path`, which stays loaded. Call before other threads use them. 0, or
 * PS_FAILED with `why` filled; the functions bound before then stay. */
int ps_engine_bind(const char *path, char *why) {
    ps_nvjpeg_functions found;
    const ps_symbol wanted[] = {
        {"nvjpegGetProperty", (void **)&found.property},
        {"nvjpegCreateExV2", (void **)&found.create},
        {"nvjpegDestroy", (void **)&found.destroy},
        {"nvjpegGetHardwareDecoderInfo", (void **)&found.hardware},
        {"nvjpegJpegStateCreate", (void **)&found.state_create},
        {"nvjpegJpegStateDestroy", (void **)&found.state_destroy},
        {"nvjpegDecodeBatchedPreAllocate", (void **)&found.preallocate},
        {"nvjpegDecodeBatchedInitialize", (void **)&found.initialise},
        {"nvjpegDecodeBatched", (void **)&found.decode},
        {"nvjpegJpegStreamCreate", (void **)&found.header_create},
        {"nvjpegJpegStreamDestroy", (void **)&found.header_destroy},
        {"nvjpegJpegStreamParseHeader", (void **)&found.header_parse},
        {"nvjpegDecodeBatchedSupported", (void **)&found.supported},
    };
    if (ps_find(path, wanted, sizeof wanted / sizeof *wanted, why)) return PS_FAILED;
    ps_nvjpeg = found;
    return 0;
}

int ps_nvjpeg_why(const char *function, int status, char *why) {
    snprintf(why, PS_WHY, "%s failed with nvJPEG's status %d", function, status);
    return status;
}

/* ---- an engine */

int ps_engine_handle(ps_engine *own, void **handle, char *why) {
    int problem = ps_nvjpeg.create(own->backend, &own->on_device, &own->pinned, own->flags, handle);
    if (!problem) return 0;
    *handle = NULL;
    return ps_nvjpeg_why("nvjpegCreateExV2", problem, why);
}

/* Decoders on it must be closed before. */
void ps_engine_close(ps_engine *own) {
    ps_cuda.set_current(own->context);
    if (own->handle) ps_nvjpeg.destroy(own->handle);
    ps_cuda.release(own->device);
    free(own);
}

static int begin(ps_engine *own, int ordinal, char *why) {
    int error = ps_cuda.device(&own->device, ordinal);
    if (!error) error = ps_cuda.retain(&own->context, own->device);
    if (error) {
        ps_cuda_why("the GPU cannot be used", error, why);
        free(own);
        return PS_FAILED;
    }
    error = ps_cuda.set_current(own->context);
    int problem = error ? PS_FAILED : ps_engine_handle(own, &own->handle, why);
    if (error) ps_cuda_why("the GPU cannot be used", error, why);
    if (problem) ps_engine_close(own);
    return problem;
}

/* nvJPEG on a device, in the device's primary context, which becomes the calling thread's. `backend` 3 is the JPEG
 * engine, 2 decodes on the GPU's processors; `flags` are nvJPEG's; it may take `limit` bytes of the device. 0; or a
 * code above, or nvJPEG's status (PS_ARCH_MISMATCH where the GPU has no engine), with `why` filled. */
int ps_engine_open(int32_t device, int32_t backend, uint32_t flags, int64_t limit, ps_engine **out, char *why) {
    snprintf(why, PS_WHY, "nvJPEG or the CUDA driver is not loaded");
    if (!ps_nvjpeg.create || !ps_cuda.init) return PS_SENSELESS;
    ps_engine *own = calloc(1, sizeof *own);
    snprintf(why, PS_WHY, "no memory");
    if (!own) return PS_NO_MEMORY;
    own->backend = backend;
    own->flags = flags;
    own->limit = limit;
    own->on_device = (ps_allocator){alloc_device, free_device, own};
    own->pinned = (ps_allocator){alloc_pinned, free_pinned, own};
    int problem = begin(own, device, why);
    if (!problem) *out = own;
    return problem;
}

/* Allocations and frees up to now, bytes of the device and of pinned memory held now, the most of the device's,
 * nvJPEG's version (major, minor, patch), JPEG engines and cores in each. Into result[10]. */
void ps_engine_counts(ps_engine *own, int64_t *result) {
    _Atomic int64_t *first[] = {&own->allocations, &own->frees, &own->device_bytes, &own->pinned_bytes,
                                &own->most_device_bytes};
    unsigned engines = 0, cores = 0;
    for (int i = 0; i < 5; i++) result[i] = atomic_load(first[i]);
    for (int i = 0; i < 3; i++) {
        int value = 0;
        ps_nvjpeg.property(i, &value);
        result[5 + i] = value;
    }
    if (ps_nvjpeg.hardware(own->handle, &engines, &cores)) engines = cores = 0;
    result[8] = engines;
    result[9] = cores;
}

/* Whether nvJPEG would decode this in a batch, by the header: 1 or 0. */
int ps_engine_supports(ps_engine *own, const uint8_t *data, int64_t length) {
    void *header;
    int unsupported = 1;
    ps_cuda.set_current(own->context);
    if (ps_nvjpeg.header_create(own->handle, &header)) return 0;
    if (!ps_nvjpeg.header_parse(own->handle, data, (size_t)length, header) &&
        ps_nvjpeg.supported(own->handle, header, &unsupported))
        unsupported = 1;
    ps_nvjpeg.header_destroy(header);
    return !unsupported;
}
