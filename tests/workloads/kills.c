/* kills ROUNDS: starts processes that work on memory and kills them after a moment, perhaps while somebody attaches to them. Nothing of
 * them may stay behind. The memory that the parent shares with them until they write must not change. */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>

#define PAGES 256
#define MOMENT_US 12000

static char *memory;

static void work(int exec) {
    if (exec) execl("/proc/self/exe", "kills", "work", (char *)NULL);
    for (uint64_t round = 1;; round++) {
        for (uint64_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, round * PAGES + i);
        for (uint64_t i = 0; i < PAGES; i++) check_page(memory + i * PAGE, round * PAGES + i, "in a child");
    }
}

int main(int argc, char **argv) {
    memory = map_pages(PAGES);
    if (argc > 1 && strcmp(argv[1], "work") == 0) work(0);
    uint64_t rounds = number(argc, argv, 1, 200), random = rounds;
    for (uint64_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, i + 1);
    for (uint64_t round = 0; round < rounds; round++) {
        int status;
        pid_t pid = fork();
        if (pid < 0) die("fork: %s", strerror(errno));
        if (pid == 0) work(round % 2);
        usleep(next(&random) % MOMENT_US);
        if (kill(pid, SIGKILL)) die("kill: %s", strerror(errno));
        if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
            die("child %d ended with status %x (round %lu)", (int)pid, status, (unsigned long)round);
        for (uint64_t i = round % 16; i < PAGES; i += 16) check_page(memory + i * PAGE, i + 1, "in the parent");
    }
    printf("kills ok %lu rounds\n", (unsigned long)rounds);
    return 0;
}
