/* XXH64, a checksum that reads memory about as fast as it comes; https://xxhash.com describes it. Not cryptographic. */
#include <stdint.h>
#include <string.h>

#define P1 0x9E3779B185EBCA87u
#define P2 0xC2B2AE3D27D4EB4Fu
#define P3 0x165667B19E3779F9u
#define P4 0x85EBCA77C2B2AE63u
#define P5 0x27D4EB2F165667C5u

static inline uint64_t turn(uint64_t value, int by) { return value << by | value >> (64 - by); }

static inline uint64_t word64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline uint32_t word32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t stir(uint64_t lane, uint64_t word) { return turn(lane + word * P2, 31) * P1; }

static inline uint64_t merge(uint64_t sum, uint64_t lane) { return (sum ^ stir(0, lane)) * P1 + P4; }

/* The checksum of `size` bytes, from 0 up. */
uint64_t ps_checksum(const uint8_t *data, int64_t size, uint64_t seed) {
    const uint8_t *end = data + size;
    uint64_t sum = seed + P5;
    if (size >= 32) {
        uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
        for (; end - data >= 32; data += 32) {
            a = stir(a, word64(data));
            b = stir(b, word64(data + 8));
            c = stir(c, word64(data + 16));
            d = stir(d, word64(data + 24));
        }
        sum = turn(a, 1) + turn(b, 7) + turn(c, 12) + turn(d, 18);
        sum = merge(merge(merge(merge(sum, a), b), c), d);
    }
    sum += (uint64_t)size;
    for (; end - data >= 8; data += 8) sum = turn(sum ^ stir(0, word64(data)), 27) * P1 + P4;
    if (end - data >= 4) {
        sum = turn(sum ^ word32(data) * P1, 23) * P2 + P3;
        data += 4;
    }
    for (; data < end; data++) sum = turn(sum ^ *data * P5, 11) * P1;
    sum = (sum ^ sum >> 33) * P2;
    sum = (sum ^ sum >> 29) * P3;
    return sum ^ sum >> 32;
}
