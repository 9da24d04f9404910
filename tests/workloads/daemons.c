/* daemons ROUNDS: a process forks, and exits at once, as daemons begin: its child has the memory, checks it, writes to it, and does the same in
 * its turn. Whatever the parent's end takes away must stay the child's. */
#include "check.h"

#define PAGES 256
#define MOMENT_US 20000

static void live(char *memory, uint64_t rounds) {
    uint64_t random = rounds;
    for (uint64_t round = 1; round <= rounds; round++) {
        for (uint64_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, round * PAGES + i);
        usleep(next(&random) % MOMENT_US);
        pid_t pid = fork();
        if (pid < 0) die("fork: %s", strerror(errno));
        if (pid > 0) _exit(0);
        /* Some are written first, others read. */
        for (uint64_t i = round % 2; i < PAGES; i += 2) memory[i * PAGE]++;
        for (uint64_t i = round % 2; i < PAGES; i += 2) memory[i * PAGE]--;
        for (uint64_t i = 0; i < PAGES; i++) check_page(memory + i * PAGE, round * PAGES + i, "in a daemon");
    }
}

int main(int argc, char **argv) {
    char *memory = map_pages(PAGES), done;
    uint64_t rounds = number(argc, argv, 1, 60);
    int pipes[2];
    if (pipe(pipes)) die("pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid < 0) die("fork: %s", strerror(errno));
    if (pid == 0) {
        live(memory, rounds);
        _exit(write(pipes[1], "", 1) != 1);
    }
    close(pipes[1]);
    if (read(pipes[0], &done, 1) != 1) die("a daemon has ended before its time");
    printf("daemons ok %lu rounds\n", (unsigned long)rounds);
    return 0;
}
