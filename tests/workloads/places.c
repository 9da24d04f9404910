/* places MIB: data in every kind of memory (stacks, brk heap, huge pages, mlocked, shared anonymous, written private
 * file mappings, memfd, PROT_READ and PROT_NONE) must survive two sweeps of pressure over MIB of plain memory. */
#include "check.h"
#include <pthread.h>

#define EACH 512 /* pages of each kind: 2 MiB. Four kinds cannot be paged, and must leave room in the smallest budget */

static uint64_t pages;
static char *plain;
static struct { const char *kind; char *at; int hidden; } places[16];
static int count;

static void add(const char *kind, void *at, int hidden) {
    if (at == MAP_FAILED || !at) die("%s: %s", kind, strerror(errno));
    places[count].kind = kind;
    places[count].at = at;
    places[count++].hidden = hidden;
}

static void *map(int flags, int fd) { return mmap(NULL, EACH * PAGE, PROT_READ | PROT_WRITE, flags, fd, 0); }

static int memory_file(void) {
    int fd = memfd_create("places", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, EACH * PAGE)) die("memfd: %s", strerror(errno));
    return fd;
}

static void protect(const char *kind, int prot) {
    for (int i = 0; i < count; i++)
        if (strcmp(places[i].kind, kind) == 0 && mprotect(places[i].at, EACH * PAGE, prot)) die("mprotect: %s", strerror(errno));
}

static void pressure(uint64_t sweep) {
    for (uint64_t i = 0; i < pages; i++) fill_page(plain + i * PAGE, (i + 1) * 4 + sweep);
    for (uint64_t i = 0; i < pages; i++) check_page(plain + i * PAGE, (i + 1) * 4 + sweep, "plain memory");
}

static uint64_t tag_of(int place, uint64_t page) { return (place + 1) * 1000000UL + page; }

/* Frames of 8 KiB down the stack; each is checked on the way back, after the pressure at the bottom. */
static void __attribute__((noinline)) deep(uint64_t left, uint64_t tag) {
    volatile uint64_t frame[WORDS * 2];
    for (uint64_t i = 0; i < WORDS * 2; i++) frame[i] = word_of(tag + left, i);
    if (left > 0) deep(left - 1, tag);
    else pressure(tag % 4);
    for (uint64_t i = 0; i < WORDS * 2; i++)
        if (frame[i] != word_of(tag + left, i)) die("MISMATCH in the stack, frame %lu", (unsigned long)left);
}

static void *on_a_thread(void *arg) {
    deep(EACH, (uintptr_t)arg);
    return NULL;
}

int main(int argc, char **argv) {
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    plain = map_pages(pages);
    char *huge = mmap(NULL, EACH * PAGE * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(huge, EACH * PAGE * 2, MADV_HUGEPAGE);
    add("huge pages", huge, 0);
    char *heap = sbrk(EACH * PAGE + PAGE);
    add("brk heap", heap == (void *)-1 ? NULL : heap + (-(uintptr_t)heap & (PAGE - 1)), 0);
    add("mlocked", map(MAP_PRIVATE | MAP_ANONYMOUS, -1), 0);
    if (mlock(places[count - 1].at, EACH * PAGE)) die("mlock: %s", strerror(errno));
    add("shared anonymous", map(MAP_SHARED | MAP_ANONYMOUS, -1), 0);
    add("private file mapping", map(MAP_PRIVATE, memory_file()), 0);
    add("shared file mapping", map(MAP_SHARED, memory_file()), 0);
    add("read-only", map(MAP_PRIVATE | MAP_ANONYMOUS, -1), 0);
    add("inaccessible", map(MAP_PRIVATE | MAP_ANONYMOUS, -1), 1);
    add("growing down", map(MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1), 0);
    for (int p = 0; p < count; p++)
        for (uint64_t i = 0; i < EACH; i++) fill_page(places[p].at + i * PAGE, tag_of(p, i));
    protect("read-only", PROT_READ);
    protect("inaccessible", PROT_NONE);
    for (uint64_t sweep = 1; sweep <= 2; sweep++) {
        deep(EACH / 2, 40 + sweep); /* 2 MiB of the main stack */
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 32 * MIB);
        if (pthread_create(&thread, &attributes, on_a_thread, (void *)(uintptr_t)(80 + sweep))) die("pthread_create failed");
        pthread_join(thread, NULL);
        protect("inaccessible", PROT_READ);
        for (int p = 0; p < count; p++)
            for (uint64_t i = 0; i < EACH; i++) check_page(places[p].at + i * PAGE, tag_of(p, i), places[p].kind);
        protect("inaccessible", PROT_NONE);
    }
    printf("places ok %lu pages\n", (unsigned long)pages);
    return 0;
}
