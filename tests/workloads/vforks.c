/* vforks into MIB PROGRAM...: the same once; the child executes this program.
 * vforks held MIB parent|child: the same once; this one fills the memory first. Whoever has filled it says so, and waits for a line.
 * vforks MIB ROUNDS: a vfork child fills memory that it shares with its parent, sleeps, and executes another program, which leaves
 * that memory to the parent. The parent, which nobody could attach to meanwhile, must find every page. Each round is a program of
 * its own, so that the child may be the first that is met of this memory. */
#include "check.h"
#include <sys/wait.h>

static void join(pid_t pid, const char *who) {
    int status;
    if (waitpid(pid, &status, 0) != pid) die("waitpid for the %s: %s", who, strerror(errno));
    if (!WIFEXITED(status) || WEXITSTATUS(status)) die("the %s ended with status %x", who, status);
}

static int into(uint64_t pages, char **program) {
    char *memory = map_pages(pages);
    struct timespec nap = {.tv_nsec = 150000000};
    pid_t pid = vfork();
    if (pid < 0) die("vfork: %s", strerror(errno));
    if (pid == 0) {
        for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
        nanosleep(&nap, NULL);
        execv(program[0], program);
        _exit(127);
    }
    join(pid, "vfork child");
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "after the vfork child has ended");
    return 0;
}

/* By one call each, as a vfork child may. */
static void say_and_wait(const char *line) {
    char byte = 0;
    if (write(1, line, strlen(line)) < 0) die("write: %s", strerror(errno));
    while (byte != '\n')
        if (read(0, &byte, 1) != 1) die("no line came");
}

static int held(uint64_t pages, int parent_first) {
    char *memory = map_pages(pages);
    for (uint64_t i = 0; parent_first && i < pages; i++) fill_page(memory + i * PAGE, pages + i);
    if (parent_first) say_and_wait("filled by the parent\n");
    pid_t pid = vfork();
    if (pid < 0) die("vfork: %s", strerror(errno));
    if (pid == 0) {
        for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
        say_and_wait("filled by the child\n");
        execl("/proc/self/exe", "vforks", "leave", (char *)NULL);
        _exit(127);
    }
    join(pid, "vfork child");
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "after the vfork child has ended");
    return 0;
}

static int one_round(uint64_t pages) {
    char *memory = map_pages(pages);
    struct timespec nap = {.tv_nsec = 150000000};
    pid_t pid = vfork();
    if (pid < 0) die("vfork: %s", strerror(errno));
    if (pid == 0) {
        for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
        nanosleep(&nap, NULL);
        execl("/proc/self/exe", "vforks", "leave", (char *)NULL);
        _exit(127);
    }
    nanosleep(&nap, NULL); /* for whoever watches to see that the child has left */
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "after the vfork child has left");
    join(pid, "vfork child");
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "leave") == 0) return usleep(200000);
    if (argc > 3 && strcmp(argv[1], "into") == 0) return into(number(argc, argv, 2, 8) * MIB / PAGE, argv + 3);
    if (argc > 3 && strcmp(argv[1], "held") == 0)
        return held(number(argc, argv, 2, 8) * MIB / PAGE, strcmp(argv[3], "parent") == 0);
    if (argc > 2 && strcmp(argv[1], "round") == 0) return one_round(strtoull(argv[2], NULL, 10));
    uint64_t pages = number(argc, argv, 1, 8) * MIB / PAGE, rounds = number(argc, argv, 2, 4);
    char count[32];
    snprintf(count, sizeof count, "%lu", (unsigned long)pages);
    for (uint64_t round = 0; round < rounds; round++) {
        pid_t pid = fork();
        if (pid < 0) die("fork: %s", strerror(errno));
        if (pid == 0) {
            execl("/proc/self/exe", "vforks", "round", count, (char *)NULL);
            _exit(127);
        }
        join(pid, "round");
    }
    printf("vforks ok %lu pages, %lu rounds\n", (unsigned long)pages, (unsigned long)rounds);
    return 0;
}
