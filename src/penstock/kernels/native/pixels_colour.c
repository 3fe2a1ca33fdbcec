/* Steps that mix the channels of a pixel, or a pixel with its neighbours: saturation, sharpness, hue. */
#include <string.h>

#include "pixels.h"

#ifdef __AVX2__
static inline __m256i blend_eight(const uint8_t *a, const uint8_t *b, __m256 factor)
{
    __m256i from = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)a));
    __m256i to = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)b));
    __m256 change = _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_sub_epi32(to, from)));
    return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_cvtepi32_ps(from), change));
}

/* The same sums as `blend`; packing clips. Compilers make of the plain loop something half as fast. */
static int64_t blend_wide(const uint8_t *a, const uint8_t *b, uint8_t *out, int64_t n, float factor)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 by = _mm256_set1_ps(factor);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i low = _mm256_packs_epi32(blend_eight(a + i, b + i, by), blend_eight(a + i + 8, b + i + 8, by));
        __m256i high =
            _mm256_packs_epi32(blend_eight(a + i + 16, b + i + 16, by), blend_eight(a + i + 24, b + i + 24, by));
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(out + i), bytes);
    }
    return i;
}
#endif

/* `out` may be `a`. */
static void blend_all(const uint8_t *a, const uint8_t *b, uint8_t *out, int64_t n, float factor)
{
    int64_t i = 0;
#ifdef __AVX2__
    i = blend_wide(a, b, out, n, factor);
#endif
    for (; i < n; i++)
        out[i] = blend(a[i], b[i], factor);
}

static void grey_of(const uint8_t *restrict from, uint8_t *restrict grey, int64_t pixels)
{
    for (int64_t i = 0; i < pixels; i++)
        grey[3 * i] = grey[3 * i + 1] = grey[3 * i + 2] = (uint8_t)luma(from[3 * i], from[3 * i + 1], from[3 * i + 2]);
}

int ps_saturation(Work *work, const double *p)
{
    if (work->channels == 1)
        return PS_OK;
    ps_settle(work);
    int64_t pixels = work->height * work->width;
    uint8_t *to = place(work), grey[3 * PS_BLOCK];
    for (int64_t start = 0; start < pixels; start += PS_BLOCK) {
        int64_t n = pixels - start < PS_BLOCK ? pixels - start : PS_BLOCK;
        const uint8_t *from = work->now + 3 * start;
        grey_of(from, grey, n);
        blend_all(grey, from, to + 3 * start, 3 * n, (float)p[0]);
    }
    work->now = to;
    return PS_OK;
}

/* Values c .. n-c-1 of a row under the kernel 1 1 1, 1 5 1, 1 1 1 over 13. No sum lies half-way, so integers round as
 * Pillow's floats do; 5042 / 65536 divides by 13 exactly up to 6553. */
static void smooth_row(const uint8_t *restrict at, uint8_t *restrict out, int64_t n, int64_t c)
{
    const uint8_t *up = at - n, *down = at + n;
    for (int64_t i = c; i < n - c; i++) {
        uint16_t sum = (uint16_t)(up[i - c] + up[i] + up[i + c] + at[i - c] + 5 * at[i] + at[i + c] + down[i - c] +
                                  down[i] + down[i + c] + 6);
        out[i] = (uint8_t)(((uint32_t)sum * 5042u) >> 16);
    }
}

int ps_sharpness(Work *work, const double *p)
{
    ps_settle(work);
    if (work->width < 3 || work->height < 3)
        return PS_OK;
    int64_t c = work->channels, n = work->width * c, last = (work->height - 1) * n;
    uint8_t *to = other(work);
    if (!to)
        return PS_NO_MEMORY;
    memcpy(to, work->now, (size_t)n);
    memcpy(to + last, work->now + last, (size_t)n);
    for (int64_t y = n; y < last; y += n) {
        const uint8_t *at = work->now + y;
        memcpy(to + y, at, (size_t)c);
        memcpy(to + y + n - c, at + n - c, (size_t)c);
        smooth_row(at, to + y, n, c);
        blend_all(to + y + c, at + c, to + y + c, n - 2 * c, (float)p[0]);
    }
    work->now = to;
    return PS_OK;
}

/* Pillow's 8-bit hue and saturation, in its mixture of float and double, by selection instead of branches. */
static void to_hsv(const uint8_t *restrict in, int32_t *restrict hues, int32_t *restrict saturations,
                   int32_t *restrict values, int64_t n)
{
    int32_t x[PS_BLOCK], y[PS_BLOCK], range[PS_BLOCK], base[PS_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        int32_t r = in[3 * i], g = in[3 * i + 1], b = in[3 * i + 2];
        int32_t high = r > g ? r : g, low = r < g ? r : g;
        high = high > b ? high : b;
        low = low < b ? low : b;
        int32_t is_red = r == high, is_green = g == high;
        base[i] = is_red ? 0 : is_green ? 2 : 4;
        x[i] = high - (is_red ? b : is_green ? r : g);
        y[i] = high - (is_red ? g : is_green ? b : r);
        range[i] = high - low;
        values[i] = high;
    }
    for (int64_t i = 0; i < n; i++) {
        float span = (float)(range[i] + (range[i] == 0)), high = (float)(values[i] + (values[i] == 0));
        float xs = (float)x[i] / span, ys = (float)y[i] / span, share = (float)range[i] / high;
        float sixth = (float)((double)base[i] + (double)xs - (double)ys);
        double turns = (double)sixth / 6.0 + 1.0; /* in [5/6, 11/6] */
        float hue = (float)(turns - (double)(int32_t)turns);
        hues[i] = (int32_t)((double)hue * 255.0);
        saturations[i] = (int32_t)((double)share * 255.0);
    }
}

/* And back, of hues already turned. Where the saturation is 0 all three come out as the value. */
static void to_rgb(const int32_t *restrict hues, const int32_t *restrict saturations, const int32_t *restrict values,
                   uint8_t *restrict out, int64_t n)
{
    int32_t p[PS_BLOCK], q[PS_BLOCK], t[PS_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        double v = (double)values[i], place = (double)hues[i] * 6.0 / 255.0;
        float rest = (float)(place - (double)(int32_t)place), s = (float)saturations[i] / 255.0f;
        p[i] = (int32_t)(v * (1.0 - (double)s) + 0.5);
        q[i] = (int32_t)(v * (1.0 - (double)(s * rest)) + 0.5);
        t[i] = (int32_t)(v * (1.0 - (double)s * (1.0 - (double)rest)) + 0.5);
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t sector = hues[i] * 6 / 255, v = values[i];
        int32_t in1 = -(sector == 1), in2 = -(sector == 2), in3 = -(sector == 3), in4 = -(sector == 4);
        int32_t in5 = -(sector == 5), in0 = ~(in1 | in2 | in3 | in4 | in5); /* hue 255 is in sector 6, that is 0 */
        out[3 * i] = (uint8_t)(((in0 | in5) & v) | (in1 & q[i]) | ((in2 | in3) & p[i]) | (in4 & t[i]));
        out[3 * i + 1] = (uint8_t)((in0 & t[i]) | ((in1 | in2) & v) | (in3 & q[i]) | ((in4 | in5) & p[i]));
        out[3 * i + 2] = (uint8_t)(((in0 | in1) & p[i]) | (in2 & t[i]) | ((in3 | in4) & v) | (in5 & q[i]));
    }
}

int ps_hue(Work *work, const double *p)
{
    if (work->channels == 1)
        return PS_OK;
    ps_settle(work);
    int32_t hues[PS_BLOCK], saturations[PS_BLOCK], values[PS_BLOCK], shift = (int32_t)p[0];
    int64_t pixels = work->height * work->width;
    uint8_t *to = place(work);
    for (int64_t start = 0; start < pixels; start += PS_BLOCK) {
        int64_t n = pixels - start < PS_BLOCK ? pixels - start : PS_BLOCK;
        to_hsv(work->now + 3 * start, hues, saturations, values, n);
        for (int64_t i = 0; i < n; i++)
            hues[i] = (hues[i] + shift) & 255;
        to_rgb(hues, saturations, values, to + 3 * start, n);
    }
    work->now = to;
    return PS_OK;
}
