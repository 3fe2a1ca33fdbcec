/* What the steps over pixels share: the image on its way through a chain, and Pillow's arithmetic. */
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { PS_BLOCK = 256 }; /* pixels per inner block */
enum { PS_OK = 0, PS_BAD_SIZE = -1, PS_NO_MEMORY = -2, PS_BAD_STEP = -3 };

typedef struct {
    const uint8_t *now; /* the pixels as of the last settled step: the input, `out` or `spare` */
    uint8_t *out;
    uint8_t *spare;
    int64_t height, width, channels, bytes;
    int pending; /* `table` is still to be applied to `now` */
    int alike;   /* the tables of all channels are equal */
    uint8_t table[3][256];
} Work;

/* A step over the image with its nine parameters; returns one of the codes above. */
typedef int Step(Work *work, const double *p);

/* Applies the pending tables to the pixels. */
void ps_settle(Work *work);

/* Where a step may write that reads and writes the same pixel. */
static inline uint8_t *place(const Work *work)
{
    return work->now == work->spare ? work->spare : work->out;
}

/* Where a step may write that reads pixels elsewhere than it writes; NULL when out of memory. */
static inline uint8_t *other(Work *work)
{
    if (work->now != work->out)
        return work->out;
    if (!work->spare)
        work->spare = malloc((size_t)work->bytes);
    return work->spare;
}

/* Pillow's blend, from `a` to `b`: single precision, multiplied, then added, truncated, clipped. */
static inline uint8_t blend(int a, int b, float factor)
{
    int value = (int)((float)a + factor * (float)(b - a));
    value = value < 0 ? 0 : value;
    return (uint8_t)(value > 255 ? 255 : value);
}

static inline int luma(int r, int g, int b)
{
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
}

Step ps_saturation, ps_hue, ps_sharpness, ps_affine, ps_affine_bilinear, ps_affine_bicubic, ps_erase;
