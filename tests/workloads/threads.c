/* threads MIB: four threads write and verify one another's pages while short-lived threads come and go; then four
 * threads count in the same pages, each in its own words, so that a write lost while its page moved is found. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

#define WORKERS 4
#define ROUNDS 2
#define COUNTS_A_PAGE 1

static uint64_t pages;
static char *memory;
static pthread_barrier_t barrier;
static atomic_int working = WORKERS;

static uint64_t tag_of(uint64_t page, uint64_t round) { return (page + 1) * 7919 + round; }

static void write_and_verify(uint64_t me) {
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        for (uint64_t i = me; i < pages; i += WORKERS) fill_page(memory + i * PAGE, tag_of(i, round));
        pthread_barrier_wait(&barrier);
        for (uint64_t i = (me + round) % WORKERS; i < pages; i += WORKERS)
            check_page(memory + i * PAGE, tag_of(i, round), "another thread's page");
        pthread_barrier_wait(&barrier);
    }
}

static void count_in_shared_pages(uint64_t me) {
    volatile uint64_t *words = (void *)memory;
    uint64_t random = me + 1, steps = pages * COUNTS_A_PAGE;
    for (uint64_t i = me; i < pages; i += WORKERS) fill_page(memory + i * PAGE, 0);
    pthread_barrier_wait(&barrier);
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t r = next(&random);
        words[(r % pages) * WORDS + (r >> 32) % (WORDS / WORKERS) * WORKERS + me]++;
    }
    pthread_barrier_wait(&barrier);
    random = me + 1; /* the same walk again takes every count back: what is left over was lost or doubled */
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t r = next(&random);
        words[(r % pages) * WORDS + (r >> 32) % (WORDS / WORKERS) * WORKERS + me]--;
    }
    pthread_barrier_wait(&barrier);
    for (uint64_t i = me; i < pages; i += WORKERS) check_page(memory + i * PAGE, 0, "counts taken back");
}

static void *worker(void *arg) {
    write_and_verify((uintptr_t)arg);
    count_in_shared_pages((uintptr_t)arg);
    atomic_fetch_sub(&working, 1);
    return NULL;
}

static __thread uint64_t own[1024];

static void *short_lived(void *arg) {
    volatile char stack[64 * 1024];
    uint64_t tag = (uintptr_t)arg;
    for (uint64_t i = 0; i < sizeof stack; i++) stack[i] = (char)(tag + i);
    for (uint64_t i = 0; i < 1024; i++) own[i] = word_of(tag, i);
    char *heap = malloc(8 * PAGE);
    if (!heap) die("malloc failed");
    memset(heap, (int)tag, 8 * PAGE);
    for (uint64_t i = 0; i < sizeof stack; i++)
        if (stack[i] != (char)(tag + i)) die("MISMATCH in a short thread's stack at %lu", (unsigned long)i);
    for (uint64_t i = 0; i < 1024; i++)
        if (own[i] != word_of(tag, i)) die("MISMATCH in thread-local storage at %lu", (unsigned long)i);
    for (uint64_t i = 0; i < 8 * PAGE; i++)
        if (heap[i] != (char)tag) die("MISMATCH in a short thread's heap at %lu", (unsigned long)i);
    free(heap);
    return arg;
}

static void start(pthread_t *thread, void *(*body)(void *), uint64_t arg) {
    int error = pthread_create(thread, NULL, body, (void *)(uintptr_t)arg);
    if (error) die("pthread_create: %s", strerror(error));
}

int main(int argc, char **argv) {
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    memory = map_pages(pages);
    pthread_barrier_init(&barrier, NULL, WORKERS);
    pthread_t workers[WORKERS], batch[8];
    for (uint64_t i = 0; i < WORKERS; i++) start(&workers[i], worker, i);
    uint64_t churned = 0;
    for (; atomic_load(&working) > 0; churned += 8) {
        for (uint64_t i = 0; i < 8; i++) start(&batch[i], short_lived, churned + i + 1);
        for (uint64_t i = 0; i < 8; i++) pthread_join(batch[i], NULL);
        usleep(2000); /* leave the processors to the workers */
    }
    for (int i = 0; i < WORKERS; i++) pthread_join(workers[i], NULL);
    fprintf(stderr, "churned %lu short threads\n", (unsigned long)churned);
    printf("threads ok %lu pages\n", (unsigned long)pages);
    return 0;
}
