/* forkcow MIB [held]: fork with copy-on-write checks on both sides, a nested fork, vfork + exec, WIPEONFORK and DONTFORK
 * ranges; at the end wait4(-1, __WALL) must find no child that this program did not make. With `held` parent, child and grandchild of the first
 * round wait once each has written what is its own: then it prints "held", and they go on when a line comes on stdin. */
#include "check.h"
#include <sys/wait.h>

#define ROUNDS 2
#define SPECIAL 256 /* pages of each special range */

static uint64_t pages;
static char *memory, *wiped, *kept;

enum { FIRST = 1, CHILD, GRANDCHILD, PARENT };

/* Those who are held: one byte each says that they have come, the end of the other pipe lets them go. */
static int come[2], go[2];
static int holds;

static void hold(void) {
    char byte = 0;
    if (holds && (write(come[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 0)) die("hold: %s", strerror(errno));
}

static void hold_all(void) {
    char byte;
    for (int below = 0; below < 2; below++)
        if (read(come[0], &byte, 1) != 1) die("hold: %s", strerror(errno));
    printf("held\n");
    fflush(stdout);
    if (read(0, &byte, 1) != 1) die("no line");
    close(go[1]);
    holds = 0;
}

static uint64_t tag_of(uint64_t page, uint64_t round, uint64_t writer) {
    return ((page + 1) * 64 + round) * 8 + writer;
}

/* Writes pages i with i % 4 == part; parts of one writer never overlap with those it verifies as another's. */
static void rewrite(uint64_t part, uint64_t round, uint64_t writer) {
    for (uint64_t i = part; i < pages; i += 4) fill_page(memory + i * PAGE, tag_of(i, round, writer));
}

static void verify(const uint64_t writers[4], uint64_t round, const char *where) {
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, tag_of(i, round, writers[i % 4]), where);
}

static void join(pid_t pid, const char *who) {
    int status;
    if (waitpid(pid, &status, 0) != pid) die("waitpid for the %s: %s", who, strerror(errno));
    if (!WIFEXITED(status) || WEXITSTATUS(status)) die("the %s ended with status %x", who, status);
}

static pid_t split(void) {
    pid_t pid = fork();
    if (pid < 0) die("fork: %s", strerror(errno));
    return pid;
}

static void child(uint64_t round) {
    if (holds) close(go[1]);
    verify((uint64_t[]){FIRST, FIRST, FIRST, FIRST}, round, "in the child, fresh");
    for (uint64_t i = 0; i < SPECIAL; i++) check_page(wiped + i * PAGE, 0, "WIPEONFORK in the child");
    unsigned char resident;
    if (mincore(kept, PAGE, &resident) == 0 || errno != ENOMEM) die("the DONTFORK range is in the child");
    rewrite(0, round, CHILD);
    rewrite(1, round, CHILD);
    pid_t grandchild = split();
    if (grandchild == 0) {
        verify((uint64_t[]){CHILD, CHILD, FIRST, FIRST}, round, "in the grandchild, fresh");
        rewrite(1, round, GRANDCHILD);
        hold();
        verify((uint64_t[]){CHILD, GRANDCHILD, FIRST, FIRST}, round, "in the grandchild, rewritten");
        _exit(0);
    }
    rewrite(2, round, CHILD);
    hold();
    verify((uint64_t[]){CHILD, CHILD, CHILD, FIRST}, round, "in the child, rewritten");
    join(grandchild, "grandchild");
    verify((uint64_t[]){CHILD, CHILD, CHILD, FIRST}, round, "in the child, after the grandchild");
    _exit(0);
}

static void vfork_and_exec(char *self) {
    pid_t pid = vfork();
    if (pid == 0) {
        execl(self, self, "exec", (char *)NULL);
        _exit(127);
    }
    if (pid < 0) die("vfork: %s", strerror(errno));
    join(pid, "program executed after vfork");
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "exec") == 0) {
        char *own = map_pages(512);
        for (uint64_t i = 0; i < 512; i++) fill_page(own + i * PAGE, i + 1);
        for (uint64_t i = 0; i < 512; i++) check_page(own + i * PAGE, i + 1, "after exec");
        return 0;
    }
    holds = argc > 2 && strcmp(argv[2], "held") == 0;
    if (holds && (pipe(come) || pipe(go))) die("pipe: %s", strerror(errno));
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    memory = map_pages(pages);
    wiped = map_pages(SPECIAL);
    kept = map_pages(SPECIAL);
    if (madvise(wiped, SPECIAL * PAGE, MADV_WIPEONFORK) || madvise(kept, SPECIAL * PAGE, MADV_DONTFORK))
        die("madvise: %s", strerror(errno));
    for (uint64_t i = 0; i < SPECIAL; i++) fill_page(wiped + i * PAGE, 5000 + i), fill_page(kept + i * PAGE, 9000 + i);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        for (uint64_t part = 0; part < 4; part++) rewrite(part, round, FIRST);
        pid_t pid = split();
        if (pid == 0) child(round);
        rewrite(0, round, PARENT); /* while the child verifies its own view of the same pages */
        rewrite(3, round, PARENT);
        if (holds) hold_all();
        verify((uint64_t[]){PARENT, FIRST, FIRST, PARENT}, round, "in the parent, beside the child");
        vfork_and_exec("/proc/self/exe");
        join(pid, "child");
        verify((uint64_t[]){PARENT, FIRST, FIRST, PARENT}, round, "in the parent, after the child");
    }
    for (uint64_t i = 0; i < SPECIAL; i++) {
        check_page(wiped + i * PAGE, 5000 + i, "WIPEONFORK in the parent");
        check_page(kept + i * PAGE, 9000 + i, "DONTFORK in the parent");
    }
    if (wait4(-1, NULL, __WALL | WNOHANG, NULL) != -1 || errno != ECHILD) die("a child that nobody forked");
    printf("forkcow ok %lu pages\n", (unsigned long)pages);
    return 0;
}
