/* Random numbers and orders that are functions of their place, not of who asks.
 *
 * Philox-4x32-10 (Salmon et al., SC 2011): counter in, 128 random bits out. Orders are a balanced Feistel network over
 * the next even power of two with cycle walking, so position -> id costs O(1) memory. Integer arithmetic only: the same
 * on every machine. tests/test_draw.py holds a plain Python twin of both and the published Philox test vectors.
 */
#include <stdint.h>

static inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t n0 = (uint32_t)(b >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        c[0] = n0;
        c[2] = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* One block, for the published test vectors. */
void ps_philox(uint32_t counter[4], uint32_t k0, uint32_t k1) { philox(counter, k0, k1); }

/* out[i * width + j]: the j-th uniform number in [0, 1) of positions[i]; 53 random bits each. For width up to 2^17 and
 * stream below 2^15 no two of these and no round of an order share a counter. */
void ps_units(uint64_t seed, uint32_t epoch, uint32_t stream, const int64_t *positions, int64_t count, int32_t width,
              double *out)
{
    for (int64_t i = 0; i < count; i++)
        for (int32_t j = 0; j < width; j += 2) {
            uint64_t p = (uint64_t)positions[i];
            uint32_t c[4] = {(uint32_t)p, (uint32_t)(p >> 32), ((uint32_t)j >> 1) | (stream << 16), epoch};
            philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
            double *row = out + i * width + j;
            row[0] = (double)((((uint64_t)c[0] << 32) | c[1]) >> 11) * 0x1p-53;
            if (j + 1 < width)
                row[1] = (double)((((uint64_t)c[2] << 32) | c[3]) >> 11) * 0x1p-53;
        }
}

/* ids[i]: which of n samples stands at positions[i] of the epoch. n at most 2^62. Returns 0, or -1 where a position is
 * not one of 0 .. n-1: those have no place to walk to. */
int32_t ps_order(uint64_t seed, uint32_t epoch, int64_t n, const int64_t *positions, int64_t count, int64_t *ids)
{
    for (int64_t i = 0; i < count; i++)
        if (positions[i] < 0 || positions[i] >= n || n > (int64_t)1 << 62)
            return -1;
    int half = 1;
    while (((uint64_t)1 << (2 * half)) < (uint64_t)n)
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t x = (uint64_t)positions[i];
        do {
            uint64_t left = x >> half, right = x & mask;
            for (uint32_t round = 0; round < 6; round++) {
                uint32_t c[4] = {(uint32_t)right, (uint32_t)(right >> 32), round | 0x80000000u, epoch};
                philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
                uint64_t mixed = left ^ ((((uint64_t)c[0] << 32) | c[1]) & mask);
                left = right;
                right = mixed;
            }
            x = (left << half) | right;
        } while (x >= (uint64_t)n);
        ids[i] = (int64_t)x;
    }
    return 0;
}
