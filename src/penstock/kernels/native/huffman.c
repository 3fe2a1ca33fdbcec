/* Entropy decoding takes most of the time that a JPEG takes, also of the part that is cropped away. This decoder reads
 * two coefficients per table lookup and does not store those outside the columns wanted. It stands in for libjpeg's
 * through the one function pointer by which libjpeg itself selects its decoder; everything else stays libjpeg's. */
#define _GNU_SOURCE
#include "huffman.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "resample.h"

#define LOOK PS_HUFFMAN_BITS
#define CODES 8

/* The head of libjpeg's jpeg_entropy_decoder: the same in every release from IJG 6b to libjpeg-turbo 3. */
struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr jpeg);
    boolean (*decode_mcu)(j_decompress_ptr jpeg, JBLOCKROW *blocks);
};

/* Zigzag to row order; runs past the end of a corrupt block land on the last coefficient, as in libjpeg. */
static const uint8_t order[64 + 64 + 16] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,
    7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46,
    53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63,
};

/* ---- tables */

/* The value that `size` bits stand for. */
static inline int extend(uint32_t raw, int size) {
    return size && !(raw >> (size - 1)) ? (int)raw - (1 << size) + 1 : (int)raw;
}

static int step_of(int symbol) { return symbol & 15 || symbol >> 4 == 15 ? (symbol >> 4) + 1 : 64; }

static void build_pairs(ps_code *code) {
    for (uint32_t look = 0; look < 1u << LOOK; look++) {
        ps_ac_entry entry = {{0, 0}, {0, 0}, {0, 0}};
        int length = code->length[look], size = code->symbol[look] & 15, used = length + size;
        if (length) {
            uint32_t mask = (1u << LOOK) - 1, rest = look << used & mask;
            int fits = used <= LOOK, next = fits ? code->length[rest] : 0;
            int next_size = code->symbol[rest] & 15, both = used + next + next_size;
            entry.step[0] = (uint8_t)step_of(code->symbol[look]);
            entry.bits[0] = entry.bits[1] = (uint8_t)used;
            int value = fits ? extend((look & (mask >> length)) >> (LOOK - used), size) : PS_LONGER + size;
            entry.value[0] = (int16_t)value;
            entry.value[1] = entry.value[0];
            if (next && both <= LOOK) {
                uint32_t raw = (look & (mask >> (used + next))) >> (LOOK - both);
                entry.value[1] = (int16_t)extend(raw, next_size);
                entry.step[1] = (uint8_t)step_of(code->symbol[rest]);
                entry.bits[1] = (uint8_t)both;
            }
        }
        code->pairs[look] = entry;
    }
}

/* libjpeg has checked, when it started the scan, that the counts form a prefix code. */
static void build(ps_code *code, const JHUFF_TBL *table, int ac) {
    memcpy(code->counts, table->bits, sizeof code->counts);
    memcpy(code->symbols, table->huffval, sizeof code->symbols);
    memset(code->length, 0, sizeof code->length);
    memset(code->symbol, 0, sizeof code->symbol);
    int32_t next = 0, index = 0;
    for (int length = 1; length <= 16; length++, next <<= 1) {
        code->offset[length] = index - next;
        for (int i = 0; i < table->bits[length] && index < 256; i++, index++, next++) {
            if (length > LOOK) continue;
            size_t first = (size_t)next << (LOOK - length), many = (size_t)1 << (LOOK - length);
            if (first + many > 1u << LOOK) continue;
            memset(code->length + first, length, many);
            memset(code->symbol + first, table->huffval[index], many);
        }
        code->highest[length] = next - 1;
    }
    if (ac) build_pairs(code);
    code->built = 1;
}

/* The code of a table, built already when the thread's previous image had the same table, as cameras' have. */
static const ps_code *code_for(ps_code *codes, const JHUFF_TBL *table, int number, int ac) {
    ps_code *code = codes + number * 2 + ac;
    if (!code->built || memcmp(code->counts, table->bits, sizeof code->counts) ||
        memcmp(code->symbols, table->huffval, sizeof code->symbols))
        build(code, table, ac);
    return code;
}

/* ---- bits */

typedef struct {
    const uint8_t *at, *end;
    uint64_t buffer;
    int bits;
} reader;

/* Byte by byte, up to a marker or the end. By value, so that the caller's copy can stay in registers. */
static __attribute__((noinline)) reader refilled_slowly(reader r) {
    while (r.bits <= 56 && r.at < r.end) {
        uint64_t byte = *r.at;
        const uint8_t *next = r.at + 1;
        if (byte == 0xFF) {
            while (next < r.end && *next == 0xFF) next++;
            if (next >= r.end || *next) return r;
            next++;
        }
        r.buffer |= byte << (56 - r.bits);
        r.bits += 8;
        r.at = next;
    }
    return r;
}

/* At least 56 valid bits, or all there are. */
static inline __attribute__((always_inline)) void refill(reader *r) {
    uint64_t word = ~(uint64_t)0;
    if (r->end - r->at >= 8) memcpy(&word, r->at, 8);
    if ((~word - 0x0101010101010101u) & word & 0x8080808080808080u) { /* a byte 0xFF */
        *r = refilled_slowly(*r);
        return;
    }
    r->buffer |= __builtin_bswap64(word) >> r->bits;
    r->at += (63 - r->bits) >> 3;
    r->bits |= 56;
}

static inline __attribute__((always_inline)) void drop(reader *r, int bits) {
    r->buffer <<= bits;
    r->bits -= bits;
}

static inline uint32_t peek(const reader *r, int bits) { return (uint32_t)(r->buffer >> 1 >> (63 - bits)); }

/* The next symbol, dropped, or -1. */
static inline __attribute__((always_inline)) int read_symbol(reader *r, const ps_code *code) {
    uint32_t look = peek(r, LOOK);
    if (code->length[look]) {
        drop(r, code->length[look]);
        return code->symbol[look];
    }
    for (int length = LOOK + 1; length <= 16; length++) {
        int32_t bits = (int32_t)peek(r, length);
        if (bits > code->highest[length]) continue;
        drop(r, length);
        return code->symbols[(bits + code->offset[length]) & 255];
    }
    return -1;
}

/* ---- blocks */

static inline __attribute__((always_inline)) int read_value(reader *r, int size) {
    int value = extend(peek(r, size), size);
    drop(r, size);
    return value;
}

/* The coefficients after the first; stored if `keep`, a constant. 0 for a code that does not exist. */
static inline __attribute__((always_inline)) int read_rest(reader *r, const ps_code *code, JCOEF *block, int keep) {
    for (int k = 1; k < 64;) {
        if (r->bits < 32) refill(r);
        const ps_ac_entry entry = code->pairs[peek(r, LOOK)];
        if (__builtin_expect(!entry.bits[0], 0)) {
            int symbol = read_symbol(r, code);
            if (symbol < 0) return 0;
            k += step_of(symbol);
            int value = read_value(r, symbol & 15);
            if (keep) block[order[k - 1]] = (JCOEF)value;
            continue;
        }
        k += entry.step[0];
        if (keep && __builtin_expect(entry.value[0] < PS_LONGER / 2, 0)) {
            int size = entry.value[0] - PS_LONGER;
            drop(r, entry.bits[0] - size);
            block[order[k - 1]] = (JCOEF)read_value(r, size);
            continue;
        }
        if (keep) block[order[k - 1]] = entry.value[0];
        if (k > 63) {
            drop(r, entry.bits[0]);
            break;
        }
        k += entry.step[1];
        if (keep) block[order[k - 1]] = entry.value[1];
        drop(r, entry.bits[1]);
    }
    return 1;
}

static void corrupt(j_decompress_ptr jpeg, ps_huffman *state, const char *reason) { state->fail(jpeg, reason); }

/* Past the restart marker that must come now. */
static void restart(j_decompress_ptr jpeg, ps_huffman *state) {
    const uint8_t *at = state->at;
    while (state->end - at >= 2 && !(at[0] == 0xFF && at[1] != 0 && at[1] != 0xFF)) at++;
    if (state->end - at < 2 || at[1] != 0xD0 + state->next_restart)
        corrupt(jpeg, state, "Corrupt JPEG data: a restart marker is missing");
    state->at = at + 2;
    state->next_restart = (state->next_restart + 1) & 7;
    state->left_of_interval = jpeg->restart_interval;
    state->buffer = 0;
    state->bits = 0;
    memset(state->previous, 0, sizeof state->previous);
}

static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    ps_huffman *state = jpeg->client_data;
    if (jpeg->restart_interval) {
        if (!state->left_of_interval) restart(jpeg, state);
        state->left_of_interval--;
    }
    int keep = blocks && state->column >= state->first_column && state->column <= state->last_column, good = 1;
    if (++state->column == jpeg->MCUs_per_row) state->column = 0;
    reader r = {state->at, state->end, state->buffer, state->bits};
    for (int i = 0; i < jpeg->blocks_in_MCU && good; i++) {
        if (r.bits < 32) refill(&r);
        int size = read_symbol(&r, state->dc[i]), component = jpeg->MCU_membership[i];
        if (size < 0) {
            good = 0;
            break;
        }
        if (r.bits < 32) refill(&r);
        state->previous[component] += read_value(&r, size & 15);
        if (keep) {
            JCOEF *block = blocks[i][0];
            block[0] = (JCOEF)state->previous[component];
            good = read_rest(&r, state->ac[i], block, 1);
        } else {
            good = read_rest(&r, state->ac[i], NULL, 0);
        }
    }
    if (!good) corrupt(jpeg, state, "Corrupt JPEG data: bad Huffman code");
    if (r.bits < 0) corrupt(jpeg, state, "Corrupt JPEG data: premature end of data segment");
    state->at = r.at;
    state->buffer = r.buffer;
    state->bits = r.bits;
    return TRUE;
}

/* ---- taking over */

/* Both pointers lead into libjpeg itself: so the structure is laid out as we believe. */
static int as_expected(const struct jpeg_entropy_decoder *entropy, void *known) {
    Dl_info start, decode, library;
    return dladdr(known, &library) && dladdr((void *)entropy->start_pass, &start) &&
           dladdr((void *)entropy->decode_mcu, &decode) && start.dli_fbase == library.dli_fbase &&
           decode.dli_fbase == library.dli_fbase;
}

void ps_huffman_take_over(j_decompress_ptr jpeg, ps_huffman *state, JDIMENSION first, JDIMENSION last,
                          void (*fail)(j_decompress_ptr jpeg, const char *reason)) {
    if (!as_expected(jpeg->entropy, (void *)jpeg->err->format_message)) return;
    ps_code *codes = ps_scratch(PS_SCRATCH_CODES, CODES * sizeof *codes);
    if (!codes) return;
    memset(state, 0, sizeof *state);
    state->at = jpeg->src->next_input_byte;
    state->end = state->at + jpeg->src->bytes_in_buffer;
    state->left_of_interval = jpeg->restart_interval;
    state->first_column = first;
    state->last_column = last;
    state->fail = fail;
    for (int i = 0; i < jpeg->blocks_in_MCU; i++) {
        const jpeg_component_info *component = jpeg->cur_comp_info[jpeg->MCU_membership[i]];
        int dc = component->dc_tbl_no, ac = component->ac_tbl_no;
        state->dc[i] = code_for(codes, jpeg->dc_huff_tbl_ptrs[dc], dc, 0);
        state->ac[i] = code_for(codes, jpeg->ac_huff_tbl_ptrs[ac], ac, 1);
    }
    jpeg->client_data = state;
    jpeg->entropy->decode_mcu = decode_mcu;
}
