/* firsts PAGES ROUNDS: four threads touch the same fresh pages for the first time at the same moment, in the same order, each
 * writing words of its own; then every word of every thread is verified. A page that is filled a second time, for a thread whose
 * fault was known before the first, loses what was written in between. Between rounds the pages are discarded: mostly by
 * MADV_DONTNEED, at times by munmap and mmap, or by mapping over them. A fifth thread discards pages of its own all the time, so
 * that faults are read together with events. PAGES is a power of two. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

#define WORKERS 4
#define BURST 16 /* pages touched before the threads meet again */

#define OTHERS 8 /* pages of the fifth thread */

static uint64_t pages, rounds;
static atomic_int over;
static char *memory;
static pthread_barrier_t barrier;

static uint64_t tag_of(uint64_t page, uint64_t round, uint64_t who) { return mix((page * 64 + round) * WORKERS + who) | 1; }

static volatile uint64_t *word(uint64_t page, uint64_t who, uint64_t i) {
    return (volatile uint64_t *)(memory + page * PAGE) + i * WORKERS + who;
}

static void renew(uint64_t round) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    uint64_t how = round % 8;
    if (how == 0 && munmap(memory, pages * PAGE)) die("munmap: %s", strerror(errno));
    if (how > 1 && madvise(memory, pages * PAGE, MADV_DONTNEED)) die("madvise: %s", strerror(errno));
    if (how < 2 && mmap(memory, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != memory) die("mmap: %s", strerror(errno));
}

static void check(uint64_t page, uint64_t round, uint64_t who, uint64_t i, uint64_t expected) {
    uint64_t found = *word(page, who, i);
    if (found != expected)
        die("%s: page %lu round %lu, word %lu of thread %lu is %016lx, expected %016lx", found ? "MISMATCH" : "ZERO PAGE",
            (unsigned long)page, (unsigned long)round, (unsigned long)i, (unsigned long)who, (unsigned long)found, (unsigned long)expected);
}

static void *worker(void *arg) {
    uint64_t me = (uintptr_t)arg;
    /* Where the first one unmaps nothing else may be mapped: nobody's stack is missing any more. */
    pthread_barrier_wait(&barrier);
    for (uint64_t round = 0; round < rounds; round++) {
        if (me == 0) renew(round);
        pthread_barrier_wait(&barrier);
        uint64_t stride = round % 2 ? 1 : 67; /* runs of first touches, and single ones */
        for (uint64_t i = 0; i < pages; i++) {
            uint64_t page = i * stride % pages;
            if (i % BURST == 0) pthread_barrier_wait(&barrier);
            if (mix(page * 8 + round) % 4 == 0) check(page, round, me, 0, 0); /* a read gets the shared zero page first */
            *word(page, me, 0) = tag_of(page, round, me);
            check(page, round, me, 1, 0);
            *word(page, me, 1) = tag_of(page, round, me);
        }
        pthread_barrier_wait(&barrier);
        for (uint64_t page = me; page < pages; page += WORKERS)
            for (uint64_t who = 0; who < WORKERS; who++)
                for (uint64_t i = 0; i < WORDS / WORKERS; i++) check(page, round, who, i, i < 2 ? tag_of(page, round, who) : 0);
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

static void *discarder(void *arg) {
    char *own = arg;
    for (uint64_t round = 1; !atomic_load(&over); round++) {
        for (uint64_t i = 0; i < OTHERS; i++) {
            check_page(own + i * PAGE, 0, "discarded page");
            fill_page(own + i * PAGE, round * OTHERS + i);
        }
        for (uint64_t i = 0; i < OTHERS; i++) {
            check_page(own + i * PAGE, round * OTHERS + i, "page of the fifth thread");
            if (madvise(own + i * PAGE, PAGE, MADV_DONTNEED)) die("madvise: %s", strerror(errno));
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    pages = number(argc, argv, 1, 256);
    rounds = number(argc, argv, 2, 200);
    memory = map_pages(pages);
    pthread_barrier_init(&barrier, NULL, WORKERS);
    pthread_t threads[WORKERS], fifth;
    if (pthread_create(&fifth, NULL, discarder, map_pages(OTHERS))) die("pthread_create failed");
    for (uint64_t i = 0; i < WORKERS; i++)
        if (pthread_create(&threads[i], NULL, worker, (void *)(uintptr_t)i)) die("pthread_create failed");
    for (uint64_t i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
    atomic_store(&over, 1);
    pthread_join(fifth, NULL);
    printf("firsts ok %lu pages, %lu rounds\n", (unsigned long)pages, (unsigned long)rounds);
    return 0;
}
