/* brood ALIVE TOTAL MIB: a process of MIB forks TOTAL children one after the other, ALIVE of which live at the same time. All write to their memory
 * until it is a child's turn to end, and look whether it is right. */
#include "check.h"
#include <sys/wait.h>

static uint64_t pages;
static char *memory;

/* Each process rewrites its pages with tags of its own, a share of them at a time. */
static void rewrite(uint64_t *round, uint64_t owner) {
    for (uint64_t i = *round % 8; i < pages; i += 8) fill_page(memory + i * PAGE, owner << 32 | (i + 1));
    ++*round;
}

static void check_all(uint64_t round, uint64_t owner, uint64_t before) {
    for (uint64_t i = 0; i < pages; i++) {
        uint64_t by = i % 8 < round ? owner : before;
        check_page(memory + i * PAGE, by << 32 | (i + 1), "one of a brood");
    }
}

static void child(uint64_t owner, volatile int *ends) {
    uint64_t round = 0;
    const struct timespec pause = {.tv_nsec = 5000000};
    do {
        rewrite(&round, owner);
        nanosleep(&pause, NULL);
    } while (!*ends);
    check_all(round, owner, 1);
    _exit(0);
}

int main(int argc, char **argv) {
    uint64_t alive = number(argc, argv, 1, 16), total = number(argc, argv, 2, 32);
    pages = number(argc, argv, 3, 1) * MIB / PAGE;
    memory = map_pages(pages);
    int *pids = calloc(total, sizeof *pids);
    volatile int *ends = mmap(NULL, total * sizeof *ends, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!pids || ends == MAP_FAILED) die("no memory");
    uint64_t round = 0;
    for (uint64_t i = 0; i < 8; i++) rewrite(&round, 1);
    for (uint64_t i = 0; i < total + alive; i++) {
        if (i >= alive) {
            int status;
            ends[i - alive] = 1;
            if (waitpid(pids[i - alive], &status, 0) != pids[i - alive]) die("waitpid: %s", strerror(errno));
            if (status) die("a child ended with status %x", status);
        }
        if (i < total) {
            if ((pids[i] = fork()) < 0) die("fork: %s", strerror(errno));
            if (pids[i] == 0) child(i + 2, &ends[i]);
        }
        const struct timespec pause = {.tv_nsec = 20000000};
        nanosleep(&pause, NULL);
        rewrite(&round, 1);
    }
    check_all(round, 1, 1);
    printf("brood ok %lu of %lu pages\n", (unsigned long)total, (unsigned long)pages);
    return 0;
}
