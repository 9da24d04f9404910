/* filtered MIB: a thread that has put itself, and no other, under a seccomp filter fills memory and reads it for two seconds, while the first thread waits for
 * its end. The filter kills the process when the thread maps memory, starts a process or changes what is protected, as it never does. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define REFUSE(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)

static char *memory;
static uint64_t pages;

static void *work(void *nothing) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSE(SYS_mmap), REFUSE(SYS_mprotect), REFUSE(SYS_clone), REFUSE(SYS_prctl), REFUSE(SYS_wait4),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        die("seccomp: %s", strerror(errno));
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
    for (uint64_t end = now_ms() + 2000; now_ms() < end;)
        for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "under a filter");
    return nothing;
}

int main(int argc, char **argv) {
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    memory = map_pages(pages);
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL) || pthread_join(thread, NULL)) die("pthread");
    printf("filtered ok %lu pages\n", (unsigned long)pages);
    return 0;
}
