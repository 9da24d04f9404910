/* captor PATH [child]: gives its rights up, then makes its evictor, which has the same memory, execute what it likes: to make a file at PATH, where only root may. Says "refused"
 * if the evictor may not, "made" if it has. Or has a child do all that. */
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/wait.h>

#define ELSEWHERE (96 * MIB)
#define DATA_LEN 0xA000UL

static volatile long result = 1, advised = 1;

/* The evictor's code: a page, and its data behind it. */
static unsigned char *find_code(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps) die("maps: %s", strerror(errno));
    unsigned long from, to, code = 0, found = 0;
    char access[5], line[512];
    while (!found && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s", &from, &to, access) != 3) die("maps: %s", line);
        if (code == from && to - from == DATA_LEN && !strcmp(access, "rw-p")) found = code - PAGE;
        code = to - from == PAGE && !strcmp(access, "r-xp") ? to : 0;
    }
    fclose(maps);
    return (unsigned char *)found;
}

static unsigned char *find(unsigned char *from, unsigned char *to, const char *what, size_t length) {
    unsigned char *at = memmem(from, to - from, what, length);
    if (!at) die("the evictor has another code");
    return at;
}

/* More than may be resident: an evictor is there when it has been filled once, and is needed as long as it is filled. */
static void *fill(void *rounds) {
    static char *memory;
    if (!memory) memory = map_pages(ELSEWHERE / PAGE);
    for (uint64_t i = 0; i < (uintptr_t)rounds * (ELSEWHERE / PAGE); i++) fill_page(memory + i % (ELSEWHERE / PAGE) * PAGE, i + 1);
    return NULL;
}

/* In one step: it may be executed meanwhile. */
static void jump(unsigned char *from, const unsigned char *to) {
    unsigned char bytes[8];
    memcpy(bytes, from, 8);
    int32_t distance = to - (from + 5);
    bytes[0] = 0xe9;
    memcpy(bytes + 1, &distance, 4);
    uint64_t word;
    memcpy(&word, bytes, 8);
    *(volatile uint64_t *)from = word;
}

int main(int argc, char **argv) {
    if (argc < 2) die("usage: captor PATH [child]");
    fill((void *)1);
    int status;
    pid_t child = argc > 2 ? fork() : 0;
    if (child) return waitpid(child, &status, 0) != child || status;
    if (argc > 2) fill((void *)1);
    unsigned char *code = find_code();
    if (!code) die("there is no evictor");
    if (setgid(65534) || setuid(65534)) die("setuid: %s", strerror(errno));
    if (open(argv[1], O_CREAT | O_WRONLY, 0600) >= 0 || errno != EACCES) die("this process may make the file: %s", strerror(errno));
    if (mprotect(code, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC)) die("mprotect: %s", strerror(errno));
    /* It waits in recvmsg, and executes next what follows that. */
    unsigned char *receives = find(code, code + PAGE, "\xb8\x2f\0\0\0", 5);
    unsigned char *next = find(receives, code + PAGE, "\x0f\x05", 2) + 2;
    unsigned char captured[] = {
        0x48, 0xbf, 0, 0, 0, 0, 0, 0, 0, 0, /* mov rdi, path */
        0xbe, 0x80, 0x01, 0, 0,             /* mov esi, 0600 */
        0xb8, 0x55, 0, 0, 0,                /* mov eax, creat */
        0x0f, 0x05,                         /* syscall */
        0x48, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, /* mov rcx, &result */
        0x48, 0x89, 0x01,                   /* mov [rcx], rax */
        0x31, 0xff, 0x31, 0xf6,             /* xor edi, edi; xor esi, esi */
        0xba, 0xff, 0xff, 0, 0,             /* mov edx, 0xffff: no advice that there is */
        0xb8, 0x1c, 0, 0, 0,                /* mov eax, madvise */
        0x0f, 0x05,                         /* syscall */
        0x48, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, /* mov rcx, &advised */
        0x48, 0x89, 0x01,                   /* mov [rcx], rax */
    };
    const volatile long *of_file = &result, *of_advice = &advised;
    memcpy(captured + 2, &argv[1], 8);
    memcpy(captured + 24, &of_file, 8);
    memcpy(captured + sizeof captured - 11, &of_advice, 8);
    unsigned char *behind = code + PAGE - 128;
    memcpy(behind, captured, sizeof captured);
    jump(behind + sizeof captured, receives);
    jump(next, behind);
    pthread_t thread;
    if (pthread_create(&thread, NULL, fill, (void *)1000000)) die("pthread_create");
    while (result == 1 || advised == 1) usleep(1000);
    if (result >= 0) die("made");
    if (result != -EPERM) die("it failed otherwise: %s", strerror(-result));
    if (advised != -EPERM) die("other advice than it needs: %s", strerror(-advised));
    if (write(1, "refused\n", 8) != 8) die("write");
    _exit(0);
}
