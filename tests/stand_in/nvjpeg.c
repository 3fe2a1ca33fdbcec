/* Its images: "JP", width, height (16 bits each, little-endian), subsampling across, down, components, level; then
 * anything, and "." last. Plane c of an image is filled with level + c. An image that begins with "XX" is corrupt, one
 * that does not end with "." incomplete. */
#include <stdlib.h>
#include <string.h>

#include "stand_in.h"

enum { SUCCESS, NOT_INITIALIZED, INVALID_PARAMETER, BAD_JPEG, UNSUPPORTED, ALLOCATOR_FAILURE, ARCH_MISMATCH = 7 };
enum { INCOMPLETE = 10, MOST = 512 };

typedef struct {
    int (*alloc)(void *owner, void **start, size_t bytes, void *stream);
    int (*free)(void *owner, void *start, size_t bytes, void *stream);
    void *owner;
} allocator;

typedef struct {
    allocator device, pinned;
    int backend;
} library;

typedef struct {
    library *of;
    int batch, format;
    int64_t last;
    void *buffer, *pinned;
    size_t bytes;
} decoder;

typedef struct {
    uint8_t *channel[4];
    size_t pitch[4];
} planes;

static int engines = 1;

void stand_in_engines(int number) { engines = number; }

int nvjpegGetProperty(int which, int *value) {
    *value = (int[]){13, 1, 2}[which];
    return SUCCESS;
}

int nvjpegCreateExV2(int backend, allocator *device, allocator *pinned, unsigned flags, void **handle) {
    int error = asked_for("nvjpegCreateExV2");
    note("create backend %d, flags %u", backend, flags);
    if (error || (backend == 3 && !engines)) return error ? error : ARCH_MISMATCH;
    library *own = calloc(1, sizeof *own);
    own->device = *device;
    own->pinned = *pinned;
    own->backend = backend;
    *handle = own;
    return SUCCESS;
}

int nvjpegDestroy(void *handle) {
    note("destroy");
    free(handle);
    return SUCCESS;
}

int nvjpegGetHardwareDecoderInfo(void *handle, unsigned *number, unsigned *cores) {
    if (((library *)handle)->backend != 3) return ARCH_MISMATCH;
    *number = (unsigned)engines;
    *cores = 8;
    return SUCCESS;
}

int nvjpegJpegStateCreate(void *handle, void **state) {
    int error = asked_for("nvjpegJpegStateCreate");
    if (error) return error;
    decoder *own = calloc(1, sizeof *own);
    own->of = handle;
    *state = own;
    return SUCCESS;
}

static int grow(decoder *own, size_t bytes) {
    allocator *device = &own->of->device;
    if (bytes <= own->bytes) return SUCCESS;
    if (own->buffer) device->free(device->owner, own->buffer, own->bytes, NULL);
    own->bytes = 0;
    own->buffer = NULL;
    if (device->alloc(device->owner, &own->buffer, bytes, NULL)) return ALLOCATOR_FAILURE;
    own->bytes = bytes;
    return SUCCESS;
}

int nvjpegJpegStateDestroy(void *state) {
    decoder *own = state;
    if (!settled(own->last)) breach("a state is destroyed while it decodes");
    if (own->buffer) own->of->device.free(own->of->device.owner, own->buffer, own->bytes, NULL);
    if (own->pinned) own->of->pinned.free(own->of->pinned.owner, own->pinned, 1000, NULL);
    free(own);
    return SUCCESS;
}

int nvjpegDecodeBatchedPreAllocate(void *handle, void *state, int batch, int width, int height, int sampling,
                                   int format) {
    (void)handle;
    decoder *own = state;
    note("preallocate %d of %d x %d, sampling %d, format %d", batch, width, height, sampling, format);
    if (own->of->pinned.alloc(own->of->pinned.owner, &own->pinned, 1000, NULL)) return ALLOCATOR_FAILURE;
    return grow(own, (size_t)width * (size_t)height);
}

int nvjpegDecodeBatchedInitialize(void *handle, void *state, int batch, int threads, int format) {
    (void)handle, (void)threads;
    decoder *own = state;
    note("initialise %d, format %d", batch, format);
    if (!settled(own->last)) breach("initialised while it decodes");
    own->batch = batch;
    own->format = format;
    return SUCCESS;
}

static size_t number(const uint8_t *p) { return (size_t)p[0] | (size_t)p[1] << 8; }

static int decode_one(decoder *own, const uint8_t *data, size_t length, const planes *to) {
    if (!memcmp(data, "XX", 2)) return BAD_JPEG;
    if (memcmp(data, "JP", 2)) return UNSUPPORTED;
    if (data[length - 1] != '.') return INCOMPLETE;
    size_t width = number(data + 2), height = number(data + 4);
    if (grow(own, width * height)) return ALLOCATOR_FAILURE;
    for (int c = 0; c < data[8]; c++) {
        size_t across = c ? (width + data[6] - 1) / data[6] : width;
        size_t down = c ? (height + data[7] - 1) / data[7] : height;
        for (size_t y = 0; y < down; y++) memset(to->channel[c] + y * to->pitch[c], data[9] + c, across);
    }
    if (data[8] == 1 && (to->channel[1] || to->channel[2])) breach("gray with three planes");
    return SUCCESS;
}

int nvjpegDecodeBatched(void *handle, void *state, const uint8_t *const *data, const size_t *lengths, planes *to,
                        void *stream) {
    (void)handle;
    decoder *own = state;
    note("decode %d on %d", own->batch, *(int *)stream);
    int error = asked_for("nvjpegDecodeBatched");
    if (!settled(own->last)) breach("decodes while it decodes");
    if (!own->batch) breach("not initialised");
    own->last = begun();
    for (int i = 0; i < own->batch && !error; i++) error = decode_one(own, data[i], lengths[i], to + i);
    if (error) own->batch = 0;
    return error;
}

int nvjpegJpegStreamCreate(void *handle, void **header) {
    (void)handle;
    *header = calloc(1, sizeof(int));
    return SUCCESS;
}

int nvjpegJpegStreamDestroy(void *header) {
    free(header);
    return SUCCESS;
}

int nvjpegJpegStreamParseHeader(void *handle, const uint8_t *data, size_t length, void *header) {
    (void)handle;
    *(int *)header = length > 8 ? data[8] : 0;
    return memcmp(data, "JP", 2) ? BAD_JPEG : SUCCESS;
}

int nvjpegDecodeBatchedSupported(void *handle, void *header, int *unsupported) {
    (void)handle;
    *unsupported = *(int *)header != 1 && *(int *)header != 3;
    return SUCCESS;
}
