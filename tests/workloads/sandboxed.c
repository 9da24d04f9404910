/* sandboxed MIB: fills memory, then reads it at random together with children that have put themselves under a seccomp filter: nobody can
 * attach to those, so they have no evictor. Says "forked N", and replaces the older of two children, every 50 ms. Ends when stdin ends. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define CHILDREN 2
#define READS 64

static int stdin_ended(void) {
    struct pollfd fd = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&fd, 1, 0) == 1 && read(0, &byte, 1) <= 0;
}

static void allow_everything(void) {
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = 1, .filter = &allow};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        die("seccomp: %s", strerror(errno));
}

static void read_on(const char *memory, uint64_t pages, uint64_t random, const char *where) {
    while (!stdin_ended())
        for (int i = 0; i < READS; i++) {
            uint64_t page = next(&random) % pages;
            check_page(memory + page * PAGE, page + 1, where);
        }
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 64) * MIB / PAGE;
    char *memory = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
    pid_t children[CHILDREN] = {0};
    for (uint64_t forked = 0; !stdin_ended(); forked++) {
        pid_t *child = &children[forked % CHILDREN];
        if (*child > 0 && (kill(*child, SIGKILL) || waitpid(*child, NULL, 0) != *child)) die("child: %s", strerror(errno));
        *child = fork();
        if (*child < 0) die("fork: %s", strerror(errno));
        if (*child == 0) {
            allow_everything();
            read_on(memory, pages, forked, "in a sandboxed child");
            _exit(0);
        }
        printf("forked %lu\n", (unsigned long)forked);
        fflush(stdout);
        for (uint64_t end = now_ms() + 50, random = forked; now_ms() < end;) {
            uint64_t page = next(&random) % pages;
            check_page(memory + page * PAGE, page + 1, "in the parent");
        }
    }
    while (wait(NULL) > 0) {}
    return 0;
}
