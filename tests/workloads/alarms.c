/* alarms MIB: the kernel copies pages of memory to a file and from there onto others, while a timer's signal comes every
 * millisecond. A thread that faults inside the kernel and has a signal pending does not sleep: it faults again and again
 * until it is served. Prints "round N" after each round; when stdin ends it looks at every page once more, and stops. */
#include "check.h"
#include <poll.h>
#include <signal.h>
#include <sys/time.h>

static volatile sig_atomic_t ticks;

static void tick(int number) {
    (void)number;
    ticks++;
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 64) * MIB / PAGE, state = 1;
    char *memory = map_pages(pages), bounce[PAGE] __attribute__((aligned(4096)));
    uint32_t *tags = map_pages((pages * sizeof *tags + PAGE - 1) / PAGE);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, tags[i] = i + 1);
    int file = memfd_create("alarms", MFD_CLOEXEC); /* holds one page */
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 1000}, {0, 1000}};
    if (file < 0 || sigaction(SIGALRM, &action, NULL) || setitimer(ITIMER_REAL, &often, NULL)) die("alarms: %s", strerror(errno));
    struct pollfd in = {.fd = 0, .events = POLLIN};
    for (uint64_t round = 0; poll(&in, 1, 0) != 1; round++) {
        for (uint64_t turn = 0; turn < pages / 8; turn++) {
            uint64_t from = next(&state) % pages, to = next(&state) % pages;
            if (pwrite(file, memory + from * PAGE, PAGE, 0) != (ssize_t)PAGE || pread(file, bounce, PAGE, 0) != (ssize_t)PAGE)
                die("copying a page to a file: %s", strerror(errno));
            check_page(bounce, tags[from], "copied by the kernel");
            if (pread(file, memory + to * PAGE, PAGE, 0) != (ssize_t)PAGE) die("copying a page from a file: %s", strerror(errno));
            tags[to] = tags[from];
        }
        printf("round %lu\n", (unsigned long)round);
        fflush(stdout);
    }
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, tags[i], "at the end");
    if (!ticks) die("no signal came");
    printf("ended, every page right\n");
    return 0;
}
