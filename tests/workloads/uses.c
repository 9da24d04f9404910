/* uses CASE MIB: memory that is away when the kernel itself touches it for the program, or when the program changes what it is: direct I/O, io_uring,
 * vmsplice, signal frames, an exec by another thread than the first, other rights, stops and kills in the midst of faults. Files are made in
 * the working directory. */
#include "area.h"
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define CHUNK 64UL /* pages of one transfer */
#define SLOTS 8UL  /* transfers under way */

/* Enough for what was filled before to go. */
static void press_out(void) { press(pages * PAGE / 2); }

static int scratch(int flags) {
    int fd = open("scratch", O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
    if (fd < 0) die("scratch: %s", strerror(errno));
    if (unlink("scratch")) die("unlink: %s", strerror(errno));
    return fd;
}

static void whole(ssize_t count, const char *what) {
    if (count != (ssize_t)(CHUNK * PAGE)) die("%s: %zd bytes: %s", what, count, count < 0 ? strerror(errno) : "short");
}

/* ---- direct I/O */

static void direct(void) {
    int fd = scratch(O_DIRECT);
    fill(0);
    press_out();
    for (uint64_t i = 0; i < pages; i += CHUNK) whole(pwrite(fd, page_of(i), CHUNK * PAGE, i * PAGE), "write");
    fill(1 << 20);
    press_out();
    for (uint64_t i = 0; i < pages; i += CHUNK) whole(pread(fd, page_of(i), CHUNK * PAGE, i * PAGE), "read");
    press_out();
    check(0, "read directly");
    puts("direct I/O is right");
}

/* ---- io_uring */

static struct { int fd; char *sq, *cq; struct io_uring_sqe *sqes; struct io_uring_params p; } ring;

static void *map_ring(uint64_t length, uint64_t offset) {
    void *p = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, offset);
    if (p == MAP_FAILED) die("mmap of a ring: %s", strerror(errno));
    return p;
}

static void submit(int op, int flags, int fd, char *at, uint64_t offset, uint64_t tag) {
    _Atomic unsigned *tail = (void *)(ring.sq + ring.p.sq_off.tail);
    unsigned slot = *tail & *(unsigned *)(ring.sq + ring.p.sq_off.ring_mask);
    ring.sqes[slot] = (struct io_uring_sqe){.opcode = op, .flags = flags, .fd = fd, .addr = (uint64_t)at, .len = CHUNK * PAGE, .off = offset, .user_data = tag};
    ((unsigned *)(ring.sq + ring.p.sq_off.array))[slot] = slot;
    atomic_fetch_add(tail, 1);
    if (syscall(SYS_io_uring_enter, ring.fd, 1, 0, 0, NULL, 0) != 1) die("io_uring_enter: %s", strerror(errno));
}

static void complete(void) {
    _Atomic unsigned *head = (void *)(ring.cq + ring.p.cq_off.head), *tail = (void *)(ring.cq + ring.p.cq_off.tail);
    while (*head == *tail)
        if (syscall(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 && errno != EINTR) die("io_uring_enter: %s", strerror(errno));
    struct io_uring_cqe *cqes = (void *)(ring.cq + ring.p.cq_off.cqes);
    struct io_uring_cqe *cqe = &cqes[*head & *(unsigned *)(ring.cq + ring.p.cq_off.ring_mask)];
    errno = cqe->res < 0 ? -cqe->res : 0;
    whole(cqe->res < 0 ? -1 : cqe->res, "a transfer");
    atomic_fetch_add(head, 1);
}

/* All of the area, some transfers at a time. */
static void transfer(int op, int flags, int fd) {
    uint64_t under_way = 0;
    for (uint64_t i = 0; i < pages; i += CHUNK) {
        if (under_way == SLOTS) complete(), under_way--;
        submit(op, flags, fd, page_of(i), i * PAGE, i);
        under_way++;
    }
    while (under_way--) complete();
}

static void uring(void) {
    if ((ring.fd = syscall(SYS_io_uring_setup, SLOTS, &ring.p)) < 0) die("io_uring_setup: %s", strerror(errno));
    ring.sq = map_ring(ring.p.sq_off.array + ring.p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    ring.cq = map_ring(ring.p.cq_off.cqes + ring.p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sqes = map_ring(ring.p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    int fd = scratch(0);
    fill(0);
    press_out();
    transfer(IORING_OP_WRITE, IOSQE_ASYNC, fd); /* by the kernel's own threads */
    fill(1 << 20);
    press_out();
    transfer(IORING_OP_READ, 0, fd);
    press_out();
    check(0, "read by io_uring");
    /* Registered, they are pinned: what is written to the pages before and after is what is transferred. */
    struct iovec all = {area, pages * PAGE};
    if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &all, 1)) die("registering: %s", strerror(errno));
    fill(2 << 20);
    press_out();
    transfer(IORING_OP_WRITE_FIXED, 0, fd);
    fill(3 << 20);
    press_out();
    transfer(IORING_OP_READ_FIXED, IOSQE_ASYNC, fd);
    if (syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0)) die("unregistering: %s", strerror(errno));
    press_out();
    check(2 << 20, "read into registered buffers");
    puts("io_uring is right");
}

/* ---- pages lent to a pipe */

static void splice_pages(void) {
    int ends[2];
    char *copy = malloc(CHUNK * PAGE);
    if (!copy || pipe(ends) || fcntl(ends[1], F_SETPIPE_SZ, CHUNK * PAGE) < 0) die("pipe: %s", strerror(errno));
    fill(0);
    for (uint64_t i = 0; i < pages; i += pages / 16) {
        press_out();
        struct iovec lent = {page_of(i), CHUNK * PAGE};
        whole(vmsplice(ends[1], &lent, 1, 0), "vmsplice");
        press_out();
        for (uint64_t got = 0, n; got < CHUNK * PAGE; got += n)
            if ((n = read(ends[0], copy + got, CHUNK * PAGE - got)) <= 0) die("read: %s", strerror(errno));
        for (uint64_t j = 0; j < CHUNK; j++) check_page(copy + j * PAGE, i + j + 1, "out of the pipe");
    }
    check(0, "lent");
    puts("vmsplice is right");
}

/* ---- signal frames */

static volatile sig_atomic_t handled;
static char *stack_low, *stack_high;

static void on_signal(int number) {
    volatile char here[3 * PAGE];
    for (unsigned i = 0; i < sizeof here; i += PAGE) here[i] = number;
    if ((char *)here < stack_low || (char *)here > stack_high) die("not on the alternate stack");
    handled++;
}

static void altstack(void) {
    stack_t own = {.ss_sp = map_pages(64), .ss_size = 64 * PAGE};
    stack_low = own.ss_sp, stack_high = stack_low + own.ss_size;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&own, NULL) || sigaction(SIGUSR1, &action, NULL)) die("sigaltstack: %s", strerror(errno));
    fill(0);
    for (int round = 1; round <= 8; round++) {
        press_out();
        raise(SIGUSR1);
        if (handled != round) die("signal %d was not handled", round);
    }
    check(0, "beside signals");
    puts("signals are handled on memory that was away");
}

/* ---- another program, other rights */

static void plain(void) {
    fill(0);
    press_out();
    check(0, "plain");
    puts("every page is right");
}

static void *execute(void *unused) {
    char size[32];
    snprintf(size, sizeof size, "%lu", (unsigned long)(pages * PAGE / MIB));
    execl("/proc/self/exe", "uses", "plain", size, NULL);
    die("exec: %s %p", strerror(errno), unused);
}

static void exec_by_a_thread(void) {
    fill(0);
    press_out();
    start(execute, NULL);
    for (;;) check(0, "until the exec");
}

/* Says how far it is, and goes on when a line comes on stdin. */
static void pause_at(const char *what) {
    char byte;
    puts(what);
    fflush(stdout);
    if (read(0, &byte, 1) != 1) die("no line");
}

static void rights(void) {
    fill(0);
    press_out();
    if (setgid(65534) || setuid(65534)) die("setuid: %s", strerror(errno));
    pause_at("has other rights");
    check(0, "with other rights");
    fill(1 << 20);
    press_out();
    check(1 << 20, "with other rights");
    pause_at("has touched all of it again");
    pid_t child = fork();
    check(1 << 20, "after a fork with other rights");
    if (child == 0) _exit(0);
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status) die("the child: %d", status);
    puts("other rights change nothing");
}

/* ---- stops and kills in the midst of faults */

static void stops(void) {
    _Atomic int *over = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fill(0);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        while (!*over && getppid() == parent) {
            kill(parent, SIGSTOP);
            usleep(300);
            kill(parent, SIGCONT);
            usleep(700);
        }
        _exit(0);
    }
    for (int round = 0; round < 4; round++) {
        press_out();
        check(0, "between stops");
    }
    *over = 1;
    if (waitpid(child, NULL, 0) != child) die("the child: %s", strerror(errno));
    puts("stops change nothing");
}

static void *check_for_ever(void *unused) {
    for (;;) check(0, "of a child that is killed");
    return unused;
}

static void kills(void) {
    fill(0);
    press_out();
    uint64_t random = 1;
    for (int n = 0; n < 40; n++) {
        pid_t child = fork();
        if (child < 0) die("fork: %s", strerror(errno));
        if (child == 0) {
            start(check_for_ever, NULL);
            check_for_ever(NULL);
        }
        usleep(next(&random) % 8000);
        int status;
        if (kill(child, SIGKILL) || waitpid(child, &status, 0) != child) die("the child: %s", strerror(errno));
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) die("a child ended by itself: %d", status);
    }
    check(0, "after the kills");
    puts("kills change nothing");
}

/* ---- unmaps that are told of and not made */

/* A mapping over all of the area, and one that ends behind a sealed page, are refused: the kernel has told of the unmap by then. */
static void refused(void) {
    char *room = mmap(NULL, 1UL << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED || munmap(room, 1UL << 30)) die("room: %s", strerror(errno));
    area = mmap(room, (pages + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (area == MAP_FAILED) die("area: %s", strerror(errno));
    struct rlimit all, few;
    if (getrlimit(RLIMIT_AS, &all)) die("getrlimit: %s", strerror(errno));
    few = (struct rlimit){.rlim_cur = pages * PAGE * 4, .rlim_max = all.rlim_max};
    fill(0);
    press_out();
    if (setrlimit(RLIMIT_AS, &few)) die("setrlimit: %s", strerror(errno));
    char *over = mmap(area, 1UL << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (over != MAP_FAILED || errno != ENOMEM) die("a mapping beyond the limit: %p", (void *)over);
    if (setrlimit(RLIMIT_AS, &all)) die("setrlimit: %s", strerror(errno));
    check(0, "after a mapping that was refused");
    press_out();
    if (syscall(462 /* mseal */, page_of(pages), PAGE, 0)) {
        if (errno != ENOSYS && errno != EPERM) die("mseal: %s", strerror(errno));
    } else if (!munmap(area, (pages + 1) * PAGE) || errno != EPERM) {
        die("an unmap of what is sealed: %s", strerror(errno));
    }
    check(0, "after an unmap that was refused");
    press_out();
    check(0, "away again");
    puts("refused changes change nothing");
}

/* ---- a guard in the midst of the heap */

static void guarded(void) {
    if (madvise(page_of(pages / 4), PAGE, 102 /* MADV_GUARD_INSTALL */) && errno != EINVAL) die("guard: %s", strerror(errno));
    for (int round = 0; round < 3; round++)
        for (uint64_t i = 0; i < pages; i++)
            if (i != pages / 4) round == 0 ? fill_page(page_of(i), i + 1) : check_page(page_of(i), i + 1, "beside a guard");
    puts("what lies far from a guard is paged");
}

int main(int argc, char **argv) {
    const struct named cases[] = {
        {"direct", direct}, {"uring", uring}, {"splice", splice_pages}, {"altstack", altstack}, {"plain", plain},
        {"exec", exec_by_a_thread}, {"rights", rights}, {"stops", stops}, {"kills", kills}, {"refused", refused},
        {"guarded", guarded},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases);
}
