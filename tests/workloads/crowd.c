/* crowd MIB STEPS [held]: twelve threads of one address space fault all the time, so that several threads of the pager fetch for it, while the same threads change
 * it. Each page belongs to one thread, which verifies it, rewrites it, or discards it and finds zeros at once; the others look at it, and so wait for
 * it just then. Each thread also moves a block of its own to and fro, and forks children that find what it had. Held, they begin when a line is read. */
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>

#define THREADS 12UL
#define BLOCK 8UL
#define CHECKED_IN_CHILD 6

static uint64_t pages, steps;
static char *memory;
static uint32_t *rounds;         /* what each page holds: 0 for zeros, else a number that its owner has not used before */
static __thread uint32_t writes; /* numbers used */
static pthread_barrier_t barrier;

/* Where the kernel maps nothing by itself: nobody else comes into the holes. */
static char *place_of(uint64_t me, uint64_t side) { return (char *)(1UL << 40) + (2 * me + side) * (1UL << 30); }

/* The first word names the page, so that others know whose it is. */
static uint64_t first_of(uint64_t page) { return rounds[page] ? page << 32 | rounds[page] : 0; }

static void *at(uint64_t page) { return memory + page * PAGE; }

static void write_page(uint64_t page) {
    rounds[page] = ++writes;
    volatile uint64_t *words = at(page);
    words[0] = first_of(page); /* others look at it at any moment */
    for (uint64_t i = 1; i < WORDS; i++) words[i] = word_of(first_of(page), i);
}

static void check_own(uint64_t page, const char *where) {
    volatile uint64_t *words = at(page);
    uint64_t first = first_of(page);
    for (uint64_t i = 0; i < WORDS; i++) {
        uint64_t expected = i ? word_of(first, i) : first, found = words[i];
        if (found != expected)
            die("%s %s: page %lu word %lu is %016lx, expected %016lx", found ? "MISMATCH" : "ZERO PAGE", where, (unsigned long)page,
                (unsigned long)i, (unsigned long)found, (unsigned long)expected);
    }
}

static void discard(uint64_t page) {
    if (madvise(at(page), PAGE, MADV_DONTNEED)) die("madvise: %s", strerror(errno));
    rounds[page] = 0;
    check_own(page, "discarded");
}

static void look(uint64_t page) {
    uint64_t found = *(volatile uint64_t *)at(page);
    if (found && found >> 32 != page) die("MISMATCH: page %lu begins with %016lx", (unsigned long)page, (unsigned long)found);
}

static uint64_t own_page(uint64_t me, uint64_t random) { return random % (pages / THREADS) * THREADS + me; }

static void move(uint64_t me, uint64_t *side) {
    char *from = place_of(me, *side), *to = place_of(me, !*side);
    if (mremap(from, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to) die("mremap: %s", strerror(errno));
    *side = !*side;
    for (uint64_t i = 0; i < BLOCK; i++) check_page(to + i * PAGE, me * BLOCK + i + 1, "moved");
}

static void fork_one(uint64_t me, uint64_t random) {
    pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child == 0) {
        for (int i = 0; i < CHECKED_IN_CHILD; i++) check_own(own_page(me, next(&random)), "in a child");
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) die("a child failed");
}

static void *run(void *arg) {
    uint64_t me = (uintptr_t)arg, random = me + 1, side = 0;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    char *block = mmap(place_of(me, 0), BLOCK * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (block != place_of(me, 0)) die("mmap: %s", strerror(errno));
    for (uint64_t i = 0; i < BLOCK; i++) fill_page(block + i * PAGE, me * BLOCK + i + 1);
    for (uint64_t page = me; page < pages; page += THREADS) write_page(page);
    pthread_barrier_wait(&barrier); /* all is written */
    pthread_barrier_wait(&barrier);
    for (uint64_t step = 0; step < steps; step++) {
        uint64_t what = next(&random) % 400, page = own_page(me, next(&random));
        if (what == 0) fork_one(me, random);
        else if (what < 8) move(me, &side);
        else if (what < 40) discard(page);
        else if (what < 100) {
            check_own(page, "its own");
            write_page(page);
        } else if (what < 160) check_own(page, "its own");
        else look(next(&random) % pages);
    }
    for (uint64_t page = me; page < pages; page += THREADS) check_own(page, "at the end");
    return NULL;
}

int main(int argc, char **argv) {
    pages = number(argc, argv, 1, 32) * MIB / PAGE / THREADS * THREADS;
    steps = number(argc, argv, 2, 2000);
    memory = map_pages(pages);
    rounds = calloc(pages, sizeof *rounds);
    if (!rounds) die("calloc");
    pthread_barrier_init(&barrier, NULL, THREADS + 1);
    pthread_t threads[THREADS];
    for (uint64_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, run, (void *)(uintptr_t)i)) die("pthread_create");
    pthread_barrier_wait(&barrier);
    if (argc > 3) {
        printf("held\n");
        fflush(stdout);
        getchar();
    }
    pthread_barrier_wait(&barrier);
    for (uint64_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("crowd %lu pages of %lu threads\n", (unsigned long)pages, THREADS);
    return 0;
}
