/* A memory of which every page is filled, pressed out of memory, and checked. */
#ifndef AREA_H
#define AREA_H
#include "check.h"
#include <pthread.h>

static uint64_t pages;
static char *area;

static inline void *page_of(uint64_t i) { return area + i * PAGE; }

static inline void fill(uint64_t salt) {
    for (uint64_t i = 0; i < pages; i++) fill_page(page_of(i), salt + i + 1);
}

static inline void check(uint64_t salt, const char *where) {
    for (uint64_t i = 0; i < pages; i++) check_page(page_of(i), salt + i + 1, where);
}

/* Memory that is not looked at again, so that what was filled before goes away. */
static inline void press(uint64_t bytes) {
    char *more = map_pages(bytes / PAGE);
    for (uint64_t i = 0; i < bytes / PAGE; i++) fill_page(more + i * PAGE, 0xF00D + i);
    for (uint64_t i = 0; i < bytes / PAGE; i++) check_page(more + i * PAGE, 0xF00D + i, "press");
    munmap(more, bytes);
}

static inline void *start(void *(*run)(void *), void *argument) {
    pthread_t *thread = malloc(sizeof *thread);
    if (pthread_create(thread, NULL, run, argument)) die("pthread_create");
    return thread;
}

static inline void join(void *thread) {
    if (pthread_join(*(pthread_t *)thread, NULL)) die("pthread_join");
    free(thread);
}

struct named { const char *name; void (*run)(void); };

/* PROGRAM CASE [MIB]: fills nothing; maps the area and runs the case. */
static inline int run_case(int argc, char **argv, const struct named *cases, unsigned count) {
    pages = number(argc, argv, 2, 64) * MIB / PAGE;
    area = map_pages(pages);
    for (unsigned i = 0; argc > 1 && i < count; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    die("usage: %s CASE [MIB]", argv[0]);
}
#endif
