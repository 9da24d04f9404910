/* fastalloc MIB [4k|huge|threads]: allocates and touches memory as fast as the machine can, then verifies one word of
 * each page. Shows how far a budget is overshot before the pager has caught up. */
#include "check.h"
#include <pthread.h>

static uint64_t pages;
static volatile char *memory;

static void touch(uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i++) *(volatile uint64_t *)(memory + i * PAGE + 8) = mix(i);
}

static void *touch_half(void *arg) {
    uint64_t half = (uintptr_t)arg;
    touch(half * (pages / 2), (half + 1) * (pages / 2));
    return NULL;
}

int main(int argc, char **argv) {
    const char *how = argc > 2 ? argv[2] : "4k";
    pages = number(argc, argv, 1, 256) * MIB / PAGE;
    memory = map_pages(pages);
    int huge = strcmp(how, "huge") == 0;
    if (madvise((void *)memory, pages * PAGE, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE)) die("madvise: %s", strerror(errno));
    uint64_t start = now_ms();
    if (strcmp(how, "threads") == 0) {
        pthread_t threads[2];
        for (uint64_t i = 0; i < 2; i++)
            if (pthread_create(&threads[i], NULL, touch_half, (void *)(uintptr_t)i)) die("pthread_create failed");
        for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    } else {
        touch(0, pages);
    }
    fprintf(stderr, "touched %lu MiB in %lu ms\n", (unsigned long)(pages * PAGE / MIB), (unsigned long)(now_ms() - start));
    for (uint64_t i = 0; i < pages; i++) {
        volatile uint64_t *w = (volatile uint64_t *)(memory + i * PAGE);
        if (w[1] != mix(i) || w[0] || w[2] || w[WORDS - 1]) die("MISMATCH in page %lu: %lx", (unsigned long)i, (unsigned long)w[1]);
    }
    printf("fastalloc ok %lu pages\n", (unsigned long)pages);
    return 0;
}
