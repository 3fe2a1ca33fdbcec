/* A faster entropy decoder for baseline JPEG scans, put in the place of libjpeg's own. */
#ifndef PS_HUFFMAN_H
#define PS_HUFFMAN_H

#include <stdint.h>
#include <stdio.h>

#include "libjpeg/jpeglib.h"

#define PS_HUFFMAN_BITS 11 /* looked up at a time; 10 and 12 are slower */

typedef struct {
    int16_t value[2]; /* of the one or two coefficients in the bits looked at; PS_LONGER + size of one they cut */
    uint8_t step[2];  /* positions forward, past each coefficient; 64 at the end of a block */
    uint8_t bits[2];  /* of the first coefficient, of both */
} ps_ac_entry;        /* all zero where the code itself is longer than the bits looked at */

#define PS_LONGER -0x4000

typedef struct {
    uint8_t counts[17], symbols[256]; /* the table as the file defines it: the key to all below */
    int32_t highest[18], offset[17];
    uint8_t length[1 << PS_HUFFMAN_BITS], symbol[1 << PS_HUFFMAN_BITS];
    ps_ac_entry pairs[1 << PS_HUFFMAN_BITS];
    int built;
} ps_code;

typedef struct {
    const uint8_t *at, *end;
    uint64_t buffer; /* the next bits, from the top; `bits` of them are valid, negative past the end of the data */
    int bits;
    int previous[MAX_COMPS_IN_SCAN];
    unsigned left_of_interval;
    int next_restart;
    JDIMENSION column, first_column, last_column; /* columns of MCUs; those outside first .. last are only skipped */
    const ps_code *dc[D_MAX_BLOCKS_IN_MCU], *ac[D_MAX_BLOCKS_IN_MCU];
    void (*fail)(j_decompress_ptr jpeg, const char *reason);
} ps_huffman;

/* Takes over the only scan of `jpeg`, between jpeg_start_decompress with its crop and the first row. Columns of MCUs
 * outside first .. last are not kept. `fail` is called for corrupt data and must not return. Leaves libjpeg's decoder
 * alone where it is not laid out as expected, or where there is no memory. */
void ps_huffman_take_over(j_decompress_ptr jpeg, ps_huffman *state, JDIMENSION first, JDIMENSION last,
                          void (*fail)(j_decompress_ptr jpeg, const char *reason));

#endif
