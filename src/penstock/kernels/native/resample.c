/* Antialiased resizing of 8-bit images, bit for bit as Pillow does it: weights in doubles, rounded to 22 bits; two
 * passes, the first into 8 bits; each sum rounded once. Integer sums are exact, so their order is free. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "resample.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BITS 22
#define MOST_SIDE 65535

enum { NEAREST, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS, FILTERS };

/* ---- memory of a thread */

typedef struct {
    void *memory[PS_SCRATCH_SLOTS];
    size_t bytes[PS_SCRATCH_SLOTS];
} scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *pointer) {
    scratch *own = pointer;
    for (int slot = 0; slot < PS_SCRATCH_SLOTS; slot++) free(own->memory[slot]);
    free(own);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *ps_scratch(int slot, size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    scratch *own = pthread_getspecific(scratch_key);
    if (!own) {
        own = calloc(1, sizeof *own);
        if (!own) return NULL;
        if (pthread_setspecific(scratch_key, own)) {
            free(own);
            return NULL;
        }
    }
    if (own->bytes[slot] < bytes) {
        free(own->memory[slot]);
        own->bytes[slot] = 0;
        size_t rounded = (bytes + bytes / 4 + 4095) & ~(size_t)4095; /* sizes vary by sample: grow seldom */
        own->memory[slot] = aligned_alloc(64, rounded);
        if (!own->memory[slot]) return NULL;
        memset(own->memory[slot], 0, rounded);
        own->bytes[slot] = rounded;
    }
    return own->memory[slot];
}

/* ---- weights */

static double sinc(double x) {
    if (x == 0.0) return 1.0;
    x = x * M_PI;
    return sin(x) / x;
}

static inline double weigh(int filter, double x) {
    switch (filter) {
    case BOX:
        return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case BILINEAR:
        if (x < 0.0) x = -x;
        return x < 1.0 ? 1.0 - x : 0.0;
    case HAMMING:
        if (x < 0.0) x = -x;
        if (x == 0.0) return 1.0;
        if (x >= 1.0) return 0.0;
        x = x * M_PI;
        return sin(x) / x * (0.54f + 0.46f * cos(x));
    case BICUBIC:
        if (x < 0.0) x = -x;
        if (x < 1.0) return ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1;
        if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * -0.5;
        return 0.0;
    default:
        return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    }
}

static const double support_of[FILTERS] = {0.0, 0.5, 1.0, 1.0, 2.0, 3.0};

/* The first tap and how many, for output i. */
static inline int32_t reach(double center, double support, int32_t in, int32_t *first) {
    int32_t low = (int32_t)(center - support + 0.5), high = (int32_t)(center + support + 0.5);
    *first = low < 0 ? 0 : low;
    if (high > in) high = in;
    return high > *first ? high - *first : 0;
}

static int64_t taps_of(int filter, float low, float high, int32_t out) {
    double scale = (double)(high - low) / out;
    if (scale < 1.0) scale = 1.0;
    return ((int64_t)ceil(support_of[filter] * scale) * 2 + 1 + 3) & ~(int64_t)3; /* fours, for the vector loops */
}

static void weigh_axis(ps_axis *axis, int filter, int32_t in, float low, float high, int32_t out, int32_t from,
                       double *exact) {
    double scale = (double)(high - low) / out, widened = scale < 1.0 ? 1.0 : scale;
    double support = support_of[filter] * widened, narrow = 1.0 / widened;
    for (int32_t i = 0; i < axis->outputs; i++) {
        double center = low + (from + i + 0.5) * scale, sum = 0.0;
        int32_t count = reach(center, support, in, &axis->first[i]), *weights = axis->weights + (int64_t)i * axis->taps;
        for (int32_t t = 0; t < count; t++) {
            exact[t] = weigh(filter, (t + axis->first[i] - center + 0.5) * narrow);
            sum += exact[t];
        }
        for (int32_t t = 0; t < count; t++) {
            double weight = sum != 0.0 ? exact[t] / sum : exact[t];
            weights[t] = (int32_t)((weight < 0 ? -0.5 : 0.5) + weight * (1 << BITS));
        }
        memset(weights + count, 0, (size_t)(axis->taps - count) * sizeof *weights);
        axis->count[i] = count;
    }
}

/* Output i is source pixel first[i], as `nearest` asks (with its accumulated steps), and as no change of size does. */
static void point_axis(ps_axis *axis, int32_t in, float low, float high, int32_t out, int32_t from) {
    double step = (double)(high - low) / out, at = (double)low + step * 0.5;
    for (int32_t i = 0; i < from; i++) at += step;
    for (int32_t i = 0; i < axis->outputs; i++, at += step) {
        axis->first[i] = at < 0.0 ? 0 : at >= in ? in - 1 : (int32_t)at;
        axis->count[i] = 1;
        memset(axis->weights + (int64_t)i * axis->taps, 0, (size_t)axis->taps * sizeof(int32_t));
        axis->weights[(int64_t)i * axis->taps] = 1 << BITS;
    }
}

static void bound_axis(ps_axis *axis) {
    axis->most = 0;
    axis->low = axis->first[0];
    axis->high = axis->low;
    for (int32_t i = 0; i < axis->outputs; i++) {
        if (axis->count[i] > axis->most) axis->most = axis->count[i];
        if (axis->first[i] < axis->low) axis->low = axis->first[i];
        if (axis->first[i] + axis->count[i] > axis->high) axis->high = axis->first[i] + axis->count[i];
    }
}

static void mirror_axis(ps_axis *axis) {
    for (int32_t i = 0, j = axis->outputs - 1; i < j; i++, j--) {
        int32_t *a = axis->weights + (int64_t)i * axis->taps, *b = axis->weights + (int64_t)j * axis->taps, swap;
        for (int32_t t = 0; t < axis->taps; t++) swap = a[t], a[t] = b[t], b[t] = swap;
        swap = axis->first[i], axis->first[i] = axis->first[j], axis->first[j] = swap;
        swap = axis->count[i], axis->count[i] = axis->count[j], axis->count[j] = swap;
    }
}

static void fill_axis(ps_axis *axis, int filter, int32_t in, float low, float high, int32_t out, int32_t from,
                      double *exact) {
    if (axis->plain)
        point_axis(axis, in, low, high, out, from);
    else
        weigh_axis(axis, filter, in, low, high, out, from, exact);
    bound_axis(axis);
}

static int sensible(const ps_resize_spec *s) {
    if (s->filter < 0 || s->filter >= FILTERS || (s->channels != 1 && s->channels != 3)) return 0;
    if (s->in_h < 1 || s->in_w < 1 || s->out_h < 1 || s->out_w < 1) return 0;
    if (s->in_h > MOST_SIDE || s->in_w > MOST_SIDE || s->out_h > MOST_SIDE || s->out_w > MOST_SIDE) return 0;
    if (!(s->box[0] >= 0 && s->box[1] >= 0 && s->box[2] <= s->in_w && s->box[3] <= s->in_h)) return 0;
    if (!(s->box[2] > s->box[0] && s->box[3] > s->box[1])) return 0;
    if (s->window[0] < 0 || s->window[1] < 0 || s->window[2] > s->out_w || s->window[3] > s->out_h) return 0;
    return s->window[0] < s->window[2] && s->window[1] < s->window[3];
}

/* Pillow 13 runs the vertical pass first where the height shrinks much more than the width; before, never. */
static int tall_first = 1;

/* Follow Pillow 13 (1, as at the start) or older ones (0). Call before other threads resize. */
void ps_resize_tall_first(int32_t follow) { tall_first = follow; }

int ps_resize_prepare(const ps_resize_spec *s, ps_resize_plan *plan) {
    if (!sensible(s)) return -1;
    plan->down_first = tall_first && s->in_h > s->out_h && s->in_h - s->out_h > 2 * (s->in_w - s->out_w);
    ps_axis *across = &plan->across, *down = &plan->down;
    plan->spec = *s;
    across->plain = s->filter == NEAREST || (s->out_w == s->in_w && s->box[0] == 0 && s->box[2] == s->in_w);
    down->plain = s->filter == NEAREST || (s->out_h == s->in_h && s->box[1] == 0 && s->box[3] == s->in_h);
    across->outputs = s->window[2] - s->window[0];
    down->outputs = s->window[3] - s->window[1];
    across->taps = across->plain ? 4 : (int32_t)taps_of(s->filter, s->box[0], s->box[2], s->out_w);
    down->taps = down->plain ? 4 : (int32_t)taps_of(s->filter, s->box[1], s->box[3], s->out_h);
    size_t wide = (size_t)across->outputs, high = (size_t)down->outputs;
    size_t words = wide * (2 + (size_t)across->taps) + high * (2 + (size_t)down->taps);
    size_t most = (size_t)(across->taps > down->taps ? across->taps : down->taps);
    double *exact = ps_scratch(PS_SCRATCH_AXES, most * sizeof *exact + words * sizeof(int32_t));
    if (!exact) return -2;
    int32_t *memory = (int32_t *)(exact + most);
    across->weights = memory, memory += wide * (size_t)across->taps;
    down->weights = memory, memory += high * (size_t)down->taps;
    across->first = memory, memory += wide;
    across->count = memory, memory += wide;
    down->first = memory, memory += high;
    down->count = memory;
    fill_axis(across, s->filter, s->in_w, s->box[0], s->box[2], s->out_w, s->window[0], exact);
    fill_axis(down, s->filter, s->in_h, s->box[1], s->box[3], s->out_h, s->window[1], exact);
    if (s->flip) mirror_axis(across);
    return 0;
}

/* ---- the two passes */

static inline uint8_t clip(int32_t sum) {
    sum >>= BITS;
    return sum < 0 ? 0 : sum > 255 ? 255 : (uint8_t)sum;
}

/* One row through the horizontal pass. `row` begins at column across.low. */
static void row_across(const ps_axis *axis, const uint8_t *row, int channels, uint8_t *out) {
    for (int32_t i = 0; i < axis->outputs; i++) {
        const uint8_t *from = row + (int64_t)(axis->first[i] - axis->low) * channels;
        const int32_t *weights = axis->weights + (int64_t)i * axis->taps;
        for (int c = 0; c < channels; c++) {
            uint32_t sum = 1u << (BITS - 1);
            for (int32_t t = 0; t < axis->count[i]; t++) sum += (uint32_t)weights[t] * from[t * channels + c];
            *out++ = clip((int32_t)sum);
        }
    }
}

static void copy_across(const ps_axis *axis, const uint8_t *row, int channels, uint8_t *out) {
    int32_t n = axis->outputs;
    if (axis->high - axis->low == n && (n == 1 || axis->first[0] < axis->first[n - 1])) {
        memcpy(out, row, (size_t)n * (size_t)channels);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        const uint8_t *from = row + (int64_t)(axis->first[i] - axis->low) * channels;
        for (int c = 0; c < channels; c++) *out++ = from[c];
    }
}

#ifdef __AVX2__
/* A 22-bit weight is split as high * 2^15 + low, so that 16-bit multiply-adds sum two taps at a time, exactly. Rewrites
 * the weights in place: of each four taps the low parts (0 1, 2 3), then the high parts. */
static void split_weights(ps_axis *axis) {
    int64_t fours = (int64_t)axis->outputs * axis->taps / 4;
    for (int64_t i = 0; i < fours; i++) {
        int32_t *four = axis->weights + i * 4, low[4], high[4];
        for (int t = 0; t < 4; t++) low[t] = four[t] & 0x7FFF, high[t] = four[t] >> 15;
        for (int p = 0; p < 2; p++) {
            four[p] = low[2 * p] | (int32_t)((uint32_t)low[2 * p + 1] << 16);
            four[2 + p] = (high[2 * p] & 0xFFFF) | (int32_t)((uint32_t)high[2 * p + 1] << 16);
        }
    }
}

static inline __m256i two_rows(const uint8_t *a, const uint8_t *b) {
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a));
    return _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)b), 1);
}

/* Two taps of two rows each: the low and the high parts of their sums. */
static inline __attribute__((always_inline)) void add_taps(__m256i pixels, __m256i mask, const int32_t *weights,
                                                           __m256i *low, __m256i *high) {
    __m256i pairs = _mm256_shuffle_epi8(pixels, mask);
    *low = _mm256_add_epi32(*low, _mm256_madd_epi16(pairs, _mm256_set1_epi32(weights[0])));
    *high = _mm256_add_epi32(*high, _mm256_madd_epi16(pairs, _mm256_set1_epi32(weights[2])));
}

/* Four rows of RGB through the horizontal pass; `most`, a constant, is 2, 4, or 0 for any number of taps. Reads up to
 * 13 bytes past the last column. */
static inline __attribute__((always_inline)) void four_rows(const ps_axis *axis, const uint8_t *const rows[4],
                                                            uint8_t *const out[4], int most) {
    const __m256i first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i second = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    const __m256i half = _mm256_set1_epi32(1 << (BITS - 1));
    const uint8_t *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
    uint8_t *o0 = out[0], *o1 = out[1], *o2 = out[2], *o3 = out[3];
    const int32_t *starts = axis->first, *weights = axis->weights;
    int32_t last = axis->outputs - 1, low_column = axis->low, taps = axis->taps;
    for (int32_t i = 0; i <= last; i++, weights += taps) {
        int64_t at = (int64_t)(starts[i] - low_column) * 3;
        __m256i low_a = half, low_b = half, high_a = _mm256_setzero_si256(), high_b = high_a;
        int32_t count = most ? most : axis->count[i];
        for (int32_t t = 0; t < count; t += 4, at += 12) {
            __m256i a = two_rows(r0 + at, r1 + at), b = two_rows(r2 + at, r3 + at);
            add_taps(a, first, weights + t, &low_a, &high_a);
            add_taps(b, first, weights + t, &low_b, &high_b);
            if (most == 2) break;
            add_taps(a, second, weights + t + 1, &low_a, &high_a);
            add_taps(b, second, weights + t + 1, &low_b, &high_b);
        }
        __m256i a = _mm256_srai_epi32(_mm256_add_epi32(low_a, _mm256_slli_epi32(high_a, 15)), BITS);
        __m256i b = _mm256_srai_epi32(_mm256_add_epi32(low_b, _mm256_slli_epi32(high_b, 15)), BITS);
        __m256i bytes = _mm256_packs_epi32(a, b);
        bytes = _mm256_packus_epi16(bytes, bytes);
        uint64_t even = (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
        uint64_t odd = (uint64_t)_mm_cvtsi128_si64(_mm256_extracti128_si256(bytes, 1));
        uint32_t p0 = (uint32_t)even, p1 = (uint32_t)odd, p2 = (uint32_t)(even >> 32), p3 = (uint32_t)(odd >> 32);
        if (i < last) { /* the next pixel overwrites the fourth byte */
            memcpy(o0 + i * 3, &p0, 4);
            memcpy(o1 + i * 3, &p1, 4);
            memcpy(o2 + i * 3, &p2, 4);
            memcpy(o3 + i * 3, &p3, 4);
        } else {
            memcpy(o0 + i * 3, &p0, 3);
            memcpy(o1 + i * 3, &p1, 3);
            memcpy(o2 + i * 3, &p2, 3);
            memcpy(o3 + i * 3, &p3, 3);
        }
    }
}

static void four_rows_across(const ps_axis *axis, const uint8_t *const rows[4], uint8_t *const out[4]) {
    if (axis->most <= 2)
        four_rows(axis, rows, out, 2);
    else if (axis->most <= 4)
        four_rows(axis, rows, out, 4);
    else
        four_rows(axis, rows, out, 0);
}

static inline __m256i eight(const uint8_t *bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

/* As much of a row as fills 32 bytes at a time; returns how far it came. */
static int64_t down_by_vectors(const uint8_t *top, int64_t stride, const int32_t *weights, int32_t count, int64_t bytes,
                               uint8_t *out) {
    const __m256i half = _mm256_set1_epi32(1 << (BITS - 1)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int64_t x = 0;
    for (; x + 32 <= bytes; x += 32) {
        __m256i s0 = half, s1 = half, s2 = half, s3 = half;
        const uint8_t *from = top + x;
        for (int32_t t = 0; t < count; t++, from += stride) {
            __m256i weight = _mm256_set1_epi32(weights[t]);
            s0 = _mm256_add_epi32(s0, _mm256_mullo_epi32(eight(from), weight));
            s1 = _mm256_add_epi32(s1, _mm256_mullo_epi32(eight(from + 8), weight));
            s2 = _mm256_add_epi32(s2, _mm256_mullo_epi32(eight(from + 16), weight));
            s3 = _mm256_add_epi32(s3, _mm256_mullo_epi32(eight(from + 24), weight));
        }
        __m256i low = _mm256_packs_epi32(_mm256_srai_epi32(s0, BITS), _mm256_srai_epi32(s1, BITS));
        __m256i high = _mm256_packs_epi32(_mm256_srai_epi32(s2, BITS), _mm256_srai_epi32(s3, BITS));
        __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(out + x), packed);
    }
    return x;
}
#else
static int64_t down_by_vectors(const uint8_t *top, int64_t stride, const int32_t *weights, int32_t count, int64_t bytes,
                               uint8_t *out) {
    int64_t x = 0;
    for (; x + 16 <= bytes; x += 16) {
        uint32_t sum[16];
        for (int i = 0; i < 16; i++) sum[i] = 1u << (BITS - 1);
        const uint8_t *from = top + x;
        for (int32_t t = 0; t < count; t++, from += stride)
            for (int i = 0; i < 16; i++) sum[i] += (uint32_t)weights[t] * from[i];
        for (int i = 0; i < 16; i++) out[x + i] = clip((int32_t)sum[i]);
    }
    return x;
}
#endif

/* `rows` rows, each beginning at column axis->low, through the horizontal pass. */
static int pass_across(ps_axis *axis, int32_t rows, int channels, const uint8_t *source, int64_t stride, int padded,
                       uint8_t *out, int64_t out_stride) {
#ifdef __AVX2__
    if (channels == 3 && !axis->plain && axis->high - axis->low >= 8) { /* so that only the last row can be overrun */
        const uint8_t *tail = source + (int64_t)(rows - 1) * stride;
        if (!padded) {
            size_t bytes = (size_t)(axis->high - axis->low) * 3;
            uint8_t *copy = ps_scratch(PS_SCRATCH_TAIL, bytes + PS_PADDING);
            if (!copy) return -2;
            memcpy(copy, tail, bytes);
            memset(copy + bytes, 0, PS_PADDING);
            tail = copy;
        }
        split_weights(axis);
        for (int32_t done = 0; done < rows; done += 4) {
            const uint8_t *from[4];
            uint8_t *to[4];
            for (int r = 0; r < 4; r++) { /* the last group repeats its last row */
                int32_t row = done + r < rows ? done + r : rows - 1;
                from[r] = row == rows - 1 ? tail : source + row * stride;
                to[r] = out + row * out_stride;
            }
            four_rows_across(axis, from, to);
        }
        return 0;
    }
#endif
    (void)padded;
    for (int32_t row = 0; row < rows; row++) {
        if (axis->plain)
            copy_across(axis, source + row * stride, channels, out + row * out_stride);
        else
            row_across(axis, source + row * stride, channels, out + row * out_stride);
    }
    return 0;
}

/* Rows of `bytes` bytes, the first of them row axis->low, through the vertical pass. */
static void pass_down(const ps_axis *axis, int64_t bytes, const uint8_t *source, int64_t stride, uint8_t *out,
                      int64_t out_stride) {
    for (int32_t i = 0; i < axis->outputs; i++, out += out_stride) {
        const uint8_t *top = source + (axis->first[i] - axis->low) * stride;
        const int32_t *weights = axis->weights + (int64_t)i * axis->taps;
        if (axis->plain) {
            memcpy(out, top, (size_t)bytes);
            continue;
        }
        for (int64_t x = down_by_vectors(top, stride, weights, axis->count[i], bytes, out); x < bytes; x++) {
            uint32_t sum = 1u << (BITS - 1);
            for (int32_t t = 0; t < axis->count[i]; t++) sum += (uint32_t)weights[t] * top[t * stride + x];
            out[x] = clip((int32_t)sum);
        }
    }
}

int ps_resize_run(ps_resize_plan *plan, const uint8_t *source, int64_t stride, int padded, uint8_t *out,
                  int64_t out_stride) {
    ps_axis *across = &plan->across, *down = &plan->down;
    int channels = plan->spec.channels;
    int64_t taken = (int64_t)(across->high - across->low) * channels, given = (int64_t)across->outputs * channels;
    if (across->plain && down->plain) {
        for (int32_t i = 0; i < down->outputs; i++)
            copy_across(across, source + (down->first[i] - down->low) * stride, channels, out + i * out_stride);
        return 0;
    }
    int64_t between_stride = ((plan->down_first ? taken : given) + 63) & ~(int64_t)63;
    int32_t rows = plan->down_first ? down->outputs : down->high - down->low;
    uint8_t *between = ps_scratch(PS_SCRATCH_ROWS, (size_t)between_stride * (size_t)rows + PS_PADDING);
    if (!between) return -2;
    if (plan->down_first) {
        pass_down(down, taken, source, stride, between, between_stride);
        return pass_across(across, rows, channels, between, between_stride, 1, out, out_stride);
    }
    if (pass_across(across, rows, channels, source, stride, padded, between, between_stride)) return -2;
    pass_down(down, given, between, between_stride, out, out_stride);
    return 0;
}

/* Resizes `source` (in_h x in_w pixels of `channels` bytes, rows `stride` bytes apart) into `out`, which receives the
 * window. `out` may not overlap `source`. 0, -1 for senseless numbers, -2 without memory. */
int ps_resize(const uint8_t *source, int64_t stride, int32_t in_h, int32_t in_w, int32_t channels, float left,
              float top, float right, float bottom, int32_t out_h, int32_t out_w, int32_t filter, int32_t from_x,
              int32_t from_y, int32_t to_x, int32_t to_y, int32_t flip, uint8_t *out, int64_t out_stride) {
    ps_resize_spec spec = {in_h, in_w, {left, top, right, bottom}, out_h, out_w, filter, {from_x, from_y, to_x, to_y},
                           flip, channels};
    ps_resize_plan plan;
    int problem = ps_resize_prepare(&spec, &plan);
    if (problem) return problem;
    const uint8_t *first = source + plan.down.low * stride + (int64_t)plan.across.low * channels;
    return ps_resize_run(&plan, first, stride, 0, out, out_stride);
}
