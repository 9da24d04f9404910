/* What every C workload shares: patterns that name their page, checks that say what they found, and failure. */
#ifndef CHECK_H
#define CHECK_H
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define MIB (1024UL * 1024UL)

/* One write(2) to stderr, then exit 1: usable in children, threads and after vfork. */
__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    if (write(2, line, n) < 0) _exit(3);
    _exit(1);
}

static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15UL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9UL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBUL;
    return x ^ (x >> 31);
}

static inline uint64_t next(uint64_t *state) { return *state = mix(*state); }

/* Tag 0 is the page of zeros; any other tag gives 512 words that no other tag has. */
static inline uint64_t word_of(uint64_t tag, uint64_t i) {
    return tag ? mix(tag) + i * 0xD6E8FEB86659FD93UL : 0;
}

static inline void fill_page(void *page, uint64_t tag) {
    volatile uint64_t *w = page;
    for (uint64_t i = 0; i < WORDS; i++) w[i] = word_of(tag, i);
}

static inline int page_is(const void *page, uint64_t tag) {
    const volatile uint64_t *w = page;
    for (uint64_t i = 0; i < WORDS; i++)
        if (w[i] != word_of(tag, i)) return 0;
    return 1;
}

static inline void check_page(const void *page, uint64_t tag, const char *where) {
    if (page_is(page, tag)) return;
    const volatile uint64_t *w = page;
    uint64_t bad = 0;
    while (bad < WORDS && w[bad] == word_of(tag, bad)) bad++;
    if (bad == WORDS) die("MISMATCH %s: page %p was wrong, and is right when read again", where, page);
    die("%s %s: page %p word %lu is %016lx, expected %016lx (pid %d)",
        page_is(page, 0) ? "ZERO PAGE" : "MISMATCH", where, page, (unsigned long)bad,
        (unsigned long)w[bad], (unsigned long)word_of(tag, bad), (int)getpid());
}

static inline void *map_pages(uint64_t pages) {
    void *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) die("mmap of %lu pages: %s", (unsigned long)pages, strerror(errno));
    return p;
}

static inline uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000UL + t.tv_nsec / 1000000UL;
}

static inline uint64_t number(int argc, char **argv, int i, uint64_t otherwise) {
    return i < argc ? strtoull(argv[i], NULL, 10) : otherwise;
}
#endif
