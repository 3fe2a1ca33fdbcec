/* Decodes tiny-batches of JPEGs into planes on the GPU.
 *
 * What nvJPEG (12.3 to 13.2, on an H100 and an H200) does, beyond what its documentation says:
 * - nvjpegDecodeBatched returns before the images are decoded. What is put on the stream afterwards waits for them.
 * - On the JPEG engine it does not wait for what was put on the stream before: it writes when it is called. Only the
 *   host can wait until the memory is free; hence `after` in ps_decoder_decode.
 * - Called with a state whose last call is not done, it hangs for ever. So each call takes the next of a ring of
 *   states, and waits until that is done.
 * - 16 images a call are decoded fastest; the call takes 0.03 to 0.05 ms of the host's time for each.
 * - One code stands for all images of a call, and it judges headers only. Damage in the coded data is never reported.
 * - After a failure, or for another number of images, the state must be initialised again. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLANES_AS_CODED = 1, SAMPLING_444 = 0 };

/* table.py says what stands in them. */
enum { DATA, LENGTH, KIND, WIDTH, HEIGHT, SUB_X, SUB_Y, ORIENTATION, PLANE0, PLANE1, PLANE2, PITCH0, PITCH1 };
enum { YCC = 1, GRAY = 2 };

typedef struct {
    void *handle, *state, *done; /* `done` stands for the last call */
    int ready;                   /* images that the state is initialised for; 0 after a failure */
    int flying;                  /* what it was handed may not be done */
    int64_t ticket;              /* the number of its last call */
    const uint8_t **data;
    size_t *lengths;
    ps_planes *planes;
    int32_t *rows; /* of the table: senseless ones have no place in the call */
} seat;

typedef struct {
    ps_engine *engine;
    int grain, handles, count;
    int64_t tickets;
    seat seats[];
} decoder;

/* ---- opening */

/* Waits for what is in flight. */
void ps_decoder_close(decoder *own) {
    ps_cuda.set_current(own->engine->context);
    for (int i = own->count; i--;) {
        seat *at = own->seats + i;
        if (at->done) {
            ps_cuda.event_synchronize(at->done);
            ps_cuda.event_destroy(at->done);
        }
        if (at->state) ps_nvjpeg.state_destroy(at->state);
        if (at->handle && i < own->handles) ps_nvjpeg.destroy(at->handle);
        free(at->data);
        free(at->lengths);
        free(at->planes);
        free(at->rows);
    }
    free(own);
}

static int prepare(decoder *own, int index, int width, int height, char *why) {
    seat *at = own->seats + index;
    size_t n = (size_t)own->grain;
    at->data = calloc(n, sizeof *at->data);
    at->lengths = calloc(n, sizeof *at->lengths);
    at->planes = calloc(n, sizeof *at->planes);
    at->rows = calloc(n, sizeof *at->rows);
    if (!at->data || !at->lengths || !at->planes || !at->rows) return PS_NO_MEMORY;
    int error = ps_cuda_event(&at->done), problem = 0;
    if (error) return ps_cuda_why("no event can be made", error, why), PS_FAILED;
    if (index >= own->handles)
        at->handle = own->seats[index % own->handles].handle;
    else if ((problem = ps_engine_handle(own->engine, &at->handle, why)))
        return problem;
    if ((problem = ps_nvjpeg.state_create(at->handle, &at->state))) {
        at->state = NULL;
        return ps_nvjpeg_why("nvjpegJpegStateCreate", problem, why);
    }
    problem = ps_nvjpeg.preallocate(at->handle, at->state, own->grain, width, height, SAMPLING_444, PLANES_AS_CODED);
    return problem ? ps_nvjpeg_why("nvjpegDecodeBatchedPreAllocate", problem, why) : 0;
}

/* A ring of `states`, on as many handles of nvJPEG's or fewer, each for calls of up to `grain` images; nvJPEG's memory
 * is taken for images of width x height, and larger ones make it take more. 0; or one of engine.h's codes or nvJPEG's
 * status, with `why` filled. */
int ps_decoder_open(ps_engine *engine, int32_t grain, int32_t states, int32_t handles, int32_t width, int32_t height,
                    decoder **out, char *why) {
    snprintf(why, PS_WHY, "senseless sizes");
    if (grain < 1 || states < 1 || handles < 1 || handles > states || width < 1 || height < 1) return PS_SENSELESS;
    decoder *own = calloc(1, sizeof *own + (size_t)states * sizeof *own->seats);
    snprintf(why, PS_WHY, "no memory");
    if (!own) return PS_NO_MEMORY;
    *own = (decoder){.engine = engine, .grain = grain, .handles = handles};
    int error = ps_cuda.set_current(engine->context), problem = error ? PS_FAILED : 0;
    if (error) ps_cuda_why("the GPU cannot be used", error, why);
    while (!problem && own->count < states) problem = prepare(own, own->count++, width, height, why);
    if (problem)
        ps_decoder_close(own);
    else
        *out = own;
    return problem;
}

/* ---- rows */

static int64_t divided(int64_t size, int64_t by) { return (size + by - 1) / by; }

/* Where a row's planes lie; 0 for a row that leads outside the area or the data, or is no JPEG's. */
static int locate(const int32_t *row, uint8_t *area, int64_t area_bytes, int64_t data_bytes, ps_planes *planes) {
    memset(planes, 0, sizeof *planes);
    if (row[KIND] != YCC && row[KIND] != GRAY) return 0;
    if (row[DATA] < 0 || row[LENGTH] < 4 || (int64_t)row[DATA] + row[LENGTH] > data_bytes) return 0;
    if (row[WIDTH] < 1 || row[HEIGHT] < 1 || row[SUB_X] < 1 || row[SUB_Y] < 1) return 0;
    for (int plane = 0; plane < (row[KIND] == YCC ? 3 : 1); plane++) {
        int64_t width = divided(row[WIDTH], plane ? row[SUB_X] : 1);
        int64_t height = divided(row[HEIGHT], plane ? row[SUB_Y] : 1);
        int64_t start = row[PLANE0 + plane], pitch = row[plane ? PITCH1 : PITCH0];
        if (start < 0 || pitch < width || start + pitch * height > area_bytes) return 0;
        planes->channel[plane] = area + start;
        planes->pitch[plane] = (size_t)pitch;
    }
    return 1;
}

/* A tiny-batch, as ps_decoder_decode is given it. */
typedef struct {
    const int32_t *table;
    int columns;
    const uint8_t *data;
    int64_t data_bytes;
    uint8_t *area;
    int64_t area_bytes;
    void *stream;
    int32_t *status;
} job;

/* Fills the seat's arrays from the rows that make sense; returns how many. */
static int gather(seat *at, const job *asked, int first, int n) {
    int good = 0;
    for (int i = first; i < first + n; i++) {
        const int32_t *row = asked->table + (int64_t)i * asked->columns;
        asked->status[i] = PS_SENSELESS;
        if (!locate(row, asked->area, asked->area_bytes, asked->data_bytes, at->planes + good)) continue;
        at->data[good] = asked->data + row[DATA];
        at->lengths[good] = (size_t)row[LENGTH];
        at->rows[good++] = i;
    }
    return good;
}

/* ---- calls */

/* Waits until what the seat was handed is done. */
static int settle(seat *at, void *stream) {
    if (!at->flying) return 0;
    int error = ps_cuda.event_record(at->done, stream);
    if (!error) error = ps_cuda.event_synchronize(at->done);
    at->flying = error != 0;
    return error;
}

/* Hands images first .. first + n - 1 of the seat to nvJPEG; returns its status. */
static int hand(seat *at, int first, int n, void *stream) {
    if (settle(at, stream)) return PS_EXECUTION_FAILED;
    int problem = at->ready == n ? 0 : ps_nvjpeg.initialise(at->handle, at->state, n, 1, PLANES_AS_CODED);
    at->ready = n;
    at->flying = 1;
    if (!problem)
        problem = ps_nvjpeg.decode(at->handle, at->state, at->data + first, at->lengths + first, at->planes + first,
                                   stream);
    if (problem) at->ready = 0;
    return problem;
}

/* Whether one image can be what a call fails for. */
static int blames(int problem) {
    return problem && problem != PS_NOT_INITIALIZED && problem != PS_EXECUTION_FAILED && problem != PS_ARCH_MISMATCH;
}

/* What is refused is halved until the images to blame stand alone. Returns how many. */
static int decode(seat *at, int first, int n, const job *asked) {
    if (!n) return 0;
    int problem = hand(at, first, n, asked->stream);
    if (blames(problem) && n > 1) {
        int failed = decode(at, first, n / 2, asked);
        return failed + decode(at, first + n / 2, n - n / 2, asked);
    }
    for (int i = first; i < first + n; i++) asked->status[at->rows[i]] = problem;
    return problem ? n : 0;
}

/* One call's worth of rows, with the next seat of the ring; returns how many failed, or the driver's
 * error, negative. */
static int take_part(decoder *own, int first, int n, const job *asked) {
    seat *at = own->seats + own->tickets % own->count;
    int error = ps_cuda.event_synchronize(at->done);
    if (error) return -error;
    at->flying = 0;
    int good = gather(at, asked, first, n), failed = n - good + decode(at, 0, good, asked);
    at->flying = 1;
    at->ticket = ++own->tickets;
    error = ps_cuda.event_record(at->done, asked->stream);
    return error ? -error : failed;
}

/* Decodes the n images of `table` (rows of `columns` numbers, see table.py) from `data` in pinned host memory into
 * planes in `area` on the device, in calls of the decoder's grain. Sleeps until `after` is done, unless that is NULL:
 * everything that used the area must stand before it. Then returns when all is handed over; what is put on `stream`
 * from then on finds the planes. `data` must stay until ps_decoder_finished says the number that comes in `*ticket`.
 * status[i] is 0, or why row i is not decoded: nvJPEG's status, or PS_SENSELESS. Returns how many are not;
 * PS_SENSELESS for senseless sizes; PS_FAILED with `why` filled when the driver fails, after which nothing is known of
 * the area. For one thread at a time, within ps_cuda_enter. */
int ps_decoder_decode(decoder *own, const int32_t *table, int32_t columns, int32_t n, const uint8_t *data,
                      int64_t data_bytes, ps_address area, int64_t area_bytes, void *after, void *stream,
                      int32_t *status, int64_t *ticket, char *why) {
    if (n < 1 || columns <= PITCH1 || data_bytes < 0 || area_bytes < 0) return PS_SENSELESS;
    const job asked = {table, columns, data, data_bytes, (uint8_t *)(uintptr_t)area, area_bytes, stream, status};
    int error = ps_cuda.set_current(own->engine->context), failed = 0;
    if (!error && after) error = ps_cuda.event_synchronize(after);
    for (int first = 0; first < n && !error; first += own->grain) {
        int part = take_part(own, first, n - first < own->grain ? n - first : own->grain, &asked);
        error = part < 0 ? -part : 0;
        failed += part;
    }
    *ticket = own->tickets;
    return error ? ps_cuda_why("decoding failed", error, why), PS_FAILED : failed;
}

/* The number up to which all calls are done; the driver's error, negative, when it fails. */
int64_t ps_decoder_finished(decoder *own) {
    int64_t finished = own->tickets;
    for (int i = 0; i < own->count; i++) {
        seat *at = own->seats + i;
        int done = at->flying ? ps_cuda_event_done(at->done) : 1;
        if (done < 0) return done;
        if (done)
            at->flying = 0;
        else if (at->ticket <= finished)
            finished = at->ticket - 1;
    }
    return finished;
}
