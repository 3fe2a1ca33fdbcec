/* What decoder.c uses of engine.c: nvJPEG's functions and a GPU on which they work. */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda.h"

enum { PS_FAILED = -1, PS_NO_MEMORY = -2, PS_SENSELESS = -3 };

/* nvJPEG's status */
enum { PS_NOT_INITIALIZED = 1, PS_EXECUTION_FAILED = 6, PS_ARCH_MISMATCH = 7 };

typedef struct {
    uint8_t *channel[4];
    size_t pitch[4];
} ps_planes;

typedef struct {
    int (*alloc)(void *owner, void **start, size_t bytes, void *stream);
    int (*free)(void *owner, void *start, size_t bytes, void *stream);
    void *owner;
} ps_allocator; /* of device memory and of pinned memory alike */

typedef struct {
    int (*property)(int which, int *value);
    int (*create)(int backend, ps_allocator *device, ps_allocator *pinned, unsigned flags, void **handle);
    int (*destroy)(void *handle);
    int (*hardware)(void *handle, unsigned *engines, unsigned *cores);
    int (*state_create)(void *handle, void **state);
    int (*state_destroy)(void *state);
    int (*preallocate)(void *handle, void *state, int batch, int width, int height, int sampling, int format);
    int (*initialise)(void *handle, void *state, int batch, int threads, int format);
    int (*decode)(void *handle, void *state, const uint8_t *const *data, const size_t *lengths, ps_planes *planes,
                  void *stream);
    int (*header_create)(void *handle, void **header);
    int (*header_destroy)(void *header);
    int (*header_parse)(void *handle, const uint8_t *data, size_t length, void *header);
    int (*supported)(void *handle, void *header, int *unsupported);
} ps_nvjpeg_functions;

extern ps_nvjpeg_functions ps_nvjpeg; /* all NULL until bound */

typedef struct {
    int device, backend;
    unsigned flags;
    void *context, *handle; /* nvJPEG's handle for questions; decoders have their own */
    int64_t limit;
    _Atomic int64_t allocations, frees, device_bytes, pinned_bytes, most_device_bytes;
    ps_allocator on_device, pinned;
} ps_engine;

/* One more handle with the engine's backend, flags and memory. 0, or nvJPEG's status with `why` filled. */
int ps_engine_handle(ps_engine *engine, void **handle, char *why);

/* Writes that a function of nvJPEG failed; returns its status. */
int ps_nvjpeg_why(const char *function, int status, char *why);

#endif
