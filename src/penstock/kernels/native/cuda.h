/* What is used of the CUDA driver. It is found when it is wanted: nothing of it is needed to build. Handles are
 * pointers to what only it knows; device addresses are integers. */
#ifndef PS_CUDA_H
#define PS_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define PS_WHY 200 /* bytes that every `why` has room for */

typedef uint64_t ps_address; /* of the device */

typedef struct {
    const char *name;
    void **place;
} ps_symbol;

/* Finds all functions in the library at `path`, which stays loaded. 0, or -1 with `why` filled. */
int ps_find(const char *path, const ps_symbol *wanted, size_t count, char *why);

/* ---- the driver's functions; each returns 0 or an error of its own. All NULL until ps_cuda_bind. */

typedef struct {
    int (*init)(unsigned flags);
    int (*version)(int *version);
    int (*error_name)(int error, const char **text);
    int (*error_string)(int error, const char **text);
    int (*device)(int *device, int ordinal);
    int (*retain)(void **context, int device);
    int (*release)(int device);
    int (*set_current)(void *context);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*capture_mode)(int *mode);
    int (*stream_create)(void **stream, unsigned flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_synchronize)(void *event);
    int (*copy)(ps_address to, ps_address from, size_t bytes, void *stream);
    int (*fill)(ps_address to, unsigned word, size_t words, void *stream);
    int (*host_register)(void *start, size_t bytes, unsigned flags);
    int (*host_unregister)(void *start);
    int (*host_alloc)(void **start, size_t bytes, unsigned flags);
    int (*host_free)(void *start);
    int (*device_alloc)(ps_address *start, size_t bytes);
    int (*device_free)(ps_address start);
} ps_driver;

extern ps_driver ps_cuda;

/* Writes what failed and the driver's words for it; returns the error. */
int ps_cuda_why(const char *what, int error, char *why);

/* An event for ordering: waiting for it sleeps, it keeps no time. */
int ps_cuda_event(void **event);

/* 1 when all that the event stands for is done, 0 when not yet, else the driver's error, negative. */
int ps_cuda_event_done(void *event);

#endif
