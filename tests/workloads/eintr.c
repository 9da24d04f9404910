/* eintr KIND run|attach MIB: the first thread waits in a system call which fails with EINTR when it is disturbed,
 * while memory grows past the budget (run) or while the harness attaches (attach). No wait may return early.
 * run: a second thread grows the memory, waits for stdin to end, verifies it, then wakes the first. attach: memory is filled first, "ready" is
 * printed, and a helper process, forked before, wakes the waiter when a line arrives on stdin. `eintr list` lists. */
#include "check.h"
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* What waiter and waker share. Made before any fork. */
static int pipe_fds[2], socket_fds[2], semaphores, queue, epoll;
static pid_t waiter;
static volatile uint32_t *futex_word;
static aio_context_t aio;
static const struct timespec minute = {.tv_sec = 60};

static void write_pipe(void) { if (write(pipe_fds[1], "x", 1) != 1) die("write to the pipe: %s", strerror(errno)); }
static void write_socket(void) { if (send(socket_fds[1], "x", 1, 0) != 1) die("send: %s", strerror(errno)); }
static void raise_semaphore(void) {
    struct sembuf up = {.sem_op = 1};
    if (semop(semaphores, &up, 1)) die("semop: %s", strerror(errno));
}
static void send_message(void) {
    struct { long type; char text; } m = {1, 'x'};
    if (msgsnd(queue, &m, 1, 0)) die("msgsnd: %s", strerror(errno));
}
static void send_signal(void) { if (kill(waiter, SIGUSR1)) die("kill: %s", strerror(errno)); }
static void wake_futex(void) {
    *futex_word = 1;
    syscall(SYS_futex, futex_word, FUTEX_WAKE, 1, NULL, NULL, 0);
}
static void nothing(void) {}

static int got(long result, long expected) {
    return result == expected ? 0 : (fprintf(stderr, "returned %ld, expected %ld, errno %s\n", result, expected, strerror(errno)), 1);
}
static sigset_t usr1(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    return set;
}

static int in_epoll_wait(void) { struct epoll_event e; return got(epoll_wait(epoll, &e, 1, -1), 1); }
static int in_epoll_timeout(void) { struct epoll_event e; return got(epoll_wait(epoll, &e, 1, 60000), 1); }
static int in_epoll_pwait(void) { struct epoll_event e; sigset_t s = usr1(); return got(epoll_pwait(epoll, &e, 1, 60000, &s), 1); }
static int in_epoll_pwait2(void) { struct epoll_event e; return got(syscall(SYS_epoll_pwait2, epoll, &e, 1, &minute, NULL, 8), 1); }
static int in_recv_timeout(void) {
    struct timeval t = {.tv_sec = 60};
    char byte;
    if (setsockopt(socket_fds[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t)) die("SO_RCVTIMEO: %s", strerror(errno));
    return got(recv(socket_fds[0], &byte, 1, 0), 1);
}
static int in_recv(void) { char byte; return got(recv(socket_fds[0], &byte, 1, 0), 1); }
static int in_read(void) { char byte; return got(read(pipe_fds[0], &byte, 1), 1); }
static int in_sigtimedwait(void) { sigset_t s = usr1(); return got(sigtimedwait(&s, NULL, &minute), SIGUSR1); }
static int in_sigwaitinfo(void) { sigset_t s = usr1(); return got(sigwaitinfo(&s, NULL), SIGUSR1); }
static int in_semop(void) { struct sembuf down = {.sem_op = -1}; return got(semop(semaphores, &down, 1), 0); }
static int in_semtimedop(void) { struct sembuf down = {.sem_op = -1}; return got(semtimedop(semaphores, &down, 1, &minute), 0); }
static int in_msgrcv(void) { struct { long type; char text; } m; return got(msgrcv(queue, &m, 1, 0, 0), 1); }
static int in_poll(void) { struct pollfd p = {pipe_fds[0], POLLIN, 0}; return got(poll(&p, 1, 60000), 1); }
static int in_ppoll(void) { struct pollfd p = {pipe_fds[0], POLLIN, 0}; return got(ppoll(&p, 1, &minute, NULL), 1); }
static int in_select(void) {
    fd_set set;
    struct timeval t = {.tv_sec = 60};
    FD_ZERO(&set);
    FD_SET(pipe_fds[0], &set);
    return got(select(pipe_fds[0] + 1, &set, NULL, NULL, &t), 1);
}
static int in_futex(void) {
    while (*futex_word == 0)
        if (syscall(SYS_futex, futex_word, FUTEX_WAIT, 0, &minute, NULL, 0) && errno != EAGAIN) return got(-1, 0);
    return 0;
}
static int in_nanosleep(void) {
    struct timespec t = {.tv_sec = 1, .tv_nsec = 500000000};
    uint64_t start = now_ms();
    int failed = got(nanosleep(&t, NULL), 0);
    if (now_ms() - start < 1500) die("nanosleep ended after %lu ms of 1500", (unsigned long)(now_ms() - start));
    return failed;
}
static int in_clock_nanosleep(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += 2;
    return got(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL), 0);
}
static int in_io_getevents(void) {
    struct io_event event;
    struct iocb poll_pipe = {.aio_fildes = pipe_fds[0], .aio_lio_opcode = IOCB_CMD_POLL, .aio_buf = POLLIN}, *list = &poll_pipe;
    if (syscall(SYS_io_setup, 4, &aio) || syscall(SYS_io_submit, aio, 1, &list) != 1) die("aio: %s", strerror(errno));
    return got(syscall(SYS_io_getevents, aio, 1, 1, &event, &minute), 1);
}
static const struct { const char *kind; int (*wait)(void); void (*wake)(void); } table[] = {
    {"epoll_wait", in_epoll_wait, write_pipe},      {"epoll_timeout", in_epoll_timeout, write_pipe},
    {"epoll_pwait", in_epoll_pwait, write_pipe},    {"epoll_pwait2", in_epoll_pwait2, write_pipe},
    {"recv_timeout", in_recv_timeout, write_socket}, {"recv", in_recv, write_socket},
    {"read", in_read, write_pipe},                  {"sigtimedwait", in_sigtimedwait, send_signal},
    {"sigwaitinfo", in_sigwaitinfo, send_signal},   {"semop", in_semop, raise_semaphore},
    {"semtimedop", in_semtimedop, raise_semaphore}, {"msgrcv", in_msgrcv, send_message},
    {"poll", in_poll, write_pipe},                  {"ppoll", in_ppoll, write_pipe},
    {"select", in_select, write_pipe},              {"futex", in_futex, wake_futex},
    {"nanosleep", in_nanosleep, nothing},           {"clock_nanosleep", in_clock_nanosleep, nothing},
    {"io_getevents", in_io_getevents, write_pipe},
};
#define KINDS (sizeof table / sizeof *table)

static uint64_t pages, kind;
static char *memory;

static void fill(void) {
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
}
static void verify(void) {
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "beside the wait");
}

static void *grow_and_wake(void *arg) {
    (void)arg;
    char byte;
    fill();
    if (read(0, &byte, 1) < 0) die("read of stdin: %s", strerror(errno));
    verify();
    table[kind].wake();
    return NULL;
}

static pid_t start_waker(void) {
    pid_t pid = fork();
    if (pid < 0) die("fork: %s", strerror(errno));
    if (pid > 0) return pid;
    char byte;
    if (read(0, &byte, 1) < 0) die("read of stdin: %s", strerror(errno));
    table[kind].wake();
    _exit(0);
}

static void prepare(void) {
    sigset_t set = usr1();
    sigprocmask(SIG_BLOCK, &set, NULL);
    waiter = getpid();
    semaphores = semget(IPC_PRIVATE, 1, 0600 | IPC_CREAT);
    queue = msgget(IPC_PRIVATE, 0600 | IPC_CREAT);
    epoll = epoll_create1(EPOLL_CLOEXEC);
    futex_word = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pipe(pipe_fds) || socketpair(AF_UNIX, SOCK_STREAM, 0, socket_fds) || semaphores < 0 || queue < 0 || epoll < 0 ||
        futex_word == MAP_FAILED)
        die("preparing: %s", strerror(errno));
    struct epoll_event e = {.events = EPOLLIN};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, pipe_fds[0], &e)) die("epoll_ctl: %s", strerror(errno));
}

int main(int argc, char **argv) {
    if (argc < 3) {
        for (uint64_t k = 0; k < KINDS; k++) puts(table[k].kind);
        return 0;
    }
    while (kind < KINDS && strcmp(table[kind].kind, argv[1])) kind++;
    if (kind == KINDS) die("no such kind: %s", argv[1]);
    pages = number(argc, argv, 3, 64) * MIB / PAGE;
    memory = map_pages(pages);
    prepare();
    int attach = strcmp(argv[2], "attach") == 0, failed;
    if (attach) {
        pid_t waker = start_waker();
        fill();
        printf("ready\n");
        fflush(stdout);
        failed = table[kind].wait();
        waitpid(waker, NULL, 0);
        verify();
    } else {
        pthread_t thread;
        if (pthread_create(&thread, NULL, grow_and_wake, NULL)) die("pthread_create failed");
        failed = table[kind].wait();
        pthread_join(thread, NULL);
    }
    semctl(semaphores, 0, IPC_RMID);
    msgctl(queue, IPC_RMID, NULL);
    if (failed) die("FAILED WAIT: %s", argv[1]);
    printf("%s ok\n", argv[1]);
    return 0;
}
