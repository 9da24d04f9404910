/* manyprocs COUNT KIB [huge]: COUNT processes fill KIB each, all at the same time, hold it until every one has filled its own, and verify it.
 * Shows how far the budget of a tree is overshot by processes that begin to allocate at once. */
#include "check.h"
#include <sys/wait.h>

static uint64_t pages;
static int huge;

static void *memory_of_one(void) {
    char *p = map_pages(pages + 2 * MIB / PAGE);
    if (!huge) return p;
    /* Huge pages need an aligned beginning. */
    p = (char *)(((uintptr_t)p + 2 * MIB - 1) & ~(2 * MIB - 1));
    if (madvise(p, pages * PAGE, MADV_HUGEPAGE)) die("madvise: %s", strerror(errno));
    return p;
}

/* Reads until every writer has closed the pipe. */
static void await_all(int pipe) {
    char byte;
    while (read(pipe, &byte, 1) != 0) {}
}

static void child(uint64_t number, int start, int filled[2]) {
    await_all(start);
    char *memory = memory_of_one();
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, number << 32 | (i + 1));
    close(filled[1]);
    await_all(filled[0]);
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, number << 32 | (i + 1), "a process of many");
    _exit(0);
}

int main(int argc, char **argv) {
    uint64_t count = number(argc, argv, 1, 200);
    pages = number(argc, argv, 2, 1024) * 1024 / PAGE;
    huge = argc > 3 && strcmp(argv[3], "huge") == 0;
    int start[2], filled[2];
    if (pipe(start) || pipe(filled)) die("pipe: %s", strerror(errno));
    for (uint64_t i = 0; i < count; i++) {
        int pid = fork();
        if (pid < 0) die("fork %lu: %s", (unsigned long)i, strerror(errno));
        if (pid == 0) {
            close(start[1]);
            child(i + 1, start[0], filled);
        }
    }
    close(start[1]);
    close(filled[1]);
    for (uint64_t i = 0; i < count; i++) {
        int status;
        if (wait(&status) < 0) die("wait: %s", strerror(errno));
        if (status) die("a child ended with status %x", status);
    }
    printf("manyprocs ok %lu processes of %lu pages\n", (unsigned long)count, (unsigned long)pages);
    return 0;
}
