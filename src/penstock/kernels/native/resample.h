/* What jpeg.c uses of resample.c. */
#ifndef PS_RESAMPLE_H
#define PS_RESAMPLE_H

#include <stddef.h>
#include <stdint.h>

/* A resize of a virtual image of in_h x in_w pixels to out_h x out_w, of which only the window is computed. */
typedef struct {
    int32_t in_h, in_w;
    float box[4]; /* left, top, right, bottom in the virtual image, as Pillow's resize(box=) */
    int32_t out_h, out_w;
    int32_t filter;
    int32_t window[4]; /* left, top, right, bottom in the output */
    int32_t flip;      /* mirror the window's columns */
    int32_t channels;  /* 1 or 3 */
} ps_resize_spec;

/* One axis of a resize: for output i the taps first[i] .. first[i] + count[i] - 1. `low` and `high` bound them all,
 * `most` their number. */
typedef struct {
    int32_t outputs, taps, low, high, most, plain;
    int32_t *first, *count, *weights;
} ps_axis;

typedef struct {
    ps_resize_spec spec;
    ps_axis across, down;
    int down_first; /* the vertical pass before the horizontal one */
} ps_resize_plan;

/* Memory of this thread that lives until the thread ends, zero at first; a slot's content is lost when it grows. NULL
 * without memory. */
#define PS_PADDING 64
enum { PS_SCRATCH_AXES, PS_SCRATCH_ROWS, PS_SCRATCH_IMAGE, PS_SCRATCH_TAIL, PS_SCRATCH_CODES, PS_SCRATCH_SLOTS };
void *ps_scratch(int slot, size_t bytes);

/* 0, or -1 for a senseless spec, or -2 without memory. The plan uses PS_SCRATCH_AXES. */
int ps_resize_prepare(const ps_resize_spec *spec, ps_resize_plan *plan);

/* `source` holds rows down.low.. and columns across.low.. of the virtual image; PS_PADDING readable bytes follow its
 * last row if `padded`. 0, or -2 without memory. */
int ps_resize_run(ps_resize_plan *plan, const uint8_t *source, int64_t stride, int padded, uint8_t *out,
                  int64_t out_stride);

#endif
