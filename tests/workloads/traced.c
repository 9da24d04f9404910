/* traced ROUNDS: who is being stopped by a tracer does what changes who is traced. A child by CLONE_PTRACE is traced as its parent is; a thread
 * that is not the first one and executes a program goes on under the first one's id. None may be left stopped. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PAGES 2048
#define CHILDREN 9

static char **again;

static void fork_traced(uint64_t round) {
    for (uint64_t i = 0; i < CHILDREN; i++) {
        /* One waits for its end in clone, one ends by itself, one is killed. */
        int expected = i % 3 == 2 ? SIGKILL : 0, status;
        long pid = syscall(SYS_clone, CLONE_PTRACE | SIGCHLD | (i % 3 ? 0 : CLONE_VFORK), NULL, NULL, NULL, NULL);
        if (pid < 0) die("clone: %s", strerror(errno));
        if (pid == 0 && expected) pause();
        if (pid == 0) _exit(0);
        if (expected) kill(pid, SIGKILL);
        if (waitpid(pid, &status, __WALL) != pid || status != expected)
            die("child %lu of round %lu ended with status %x", i, round, status);
    }
}

static void *execute(void *unused) {
    (void)unused;
    execv("/proc/self/exe", again);
    die("execv: %s", strerror(errno));
}

int main(int argc, char **argv) {
    uint64_t rounds = number(argc, argv, 1, 40);
    char *memory = map_pages(PAGES), left[24];
    for (uint64_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, rounds + i);
    fork_traced(rounds);
    for (uint64_t i = 0; i < PAGES; i++) check_page(memory + i * PAGE, rounds + i, "after children that may be traced");
    if (rounds == 0) {
        puts("traced ok");
        return 0;
    }
    snprintf(left, sizeof left, "%lu", (unsigned long)rounds - 1);
    again = (char *[]){argv[0], left, NULL};
    pthread_t thread;
    if (pthread_create(&thread, NULL, execute, NULL)) die("pthread_create failed");
    for (;;) __asm__ volatile("");
}
