/* The never-evict arena: samples of any length in shared memory, filled by many processes and read without a lock.
 *
 * Two files without names. The control file holds words of 64 bits that processes change atomically: the head, a row for
 * each shelf (the samples of one data set in one form), and each shelf's index, two words for each sample: its state and
 * place, and its sizes. The data file holds the samples: their sizes, a checksum, the bytes, a note. It is mapped for
 * reading only and written with `pwrite`, so that a stray pointer cannot harm it, and memory that is not there is an
 * error and no signal. (The sizes stand in the index too because a reader needs them first: fetching them from the
 * sample would take a third of the time of copying 100 KB.)
 *
 * A sample goes EMPTY -> CLAIMED -> READY by compare-and-swap of its word, and only when all else is written. From
 * READY it can only become BAD: nothing is evicted, moved, or put where another was. So a reader that finds the same
 * READY word before and after it copied has copied that sample, unless its memory was given back meanwhile: then TOP,
 * which is lowered before that, lies below the sample's end.
 *
 * A writer that dies leaves a claim, which lapses, and at most one sample's room, which stays unused.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef _Atomic uint64_t word;

/* Words of the head and of a shelf's row that are used here; cache/arena.py has all. */
enum { GRANTED = 2, USED = 3, TOP = 4 };
enum { SAMPLES = 4, BYTES = 5, SPOILT = 6 };
/* States of a sample, in the low bits of its word. Above them stands, of a claim, its stamp; of a sample that is there,
 * its room and above that its place in the data file, both in units of ALIGN. */
enum { EMPTY, CLAIMED, READY, BAD };
/* Outcomes; cache/arena.py has the same. */
enum { DONE, FIRST, ABSENT, SPOILED, TAKEN, NO_ROOM };
/* A process's row in the tally. */
enum { HITS, HIT_BYTES };

enum { ALIGN = 64, STATE_BITS = 3, ROOM_BITS = 26, NOTE_BITS = 24, PID_BITS = 22 };
#define STATE(w) ((w) & ((1u << STATE_BITS) - 1))
#define ROOM(w) (((w) >> STATE_BITS & ((1u << ROOM_BITS) - 1)) * ALIGN)
#define PLACE(w) (((w) >> (STATE_BITS + ROOM_BITS)) * ALIGN)
#define SIZE(sizes) ((sizes) >> NOTE_BITS)
#define NOTED(sizes) ((sizes) & ((1u << NOTE_BITS) - 1))

/* After so many milliseconds a claim counts as left behind by a writer that is dead. One that was merely slow finds its
 * claim gone when it comes to publish. */
#define CLAIM_MS 60000u
/* Checksums are verified when a process meets a sample first, and at one of so many hits: at every hit that would add a
 * fifth to the time of copying 100 KB. */
#define VERIFY_EVERY 16u

/* What a process needs of one shelf; cache/arena.py fills it in. */
typedef struct {
    const uint8_t *data;
    uint64_t mapped; /* bytes of it */
    word *head, *row, *index;
    uint8_t *met;    /* a bit for each sample that this process has verified */
    uint64_t *tally; /* this process's own */
    uint64_t hits;
    int32_t fd; /* of the data file */
} shelf;

typedef struct {
    uint64_t sizes, sum;
} header;

/* A word at any place, of whatever type the bytes are. */
typedef uint64_t __attribute__((aligned(1), may_alias)) loose;

/* Two sums in each of eight lanes, the second of which weighs words by their place: as quick as reading the bytes.
 * Whatever is changed within one word is noticed. */
static uint64_t checksum(const uint8_t *data, uint64_t size, uint64_t sum) {
    uint64_t plain[8] = {0}, weighed[8] = {0}, last[8] = {0};
    const loose *words = (const loose *)data;
    uint64_t whole = size / 64;
    for (uint64_t i = 0; i < whole; i++, words += 8)
        for (int j = 0; j < 8; j++) {
            plain[j] += words[j];
            weighed[j] += plain[j];
        }
    memcpy(last, words, size % 64);
    sum ^= size;
    for (int j = 0; j < 8; j++) {
        sum = (sum ^ (plain[j] + last[j])) * 0x9E3779B97F4A7C15u;
        sum = (sum ^ weighed[j] ^ sum >> 32) * 0xC2B2AE3D27D4EB4Fu;
    }
    return sum ^ sum >> 29;
}

static uint64_t milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Memory of a file, or NULL. */
void *ps_arena_map(int32_t fd, int64_t offset, int64_t size, int32_t writable) {
    void *at = mmap(NULL, (size_t)size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, offset);
    return at == MAP_FAILED ? NULL : at;
}

void ps_arena_unmap(void *at, int64_t size) { munmap(at, (size_t)size); }

uint64_t ps_arena_load(word *at) { return atomic_load(at); }
void ps_arena_store(word *at, uint64_t value) { atomic_store(at, value); }
void ps_arena_add(word *at, uint64_t value) { atomic_fetch_add(at, value); }

static word *entry(const shelf *s, int64_t id) { return s->index + 2 * id; }

/* The sample is READY, and none of it was given back. */
static int whole(const shelf *s, uint64_t found) {
    uint64_t end = PLACE(found) + ROOM(found);
    return STATE(found) == READY && end <= s->mapped && end <= atomic_load_explicit(s->head + TOP, memory_order_acquire);
}

static int32_t spoil(shelf *s, int64_t id, uint64_t found) {
    if (!whole(s, found)) return ABSENT;
    if (atomic_compare_exchange_strong(entry(s, id), &found, BAD)) atomic_fetch_add(s->row + SPOILT, 1);
    return SPOILED;
}

/* Nobody gets this sample again. */
int32_t ps_arena_spoil(shelf *s, int64_t id) { return spoil(s, id, atomic_load(entry(s, id))); }

/* Copies a sample of these sizes, which the caller has read from the index and made room for; its note only where there
 * is room for that, else NULL. DONE, or FIRST where this process had not met it yet; ABSENT; SPOILED where its bytes are not what was stored: nobody gets it again. */
int32_t ps_arena_get(shelf *s, int64_t id, uint64_t sizes, uint8_t *data, uint8_t *note) {
    uint64_t found = atomic_load_explicit(entry(s, id), memory_order_acquire);
    if (!whole(s, found)) return ABSENT;
    const uint8_t *at = s->data + PLACE(found);
    header stored;
    memcpy(&stored, at, sizeof stored);
    int fits = stored.sizes == sizes && sizeof stored + SIZE(sizes) + NOTED(sizes) <= ROOM(found);
    if (fits) {
        memcpy(data, at + sizeof stored, SIZE(sizes));
        if (note)
            memcpy(note, at + sizeof stored + SIZE(sizes), NOTED(sizes));
        else
            note = (uint8_t *)at + sizeof stored + SIZE(sizes);
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(entry(s, id), memory_order_relaxed) != found || !whole(s, found)) return ABSENT;
    if (!fits) return spoil(s, id, found);
    uint8_t bit = (uint8_t)(1u << (id & 7)), *met = s->met + (id >> 3);
    int first = !(*met & bit);
    if (first || ++s->hits % VERIFY_EVERY == 0)
        if (checksum(note, NOTED(sizes), checksum(data, SIZE(sizes), 0)) != stored.sum) return spoil(s, id, found);
    if (first) *met |= bit;
    s->tally[HITS]++;
    s->tally[HIT_BYTES] += SIZE(sizes);
    return first ? FIRST : DONE;
}

/* Finds a sample without copying it: into result[0] its word, into [1] where its bytes begin in the data file, into [2]
 * its sizes. Who has read it there asks `ps_arena_still` whether that was the sample. Outcomes as of `get`. */
int32_t ps_arena_look(shelf *s, int64_t id, uint64_t *result) {
    uint64_t found = atomic_load_explicit(entry(s, id), memory_order_acquire);
    if (!whole(s, found)) return ABSENT;
    const uint8_t *at = s->data + PLACE(found);
    header stored;
    memcpy(&stored, at, sizeof stored);
    uint64_t size = SIZE(stored.sizes), noted = NOTED(stored.sizes);
    uint8_t bit = (uint8_t)(1u << (id & 7)), *met = s->met + (id >> 3);
    int first = !(*met & bit), good = size <= ROOM(found) && sizeof stored + size + noted <= ROOM(found);
    if (good && (first || ++s->hits % VERIFY_EVERY == 0)) {
        const uint8_t *data = at + sizeof stored;
        good = checksum(data + size, noted, checksum(data, size, 0)) == stored.sum;
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(entry(s, id), memory_order_relaxed) != found || !whole(s, found)) return ABSENT;
    if (!good) return spoil(s, id, found);
    *met |= bit;
    result[0] = found, result[1] = PLACE(found) + sizeof stored, result[2] = stored.sizes;
    s->tally[HITS]++;
    s->tally[HIT_BYTES] += size;
    return first ? FIRST : DONE;
}

/* What `ps_arena_look` found as this word has been there all the time. */
int32_t ps_arena_still(const shelf *s, int64_t id, uint64_t found) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(entry(s, id), memory_order_relaxed) == found && whole(s, found);
}

/* So much room in the data file, or UINT64_MAX. */
static uint64_t allocate(shelf *s, uint64_t size) {
    uint64_t used = atomic_load(s->head + USED);
    do {
        if (used + size > atomic_load(s->head + GRANTED)) return UINT64_MAX;
    } while (!atomic_compare_exchange_weak(s->head + USED, &used, used + size));
    return used;
}

static int32_t claim(word *e, uint64_t *claimed) {
    uint64_t now = milliseconds(), found = atomic_load(e);
    int lapsed = STATE(found) == CLAIMED && (found >> (STATE_BITS + PID_BITS)) + CLAIM_MS <= now;
    if (found != EMPTY && !lapsed) return TAKEN;
    uint64_t pid = (uint64_t)getpid() & ((1u << PID_BITS) - 1);
    *claimed = (now << PID_BITS | pid) << STATE_BITS | CLAIMED;
    return atomic_compare_exchange_strong(e, &found, *claimed) ? DONE : TAKEN;
}

static int32_t write_all(int fd, struct iovec *parts, int count, uint64_t at) {
    while (count) {
        ssize_t done = parts->iov_len ? pwritev(fd, parts, count, (off_t)at) : 0;
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -errno;
        if (done == 0 && parts->iov_len) return -EIO;
        at += (uint64_t)done;
        while (count && (size_t)done >= parts->iov_len) {
            done -= (ssize_t)parts->iov_len;
            parts++;
            count--;
        }
        if (count) {
            parts->iov_base = (char *)parts->iov_base + done;
            parts->iov_len -= (size_t)done;
        }
    }
    return DONE;
}

/* Stores a sample. DONE; TAKEN where it is there, was there, or another process is at it; NO_ROOM where more has to be
 * granted; or minus an errno. Only with DONE is it readable. */
int32_t ps_arena_put(shelf *s, int64_t id, const uint8_t *data, uint64_t size, const uint8_t *note, uint64_t noted) {
    uint64_t claimed = 0;
    if (claim(entry(s, id), &claimed) != DONE) return TAKEN;
    header top = {size << NOTE_BITS | noted, checksum(note, noted, checksum(data, size, 0))};
    uint64_t room = (sizeof top + size + noted + ALIGN - 1) / ALIGN * ALIGN, at = allocate(s, room);
    int32_t status = at == UINT64_MAX || at + room > atomic_load(s->head + TOP) ? NO_ROOM : DONE;
    struct iovec parts[] = {{&top, sizeof top}, {(void *)data, size}, {(void *)note, noted}};
    if (status == DONE) status = write_all(s->fd, parts, 3, at);
    if (status == DONE) atomic_store_explicit(entry(s, id) + 1, top.sizes, memory_order_relaxed);
    uint64_t ready = (at / ALIGN << ROOM_BITS | room / ALIGN) << STATE_BITS | READY;
    /* it fails where the claim lapsed, and another process took it over */
    if (!atomic_compare_exchange_strong(entry(s, id), &claimed, status == DONE ? ready : EMPTY)) return TAKEN;
    if (status == DONE) {
        atomic_fetch_add(s->row + SAMPLES, 1);
        atomic_fetch_add(s->row + BYTES, room);
    }
    return status;
}

/* Of a shelf's samples that end beyond `below` and up to `above`: into result[0] their number, [1] the bytes of their
 * room. Into [2] the highest end of a sample up to `below`. */
void ps_arena_range(word *index, uint64_t samples, uint64_t below, uint64_t above, uint64_t *result) {
    memset(result, 0, 3 * sizeof *result);
    for (uint64_t id = 0; id < samples; id++) {
        uint64_t found = atomic_load_explicit(index + 2 * id, memory_order_acquire), end = PLACE(found) + ROOM(found);
        if (STATE(found) != READY) continue;
        if (end > below && end <= above) {
            result[0]++;
            result[1] += ROOM(found);
        } else if (end <= below && end > result[2])
            result[2] = end;
    }
}
