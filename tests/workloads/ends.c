/* ends MIB ROUNDS: in each round a child fills MIB with small pages and exits, while its parent goes on to touch fresh pages, a few at a time.
 * Prints how long the parent stood at most between two of them after a child's end, when the kernel frees what that had. */
#include "check.h"
#include <sys/wait.h>

/* Of the parent: what it has touched is unmapped when it is so much. */
#define OWN_PAGES (64 * MIB / PAGE)

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000UL + t.tv_nsec / 1000UL;
}

static void child(uint64_t pages, uint64_t round) {
    char *p = map_pages(pages);
    if (madvise(p, pages * PAGE, MADV_NOHUGEPAGE)) die("madvise: %s", strerror(errno));
    for (uint64_t i = 0; i < pages; i++) fill_page(p + i * PAGE, round << 32 | (i + 1));
    for (uint64_t i = 0; i < pages; i++) check_page(p + i * PAGE, round << 32 | (i + 1), "the child");
    _exit(0);
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 64) * MIB / PAGE, rounds = number(argc, argv, 2, 4);
    uint64_t longest = 0, tag = 0, last = now_us();
    char *own = map_pages(OWN_PAGES);
    if (madvise(own, OWN_PAGES * PAGE, MADV_NOHUGEPAGE)) die("madvise: %s", strerror(errno));
    for (uint64_t round = 1; round <= rounds; round++) {
        int pid = fork();
        if (pid < 0) die("fork: %s", strerror(errno));
        if (pid == 0) child(pages, round);
        for (uint64_t until = 0; !until || now_us() < until; tag++) {
            int status;
            if (!until && waitpid(pid, &status, WNOHANG) == pid) {
                if (status) die("a child ended with status %x", status);
                until = now_us() + 500000;
            }
            char *page = own + tag % OWN_PAGES * PAGE;
            if (tag >= OWN_PAGES) {
                check_page(page, tag - OWN_PAGES + 1, "the parent");
                if (madvise(page, PAGE, MADV_DONTNEED)) die("madvise: %s", strerror(errno));
            }
            fill_page(page, tag + 1);
            uint64_t now = now_us();
            if (until && now - last > longest) longest = now - last;
            last = now;
        }
    }
    printf("ends ok, longest gap %lu us\n", (unsigned long)longest);
    return 0;
}
