/* Steps that move pixels: affine maps by nearest pixel, bilinear, bicubic; and holes. */
#include <math.h>
#include <string.h>

#include "pixels.h"

static inline void copy_pixel(uint8_t *to, const uint8_t *from, int64_t channels)
{
    if (channels == 3) {
        memcpy(to, from, 2);
        to[2] = from[2];
    } else {
        *to = *from;
    }
}

static void fill_pixels(uint8_t *to, int64_t n, int64_t channels, const uint8_t *fill)
{
    if (channels == 1 || (fill[0] == fill[1] && fill[1] == fill[2])) {
        memset(to, fill[0], (size_t)(n > 0 ? n * channels : 0));
        return;
    }
    for (int64_t i = 0; i < n; i++)
        copy_pixel(to + 3 * i, fill, 3);
}

static void read_fill(const double *p, uint8_t *fill)
{
    for (int c = 0; c < 3; c++)
        fill[c] = (uint8_t)(p[c] < 0 ? 0 : p[c] > 255 ? 255 : p[c]);
}

static int64_t divide_down(int64_t a, int64_t b) /* floor(a / b), b > 0 */
{
    return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/* Narrows [*first, *end) to the x for which start + step * x lies in [0, limit). */
static void narrow(int64_t start, int64_t step, int64_t limit, int64_t *first, int64_t *end)
{
    int64_t a = 0, b = 0; /* first and last x */
    if (step == 0) {
        if (start < 0 || start >= limit)
            *end = *first;
        return;
    }
    if (step > 0) {
        a = -divide_down(start, step);
        b = divide_down(limit - 1 - start, step);
    } else {
        a = -divide_down(limit - 1 - start, -step);
        b = divide_down(start, -step);
    }
    *first = a > *first ? a : *first;
    *end = b + 1 < *end ? b + 1 : *end;
    if (*end < *first)
        *end = *first;
}

typedef struct {
    const uint8_t *from, *end;
    uint8_t *to;
    int64_t height, width, channels;
    const double *m; /* the inverse matrix: x' = m0 x + m1 y + m2, y' = m3 x + m4 y + m5, at pixel centres */
    uint8_t fill[3];
} Warp;

/* One row in 16.16 fixed point, as Pillow does it, without tests inside the loop. */
static void row_fixed(const Warp *warp, int64_t y, int64_t xx, int64_t yy, int64_t dx, int64_t dy)
{
    int64_t c = warp->channels, stride = warp->width * c, first = 0, end = warp->width;
    uint8_t *to = warp->to + y * stride;
    narrow(xx, dx, warp->width << 16, &first, &end);
    narrow(yy, dy, warp->height << 16, &first, &end);
    if (end <= first)
        first = end = warp->width;
    fill_pixels(to, first, c, warp->fill);
    fill_pixels(to + end * c, warp->width - end, c, warp->fill);
    xx += dx * first;
    yy += dy * first;
    if (dx == 65536 && dy == 0) {
        if (end > first)
            memcpy(to + first * c, warp->from + (yy >> 16) * stride + (xx >> 16) * c, (size_t)((end - first) * c));
        return;
    }
    if (c == 3) {
        for (int64_t x = first; x < end; x++, xx += dx, yy += dy)
            copy_pixel(to + 3 * x, warp->from + (yy >> 16) * stride + (xx >> 16) * 3, 3);
    } else {
        for (int64_t x = first; x < end; x++, xx += dx, yy += dy)
            to[x] = warp->from[(yy >> 16) * stride + (xx >> 16)];
    }
}

static int64_t fixed(double value)
{
    return (int64_t)floor(value * 65536.0 + 0.5);
}

static void warp_fixed(const Warp *warp)
{
    const double *m = warp->m;
    int64_t xx = fixed(m[2] + m[0] * 0.5 + m[1] * 0.5), yy = fixed(m[5] + m[3] * 0.5 + m[4] * 0.5);
    int64_t dx = fixed(m[0]), dy = fixed(m[3]), down_x = fixed(m[1]), down_y = fixed(m[4]);
    for (int64_t y = 0; y < warp->height; y++)
        row_fixed(warp, y, xx + y * down_x, yy + y * down_y, dx, dy);
}

static int64_t whole(double value) /* -1 for anything left of the image */
{
    return value < 0.0 ? -1 : value >= 2147483647.0 ? INT32_MAX : (int64_t)value;
}

/* Without shear or rotation: columns are tabulated once. */
static int warp_scaled(const Warp *warp)
{
    const double *m = warp->m;
    int64_t c = warp->channels, stride = warp->width * c, first = warp->width, end = 0;
    int64_t *column = malloc((size_t)warp->width * sizeof(*column));
    if (!column)
        return PS_NO_MEMORY;
    double xo = m[2] + m[0] * 0.5, yo = m[5] + m[4] * 0.5;
    int straight = 1;
    for (int64_t x = 0; x < warp->width; x++, xo += m[0]) {
        int64_t at = whole(xo);
        if (at < 0 || at >= warp->width)
            continue;
        first = x < first ? x : first;
        straight &= x == first || at == column[end - 1] + 1;
        column[x] = at;
        end = x + 1;
    }
    for (int64_t y = 0; y < warp->height; y++, yo += m[4]) {
        uint8_t *to = warp->to + y * stride;
        int64_t at = whole(yo);
        if (at < 0 || at >= warp->height || end <= first) {
            fill_pixels(to, warp->width, c, warp->fill);
            continue;
        }
        const uint8_t *from = warp->from + at * stride;
        fill_pixels(to, first, c, warp->fill);
        fill_pixels(to + end * c, warp->width - end, c, warp->fill);
        if (straight)
            memcpy(to + first * c, from + column[first] * c, (size_t)((end - first) * c));
        else
            for (int64_t x = first; x < end; x++)
                copy_pixel(to + x * c, from + column[x] * c, c);
    }
    free(column);
    return PS_OK;
}

/* For images so large that 16.16 overflows. */
static void warp_float(const Warp *warp)
{
    const double *m = warp->m;
    int64_t c = warp->channels, stride = warp->width * c;
    double xo = m[2] + m[1] * 0.5 + m[0] * 0.5, yo = m[5] + m[4] * 0.5 + m[3] * 0.5;
    for (int64_t y = 0; y < warp->height; y++, xo += m[1], yo += m[4]) {
        double xx = xo, yy = yo;
        for (int64_t x = 0; x < warp->width; x++, xx += m[0], yy += m[3]) {
            int64_t xin = whole(xx), yin = whole(yy);
            int inside = xin >= 0 && xin < warp->width && yin >= 0 && yin < warp->height;
            copy_pixel(warp->to + y * stride + x * c, inside ? warp->from + yin * stride + xin * c : warp->fill, c);
        }
    }
}

static int fits(const double *m, int64_t x, int64_t y)
{
    return fabs(x * m[0] + y * m[1] + m[2]) < 32768.0 && fabs(x * m[3] + y * m[4] + m[5]) < 32768.0;
}

static int warp_nearest(const Warp *warp)
{
    int64_t w = warp->width, h = warp->height;
    if (warp->m[1] == 0 && warp->m[3] == 0)
        return warp_scaled(warp);
    if (fits(warp->m, 0, 0) && fits(warp->m, w, h) && fits(warp->m, 0, h) && fits(warp->m, w, 0))
        warp_fixed(warp);
    else
        warp_float(warp);
    return PS_OK;
}

static int64_t clamp(int64_t value, int64_t limit)
{
    return value < 0 ? 0 : value < limit ? value : limit - 1;
}

/* The channels of one pixel side by side; a fourth is room. */
typedef double Quad __attribute__((vector_size(32)));

static inline void load(const Warp *warp, const uint8_t *from, Quad *levels)
{
#ifdef __AVX2__
    int32_t four;
    if (from + 4 <= warp->end) {
        memcpy(&four, from, 4);
        *levels = (Quad)_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
        return;
    }
#endif
    *levels = warp->channels == 3 ? (Quad){from[0], from[1], from[2]} : (Quad){from[0]};
}

static inline void store(const Quad *levels, uint8_t *to, int64_t channels)
{
#ifdef __AVX2__
    __m128i whole = _mm256_cvttpd_epi32((__m256d)*levels), half = _mm_packus_epi32(whole, whole);
    int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(half, half)); /* packing clips */
    uint8_t bytes[4];
    memcpy(bytes, &four, 4);
    copy_pixel(to, bytes, channels);
#else
    for (int64_t k = 0; k < channels; k++) {
        double level = (*levels)[k];
        to[k] = (uint8_t)(level <= 0.0 ? 0.0 : level >= 255.0 ? 255.0 : level);
    }
#endif
}

static inline void bilinear(const Warp *warp, int64_t x, int64_t y, double dx, double dy, uint8_t *to)
{
    int64_t c = warp->channels, stride = warp->width * c;
    int64_t x0 = clamp(x, warp->width) * c, x1 = clamp(x + 1, warp->width) * c;
    Quad line[2], left, right;
    for (int i = 0; i < 2; i++) {
        const uint8_t *from = warp->from + clamp(y + i, warp->height) * stride;
        load(warp, from + x0, &left);
        load(warp, from + x1, &right);
        line[i] = left + (right - left) * dx;
    }
    left = line[0] + (line[1] - line[0]) * dy;
    store(&left, to, c);
}

static inline void cubic(const Quad *v, double d, Quad *out)
{
    Quad p2 = -v[0] + v[2], p3 = 2 * (v[0] - v[1]) + v[2] - v[3], p4 = -v[0] + v[1] - v[2] + v[3];
    *out = v[1] + d * (p2 + d * (p3 + d * p4));
}

static inline void bicubic(const Warp *warp, int64_t x, int64_t y, double dx, double dy, uint8_t *to)
{
    int64_t c = warp->channels, stride = warp->width * c;
    Quad line[4], level[4], out;
    for (int i = 0; i < 4; i++) {
        const uint8_t *from = warp->from + clamp(y - 1 + i, warp->height) * stride;
        for (int j = 0; j < 4; j++)
            load(warp, from + clamp(x - 1 + j, warp->width) * c, &level[j]);
        cubic(level, dx, &line[i]);
    }
    cubic(line, dy, &out);
    store(&out, to, c);
}

static inline int64_t floor_of(double value)
{
    int64_t near = (int64_t)value;
    return near - (value < (double)near);
}

typedef enum { NEAREST, BILINEAR, BICUBIC } Sampler;

static inline __attribute__((always_inline)) void warp_smooth(const Warp *warp, Sampler sampler)
{
    const double *m = warp->m;
    uint8_t *to = warp->to;
    for (int64_t y = 0; y < warp->height; y++)
        for (int64_t x = 0; x < warp->width; x++, to += warp->channels) {
            double at_x = (double)x + 0.5, at_y = (double)y + 0.5;
            double xin = m[0] * at_x + m[1] * at_y + m[2], yin = m[3] * at_x + m[4] * at_y + m[5];
            if (xin < 0.0 || xin >= (double)warp->width || yin < 0.0 || yin >= (double)warp->height) {
                copy_pixel(to, warp->fill, warp->channels);
                continue;
            }
            int64_t left = floor_of(xin - 0.5), top = floor_of(yin - 0.5);
            double dx = xin - 0.5 - (double)left, dy = yin - 0.5 - (double)top;
            if (sampler == BILINEAR)
                bilinear(warp, left, top, dx, dy, to);
            else
                bicubic(warp, left, top, dx, dy, to);
        }
}

static int warp_with(Work *work, const double *p, Sampler sampler)
{
    ps_settle(work);
    uint8_t *to = other(work);
    if (!to)
        return PS_NO_MEMORY;
    Warp warp = {work->now, work->now + work->bytes, to, work->height, work->width, work->channels, p, {0}};
    read_fill(p + 6, warp.fill);
    int outcome = PS_OK;
    if (sampler == NEAREST)
        outcome = warp_nearest(&warp);
    else if (sampler == BILINEAR)
        warp_smooth(&warp, BILINEAR);
    else
        warp_smooth(&warp, BICUBIC);
    work->now = to;
    return outcome;
}

int ps_affine(Work *work, const double *p)
{
    return warp_with(work, p, NEAREST);
}

int ps_affine_bilinear(Work *work, const double *p)
{
    return warp_with(work, p, BILINEAR);
}

int ps_affine_bicubic(Work *work, const double *p)
{
    return warp_with(work, p, BICUBIC);
}

static int64_t edge(double value, int64_t limit)
{
    return value > 0 ? value < limit ? (int64_t)value : limit : 0;
}

/* Fills rows p0 .. p2-1, columns p1 .. p3-1. */
int ps_erase(Work *work, const double *p)
{
    ps_settle(work);
    uint8_t *to = place(work), fill[3];
    if (work->now != to)
        memcpy(to, work->now, (size_t)work->bytes);
    work->now = to;
    read_fill(p + 4, fill);
    int64_t top = edge(p[0], work->height), bottom = edge(p[2], work->height);
    int64_t left = edge(p[1], work->width), right = edge(p[3], work->width);
    for (int64_t y = top; y < bottom && left < right; y++)
        fill_pixels(to + (y * work->width + left) * work->channels, right - left, work->channels, fill);
    return PS_OK;
}
