/* sprouts MIB: a child fills MIB and checks it over and over; its parent, which is so small that nothing of it is evicted, forks children one after the other, LIVE of
 * which live at the same time, and each finds what its parent has. "ready" when the child has filled its memory, then "forked N" now and then, until the
 * input ends. */
#include "check.h"
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#define LIVE 4
#define OWN (512UL * 1024 / PAGE)
#define TOLD_EACH 100

static void grow(uint64_t pages) {
    char *memory = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
    if (write(1, "ready\n", 6) != 6) die("write");
    for (;;)
        for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "in the large child");
}

static void check_own(const char *own, const char *where) {
    for (uint64_t i = 0; i < OWN; i++) check_page(own + i * PAGE, ~i, where);
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 64) * MIB / PAGE;
    char *own = map_pages(OWN);
    for (uint64_t i = 0; i < OWN; i++) fill_page(own + i * PAGE, ~i);
    pid_t large = fork();
    if (large == 0) grow(pages);
    struct pollfd input = {.fd = 0, .events = POLLIN};
    pid_t live[LIVE] = {0};
    uint64_t forked = 0;
    int status;
    for (; poll(&input, 1, 0) == 0; forked++) {
        pid_t *next = &live[forked % LIVE];
        if (*next && (waitpid(*next, &status, 0) != *next || status)) die("a child ended with %x", status);
        *next = fork();
        if (*next < 0) die("fork: %s", strerror(errno));
        if (*next == 0) {
            check_own(own, "in a child");
            fill_page(own, 1);
            check_page(own, 1, "written by a child");
            _exit(0);
        }
        if (forked % TOLD_EACH == 0) {
            printf("forked %lu\n", (unsigned long)forked);
            fflush(stdout);
        }
    }
    for (int i = 0; i < LIVE; i++)
        if (live[i] && (waitpid(live[i], &status, 0) != live[i] || status)) die("a child ended with %x", status);
    check_own(own, "in the parent");
    if (waitpid(large, &status, WNOHANG) != 0) die("the large child has ended");
    kill(large, SIGKILL);
    waitpid(large, &status, 0);
    puts("every page right");
    return 0;
}
