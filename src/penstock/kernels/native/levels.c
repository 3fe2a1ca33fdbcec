/* Turns 8-bit levels into floats by a table per channel, which holds whatever arithmetic the caller wants, exactly. */
#include <stddef.h>
#include <stdint.h>

/* out = table[channel][in], for 3 interleaved channels whose rows are `stride` bytes apart. `table` has 3 x 256 entries.
 * `out` is dense: interleaved as well, or with `planar` one channel behind the other. 0, or -1 for senseless sizes. */
int ps_levels(const uint8_t *in, int64_t stride, int32_t height, int32_t width, const float *table, int32_t planar,
              float *out)
{
    if (height < 0 || width < 0 || stride < (int64_t)width * 3)
        return -1;
    const float *red = table, *green = table + 256, *blue = table + 512;
    const int64_t step = planar ? 1 : 3, plane = planar ? (int64_t)height * width : 1;
    for (int32_t y = 0; y < height; y++, in += stride) {
        float *r = out + (int64_t)y * width * step, *g = r + plane, *b = g + plane;
        for (int32_t x = 0; x < width; x++) {
            r[x * step] = red[in[3 * (ptrdiff_t)x]];
            g[x * step] = green[in[3 * (ptrdiff_t)x + 1]];
            b[x * step] = blue[in[3 * (ptrdiff_t)x + 2]];
        }
    }
    return 0;
}
