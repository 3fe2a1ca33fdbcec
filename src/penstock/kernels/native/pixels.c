/* Colour and geometry over interleaved 8-bit images, with the arithmetic of Pillow: equal parameters give equal bytes.
 *
 * A chain of steps runs in one call. Steps that map each value of a channel by itself (brightness, posterize, ...) are
 * composed into one table per channel, which is exact, and touch the pixels once, when a step of another kind or the end
 * of the chain needs them. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { STEP = 10, BLOCK = 256 }; /* doubles per step: its code, then up to nine parameters; pixels per inner block */
enum { OK = 0, BAD_SIZE = -1, NO_MEMORY = -2, BAD_STEP = -3 };

typedef struct {
    const uint8_t *now; /* the pixels as of the last settled step: the input, `out` or `spare` */
    uint8_t *out;
    uint8_t *spare;
    int64_t height, width, channels, bytes;
    int pending; /* `table` is still to be applied to `now` */
    int alike;   /* the tables of all channels are equal */
    uint8_t table[3][256];
} Work;

/* ---- buffers -------------------------------------------------------------------------------------------------- */

/* Where a step may write that reads and writes the same pixel. */
static uint8_t *place(const Work *work)
{
    return work->now == work->spare ? work->spare : work->out;
}

/* Where a step may write that reads pixels elsewhere than it writes; NULL when out of memory. */
static uint8_t *other(Work *work)
{
    if (work->now != work->out)
        return work->out;
    if (!work->spare)
        work->spare = malloc((size_t)work->bytes);
    return work->spare;
}

/* ---- tables --------------------------------------------------------------------------------------------------- */

#ifdef __AVX2__
/* 256 entries as sixteen shuffles of sixteen, then chosen between by the four high bits. */
static int64_t map_wide(const uint8_t *in, uint8_t *out, int64_t n, const uint8_t *table)
{
    const __m256i low = _mm256_set1_epi8(0x0f);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(in + i)), index = _mm256_and_si256(x, low), row[16];
        for (int k = 0; k < 16; k++) {
            __m256i part = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + 16 * k)));
            row[k] = _mm256_shuffle_epi8(part, index);
        }
        __m256i bit4 = _mm256_slli_epi16(x, 3), bit5 = _mm256_slli_epi16(x, 2), bit6 = _mm256_slli_epi16(x, 1);
        for (int k = 0; k < 8; k++)
            row[k] = _mm256_blendv_epi8(row[2 * k], row[2 * k + 1], bit4);
        for (int k = 0; k < 4; k++)
            row[k] = _mm256_blendv_epi8(row[2 * k], row[2 * k + 1], bit5);
        for (int k = 0; k < 2; k++)
            row[k] = _mm256_blendv_epi8(row[2 * k], row[2 * k + 1], bit6);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_blendv_epi8(row[0], row[1], x));
    }
    return i;
}
#endif

static void map_all(const uint8_t *in, uint8_t *out, int64_t n, const uint8_t *table)
{
    int64_t i = 0;
#ifdef __AVX2__
    i = map_wide(in, out, n, table);
#endif
    for (; i < n; i++)
        out[i] = table[in[i]];
}

static void map_channels(const uint8_t *in, uint8_t *out, int64_t pixels, uint8_t (*table)[256])
{
    for (int64_t i = 0; i < pixels; i++, in += 3, out += 3) {
        uint8_t r = table[0][in[0]], g = table[1][in[1]], b = table[2][in[2]];
        out[0] = r;
        out[1] = g;
        out[2] = b;
    }
}

/* Applies the pending tables to the pixels. */
static void settle(Work *work)
{
    if (!work->pending)
        return;
    uint8_t *to = place(work);
    if (work->alike)
        map_all(work->now, to, work->bytes, work->table[0]);
    else
        map_channels(work->now, to, work->height * work->width, work->table);
    work->now = to;
    work->pending = 0;
}

static void begin_table(Work *work)
{
    if (work->pending)
        return;
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < 256; i++)
            work->table[c][i] = (uint8_t)i;
    work->pending = work->alike = 1;
}

/* Composes one more table, the same for all channels. */
static void compose(Work *work, const uint8_t *table)
{
    begin_table(work);
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < 256; i++)
            work->table[c][i] = table[work->table[c][i]];
}

/* Pillow's blend, from `a` to `b`: single precision, multiplied, then added, truncated, clipped. */
static inline uint8_t blend(int a, int b, float factor)
{
    int value = (int)((float)a + factor * (float)(b - a));
    value = value < 0 ? 0 : value;
    return (uint8_t)(value > 255 ? 255 : value);
}

/* Beyond a million every difference saturates; kept there, no product leaves the range of int. */
static float tame(double factor)
{
    return (float)(factor < -1e6 ? -1e6 : factor > 1e6 ? 1e6 : factor);
}

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
        __m256i high = _mm256_packs_epi32(blend_eight(a + i + 16, b + i + 16, by), blend_eight(a + i + 24, b + i + 24, by));
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

static void blend_from(Work *work, int level, float factor)
{
    uint8_t table[256];
    for (int i = 0; i < 256; i++)
        table[i] = blend(level, i, factor);
    compose(work, table);
}

static int brightness(Work *work, const double *p)
{
    blend_from(work, 0, tame(p[0]));
    return OK;
}

static int posterize(Work *work, const double *p)
{
    uint8_t table[256];
    int bits = (int)p[0], mask = bits >= 8 ? 0xff : bits <= 0 ? 0 : 0xff & ~((1 << (8 - bits)) - 1);
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(i & mask);
    compose(work, table);
    return OK;
}

static int solarize(Work *work, const double *p)
{
    uint8_t table[256];
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(i < p[0] ? i : 255 - i);
    compose(work, table);
    return OK;
}

static int invert(Work *work, const double *p)
{
    uint8_t table[256];
    (void)p;
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(255 - i);
    compose(work, table);
    return OK;
}

/* ---- tables that depend on the image -------------------------------------------------------------------------- */

static inline int luma(int r, int g, int b)
{
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
}

static uint64_t luma_sum(const uint8_t *in, int64_t pixels)
{
    uint64_t total = 0;
    for (int64_t start = 0; start < pixels; start += BLOCK) {
        int64_t n = pixels - start < BLOCK ? pixels - start : BLOCK;
        const uint8_t *p = in + 3 * start;
        uint32_t sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += (uint32_t)luma(p[3 * i], p[3 * i + 1], p[3 * i + 2]);
        total += sum;
    }
    return total;
}

static uint64_t value_sum(const uint8_t *in, int64_t n)
{
    uint64_t total = 0;
    for (int64_t i = 0; i < n; i++)
        total += in[i];
    return total;
}

static int contrast(Work *work, const double *p)
{
    settle(work);
    int64_t pixels = work->height * work->width;
    uint64_t sum = work->channels == 3 ? luma_sum(work->now, pixels) : value_sum(work->now, pixels);
    blend_from(work, (int)((double)sum / (double)pixels + 0.5), tame(p[0]));
    return OK;
}

static void extremes(const uint8_t *in, int64_t pixels, int64_t channels, uint8_t *low, uint8_t *high)
{
    enum { LANES = 96 }; /* a multiple of three channels and of a vector */
    uint8_t lo[LANES], hi[LANES];
    int64_t n = pixels * channels, i = 0;
    memset(lo, 255, LANES);
    memset(hi, 0, LANES);
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            uint8_t v = in[i + k];
            lo[k] = v < lo[k] ? v : lo[k];
            hi[k] = v > hi[k] ? v : hi[k];
        }
    for (int k = 0; i < n; i++, k++) {
        lo[k] = in[i] < lo[k] ? in[i] : lo[k];
        hi[k] = in[i] > hi[k] ? in[i] : hi[k];
    }
    for (int64_t c = 0; c < channels; c++) {
        low[c] = 255;
        high[c] = 0;
        for (int64_t k = c; k < LANES; k += channels) {
            low[c] = lo[k] < low[c] ? lo[k] : low[c];
            high[c] = hi[k] > high[c] ? hi[k] : high[c];
        }
    }
}

static int autocontrast(Work *work, const double *p)
{
    uint8_t low[3], high[3];
    (void)p;
    settle(work);
    extremes(work->now, work->height * work->width, work->channels, low, high);
    begin_table(work);
    for (int64_t c = 0; c < work->channels; c++) {
        if (high[c] <= low[c])
            continue;
        double scale = 255.0 / (high[c] - low[c]), offset = -low[c] * scale;
        for (int i = 0; i < 256; i++) {
            int value = (int)(i * scale + offset);
            work->table[c][i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
        }
    }
    work->alike = work->channels == 1;
    return OK;
}

/* Two counters per value, taken in turn: neighbours are often equal, and would wait for each other's store. */
static void histogram(const uint8_t *in, int64_t pixels, int64_t channels, uint32_t (*count)[256])
{
    uint32_t twin[3][256] = {{0}};
    int64_t i = 0;
    memset(count, 0, sizeof(twin));
    if (channels == 3) {
        for (; i + 2 <= pixels; i += 2, in += 6) {
            count[0][in[0]]++;
            count[1][in[1]]++;
            count[2][in[2]]++;
            twin[0][in[3]]++;
            twin[1][in[4]]++;
            twin[2][in[5]]++;
        }
    }
    for (; i < pixels; i++)
        for (int64_t c = 0; c < channels; c++)
            count[c][*in++]++;
    for (int c = 0; c < 3; c++)
        for (int k = 0; k < 256; k++)
            count[c][k] += twin[c][k];
}

static void equalize_table(const uint32_t *count, uint8_t *table)
{
    int last = 255;
    uint64_t total = 0;
    int kinds = 0;
    for (int i = 0; i < 256; i++) {
        total += count[i];
        kinds += count[i] != 0;
    }
    while (last > 0 && !count[last])
        last--;
    uint64_t step = (total - count[last]) / 255;
    if (kinds <= 1 || !step)
        return;
    uint64_t n = step / 2;
    uint8_t fresh[256];
    for (int i = 0; i < 256; i++) {
        fresh[i] = (uint8_t)(n / step > 255 ? 255 : n / step);
        n += count[i];
    }
    for (int i = 0; i < 256; i++)
        table[i] = fresh[table[i]];
}

static int equalize(Work *work, const double *p)
{
    uint32_t raw[3][256], count[3][256] = {{0}};
    (void)p;
    histogram(work->now, work->height * work->width, work->channels, raw);
    begin_table(work);
    for (int64_t c = 0; c < work->channels; c++) {
        for (int i = 0; i < 256; i++)
            count[c][work->table[c][i]] += raw[c][i];
        equalize_table(count[c], work->table[c]);
    }
    work->alike = work->channels == 1;
    return OK;
}

/* ---- colour --------------------------------------------------------------------------------------------------- */

static void grey_of(const uint8_t *restrict from, uint8_t *restrict grey, int64_t pixels)
{
    for (int64_t i = 0; i < pixels; i++)
        grey[3 * i] = grey[3 * i + 1] = grey[3 * i + 2] = (uint8_t)luma(from[3 * i], from[3 * i + 1], from[3 * i + 2]);
}

static int saturation(Work *work, const double *p)
{
    if (work->channels == 1)
        return OK;
    settle(work);
    int64_t pixels = work->height * work->width;
    uint8_t *to = place(work), grey[3 * BLOCK];
    for (int64_t start = 0; start < pixels; start += BLOCK) {
        int64_t n = pixels - start < BLOCK ? pixels - start : BLOCK;
        const uint8_t *from = work->now + 3 * start;
        grey_of(from, grey, n);
        blend_all(grey, from, to + 3 * start, 3 * n, tame(p[0]));
    }
    work->now = to;
    return OK;
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

static int sharpness(Work *work, const double *p)
{
    settle(work);
    if (work->width < 3 || work->height < 3)
        return OK;
    int64_t c = work->channels, n = work->width * c, last = (work->height - 1) * n;
    uint8_t *to = other(work);
    if (!to)
        return NO_MEMORY;
    memcpy(to, work->now, (size_t)n);
    memcpy(to + last, work->now + last, (size_t)n);
    for (int64_t y = n; y < last; y += n) {
        const uint8_t *at = work->now + y;
        memcpy(to + y, at, (size_t)c);
        memcpy(to + y + n - c, at + n - c, (size_t)c);
        smooth_row(at, to + y, n, c);
        blend_all(to + y + c, at + c, to + y + c, n - 2 * c, tame(p[0]));
    }
    work->now = to;
    return OK;
}

/* Pillow's 8-bit hue and saturation, in its mixture of float and double, by selection instead of branches. */
static void to_hsv(const uint8_t *restrict in, int32_t *restrict hues, int32_t *restrict saturations,
                   int32_t *restrict values, int64_t n)
{
    int32_t x[BLOCK], y[BLOCK], range[BLOCK], base[BLOCK];
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
    int32_t p[BLOCK], q[BLOCK], t[BLOCK];
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

static int hue(Work *work, const double *p)
{
    if (work->channels == 1)
        return OK;
    settle(work);
    int32_t hues[BLOCK], saturations[BLOCK], values[BLOCK], shift = (int32_t)p[0];
    int64_t pixels = work->height * work->width;
    uint8_t *to = place(work);
    for (int64_t start = 0; start < pixels; start += BLOCK) {
        int64_t n = pixels - start < BLOCK ? pixels - start : BLOCK;
        to_hsv(work->now + 3 * start, hues, saturations, values, n);
        for (int64_t i = 0; i < n; i++)
            hues[i] = (hues[i] + shift) & 255;
        to_rgb(hues, saturations, values, to + 3 * start, n);
    }
    work->now = to;
    return OK;
}

/* ---- geometry ------------------------------------------------------------------------------------------------- */

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
    const uint8_t *from;
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
        return NO_MEMORY;
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
    return OK;
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
    return OK;
}

static int64_t clamp(int64_t value, int64_t limit)
{
    return value < 0 ? 0 : value < limit ? value : limit - 1;
}

static void pixel_bilinear(const Warp *warp, double xin, double yin, uint8_t *to)
{
    int64_t c = warp->channels, stride = warp->width * c, x = (int64_t)floor(xin - 0.5), y = (int64_t)floor(yin - 0.5);
    double dx = xin - 0.5 - x, dy = yin - 0.5 - y;
    int64_t x0 = clamp(x, warp->width) * c, x1 = clamp(x + 1, warp->width) * c;
    const uint8_t *top = warp->from + clamp(y, warp->height) * stride;
    const uint8_t *bottom = y + 1 < warp->height ? warp->from + (y + 1) * stride : top;
    for (int64_t k = 0; k < c; k++) {
        double a = top[x0 + k] + (top[x1 + k] - top[x0 + k]) * dx;
        double b = bottom[x0 + k] + (bottom[x1 + k] - bottom[x0 + k]) * dx;
        to[k] = (uint8_t)(a + (b - a) * dy);
    }
}

static double cubic(double v1, double v2, double v3, double v4, double d)
{
    double p2 = -v1 + v3, p3 = 2 * (v1 - v2) + v3 - v4, p4 = -v1 + v2 - v3 + v4;
    return v2 + d * (p2 + d * (p3 + d * p4));
}

static void pixel_bicubic(const Warp *warp, double xin, double yin, uint8_t *to)
{
    int64_t c = warp->channels, stride = warp->width * c, x = (int64_t)floor(xin - 0.5), y = (int64_t)floor(yin - 0.5);
    double dx = xin - 0.5 - x, dy = yin - 0.5 - y, v[4];
    int64_t column[4];
    for (int i = 0; i < 4; i++)
        column[i] = clamp(x - 1 + i, warp->width) * c;
    for (int64_t k = 0; k < c; k++) {
        for (int i = 0; i < 4; i++) {
            /* Below the last row Pillow repeats the value it has, above the first it clamps: the same row either way. */
            const uint8_t *line = warp->from + clamp(y - 1 + i, warp->height) * stride + k;
            v[i] = cubic(line[column[0]], line[column[1]], line[column[2]], line[column[3]], dx);
        }
        double value = cubic(v[0], v[1], v[2], v[3], dy);
        to[k] = (uint8_t)(value <= 0.0 ? 0.0 : value >= 255.0 ? 255.0 : value);
    }
}

typedef void (*Sample)(const Warp *, double, double, uint8_t *);

static void warp_smooth(const Warp *warp, Sample sample)
{
    const double *m = warp->m;
    int64_t c = warp->channels;
    for (int64_t y = 0; y < warp->height; y++)
        for (int64_t x = 0; x < warp->width; x++) {
            double at_x = x + 0.5, at_y = y + 0.5;
            double xin = m[0] * at_x + m[1] * at_y + m[2], yin = m[3] * at_x + m[4] * at_y + m[5];
            uint8_t *to = warp->to + (y * warp->width + x) * c;
            if (xin < 0.0 || xin >= warp->width || yin < 0.0 || yin >= warp->height)
                copy_pixel(to, warp->fill, c);
            else
                sample(warp, xin, yin, to);
        }
}

static int warp_with(Work *work, const double *p, Sample sample)
{
    settle(work);
    uint8_t *to = other(work);
    if (!to)
        return NO_MEMORY;
    for (int i = 0; i < 6; i++)
        if (!(fabs(p[i]) < 1e9)) /* also NaN */
            return BAD_STEP;
    Warp warp = {work->now, to, work->height, work->width, work->channels, p, {0}};
    read_fill(p + 6, warp.fill);
    int outcome = OK;
    if (sample)
        warp_smooth(&warp, sample);
    else
        outcome = warp_nearest(&warp);
    work->now = to;
    return outcome;
}

static int affine(Work *work, const double *p)
{
    return warp_with(work, p, NULL);
}

static int affine_bilinear(Work *work, const double *p)
{
    return warp_with(work, p, pixel_bilinear);
}

static int affine_bicubic(Work *work, const double *p)
{
    return warp_with(work, p, pixel_bicubic);
}

static int64_t edge(double value, int64_t limit)
{
    return value > 0 ? value < limit ? (int64_t)value : limit : 0;
}

/* Fills rows p0 .. p2-1, columns p1 .. p3-1. */
static int erase(Work *work, const double *p)
{
    settle(work);
    uint8_t *to = place(work), fill[3];
    if (work->now != to)
        memcpy(to, work->now, (size_t)work->bytes);
    work->now = to;
    read_fill(p + 4, fill);
    int64_t top = edge(p[0], work->height), bottom = edge(p[2], work->height);
    int64_t left = edge(p[1], work->width), right = edge(p[3], work->width);
    for (int64_t y = top; y < bottom && left < right; y++)
        fill_pixels(to + (y * work->width + left) * work->channels, right - left, work->channels, fill);
    return OK;
}

/* ---- the chain ------------------------------------------------------------------------------------------------ */

/* In the order of penstock.kernels.pixels.Op. */
static int (*const STEPS[])(Work *, const double *) = {
    brightness, contrast, saturation,      hue,            sharpness, posterize, solarize, autocontrast, equalize,
    invert,     affine,   affine_bilinear, affine_bicubic, erase,
};

/* Applies `count` steps of ten doubles each (code, parameters) to an image of 1 or 3 channels; `in` is only read, `out`
 * has its size and does not overlap it. Returns 0; -1 for a size out of range, -2 when out of memory, -3 for a step that
 * is unknown or has senseless parameters. */
int ps_augment(const uint8_t *in, uint8_t *out, int64_t height, int64_t width, int32_t channels, const double *steps,
               int32_t count)
{
    if (height < 1 || width < 1 || height > (1 << 24) || width > (1 << 24) || (channels != 1 && channels != 3))
        return BAD_SIZE;
    Work work = {.now = in, .out = out, .height = height, .width = width, .channels = channels};
    work.bytes = height * width * channels;
    int outcome = OK;
    for (int32_t i = 0; i < count && outcome == OK; i++) {
        const double *step = steps + (int64_t)i * STEP;
        int known = step[0] >= 0 && step[0] < (double)(sizeof(STEPS) / sizeof(*STEPS));
        outcome = known ? STEPS[(int)step[0]](&work, step + 1) : BAD_STEP;
    }
    settle(&work);
    if (outcome == OK && work.now != out)
        memcpy(out, work.now, (size_t)work.bytes);
    free(work.spare);
    return outcome;
}

/* out = in * scale + bias per channel, in single precision; 1 or 3 channels, `pixels` of them. */
int ps_normalize(const uint8_t *in, float *out, int64_t pixels, int32_t channels, const float *scale, const float *bias)
{
    enum { LANES = 24 };
    if (pixels < 0 || (channels != 1 && channels != 3))
        return BAD_SIZE;
    float by[LANES], plus[LANES];
    for (int k = 0; k < LANES; k++) {
        by[k] = scale[k % channels];
        plus[k] = bias[k % channels];
    }
    int64_t n = pixels * channels, i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            out[i + k] = (float)in[i + k] * by[k] + plus[k];
    for (int k = 0; i < n; i++, k++)
        out[i] = (float)in[i] * by[k] + plus[k];
    return OK;
}
