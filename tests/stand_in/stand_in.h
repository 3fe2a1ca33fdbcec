/* What stands in for the CUDA driver and nvJPEG where there is no GPU: device memory is host memory, all is done at
 * once, but counts as done only once the host has waited for it. Calls are noted, as far as there is room. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Add a line to the notes, printf-like. */
void note(const char *format, ...);

/* What must never happen has. */
void breach(const char *what);

/* The error that the test has asked this function for, this time; else 0. */
int asked_for(const char *function);

/* Something asynchronous begins now: its number. */
int64_t begun(void);

/* Whether the host has waited for it. */
int settled(int64_t number);
