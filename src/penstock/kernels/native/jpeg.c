/* Decodes regions of JPEG images with the libjpeg-turbo that Pillow has loaded, so that pixels are Pillow's, and
 * resizes them in the same call. Nothing is linked: ps_jpeg_bind finds the functions in the library it is told. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "huffman.h"
#include "libjpeg/jpeglib.h"
#include "resample.h"

enum { OK = 0, FAILED = -1, NO_MEMORY = -2, SENSELESS = -3 };

typedef struct {
    __typeof__(jpeg_std_error) *std_error;
    __typeof__(jpeg_CreateDecompress) *create;
    __typeof__(jpeg_destroy_decompress) *destroy;
    void (*mem_src)(j_decompress_ptr, const unsigned char *, unsigned long);
    __typeof__(jpeg_read_header) *read_header;
    __typeof__(jpeg_start_decompress) *start;
    __typeof__(jpeg_read_scanlines) *read;
    __typeof__(jpeg_skip_scanlines) *skip;
    __typeof__(jpeg_crop_scanline) *crop;
    __typeof__(jpeg_has_multiple_scans) *several_scans;
} functions;

static functions lib; /* all NULL until bound */

/* ---- errors: libjpeg's leave through longjmp to read_region or ps_jpeg_bind, and no further */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf escape;
    char *why;
} errors;

static void fail(j_common_ptr any) {
    errors *own = (errors *)any->err;
    own->base.format_message(any, own->why);
    longjmp(own->escape, 1);
}

static void fail_because(j_decompress_ptr jpeg, const char *reason) {
    errors *own = (errors *)jpeg->err;
    snprintf(own->why, JMSG_LENGTH_MAX, "%s", reason);
    longjmp(own->escape, 1);
}

/* Warnings say that libjpeg invents pixels, or that something harmless was skipped. They are told apart by their text:
 * the codes are not the same in every version. */
static void warn(j_common_ptr any, int level) {
    if (level >= 0) return;
    const struct jpeg_error_mgr *base = any->err;
    if (base->msg_code <= 0 || base->msg_code > base->last_jpeg_message) return;
    const char *text = base->jpeg_message_table[base->msg_code];
    int corrupt = !strncmp(text, "Corrupt JPEG data", 17) && !strstr(text, "extraneous bytes");
    if (corrupt || !strncmp(text, "Premature end", 13)) fail(any);
}

static void silence(j_common_ptr any) { (void)any; }

static void begin(const functions *with, struct jpeg_decompress_struct *jpeg, errors *own, char *why) {
    memset(jpeg, 0, sizeof *jpeg);
    jpeg->err = with->std_error(&own->base);
    own->base.error_exit = fail;
    own->base.emit_message = warn;
    own->base.output_message = silence;
    own->why = why;
}

/* Take the functions from the library at `path`, which stays loaded. 0, or FAILED with `why` (JMSG_LENGTH_MAX bytes)
 * filled when it is no libjpeg-turbo of API version 62. Call once, before other threads decode. */
int ps_jpeg_bind(const char *path, char *why) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(why, JMSG_LENGTH_MAX, "%s", dlerror());
        return FAILED;
    }
    functions found;
    const struct {
        const char *name;
        void **place;
    } wanted[] = {
        {"jpeg_std_error", (void **)&found.std_error},
        {"jpeg_CreateDecompress", (void **)&found.create},
        {"jpeg_destroy_decompress", (void **)&found.destroy},
        {"jpeg_mem_src", (void **)&found.mem_src},
        {"jpeg_read_header", (void **)&found.read_header},
        {"jpeg_start_decompress", (void **)&found.start},
        {"jpeg_read_scanlines", (void **)&found.read},
        {"jpeg_skip_scanlines", (void **)&found.skip},
        {"jpeg_crop_scanline", (void **)&found.crop},
        {"jpeg_has_multiple_scans", (void **)&found.several_scans},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].place = dlsym(handle, wanted[i].name);
        if (!*wanted[i].place) {
            snprintf(why, JMSG_LENGTH_MAX, "it has no function %s", wanted[i].name);
            return FAILED;
        }
    }
    struct jpeg_decompress_struct jpeg;
    errors own;
    begin(&found, &jpeg, &own, why);
    if (setjmp(own.escape)) return FAILED;
    found.create(&jpeg, JPEG_LIB_VERSION, sizeof jpeg); /* compares version and struct size with its own */
    found.destroy(&jpeg);
    lib = found;
    return OK;
}

/* ---- the header, without libjpeg: what Python needs to know before it decides on a region */

static uint32_t big(const uint8_t *p, int bytes) {
    uint32_t value = 0;
    while (bytes--) value = value << 8 | *p++;
    return value;
}

static uint32_t number(const uint8_t *p, int bytes, int little) {
    if (!little) return big(p, bytes);
    uint32_t value = 0;
    for (int i = bytes; i--;) value = value << 8 | p[i];
    return value;
}

/* The orientation in an Exif block (a TIFF file): 1 to 8; 0 when the block is odd and Pillow should be asked. */
static int orientation(const uint8_t *tiff, size_t size) {
    if (size < 8) return 0;
    int little = !memcmp(tiff, "II*\0", 4), found = 1;
    if (!little && memcmp(tiff, "MM\0*", 4)) return 0;
    size_t at = number(tiff + 4, 4, little);
    if (at < 8 || at + 2 > size) return 0;
    size_t entries = number(tiff + at, 2, little);
    if (at + 2 + entries * 12 > size) return 0;
    for (const uint8_t *entry = tiff + at + 2; entries--; entry += 12) {
        if (number(entry, 2, little) != 0x0112) continue;
        uint32_t value = number(entry + 8, 2, little);
        int plain = number(entry + 2, 2, little) == 3 && number(entry + 4, 4, little) == 1;
        if (!plain || value < 1 || value > 8 || found != 1) return 0;
        found = (int)value;
    }
    return found;
}

static int contains(const uint8_t *data, size_t size, const char *text) {
    return memmem(data, size, text, strlen(text)) != NULL;
}

typedef struct {
    int32_t plain, width, height, components, orientation;
} header;

/* One segment's body. 0 when the file is one for Pillow. */
static int read_segment(header *found, uint8_t marker, const uint8_t *body, size_t size, int *exifs) {
    if (marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
        if (marker > 0xC2 || found->width || size < 6 || body[0] != 8) return 0;
        found->height = (int32_t)big(body + 1, 2);
        found->width = (int32_t)big(body + 3, 2);
        found->components = body[5];
        return found->height && found->width && (body[5] == 1 || body[5] == 3);
    }
    if (marker == 0xE1 && size >= 6 && !memcmp(body, "Exif\0\0", 6))
        found->orientation = (*exifs)++ ? 0 : orientation(body + 6, size - 6);
    if (marker == 0xE1 && contains(body, size, "tiff:Orientation") && found->orientation <= 1) found->orientation = 0;
    return 1;
}

/* Reads the markers up to the first scan into found[5]: plain (1 when ps_jpeg_decode can decode it, 0 when it is for
 * Pillow: another format, CMYK, 12 bits, arithmetic coding, an odd marker, no end-of-image marker), width, height,
 * components (1 or 3), Exif orientation (1 to 8, or 0 when Pillow should be asked for it). Never fails. */
void ps_jpeg_header(const uint8_t *data, int64_t size, int32_t *result) {
    header found = {.orientation = 1};
    int exifs = 0;
    const uint8_t *at = data + 2, *end = data + size;
    memset(result, 0, sizeof found);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return;
    for (uint8_t marker = 0; marker != 0xDA;) {
        while (end - at >= 2 && at[0] == 0xFF && at[1] == 0xFF) at++; /* fill bytes */
        if (end - at < 4 || at[0] != 0xFF) return;
        marker = at[1];
        size_t length = big(at + 2, 2);
        if (marker < 0xC0 || (marker >= 0xD0 && marker <= 0xD9)) return;
        if (length < 2 || (size_t)(end - at) < length + 2) return;
        if (!read_segment(&found, marker, at + 4, length - 2, &exifs)) return;
        at += length + 2;
    }
    const uint8_t *last = end - 2; /* a truncated file has no end-of-image marker after its scan began */
    while (last >= at && !(last[0] == 0xFF && last[1] == 0xD9)) last--;
    if (last < at || !found.width) return;
    found.plain = 1;
    memcpy(result, &found, sizeof found);
}

/* ---- decoding */

typedef struct {
    const uint8_t *data;
    unsigned long size;
    int32_t left, top, right, bottom; /* the region wanted, in stored pixels */
    int gray;                         /* one byte per pixel, where the file itself is gray */
    uint8_t *direct;                  /* where a region of full width may go at once, or NULL */
    int64_t direct_stride;
    uint8_t *pixels; /* result: the region's first pixel, the distance of rows, the bytes of a pixel */
    int64_t stride;
    int channels;
} region;

/* Restrict decoding to the columns wanted. Interpolated chroma needs its neighbours, and the library treats the first
 * and last column it decodes as the image's edges, so it decodes some more on both sides. Returns the columns too many
 * at the left. */
static int32_t restrict_columns(struct jpeg_decompress_struct *jpeg, const region *want, ps_huffman *entropy) {
    int32_t margin = jpeg->max_h_samp_factor > 1 ? 2 * jpeg->max_h_samp_factor : 0, width = (int32_t)jpeg->output_width;
    int32_t left = want->left > margin ? want->left - margin : 0;
    int32_t right = want->right < width - margin ? want->right + margin : width;
    JDIMENSION offset = (JDIMENSION)left, columns = (JDIMENSION)(right - left);
    if (left > 0 || right < width) lib.crop(jpeg, &offset, &columns);
    JDIMENSION mcu = DCTSIZE * (JDIMENSION)(jpeg->num_components == 1 ? 1 : jpeg->max_h_samp_factor);
    ps_huffman_take_over(jpeg, entropy, offset / mcu, (offset + columns - 1) / mcu, fail_because);
    return want->left - (int32_t)offset;
}

static void read_rows(struct jpeg_decompress_struct *jpeg, uint8_t *first, int64_t stride, int32_t rows) {
    JSAMPROW batch[16];
    for (int32_t done = 0, got = 1; done < rows && got; done += got) {
        int32_t ask = rows - done < 16 ? rows - done : 16;
        for (int32_t i = 0; i < ask; i++) batch[i] = first + (done + i) * stride;
        got = (int32_t)lib.read(jpeg, batch, (JDIMENSION)ask); /* never 0: the source does not suspend */
    }
}

/* Decodes the region, row by row, up to its last row. */
static int decode(struct jpeg_decompress_struct *jpeg, region *want, ps_huffman *entropy) {
    lib.mem_src(jpeg, want->data, want->size);
    lib.read_header(jpeg, TRUE);
    jpeg->out_color_space = want->gray && jpeg->num_components == 1 ? JCS_GRAYSCALE : JCS_RGB;
    lib.start(jpeg);
    if (want->right > (int32_t)jpeg->output_width || want->bottom > (int32_t)jpeg->output_height) return SENSELESS;
    /* Files of several scans smooth their blocks across the edges of a region, so they are decoded whole. */
    int several = lib.several_scans(jpeg);
    int32_t extra = several ? want->left : restrict_columns(jpeg, want, entropy), above = several ? want->top : 0;
    want->channels = jpeg->output_components;
    want->stride = ((int64_t)jpeg->output_width * want->channels + 63) & ~(int64_t)63;
    uint8_t *first = want->direct;
    if (first && !extra && !above && (int32_t)jpeg->output_width == want->right - want->left) {
        want->stride = want->direct_stride;
    } else {
        size_t rows = (size_t)(want->bottom - want->top + above);
        first = ps_scratch(PS_SCRATCH_IMAGE, (size_t)want->stride * rows + PS_PADDING);
        if (!first) return NO_MEMORY;
    }
    if (!several && want->top) lib.skip(jpeg, (JDIMENSION)want->top);
    want->pixels = first + above * want->stride + (int64_t)extra * want->channels;
    read_rows(jpeg, first, want->stride, want->bottom - want->top + above);
    return OK;
}

static int read_region(region *want, char *why) {
    struct jpeg_decompress_struct jpeg;
    errors own;
    ps_huffman entropy;
    if (!lib.create || want->left < 0 || want->top < 0 || want->left >= want->right || want->top >= want->bottom)
        return SENSELESS;
    begin(&lib, &jpeg, &own, why);
    volatile int outcome = FAILED;
    if (!setjmp(own.escape)) {
        lib.create(&jpeg, JPEG_LIB_VERSION, sizeof jpeg);
        outcome = decode(&jpeg, want, &entropy);
    }
    if (jpeg.mem) lib.destroy(&jpeg);
    return outcome;
}

/* Pillow's convert("L"). `out` may be `from`. */
static void to_gray(const uint8_t *from, uint8_t *out, int64_t pixels) {
    for (int64_t i = 0; i < pixels; i++, from += 3)
        out[i] = (uint8_t)((from[0] * 19595u + from[1] * 38470u + from[2] * 7471u + 0x8000u) >> 16);
}

/* Decodes columns left .. right-1 of rows top .. bottom-1 into `out`, rows `stride` bytes apart: RGB, or with channels
 * 1 Pillow's "L". The pixels are those of a full decode. 0; FAILED with `why` (JMSG_LENGTH_MAX bytes) filled when the
 * data up to the last row wanted is corrupt; NO_MEMORY; SENSELESS for a box outside the image or an unbound library. */
int ps_jpeg_decode(const uint8_t *data, int64_t size, int32_t left, int32_t top, int32_t right, int32_t bottom,
                   int32_t channels, uint8_t *out, int64_t stride, char *why) {
    region want = {.data = data, .size = (unsigned long)size, .left = left, .top = top, .right = right,
                   .bottom = bottom, .gray = channels == 1, .direct = out, .direct_stride = stride};
    int64_t columns = right - left;
    if (channels == 1) want.direct = NULL;
    int problem = read_region(&want, why);
    if (problem || want.pixels == out) return problem;
    for (int32_t row = 0; row < bottom - top; row++, out += stride, want.pixels += want.stride) {
        if (want.channels == channels)
            memcpy(out, want.pixels, (size_t)(columns * channels));
        else
            to_gray(want.pixels, out, columns);
    }
    return OK;
}

/* Decodes as ps_jpeg_decode does, cut to the box, and resizes that cut as ps_resize does a whole image; decodes only
 * what the window needs. */
int ps_jpeg_resize(const uint8_t *data, int64_t size, int32_t left, int32_t top, int32_t right, int32_t bottom,
                   int32_t channels, int32_t out_h, int32_t out_w, int32_t filter, int32_t from_x, int32_t from_y,
                   int32_t to_x, int32_t to_y, int32_t flip, uint8_t *out, int64_t stride, char *why) {
    int32_t height = bottom - top, width = right - left;
    ps_resize_spec spec = {height, width,  {0, 0, (float)width, (float)height}, out_h, out_w,
                           filter, {from_x, from_y, to_x, to_y}, flip, channels};
    ps_resize_plan plan;
    int problem = ps_resize_prepare(&spec, &plan);
    if (problem) return problem == -2 ? NO_MEMORY : SENSELESS;
    region want = {.data = data, .size = (unsigned long)size,
                   .left = left + plan.across.low, .top = top + plan.down.low,
                   .right = left + plan.across.high, .bottom = top + plan.down.high, .gray = channels == 1};
    problem = read_region(&want, why);
    if (problem) return problem;
    if (want.channels != channels)
        for (int32_t row = 0; row < want.bottom - want.top; row++)
            to_gray(want.pixels + row * want.stride, want.pixels + row * want.stride, want.right - want.left);
    return ps_resize_run(&plan, want.pixels, want.stride, 1, out, stride) ? NO_MEMORY : OK;
}
