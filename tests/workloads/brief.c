/* brief EXECS: threads that live for 100 us, until the input ends; then it executes itself EXECS times, threads and all. */
#include "check.h"
#include <poll.h>
#include <pthread.h>

#define PAGES (24 * MIB / PAGE)
#define LIFE_NS 100000
#define IMAGE_NS 20000000
#define STARTERS 2

static char *memory;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void *live(void *arg) {
    uint64_t start = now_ns(), i = (uint64_t)arg;
    for (; now_ns() - start < LIFE_NS; i = (i + 1) % PAGES) check_page(memory + i * PAGE, i + 1, "in a thread");
    return NULL;
}

static void *start_threads(void *arg) {
    for (uint64_t random = (uint64_t)arg; random; next(&random)) {
        pthread_t thread;
        /* There are no new threads while one executes a program (EAGAIN). */
        if (pthread_create(&thread, NULL, live, (void *)(random % PAGES)) == 0) pthread_join(thread, NULL);
    }
    return NULL;
}

int main(int argc, char **argv) {
    uint64_t execs = number(argc, argv, 1, 20), again = number(argc, argv, 2, 0);
    memory = map_pages(PAGES);
    for (uint64_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, i + 1);
    for (uint64_t i = 0; i < STARTERS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, start_threads, (void *)(i + 7))) die("pthread_create");
    }
    struct pollfd input = {.fd = 0, .events = POLLIN};
    if (!again && poll(&input, 1, -1) < 0) die("poll: %s", strerror(errno));
    uint64_t start = now_ns();
    while (now_ns() - start < IMAGE_NS) live((void *)0);
    if (execs == 0) {
        printf("brief ok\n");
        return 0;
    }
    char count[32];
    snprintf(count, sizeof count, "%lu", (unsigned long)(execs - 1));
    execl("/proc/self/exe", "brief", count, "1", (char *)NULL);
    die("exec: %s", strerror(errno));
}
