/* What must be known of a JPEG before the GPU's JPEG engine is given it. The engine reports no damage in the coded
 * data. So the whole file is walked here, by its markers, when it is read: what does not agree with itself is left to
 * libjpeg, which then says what is wrong, and so is all that the engine does not decode. */
#include <stdint.h>
#include <string.h>

/* facts.py puts them into words, in this order. */
enum { TAKEN, NOT_PLAIN, TOO_LONG, NOT_BASELINE, SAMPLING, COLOURS, TABLES, SCANS, DAMAGED };

/* jpeg.c: plain, width, height, components, orientation. */
void ps_jpeg_header(const uint8_t *data, int64_t size, int32_t *result);

typedef struct {
    int components, sub_x, sub_y, blocks; /* `blocks` of an MCU */
    int64_t mcus;
    uint8_t ids[3], factors[3], quantisers[3];
    uint32_t quantisers_seen;    /* a bit each */
    uint8_t shortest[2][2];      /* bits of the shortest code, by class and number; 0 for a table not seen */
    int64_t interval;            /* MCUs between restart markers; 0 for none */
    int jfif, adobe;             /* seen; Adobe's transform, or -1 */
    int64_t least_bits;          /* that an MCU takes */
} image;

static uint32_t word(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }

static int64_t divided(int64_t size, int64_t by) { return (size + by - 1) / by; }

/* ---- segments: each returns TAKEN or a refusal. `size` counts the body */

/* Tables as they must be for a baseline scan, with prefix codes that exist. */
static int read_codes(image *found, const uint8_t *body, size_t size) {
    while (size) {
        if (size < 17 || body[0] & 0xEE) return TABLES;
        uint32_t code = 0, total = 0, shortest = 0;
        for (uint32_t length = 1; length <= 16; length++, code <<= 1) {
            code += body[length];
            total += body[length];
            if (body[length] && !shortest) shortest = length;
            if (body[length] && code >= 1u << length) return TABLES;
        }
        if (!total || total > 256 || size < 17 + total) return TABLES;
        for (uint32_t i = 0; !(body[0] >> 4) && i < total; i++)
            if (body[17 + i] > 15) return TABLES;
        found->shortest[body[0] >> 4][body[0] & 1] = (uint8_t)shortest;
        body += 17 + total;
        size -= 17 + total;
    }
    return TAKEN;
}

static int read_quantisers(image *found, const uint8_t *body, size_t size) {
    for (; size; body += 65, size -= 65) {
        if (size < 65 || body[0] > 3) return TABLES; /* 16-bit ones are not baseline */
        found->quantisers_seen |= 1u << body[0];
    }
    return TAKEN;
}

/* Gray, or chroma of half or full size in each direction. */
static int read_frame(image *found, const uint8_t *body, size_t size) {
    found->components = body[5];
    if (size != 6 + 3 * (size_t)body[5]) return NOT_BASELINE;
    for (int i = 0; i < found->components; i++) {
        found->ids[i] = body[6 + 3 * i];
        found->factors[i] = body[7 + 3 * i];
        found->quantisers[i] = body[8 + 3 * i];
        if (found->quantisers[i] > 3) return TABLES;
        if (i && found->factors[i] != 0x11) return SAMPLING;
    }
    int across = found->factors[0] >> 4, down = found->factors[0] & 15, most = found->components == 1 ? 1 : 2;
    if (across < 1 || down < 1 || across > most || down > most) return SAMPLING;
    found->sub_x = across;
    found->sub_y = down;
    found->blocks = across * down + found->components - 1;
    found->mcus = divided(word(body + 3), 8 * across) * divided(word(body + 1), 8 * down);
    return TAKEN;
}

static int read_segment(image *found, uint8_t marker, const uint8_t *body, size_t size) {
    if (marker == 0xC0) return read_frame(found, body, size);
    if (marker == 0xC4) return read_codes(found, body, size);
    if (marker == 0xDB) return read_quantisers(found, body, size);
    if (marker == 0xDD) {
        if (size != 2) return TABLES;
        found->interval = word(body);
        return TAKEN;
    }
    if (marker == 0xE0 && size >= 5 && !memcmp(body, "JFIF\0", 5)) found->jfif = 1;
    if (marker == 0xEE && size >= 12 && !memcmp(body, "Adobe", 5)) found->adobe = body[11];
    return (marker & 0xF0) == 0xE0 || marker == 0xFE ? TAKEN : NOT_BASELINE;
}

/* What libjpeg takes for YCbCr, as far as nobody can take it for anything else. */
static int is_ycc(const image *found) {
    if (found->adobe >= 0) return found->adobe == 1;
    return found->jfif || memcmp(found->ids, "RGB", 3) != 0;
}

/* The one scan's header: all components in order, all their coefficients, tables that have been seen. */
static int read_scan(image *found, const uint8_t *body, size_t size) {
    int n = found->components;
    if (!n || size != 4 + 2 * (size_t)n || body[0] != n) return SCANS;
    for (int i = 0; i < n; i++) {
        int dc = body[2 + 2 * i] >> 4, ac = body[2 + 2 * i] & 15;
        if (body[1 + 2 * i] != found->ids[i]) return SCANS;
        if (dc > 1 || ac > 1 || !found->shortest[0][dc] || !found->shortest[1][ac]) return TABLES;
        if (!(found->quantisers_seen >> found->quantisers[i] & 1)) return TABLES;
        found->least_bits += (i ? 1 : found->sub_x * found->sub_y) * (found->shortest[0][dc] + found->shortest[1][ac]);
    }
    const uint8_t *range = body + 1 + 2 * n;
    if (range[0] != 0 || range[1] != 63 || range[2] != 0) return SCANS;
    return n == 3 && !is_ycc(found) ? COLOURS : TAKEN;
}

/* ---- coded data */

/* Past the end-of-image marker, or NULL: other markers than restarts in sequence, as many as the size asks for, or
 * fewer bits than the shortest codes would take. */
static const uint8_t *walk_data(const image *found, const uint8_t *at, const uint8_t *end) {
    const uint8_t *start = at;
    int64_t restarts = 0, stuffed = 0;
    while ((at = memchr(at, 0xFF, (size_t)(end - at))) && end - at >= 2 && at[1] != 0xD9) {
        if (at[1] == 0)
            stuffed++;
        else if (found->interval && at[1] == 0xD0 + (restarts & 7))
            restarts++;
        else
            return NULL;
        at += 2;
    }
    if (!at || end - at < 2) return NULL;
    if (found->interval && restarts != divided(found->mcus, found->interval) - 1) return NULL;
    int64_t bytes = at - start - stuffed - 2 * restarts;
    return bytes * 8 >= found->mcus * found->least_bits ? at + 2 : NULL;
}

static int walk(image *found, const uint8_t *data, int64_t size, int32_t *length) {
    const uint8_t *at = data + 2, *end = data + size;
    for (;;) { /* ps_jpeg_header has seen that the segments end within the data */
        if (at[1] == 0xFF) return NOT_BASELINE;
        uint8_t marker = at[1];
        size_t body = word(at + 2) - 2;
        int refusal = marker == 0xDA ? read_scan(found, at + 4, body) : read_segment(found, marker, at + 4, body);
        at += body + 4;
        if (refusal) return refusal;
        if (marker == 0xDA) break;
    }
    at = walk_data(found, at, end);
    if (at) *length = (int32_t)(at - data);
    return at ? TAKEN : DAMAGED;
}

/* Into result[8]: why the engine is not to have this file (0 when it is), width, height, components, the chroma's
 * subsampling across and down, Exif orientation as ps_jpeg_header has it, bytes up to the end of the image (what
 * follows is not part of it). All that is not known is 0. Never fails. */
void ps_jpeg_facts(const uint8_t *data, int64_t size, int32_t *result) {
    int32_t header[5], length = 0;
    image found = {.adobe = -1};
    memset(result, 0, 8 * sizeof *result);
    ps_jpeg_header(data, size, header);
    result[0] = NOT_PLAIN;
    if (!header[0]) return;
    result[0] = size > INT32_MAX ? TOO_LONG : walk(&found, data, size, &length);
    memcpy(result + 1, header + 1, 3 * sizeof *result);
    result[4] = found.sub_x;
    result[5] = found.sub_y;
    result[6] = header[4];
    result[7] = length;
}
