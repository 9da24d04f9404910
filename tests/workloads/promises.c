/* What a program may rely on, in the words of the kernel's manual, and a pager from outside can get wrong. Usage: promises CASE MIB
 * Each case fills MIB of memory (of which most is evicted), does what its name says, and checks every page. */
#include "area.h"
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

/* ---- the first thread ends, the others go on */

static void *outlive(void *unused) {
    (void)unused;
    char path[64], state[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
    /* Until the first thread is a zombie. */
    do {
        int fd = open(path, O_RDONLY);
        ssize_t n = fd < 0 ? 0 : read(fd, state, sizeof state - 1);
        if (n > 0) state[n] = 0;
        if (fd >= 0) close(fd);
        sched_yield();
    } while (!strstr(state, ") Z "));
    for (int round = 0; round < 4; round++) {
        check(round * pages, "after the first thread");
        fill((round + 1) * pages);
        press(24 * MIB);
    }
    check(4 * pages, "after the first thread");
    puts("the threads found their pages");
    fflush(stdout);
    _exit(0);
}

static void leader(void) {
    fill(0);
    start(outlive, NULL);
    pthread_exit(NULL);
}

/* ---- a process that is no thread has the memory, and its maker ends */

static int in_child(void *done) {
    for (int round = 0; round < 3; round++) {
        check(round * pages, "in a process that shares the memory");
        fill((round + 1) * pages);
    }
    check(3 * pages, "in a process that shares the memory");
    if (write((int)(intptr_t)done, "d", 1) != 1) _exit(4);
    _exit(0);
}

static void sharer(void) {
    int done[2];
    char byte;
    if (pipe(done)) die("pipe");
    fflush(stdout);
    pid_t parent = fork();
    if (!parent) {
        fill(0);
        char *stack = map_pages(64);
        if (clone(in_child, stack + 64 * PAGE, CLONE_VM | SIGCHLD, (void *)(intptr_t)done[1]) < 0)
            die("clone: %s", strerror(errno));
        kill(getpid(), SIGKILL);
    }
    close(done[1]);
    if (waitpid(parent, NULL, 0) != parent) die("waitpid");
    if (read(done[0], &byte, 1) != 1) die("the process that shares the memory did not end well");
    puts("the sharer found its pages");
}

/* ---- guards */

static void guard(void *at, uint64_t count) {
    if (madvise(at, count * PAGE, MADV_GUARD_INSTALL)) die("guard: %s", strerror(errno));
}

static void unguard(void *at, uint64_t count) {
    if (madvise(at, count * PAGE, MADV_GUARD_REMOVE)) die("unguard: %s", strerror(errno));
}

/* Linux has them since 6.13. */
static void has_guards(void) {
    int has = madvise(area, PAGE, MADV_GUARD_INSTALL) == 0;
    if (!has && errno != EINVAL) die("guard: %s", strerror(errno));
    puts(has ? "guards" : "no guards");
}

static void guards(void) {
    fill(0);
    press(24 * MIB);
    guard(area, 1);
    unguard(area, 1);
    check_page(page_of(0), 0, "the first guarded page");
    /* Every other stretch of 16 pages is guarded for a moment. */
    for (uint64_t i = 32; i + 16 <= pages; i += 32) {
        guard(page_of(i), 16);
        if (i % 64 == 0) unguard(page_of(i), 16);
    }
    press(24 * MIB);
    for (uint64_t i = 32; i + 16 <= pages; i += 32) unguard(page_of(i), 16);
    for (uint64_t i = 1; i < pages; i++) {
        int guarded = i >= 32 && i % 32 < 16 && i / 32 * 32 + 16 <= pages;
        check_page(page_of(i), guarded ? 0 : i + 1, guarded ? "a guarded page" : "beside a guard");
    }
    puts("the guarded pages are zeros");
}

static volatile sig_atomic_t caught;
static void on_segv(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    caught = 1;
    /* The page may be touched from now on. */
    unguard((void *)((uintptr_t)info->si_addr & ~(PAGE - 1)), 1);
}

/* Reading and first touches around guards must not fill them. */
static void guarded(void) {
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    fill(0);
    press(24 * MIB);
    char *fresh = map_pages(pages / 4);
    for (uint64_t i = 64; i < pages; i += 64) guard(page_of(i), 1);
    for (uint64_t i = 8; i < pages / 4; i += 8) guard(fresh + i * PAGE, 1);
    for (uint64_t i = 0; i < pages; i++) {
        caught = 0;
        int guard = i >= 64 && i % 64 == 0;
        check_page(page_of(i), guard ? 0 : i + 1, "beside a guard");
        if (caught != guard) die("page %lu: %s", (unsigned long)i, guard ? "its guard has gone" : "a guard that nobody put there");
    }
    for (uint64_t i = 0; i < pages / 4; i++) {
        caught = 0;
        int guard = i >= 8 && i % 8 == 0;
        fill_page(fresh + i * PAGE, i + 1);
        if (caught != guard) die("new page %lu: %s", (unsigned long)i, guard ? "its guard has gone" : "a guard that nobody put there");
    }
    for (uint64_t i = 0; i < pages / 4; i++) check_page(fresh + i * PAGE, i + 1, "new page");
    puts("guards guard");
}

/* ---- threads free, map and grow blocks */

#define BLOCKS 6
#define CHURNERS 4
static uint64_t churn_rounds;

static void *churn(void *which) {
    uint64_t seed = 77 + (uintptr_t)which, tag[BLOCKS] = {0}, size[BLOCKS] = {0};
    char *block[BLOCKS] = {0};
    for (uint64_t round = 0; round < churn_rounds; round++) {
        int i = next(&seed) % BLOCKS;
        if (!block[i]) {
            size[i] = 64 + next(&seed) % 192;
            block[i] = map_pages(size[i]);
            tag[i] = next(&seed) | 1;
            for (uint64_t p = 0; p < size[i]; p++) fill_page(block[i] + p * PAGE, tag[i] + p);
            continue;
        }
        if (next(&seed) % 3) {
            uint64_t larger = size[i] + 32 + next(&seed) % 128;
            char *moved = mremap(block[i], size[i] * PAGE, larger * PAGE, MREMAP_MAYMOVE);
            if (moved == MAP_FAILED) die("mremap of %p (%lu pages): %s", (void *)block[i], (unsigned long)size[i], strerror(errno));
            for (uint64_t p = size[i]; p < larger; p++) fill_page(moved + p * PAGE, tag[i] + p);
            block[i] = moved;
            size[i] = larger;
        }
        for (uint64_t p = next(&seed) % 8; p < size[i]; p += 8) check_page(block[i] + p * PAGE, tag[i] + p, "block");
        if (size[i] > 512) {
            for (uint64_t p = 0; p < size[i]; p++) check_page(block[i] + p * PAGE, tag[i] + p, "block");
            munmap(block[i], size[i] * PAGE);
            block[i] = NULL;
        }
    }
    for (int i = 0; i < BLOCKS; i++)
        for (uint64_t p = 0; p < size[i] && block[i]; p++) check_page(block[i] + p * PAGE, tag[i] + p, "block");
    return NULL;
}

static void realloc_churn(void) {
    fill(0);
    churn_rounds = 1200;
    void *threads[CHURNERS];
    for (uintptr_t i = 0; i < CHURNERS; i++) threads[i] = start(churn, (void *)i);
    for (int i = 0; i < CHURNERS; i++) join(threads[i]);
    check(0, "beside the blocks");
    puts("every block was right");
}

/* ---- locked memory grows */

static void locked(void) {
    fill(0);
    press(24 * MIB);
    uint64_t size = 512;
    char *block = map_pages(size);
    for (uint64_t p = 0; p < size; p++) fill_page(block + p * PAGE, p + 7);
    if (mlock(block, size * PAGE)) die("mlock: %s", strerror(errno));
    for (int i = 0; i < 6; i++) {
        char *between = map_pages(size / 4); /* so that it must move now and then */
        char *moved = mremap(block, size * PAGE, (size + 300) * PAGE, MREMAP_MAYMOVE);
        if (moved == MAP_FAILED) die("mremap of locked memory: %s", strerror(errno));
        for (uint64_t p = size; p < size + 300; p++) {
            check_page(moved + p * PAGE, 0, "what was gained");
            fill_page(moved + p * PAGE, p + 7);
        }
        block = moved;
        size += 300;
        fill_page(between, 3);
        press(8 * MIB);
        for (uint64_t p = 0; p < size; p++) check_page(block + p * PAGE, p + 7, "locked");
    }
    check(0, "beside locked memory");
    puts("locked memory grew");
}

/* ---- children that do not inherit everything */

static _Atomic int forking;
static char *wiped;
static void *toggle(void *unused) {
    (void)unused;
    /* Another mapping of the process changes all the time, and with it the events that are told. */
    while (forking) {
        char *p = map_pages(256);
        fill_page(p, 5);
        madvise(p, PAGE, MADV_DONTNEED);
        munmap(p, 256 * PAGE);
    }
    return NULL;
}

static void inherit(void) {
    fill(0);
    uint64_t count = pages / 4;
    wiped = map_pages(count);
    for (uint64_t i = 0; i < count; i++) fill_page(wiped + i * PAGE, 9000 + i);
    if (madvise(wiped, count * PAGE, MADV_WIPEONFORK)) die("wipeonfork: %s", strerror(errno));
    press(24 * MIB);
    forking = 1;
    void *threads[2] = {start(toggle, NULL), start(toggle, NULL)};
    for (int round = 0; round < 12; round++) {
        fflush(stdout);
        pid_t child = fork();
        if (child < 0) die("fork: %s", strerror(errno));
        if (!child) {
            for (uint64_t i = 0; i < count; i++) check_page(wiped + i * PAGE, 0, "wiped in the child");
            for (uint64_t i = round; i < pages; i += 12) check_page(page_of(i), i + 1, "child");
            if (round % 3 == 0) {
                fill_page(page_of(round), 4);
                pid_t grandchild = fork();
                if (!grandchild) {
                    check_page(page_of(round), 4, "grandchild");
                    for (uint64_t i = 0; i < count; i += 5) check_page(wiped + i * PAGE, 0, "wiped in the grandchild");
                    _exit(0);
                }
                int status;
                if (waitpid(grandchild, &status, 0) != grandchild || status) _exit(5);
            }
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) die("a child ended with %x", status);
        for (uint64_t i = round; i < count; i += 12) check_page(wiped + i * PAGE, 9000 + i, "wiped in the parent?");
    }
    forking = 0;
    join(threads[0]);
    join(threads[1]);
    check(0, "parent");
    puts("children had what is theirs");
}

/* ---- a fork while others purge */

static void *purge(void *which) {
    uint64_t seed = 5 + (uintptr_t)which;
    char *p = map_pages(512);
    while (forking) {
        for (int i = 0; i < 64; i++) fill_page(p + next(&seed) % 512 * PAGE, 1 + i);
        madvise(p, 512 * PAGE, MADV_DONTNEED);
        check_page(p + next(&seed) % 512 * PAGE, 0, "purged");
    }
    munmap(p, 512 * PAGE);
    return NULL;
}

static void purging(void) {
    fill(0);
    forking = 1;
    void *threads[8];
    for (uintptr_t i = 0; i < 8; i++) threads[i] = start(purge, (void *)i);
    for (int round = 0; round < 8; round++) {
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            check(0, "child");
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) die("a child ended with %x", status);
    }
    forking = 0;
    for (int i = 0; i < 8; i++) join(threads[i]);
    check(0, "parent");
    puts("forked beside purges");
}

/* ---- a thread reads beside others that purge without pause, and touch nothing */

static void *purge_only(void *unused) {
    char *p = map_pages(512);
    fill_page(p, 1);
    while (forking) madvise(p + PAGE, PAGE, MADV_DONTNEED);
    munmap(p, 512 * PAGE);
    return unused;
}

static void restless(void) {
    uint64_t seed = 5;
    fill(0);
    forking = 1;
    void *threads[2];
    for (int i = 0; i < 2; i++) threads[i] = start(purge_only, NULL);
    for (int i = 0; i < 300; i++) {
        uint64_t n = next(&seed) % pages;
        check_page(page_of(n), n + 1, "beside purges");
    }
    forking = 0;
    for (int i = 0; i < 2; i++) join(threads[i]);
    puts("read beside purges");
}

/* ---- a single thread makes room, and maps something else there some time later */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void room(void) {
    char *room = map_pages(16);
    if (munmap(room, 16 * PAGE)) die("munmap");
    for (double end = seconds() + 0.05; seconds() < end;) {}
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(room, 16 * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != room) die("mmap");
    for (int again = 0; again < 100; again++) {
        for (int n = 0; n < 16; n++) fill_page(room + n * PAGE, n + 1 + again);
        for (int n = 0; n < 16; n++) check_page(room + n * PAGE, n + 1 + again, "in the room");
    }
}

static void rooms(void) {
    fill(0);
    for (int i = 0; i < 20; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child < 0) die("fork");
        if (!child) {
            execl("/proc/self/exe", "promises", "room", NULL);
            die("exec");
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) die("the child ended by %x", status);
    }
    check(0, "beside them");
    puts("each had its room");
}

/* ---- somebody in the workload adopts orphans and waits for all of them */

static void subreaper(void) {
    if (prctl(PR_SET_CHILD_SUBREAPER, 1)) die("prctl");
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        fill(0);
        press(24 * MIB);
        check(0, "below a subreaper");
        fill(pages);
        check(pages, "below a subreaper");
        _exit(0);
    }
    fill(3);
    check(3, "subreaper");
    int status, bad = 0;
    while (wait(&status) > 0) bad |= status;
    if (errno != ECHILD || bad) die("wait: %s, %x", strerror(errno), bad);
    puts("everybody was waited for");
}

/* ---- many processes at once, all forked before any is met */

static void brood(void) {
    fill(0);
    press(24 * MIB);
    int go[2];
    if (pipe(go)) die("pipe");
    enum { CHILDREN = 1100 };
    static pid_t children[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
        children[i] = fork();
        if (children[i] < 0) die("fork %d: %s", i, strerror(errno));
        if (!children[i]) {
            char byte;
            close(go[1]);
            if (read(go[0], &byte, 1) < 0) _exit(3);
            check_page(page_of(i % pages), i % pages + 1, "one of many");
            _exit(0);
        }
    }
    close(go[1]);
    for (int i = 0; i < CHILDREN; i++) {
        int status;
        if (waitpid(children[i], &status, 0) != children[i] || status) die("child %d ended with %x", i, status);
    }
    check(0, "parent");
    puts("all were born");
}

/* ---- memory is discarded while pages of it are on their way back */

#define DISCARDS 60
static _Atomic int over;

static void *read_anywhere(void *seed_of) {
    uint64_t seed = 5 + (uintptr_t)seed_of, sum = 0;
    while (!atomic_load(&over)) sum += *(volatile uint64_t *)page_of(next(&seed) % pages);
    return (void *)(sum & 0);
}

static void discards(void) {
    uint64_t seed = 3;
    void *readers[2] = {start(read_anywhere, (void *)1), start(read_anywhere, (void *)2)};
    for (uint64_t round = 0; round < DISCARDS; round++) {
        fill(round * pages);
        /* What was filled first is away: read in order, it comes back ahead of its use. */
        uint64_t seen = 32 + next(&seed) % 256, from = next(&seed) % (pages / 2);
        for (uint64_t i = from; i < from + seen; i++) check_page(page_of(i), round * pages + i + 1, "before it is discarded");
        for (uint64_t spins = next(&seed) % 300000; spins; spins--) atomic_signal_fence(memory_order_seq_cst);
        if (madvise(area, pages * PAGE, MADV_DONTNEED)) die("madvise: %s", strerror(errno));
        for (uint64_t i = 0; i < 2048; i++) check_page(page_of((from + i) % pages), 0, "after it was discarded");
        for (uint64_t i = 0; i < pages; i++) check_page(page_of(i), 0, "after it was discarded");
    }
    atomic_store(&over, 1);
    join(readers[0]);
    join(readers[1]);
    puts("what was discarded is zeros");
}

/* ---- memory that the program pages itself */

static int own_uffd;

static void *serve_own(void *unused) {
    static _Alignas(4096) char bytes[PAGE];
    struct uffd_msg message;
    (void)unused;
    while (read(own_uffd, &message, sizeof message) == sizeof message) {
        if (message.event != UFFD_EVENT_PAGEFAULT) continue;
        uint64_t at = message.arg.pagefault.address & ~(PAGE - 1);
        if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
            struct uffdio_writeprotect unprotect = {.range = {at, PAGE}};
            if (ioctl(own_uffd, UFFDIO_WRITEPROTECT, &unprotect)) die("unprotect: %s", strerror(errno));
            continue;
        }
        memset(bytes, 0xAB, PAGE);
        struct uffdio_copy copy = {.dst = at, .src = (uintptr_t)bytes, .len = PAGE};
        if (ioctl(own_uffd, UFFDIO_COPY, &copy) && errno != EEXIST) die("copy: %s", strerror(errno));
    }
    return NULL;
}

/* Its userfaultfd tells of what is missing, or of writes: both are its own affair. */
static void own(uint64_t mode, const char *told) {
    struct uffdio_api api = {.api = UFFD_API};
    own_uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (own_uffd < 0 || ioctl(own_uffd, UFFDIO_API, &api)) die("userfaultfd: %s", strerror(errno));
    fill(0);
    press(16 * MIB); /* while gms may page it */
    char *mine = map_pages(pages / 2);
    struct uffdio_register reg = {.range = {(uintptr_t)mine, pages / 2 * PAGE}, .mode = mode};
    if (ioctl(own_uffd, UFFDIO_REGISTER, &reg)) {
        /* gms was faster: then it is gms's, and the program is told so. */
        if (errno != EBUSY) die("register: %s", strerror(errno));
        puts(told);
        return;
    }
    void *server = start(serve_own, NULL);
    (void)server;
    for (uint64_t i = 0; i < pages / 2; i++) fill_page(mine + i * PAGE, i + 7);
    if (mode & UFFDIO_REGISTER_MODE_WP) {
        struct uffdio_writeprotect protect = {.range = reg.range, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
        if (ioctl(own_uffd, UFFDIO_WRITEPROTECT, &protect)) die("protect: %s", strerror(errno));
    }
    press(48 * MIB);
    for (uint64_t i = 0; i < pages / 2; i++) check_page(mine + i * PAGE, i + 7, "in memory that the program pages");
    for (uint64_t i = 0; i < pages / 2; i++) fill_page(mine + i * PAGE, i + 9);
    press(48 * MIB);
    for (uint64_t i = 0; i < pages / 2; i++) check_page(mine + i * PAGE, i + 9, "in memory that the program pages, changed");
    check(0, "beside it");
    puts(told);
}

static void own_missing(void) { own(UFFDIO_REGISTER_MODE_MISSING, "its own pages are its own"); }
static void own_writes(void) { own(UFFDIO_REGISTER_MODE_WP, "its own writes are its own"); }

/* ---- guards are put over what is away, and then everything comes home */

static void line(void) {
    char byte;
    if (read(0, &byte, 1) != 1) die("no line");
}

static void guards_home(void) {
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    fill(0);
    puts("ready");
    fflush(stdout);
    line();
    for (uint64_t i = 0; i < pages; i += 4) guard(page_of(i), 1);
    puts("guarded");
    fflush(stdout);
    line();
    for (uint64_t i = 0; i < pages; i++) {
        caught = 0;
        check_page(page_of(i), i % 4 ? i + 1 : 0, "at home");
        if (caught != (i % 4 == 0)) die("page %lu: %s", (unsigned long)i, i % 4 ? "a guard that nobody put there" : "its guard has gone");
    }
    puts("right");
}

int main(int argc, char **argv) {
    const struct named cases[] = {
        {"leader", leader}, {"sharer", sharer}, {"has-guards", has_guards}, {"guards", guards}, {"guarded", guarded}, {"realloc", realloc_churn},
        {"locked", locked}, {"inherit", inherit}, {"purging", purging}, {"restless", restless}, {"room", room}, {"rooms", rooms}, {"subreaper", subreaper}, {"brood", brood},
        {"discards", discards}, {"own-missing", own_missing}, {"own-writes", own_writes}, {"guards-home", guards_home},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases);
}
