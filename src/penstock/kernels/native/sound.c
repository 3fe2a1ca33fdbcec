/* Arithmetic over waveforms and spectra: polyphase resampling, Gaussian noise, power spectra, filter banks, logarithms.
 *
 * Every sum has one fixed order and the elementary functions are written out here, so that results do not depend on
 * the processor, the compiler's instruction set or the C library; the exceptions are noted where they stand. Buffers
 * do not overlap. Functions that can refuse return -1 and have then written nothing of use.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define BLOCK 64

typedef float lanes_t __attribute__((vector_size(LANES * sizeof(float))));

/* out[c][j] = sum over k of taps[p][k] * in[c][q * stride + first[p] + k], where j = q * phases + p.
 * `width`, the taps of a phase, is a multiple of 8. -1 if an output would need more than `length` inputs. */
int32_t ps_polyphase(const float *in, int64_t channels, int64_t length, const float *taps, const int32_t *first,
                     int64_t phases, int64_t width, int64_t stride, float *out, int64_t count)
{
    if (channels < 0 || phases < 1 || stride < 1 || width < LANES || width % LANES)
        return -1;
    for (int64_t c = 0; c < channels; c++, in += length, out += count)
        for (int64_t j = 0, p = 0, base = 0; j < count; j++) {
            if (first[p] < 0 || base + first[p] + width > length)
                return -1;
            const float *x = in + base + first[p], *h = taps + p * width;
            lanes_t a = {0};
            for (int64_t k = 0; k < width; k += LANES) {
                lanes_t u, v;
                memcpy(&u, x + k, sizeof u);
                memcpy(&v, h + k, sizeof v);
                a += u * v;
            }
            out[j] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
            if (++p == phases) {
                p = 0;
                base += stride;
            }
        }
    return 0;
}

/* The natural logarithm of a positive normal number, within 1.5 units of the last place (after Cephes' logf). */
static inline float natural_log(float x)
{
    int32_t bits, mantissa;
    memcpy(&bits, &x, sizeof bits);
    bits -= 0x3F3504F3; /* sqrt(1/2), so that the mantissa lies in [sqrt(1/2), sqrt(2)) */
    float exponent = (float)(bits >> 23), m;
    mantissa = (bits & 0x7FFFFF) + 0x3F3504F3;
    memcpy(&m, &mantissa, sizeof m);
    m -= 1.0f;
    float square = m * m, y = 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * square;
    y += -2.12194440e-4f * exponent;
    y += -0.5f * square;
    return (m + y) + 0.693359375f * exponent;
}

/* x[i] = log(max(x[i], floor)), floor a positive normal number; infinity and NaN give NaN. */
void ps_log(float *x, int64_t count, float floor)
{
    for (int64_t i = 0; i < count; i++) {
        float value = x[i] < floor ? floor : x[i];
        x[i] = natural_log(value) + (value - value);
    }
}

/* 4 * BLOCK random words: block b of philox4x32-10 with the counter (start + b, 0, 0), lane i in words[i][b]. */
static void random_words(uint64_t key, uint64_t start, uint32_t words[4][BLOCK])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int b = 0; b < BLOCK; b++) {
        words[0][b] = (uint32_t)(start + (uint64_t)b);
        words[1][b] = (uint32_t)((start + (uint64_t)b) >> 32);
        words[2][b] = words[3][b] = 0;
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int b = 0; b < BLOCK; b++) {
            uint64_t m0 = (uint64_t)0xD2511F53u * words[0][b], m1 = (uint64_t)0xCD9E8D57u * words[2][b];
            words[0][b] = (uint32_t)(m1 >> 32) ^ words[1][b] ^ k0;
            words[2][b] = (uint32_t)(m0 >> 32) ^ words[3][b] ^ k1;
            words[1][b] = (uint32_t)m1;
            words[3][b] = (uint32_t)m0;
        }
}

/* Box-Muller: two random words to two normal numbers, in place. */
static void normal_pairs(uint32_t first[BLOCK], uint32_t second[BLOCK], float cosines[BLOCK], float sines[BLOCK])
{
    float radius[BLOCK];
    for (int b = 0; b < BLOCK; b++)
        radius[b] = -2.0f * natural_log((float)(int32_t)((first[b] >> 8) + 1) * 0x1p-24f);
    for (int b = 0; b < BLOCK; b++)
        radius[b] = sqrtf(radius[b] > 0.0f ? radius[b] : 0.0f);
    for (int b = 0; b < BLOCK; b++) {
        float turns = (float)(int32_t)(second[b] >> 8) * 0x1p-22f; /* in quarters */
        int32_t quarter = (int32_t)(turns + 0.5f);
        float x = (turns - (float)quarter) * 1.57079632679f, z = x * x;
        float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
        float c = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z;
        c = c - 0.5f * z + 1.0f;
        float cosine = quarter & 1 ? s : c, sine = quarter & 1 ? c : s;
        cosines[b] = radius[b] * ((quarter + 1) & 2 ? -cosine : cosine);
        sines[b] = radius[b] * (quarter & 2 ? -sine : sine);
    }
}

/* The mean of the squares, in double precision. 0 for none. */
double ps_mean_square(const float *x, int64_t count)
{
    double sums[LANES] = {0}, tail = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++)
            sums[k] += (double)x[i + k] * (double)x[i + k];
    for (; i < count; i++)
        tail += (double)x[i] * (double)x[i];
    for (int k = 0; k < LANES; k++)
        tail += sums[k];
    return count > 0 ? tail / (double)count : 0;
}

/* out[e] = in[e] + scale * n[e], n standard normal.
 *
 * The recipe, for every lane: words w0..w3 are philox4x32-10 of the counter (e/4 low, e/4 high, 0, 0) under `key`.
 * With u = ((w0 >> 8) + 1) / 2^24 and v = (w1 >> 8) / 2^24, the normals 0 and 1 of the block are
 * sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v); w2 and w3 give the normals 2 and 3 likewise. */
void ps_add_noise(const float *in, int64_t count, uint64_t key, float scale, float *out)
{
    uint32_t words[4][BLOCK];
    float normals[4][BLOCK], noise[4 * BLOCK];
    for (int64_t start = 0; start < count; start += 4 * BLOCK) {
        random_words(key, (uint64_t)start / 4, words);
        normal_pairs(words[0], words[1], normals[0], normals[1]);
        normal_pairs(words[2], words[3], normals[2], normals[3]);
        for (int b = 0; b < BLOCK; b++)
            for (int i = 0; i < 4; i++)
                noise[4 * b + i] = scale * normals[i][b];
        int64_t left = count - start < 4 * BLOCK ? count - start : 4 * BLOCK;
        for (int64_t i = 0; i < left; i++)
            out[start + i] = in[start + i] + noise[i];
    }
}

/* out[bin * step + frame] = |spectrum[frame][bin]|^power; `spectrum` holds pairs (real, imaginary).
 * Powers other than 1 and 2 go through the C library's pow. */
void ps_power(const double *spectrum, int64_t frames, int64_t bins, double power, float *out, int64_t step)
{
    for (int64_t low = 0; low < bins; low += 16)
        for (int64_t frame = 0; frame < frames; frame++) {
            int64_t high = low + 16 < bins ? low + 16 : bins;
            const double *row = spectrum + 2 * frame * bins;
            for (int64_t bin = low; bin < high; bin++) {
                double square = row[2 * bin] * row[2 * bin] + row[2 * bin + 1] * row[2 * bin + 1];
                double value = power == 2 ? square : power == 1 ? sqrt(square) : pow(square, power / 2);
                out[bin * step + frame] = (float)value;
            }
        }
}

/* out[m][frame] = sum over k < counts[m] of weights[m][k] * spectrum[first[m] + k][frame]; `widest` is the length of a
 * row of `weights`. -1 if a filter reaches past the last bin. */
int32_t ps_filter_bank(const float *spectrum, int64_t bins, int64_t frames, const float *weights, const int32_t *first,
                       const int32_t *counts, int64_t filters, int64_t widest, float *out)
{
    for (int64_t m = 0; m < filters; m++, out += frames) {
        if (first[m] < 0 || counts[m] < 0 || counts[m] > widest || first[m] + counts[m] > bins)
            return -1;
        memset(out, 0, (size_t)frames * sizeof *out);
        for (int64_t k = 0; k < counts[m]; k++) {
            const float *row = spectrum + (first[m] + k) * frames;
            float weight = weights[m * widest + k];
            for (int64_t frame = 0; frame < frames; frame++)
                out[frame] += weight * row[frame];
        }
    }
    return 0;
}
