/* mapfuzz SEED OPS MIB: a random sequence of mmap, munmap, mremap, madvise, mprotect, brk, fork, reads, writes and
 * copies by the kernel, against a mirror which holds one tag a page (the seed of its content). Every check is exact:
 * zero after DONTNEED, old or zero after FREE, zero in a fork's child after WIPEONFORK, never anything else.
 * Replay with the line that it prints. */
#include "check.h"
#include <sys/wait.h>

#define MAPS 48         /* mappings alive at a time */
#define MAP_PAGES 4096  /* pages of the largest mapping */
#define DEPTH 2         /* forks below the first process */
#define CHILDREN 2      /* children alive at a time */
#define LAZY 0x80000000u /* MADV_FREE was called: the page holds its tag, or zeros for ever */

enum { FLAG_WIPE = 1, FLAG_DONTFORK = 2, FLAG_SPLIT = 4, FLAG_BRK = 8 };

struct map {
    char *at;
    uint32_t pages, flags;
    uint32_t *tags;         /* one a page; 0 is a page of zeros */
    unsigned char *prots;
};

static struct map maps[MAPS];
static int alive, depth, children;
static pid_t child_pids[CHILDREN];
static uint64_t seed, rng, ops, pages_max, pages_now, op_now;
static uint32_t tag_last;
static const char *op_name = "start";
static int scratch_file;

static uint64_t roll(uint64_t n) { return next(&rng) % n; }
static int chance(uint64_t percent) { return roll(100) < percent; }

__attribute__((noreturn)) static void bad(const struct map *m, uint64_t i, const char *what) {
    volatile uint64_t *w = (void *)(m->at + i * PAGE);
    die("%s: map %d page %lu of %u at %p, tag %u, words %016lx %016lx..%016lx, flags %u, op %lu %s, depth %d\n"
        "replay: mapfuzz %lu %lu %lu",
        what, (int)(m - maps), (unsigned long)i, m->pages, m->at + i * PAGE, m->tags[i], (unsigned long)w[0],
        (unsigned long)w[1], (unsigned long)w[WORDS - 1], m->flags, (unsigned long)op_now, op_name, depth,
        (unsigned long)seed, (unsigned long)ops, (unsigned long)(pages_max * PAGE / MIB));
}

static void must(int ok, const char *call) {
    if (!ok)
        die("%s failed: %s (op %lu, depth %d)\nreplay: mapfuzz %lu %lu %lu", call, strerror(errno), (unsigned long)op_now,
            depth, (unsigned long)seed, (unsigned long)ops, (unsigned long)(pages_max * PAGE / MIB));
}

/* The mirror lives in mappings of its own, outside the game. */
static void mirror(struct map *m, uint32_t pages) {
    m->tags = map_pages(MAP_PAGES * 4 / PAGE);
    m->prots = map_pages(MAP_PAGES / PAGE);
    memset(m->prots, PROT_READ | PROT_WRITE, pages);
}

static void forget(struct map *m) {
    must(munmap(m->tags, MAP_PAGES * 4) == 0 && munmap(m->prots, MAP_PAGES) == 0, "munmap of the mirror");
    pages_now -= m->pages;
    *m = maps[--alive];
}

static struct map *track(char *at, uint32_t pages, uint32_t flags) {
    struct map *m = &maps[alive++];
    *m = (struct map){.at = at, .pages = pages, .flags = flags};
    mirror(m, pages);
    pages_now += pages;
    return m;
}

static void check(struct map *m, uint64_t i) {
    char *page = m->at + i * PAGE;
    if (!(m->prots[i] & PROT_READ)) return;
    if (m->tags[i] & LAZY) {
        if (page_is(page, 0)) m->tags[i] = 0;
        else if (!page_is(page, m->tags[i] & ~LAZY) && !page_is(page, 0)) bad(m, i, "MISMATCH after FREE");
    } else if (!page_is(page, m->tags[i])) {
        bad(m, i, page_is(page, m->tags[i]) ? "UNSTABLE" : page_is(page, 0) ? "ZERO PAGE" : "MISMATCH");
    }
}

static void check_all(void) {
    for (int k = 0; k < alive; k++)
        for (uint64_t i = 0; i < maps[k].pages; i++) check(&maps[k], i);
}

static void write_page(struct map *m, uint64_t i) {
    if (!(m->prots[i] & PROT_WRITE)) return;
    m->tags[i] = ++tag_last;
    fill_page(m->at + i * PAGE, m->tags[i]);
}

/* A random span of a mapping; returns its first page. */
static uint32_t span(const struct map *m, uint32_t *n) {
    uint32_t from = roll(m->pages);
    *n = 1 + roll(chance(70) && m->pages > 16 ? m->pages / 8 : m->pages);
    if (*n > m->pages - from) *n = m->pages - from;
    return from;
}

static void op_map(struct map *m) {
    (void)m;
    uint32_t n = 1 + roll(chance(30) ? MAP_PAGES : 256);
    if (alive >= MAPS - 3 || pages_now + n > pages_max) return;
    m = track(map_pages(n), n, 0);
    for (uint64_t i = 0; i < n; i++)
        if (chance(80)) write_page(m, i);
}

static void op_unmap(struct map *m) {
    uint32_t n, from = span(m, &n), tail = m->pages - from - n;
    if (m->flags & FLAG_BRK || alive >= MAPS - 3) return;
    must(munmap(m->at + from * PAGE, n * PAGE) == 0, "munmap");
    if (tail > 0) {
        struct map *rest = track(m->at + (from + n) * PAGE, tail, m->flags);
        memcpy(rest->tags, m->tags + from + n, tail * 4);
        memcpy(rest->prots, m->prots + from + n, tail);
    }
    pages_now -= m->pages - from;
    m->pages = from;
    if (from == 0) forget(m);
}

static void op_overmap(struct map *m) {
    uint32_t n, from = span(m, &n);
    if (m->flags & FLAG_BRK) return;
    void *p = mmap(m->at + from * PAGE, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    must(p != MAP_FAILED, "mmap MAP_FIXED");
    memset(m->tags + from, 0, n * 4);
    memset(m->prots + from, PROT_READ | PROT_WRITE, n);
    m->flags |= FLAG_SPLIT;
    if (m->flags & (FLAG_WIPE | FLAG_DONTFORK)) { /* the new part has neither flag: make the whole mapping plain again */
        must(madvise(m->at, m->pages * PAGE, MADV_KEEPONFORK) == 0 && madvise(m->at, m->pages * PAGE, MADV_DOFORK) == 0, "madvise");
        m->flags &= ~(FLAG_WIPE | FLAG_DONTFORK);
    }
}

/* A mapping that nothing has split is one VMA to the program, so mremap has no right to fail. */
static void op_remap(struct map *m) {
    uint32_t n = 1 + roll(chance(30) ? MAP_PAGES : 512);
    if (m->flags & (FLAG_BRK | FLAG_SPLIT) || pages_now - m->pages + n > pages_max) return;
    char *to;
    if (chance(50)) {
        to = mremap(m->at, m->pages * PAGE, n * PAGE, MREMAP_MAYMOVE);
    } else {
        char *target = map_pages(n); /* a hole of the right size, overwritten by MREMAP_FIXED */
        to = mremap(m->at, m->pages * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    }
    must(to != MAP_FAILED, "mremap");
    pages_now += (uint64_t)n - m->pages;
    for (uint32_t i = m->pages; i < n; i++) m->tags[i] = 0, m->prots[i] = m->prots[0];
    for (uint32_t i = n; i < m->pages; i++) m->tags[i] = 0;
    m->at = to;
    m->pages = n;
}

static void op_remap_keep(struct map *m) {
    if (m->flags & (FLAG_BRK | FLAG_SPLIT) || alive >= MAPS - 3 || pages_now + m->pages > pages_max) return;
    char *to = mremap(m->at, m->pages * PAGE, m->pages * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    must(to != MAP_FAILED, "mremap MREMAP_DONTUNMAP");
    struct map *moved = track(to, m->pages, m->flags);
    memcpy(moved->tags, m->tags, m->pages * 4);
    memcpy(moved->prots, m->prots, m->pages);
    memset(m->tags, 0, m->pages * 4);
}

static void op_dontneed(struct map *m) {
    uint32_t n, from = span(m, &n);
    must(madvise(m->at + from * PAGE, n * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    memset(m->tags + from, 0, n * 4);
    for (uint32_t i = 0; i < n; i++)
        if (chance(50)) check(m, from + i);
}

static void op_free(struct map *m) {
    uint32_t n, from = span(m, &n);
    must(madvise(m->at + from * PAGE, n * PAGE, MADV_FREE) == 0, "MADV_FREE");
    for (uint32_t i = from; i < from + n; i++)
        if (m->tags[i]) m->tags[i] |= LAZY;
}

static void op_advise(struct map *m) {
    uint32_t n, from = span(m, &n);
    switch (roll(5)) {
    case 0: madvise(m->at, m->pages * PAGE, MADV_HUGEPAGE); return; /* a hint: may be refused */
    case 1: madvise(m->at + from * PAGE, n * PAGE, MADV_COLD); return;
    case 2: madvise(m->at + from * PAGE, n * PAGE, MADV_WILLNEED); return;
    case 3:
        if (m->flags & FLAG_BRK) return;
        must(madvise(m->at, m->pages * PAGE, m->flags & FLAG_WIPE ? MADV_KEEPONFORK : MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
        m->flags ^= FLAG_WIPE;
        return;
    default:
        if (m->flags & FLAG_BRK) return;
        must(madvise(m->at, m->pages * PAGE, m->flags & FLAG_DONTFORK ? MADV_DOFORK : MADV_DONTFORK) == 0, "MADV_DONTFORK");
        m->flags ^= FLAG_DONTFORK;
    }
}

static void op_protect(struct map *m) {
    static const int prots[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
    uint32_t n, from = span(m, &n);
    int prot = prots[roll(4)];
    if (m->flags & FLAG_BRK) return;
    must(mprotect(m->at + from * PAGE, n * PAGE, prot) == 0, "mprotect");
    memset(m->prots + from, prot, n);
    m->flags |= FLAG_SPLIT;
}

static void op_write(struct map *m) {
    uint32_t n, from = span(m, &n);
    for (uint32_t i = from; i < from + n; i++) write_page(m, i);
}

static void op_read(struct map *m) {
    uint32_t n, from = span(m, &n);
    for (uint32_t i = from; i < from + n; i++) check(m, i);
}

/* The kernel reads one page and writes another, through a file. */
static void op_copy(struct map *m) {
    struct map *to = &maps[roll(alive)];
    uint32_t from_page = roll(m->pages), to_page = roll(to->pages);
    if (!(m->prots[from_page] & PROT_READ) || !(to->prots[to_page] & PROT_WRITE)) return;
    check(m, from_page);
    if (m->tags[from_page] & LAZY) return;
    must(pwrite(scratch_file, m->at + from_page * PAGE, PAGE, 0) == (ssize_t)PAGE, "pwrite");
    must(pread(scratch_file, to->at + to_page * PAGE, PAGE, 0) == (ssize_t)PAGE, "pread");
    to->tags[to_page] = m->tags[from_page];
    check(to, to_page);
}

static void op_brk(struct map *m) {
    for (m = maps; m < maps + alive && !(m->flags & FLAG_BRK);) m++;
    if (m == maps + alive) return;
    uint32_t n = 1 + roll(MAP_PAGES);
    if (pages_now - m->pages + n > pages_max) return;
    must(brk(m->at + n * PAGE) == 0, "brk");
    for (uint32_t i = m->pages; i < n; i++) m->tags[i] = 0, m->prots[i] = PROT_READ | PROT_WRITE;
    pages_now += (uint64_t)n - m->pages;
    m->pages = n;
}

static void join_one(void) {
    int status;
    if (children == 0) return;
    pid_t pid = child_pids[--children];
    must(waitpid(pid, &status, 0) == pid, "waitpid");
    if (status) die("child %d ended with status %x (replay: mapfuzz %lu %lu %lu)", (int)pid, status, (unsigned long)seed,
                    (unsigned long)ops, (unsigned long)(pages_max * PAGE / MIB));
}

static void play(uint64_t count);

/* A file of each process's own, for the copies by the kernel. */
static void open_scratch_file(void) {
    if (scratch_file > 0) close(scratch_file);
    scratch_file = memfd_create("mapfuzz", MFD_CLOEXEC);
    must(scratch_file >= 0, "memfd_create");
}

static void op_fork(struct map *m) {
    (void)m;
    uint64_t theirs = next(&rng), turns = 20 + roll(60);
    if (depth >= DEPTH) return;
    if (children == CHILDREN) join_one();
    pid_t pid = fork();
    must(pid >= 0, "fork");
    if (pid > 0) {
        child_pids[children++] = pid;
        return;
    }
    depth++;
    children = 0;
    open_scratch_file();
    rng = theirs;
    tag_last = (tag_last + 1000000 * (1 + theirs % 100)) & ~LAZY; /* tags of its own: a mix-up across processes shows */
    for (int k = 0; k < alive; k++) {
        struct map *map = &maps[k];
        if (map->flags & FLAG_DONTFORK) {
            unsigned char resident;
            if (mincore(map->at, PAGE, &resident) == 0) bad(map, 0, "DONTFORK range in the child");
            forget(map);
            k--;
        } else if (map->flags & FLAG_WIPE) {
            memset(map->tags, 0, map->pages * 4);
        }
    }
    check_all();
    play(turns);
    check_all();
    while (children > 0) join_one();
    _exit(0);
}

static const struct { const char *name; void (*run)(struct map *); uint64_t weight; } table[] = {
    {"map", op_map, 14}, {"unmap", op_unmap, 8}, {"overmap", op_overmap, 3}, {"remap", op_remap, 8},
    {"remap_keep", op_remap_keep, 3}, {"dontneed", op_dontneed, 8}, {"free", op_free, 4}, {"advise", op_advise, 5},
    {"protect", op_protect, 6}, {"write", op_write, 16}, {"read", op_read, 16}, {"copy", op_copy, 6},
    {"brk", op_brk, 3}, {"fork", op_fork, 1},
};
#define TABLE (sizeof table / sizeof *table)

static void play(uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t total = 0, k = 0;
        for (uint64_t t = 0; t < TABLE; t++) total += table[t].weight;
        for (uint64_t left = roll(total); left >= table[k].weight; k++) left -= table[k].weight;
        op_now = i;
        op_name = table[k].name;
        if (alive > 0 || table[k].run == op_map) table[k].run(&maps[alive ? roll(alive) : 0]);
    }
}

int main(int argc, char **argv) {
    rng = seed = number(argc, argv, 1, 1);
    ops = number(argc, argv, 2, 500);
    pages_max = number(argc, argv, 3, 64) * MIB / PAGE;
    fprintf(stderr, "replay: mapfuzz %lu %lu %lu\n", (unsigned long)seed, (unsigned long)ops, (unsigned long)(pages_max * PAGE / MIB));
    open_scratch_file();
    char *heap = sbrk(0);
    heap += -(uintptr_t)heap & (PAGE - 1);
    must(brk(heap + PAGE) == 0, "brk");
    track(heap, 1, FLAG_BRK);
    while (pages_now < pages_max * 3 / 4 && alive < MAPS - 4) op_map(NULL);
    play(ops);
    check_all();
    while (children > 0) join_one();
    uint64_t digest = alive;
    for (int k = 0; k < alive; k++) /* MADV_FREE leaves the kernel a choice, so tags of lazy pages stay out */
        for (uint64_t i = 0; i < maps[k].pages; i++) digest = mix(digest ^ maps[k].pages ^ ((uint64_t)i << 32));
    printf("mapfuzz ok seed %lu digest %016lx\n", (unsigned long)seed, (unsigned long)digest);
    return 0;
}
