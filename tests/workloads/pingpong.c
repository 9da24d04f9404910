/* pingpong ROUNDS ROUNDS: a block is moved away and back around forks, by the thread that forks (on one CPU, so that the pager reads of all three at
 * once) and by another. Each child moves the block too, then writes one word of each page, and finds the others as they were. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define BLOCK 24UL

/* Where the kernel maps nothing by itself: nobody else comes into the holes. */
static char *const home = (char *)(1UL << 40), *const away = home + (1UL << 30), *const on = home + (2UL << 30);
static atomic_int stop;

static void move(char *from, char *to) {
    char *at = mremap(from, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (at != to) die("mremap: %s", strerror(errno));
}

/* Where the block is: in a child of a program with several threads that is not known. */
static char *found(void) {
    unsigned char there;
    if (mincore(home, PAGE, &there) == 0) return home;
    if (mincore(away, PAGE, &there) == 0) return away;
    die("the block is nowhere");
}

static void check(char *block, const char *who) {
    for (uint64_t i = 0; i < BLOCK; i++) {
        volatile uint64_t *word = (uint64_t *)(block + i * PAGE) + i;
        uint64_t before = word_of(i + 1, i);
        *word = 1;
        *word = before;
    }
    for (uint64_t i = 0; i < BLOCK; i++) check_page(block + i * PAGE, i + 1, who);
}

static void one_fork(int moves, int child_moves) {
    pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child == 0) {
        char *block = found();
        if (child_moves) {
            move(block, on);
            block = on;
        }
        check(block, "in a child");
        _exit(0);
    }
    if (moves) {
        move(home, away);
        move(away, home);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) die("a child failed");
}

static void *mover(void *unused) {
    while (!stop) {
        move(home, away);
        move(away, home);
    }
    return unused;
}

int main(int argc, char **argv) {
    uint64_t rounds = number(argc, argv, 1, 200), other_rounds = number(argc, argv, 2, 200);
    move(map_pages(BLOCK), home);
    for (uint64_t i = 0; i < BLOCK; i++) fill_page(home + i * PAGE, i + 1);
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    for (uint64_t i = 0; i < rounds; i++) {
        if (i % 4 == 0) sched_setaffinity(0, sizeof one, &one);
        if (i % 4 == 2) sched_setaffinity(0, sizeof all, &all);
        one_fork(1, i % 2);
        if (i % 16 == 0) check(home, "in the parent");
    }
    sched_setaffinity(0, sizeof all, &all);
    pthread_t thread;
    if (pthread_create(&thread, NULL, mover, NULL)) die("no thread");
    for (uint64_t i = 0; i < other_rounds; i++) one_fork(0, i % 2);
    stop = 1;
    pthread_join(thread, NULL);
    check(home, "in the parent");
    printf("pingpong ok\n");
    return 0;
}
