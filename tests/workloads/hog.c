/* hog MIB_PER_S: for each number of MiB that a line of its input says, fills that much more memory at that pace (0: as fast as it can), and prints
 * "filled MIB in US, longest US": of all, and of 2 MiB. Ends with its input. */
#include "check.h"

#define STEP (2 * MIB)

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void fill(uint64_t mib, uint64_t pace) {
    char *memory = mmap(NULL, mib * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) die("mmap: %s", strerror(errno));
    madvise(memory, mib * MIB, MADV_NOHUGEPAGE);
    uint64_t start = now_ns(), longest = 0, before = start;
    for (uint64_t at = 0; at < mib * MIB; at += PAGE) {
        memory[at] = 1;
        if ((at + PAGE) % STEP != 0) continue;
        uint64_t now = now_ns();
        if (now - before > longest) longest = now - before;
        while (pace && (now - start) * pace < (at + PAGE) / MIB * 1000000000) now = now_ns();
        before = now;
    }
    printf("filled %lu in %lu, longest %lu\n", mib, (now_ns() - start) / 1000, longest / 1000);
    fflush(stdout);
}

int main(int argc, char **argv) {
    char line[32];
    uint64_t pace = number(argc, argv, 1, 2048);
    while (fgets(line, sizeof line, stdin)) fill(strtoul(line, NULL, 10), pace);
    return 0;
}
