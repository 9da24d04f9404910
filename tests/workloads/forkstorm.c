/* forkstorm MIB: fills memory, then forks children without end, a few at a time; each reads some pages of its parent's and ends. Stops when
 * stdin ends. Most children are too short-lived to be met before they fault. */
#include "check.h"
#include <poll.h>
#include <sys/wait.h>

#define CHILDREN 4
#define READS 64

static int stdin_ended(void) {
    struct pollfd fd = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&fd, 1, 0) == 1 && read(0, &byte, 1) <= 0;
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 64) * MIB / PAGE, random = 1;
    char *memory = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
    for (uint64_t forked = 0; !stdin_ended(); forked++) {
        int status;
        if (forked >= CHILDREN) {
            if (wait(&status) < 0) die("wait: %s", strerror(errno));
            if (status) die("a child ended with status %x", status);
        }
        uint64_t theirs = next(&random);
        pid_t pid = fork();
        if (pid < 0) die("fork: %s", strerror(errno));
        if (pid > 0) continue;
        for (int i = 0; i < READS; i++) {
            uint64_t page = next(&theirs) % pages;
            check_page(memory + page * PAGE, page + 1, "in a child");
        }
        _exit(0);
    }
    return 0;
}
