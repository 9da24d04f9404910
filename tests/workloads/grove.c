/* grove PROCESSES THREADS MIB: a chain of processes, each the child of the one before, with THREADS threads and MIB of memory each. The threads write
 * to their own words of pages that they share, and look whether what they wrote before is still there. Meanwhile each process, unless it is the only
 * one, forks children one after the other, which must have what it had. "ready" when all memory has been filled, then "round N", until the input ends. */
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define THREADS_MAX 8
/* Between two pauses, so that others get a CPU. */
#define PAGES_A_TURN 64

static struct { atomic_ulong ready; atomic_int ends; } *common;
static uint64_t threads, pages, kept_pages;
/* Threads share the one, only the process's first thread writes to the other. */
static char *shared, *kept;

static void nap(long ns) {
    const struct timespec pause = {.tv_nsec = ns};
    nanosleep(&pause, NULL);
}

static void *worker(void *arg) {
    uint64_t me = (uintptr_t)arg;
    for (uint64_t pass = 1;; pass++) {
        int last = atomic_load(&common->ends);
        for (uint64_t i = 0; i < pages; i++) {
            volatile uint64_t *word = (uint64_t *)(shared + i * PAGE) + me * WORDS / THREADS_MAX + pass % 4;
            uint64_t before = pass > 4 ? word_of(i + 1, (pass - 4) * THREADS_MAX + me) : 0;
            if (*word != before)
                die("%s word %lu of page %lu is %lx instead of %lx in pass %lu (pid %d)", *word ? "MISMATCH" : "ZERO PAGE",
                    (unsigned long)me, (unsigned long)i, (unsigned long)*word, (unsigned long)before, (unsigned long)pass, (int)getpid());
            *word = word_of(i + 1, pass * THREADS_MAX + me);
            if (i % PAGES_A_TURN == 0 && pass > 1) nap(1000000);
        }
        if (pass == 1) atomic_fetch_add(&common->ready, 1);
        if (last) return NULL;
    }
}

static uint64_t tag_of(uint64_t page, uint64_t round) { return (page + 1) << 32 | round; }

/* A process has filled each eighth in the last round whose number leaves that remainder. */
static void check_kept(uint64_t round, const char *where) {
    for (uint64_t i = 0; i < kept_pages; i++) {
        uint64_t part = i % 8, by = round < 8 ? 0 : round - (round - part) % 8;
        check_page(kept + i * PAGE, tag_of(i, by < 8 ? 0 : by), where);
    }
}

static void child(uint64_t round) {
    check_kept(round, "in a child, fresh");
    for (uint64_t i = round % 8; i < kept_pages; i += 8) fill_page(kept + i * PAGE, ~i);
    for (uint64_t i = round % 8; i < kept_pages; i += 8) check_page(kept + i * PAGE, ~i, "in a child, rewritten");
    _exit(0);
}

static void join(pid_t pid) {
    int status;
    if (waitpid(pid, &status, 0) != pid) die("waitpid: %s", strerror(errno));
    if (status) die("a child ended with status %x", status);
}

static pid_t split(void) {
    pid_t pid = fork();
    if (pid < 0) die("fork: %s", strerror(errno));
    if (pid == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

static int has_ended(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&input, 1, 0) == 1 && read(0, &byte, 1) == 0;
}

static void live(int is_root, uint64_t processes) {
    pthread_t ids[THREADS_MAX];
    shared = map_pages(pages);
    kept = map_pages(kept_pages);
    for (uint64_t i = 0; i < kept_pages; i++) fill_page(kept + i * PAGE, tag_of(i, 0));
    for (uint64_t i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, worker, (void *)(uintptr_t)i)) die("pthread_create failed");
    while (is_root && atomic_load(&common->ready) < processes * threads) nap(5000000);
    if (is_root) printf("ready\n"), fflush(stdout);
    for (uint64_t round = 8; !atomic_load(&common->ends); round++) {
        for (uint64_t i = round % 8; i < kept_pages; i += 8) fill_page(kept + i * PAGE, tag_of(i, round));
        pid_t pid = processes > 1 ? split() : -1;
        if (pid == 0) child(round);
        if (pid > 0) join(pid);
        check_kept(round, "in a parent");
        if (is_root) printf("round %lu\n", (unsigned long)round), fflush(stdout);
        if (is_root && has_ended()) atomic_store(&common->ends, 1);
        nap(20000000);
    }
    for (uint64_t i = 0; i < threads; i++) pthread_join(ids[i], NULL);
}

int main(int argc, char **argv) {
    uint64_t processes = number(argc, argv, 1, 3);
    threads = number(argc, argv, 2, 3);
    kept_pages = pages = number(argc, argv, 3, 32) * MIB / PAGE / 2;
    if (threads > THREADS_MAX) die("at most %d threads", THREADS_MAX);
    common = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (common == MAP_FAILED) die("mmap: %s", strerror(errno));
    uint64_t depth = 1;
    pid_t below = 0;
    while (depth < processes && (below = split()) == 0) depth++;
    /* Whoever forked nobody is the last; the first has not been forked. */
    int is_root = processes == 1 || (below && depth == 1);
    live(is_root, processes);
    if (below) join(below);
    if (is_root) printf("grove ended, every page right\n");
    return 0;
}
