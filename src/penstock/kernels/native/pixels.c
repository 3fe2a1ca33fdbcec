/* Colour and geometry over interleaved 8-bit images, with the arithmetic of Pillow: equal parameters give equal bytes.
 *
 * A chain of steps runs in one call. Steps that map each value of a channel by itself (brightness, posterize, ...) are
 * composed into one table per channel, which is exact, and touch the pixels once, when a step of another kind or the
 * end of the chain needs them. This file holds the chain and the tables. */
#include <math.h>
#include <string.h>

#include "pixels.h"

enum { STEP = 10 }; /* doubles per step: its code, then up to nine parameters */
enum { SIDE_MOST = 1 << 22 };

/* Greater numbers mean nothing on images of these sizes, and 255 times a smaller one is still an int. */
static const double PARAMETER_MOST = 8e6;

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
void ps_settle(Work *work)
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

static void blend_from(Work *work, int level, float factor)
{
    uint8_t table[256];
    for (int i = 0; i < 256; i++)
        table[i] = blend(level, i, factor);
    compose(work, table);
}

static int brightness(Work *work, const double *p)
{
    blend_from(work, 0, (float)p[0]);
    return PS_OK;
}

static int posterize(Work *work, const double *p)
{
    uint8_t table[256];
    int bits = (int)p[0], mask = bits >= 8 ? 0xff : bits <= 0 ? 0 : 0xff & ~((1 << (8 - bits)) - 1);
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(i & mask);
    compose(work, table);
    return PS_OK;
}

static int solarize(Work *work, const double *p)
{
    uint8_t table[256];
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(i < p[0] ? i : 255 - i);
    compose(work, table);
    return PS_OK;
}

static int invert(Work *work, const double *p)
{
    uint8_t table[256];
    (void)p;
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(255 - i);
    compose(work, table);
    return PS_OK;
}

/* ---- tables that depend on the image -------------------------------------------------------------------------- */

static uint64_t luma_sum(const uint8_t *in, int64_t pixels)
{
    uint64_t total = 0;
    for (int64_t start = 0; start < pixels; start += PS_BLOCK) {
        int64_t n = pixels - start < PS_BLOCK ? pixels - start : PS_BLOCK;
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
    ps_settle(work);
    int64_t pixels = work->height * work->width;
    uint64_t sum = work->channels == 3 ? luma_sum(work->now, pixels) : value_sum(work->now, pixels);
    blend_from(work, (int)((double)sum / (double)pixels + 0.5), (float)p[0]);
    return PS_OK;
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
    ps_settle(work);
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
    return PS_OK;
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
    return PS_OK;
}

/* ---- the chain ------------------------------------------------------------------------------------------------ */

/* In the order of penstock.kernels.pixels.Op. */
static Step *const STEPS[] = {
    brightness,   contrast, ps_saturation, ps_hue,    ps_sharpness,       posterize,         solarize,
    autocontrast, equalize, invert,        ps_affine, ps_affine_bilinear, ps_affine_bicubic, ps_erase,
};

static int sensible(const double *step)
{
    int good = step[0] >= 0 && step[0] < (double)(sizeof(STEPS) / sizeof(*STEPS));
    for (int i = 1; i < STEP; i++)
        good &= fabs(step[i]) < PARAMETER_MOST; /* and not NaN */
    return good;
}

/* Applies `count` steps of ten doubles each (code, parameters) to an image of 1 or 3 channels; `in` is only read, `out`
 * has its size and does not overlap it. Returns 0; -1 for a size out of range, -2 when out of memory, -3 for a step
 * that is unknown or has senseless parameters. */
int ps_augment(const uint8_t *in, uint8_t *out, int64_t height, int64_t width, int32_t channels, const double *steps,
               int32_t count)
{
    if (height < 1 || width < 1 || height > SIDE_MOST || width > SIDE_MOST || (channels != 1 && channels != 3))
        return PS_BAD_SIZE;
    Work work = {.now = in, .out = out, .height = height, .width = width, .channels = channels};
    work.bytes = height * width * channels;
    int outcome = PS_OK;
    for (int32_t i = 0; i < count && outcome == PS_OK; i++) {
        const double *step = steps + (int64_t)i * STEP;
        outcome = sensible(step) ? STEPS[(int)step[0]](&work, step + 1) : PS_BAD_STEP;
    }
    ps_settle(&work);
    if (outcome == PS_OK && work.now != out)
        memcpy(out, work.now, (size_t)work.bytes);
    free(work.spare);
    return outcome;
}

/* out = in * scale + bias per channel, in single precision; 1 or 3 channels, `pixels` of them. */
int ps_normalize(const uint8_t *in, float *out, int64_t pixels, int32_t channels, const float *scale, const float *bias)
{
    enum { LANES = 24 };
    if (pixels < 0 || (channels != 1 && channels != 3))
        return PS_BAD_SIZE;
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
    return PS_OK;
}
