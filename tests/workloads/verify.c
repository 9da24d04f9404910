/* verify MIB [ROUNDS|forever]: fills memory with a pattern of page and generation, then reads it back in
 * sequential, strided and random order, rewriting a third of the pages each round. Prints a digest which depends on
 * every byte read. With `forever` it prints "round N" after each round and stops when stdin ends. */
#include "check.h"
#include <poll.h>

static uint64_t pages;
static char *memory;

/* The generation of a page is the last round that rewrote it: a function, not a table in the memory under test. */
static int rewritten(uint64_t page, uint64_t round) { return mix(page * 1000003 + round) % 3 == 0; }

static uint64_t tag_of(uint64_t page, uint64_t round) {
    while (round > 0 && !rewritten(page, round)) round--;
    return (page + 1) * 1000003 + round;
}

static uint64_t visit(uint64_t page, uint64_t round, uint64_t digest, const char *order) {
    char *p = memory + page * PAGE;
    check_page(p, tag_of(page, round), order);
    return mix(digest ^ *(volatile uint64_t *)(p + (mix(page ^ round) % WORDS) * 8));
}

static uint64_t verify(uint64_t round, uint64_t digest) {
    for (uint64_t i = 0; i < pages; i++) digest = visit(i, round, digest, "sequential");
    uint64_t stride = 67; /* pages; every page is met once because it is coprime with a multiple of 256 */
    for (uint64_t i = 0; i < pages; i++) digest = visit(i * stride % pages, round, digest, "strided");
    uint64_t random = 42 + round;
    for (uint64_t i = 0; i < pages; i++) digest = visit(next(&random) % pages, round, digest, "random");
    return digest;
}

static int stdin_ended(void) {
    struct pollfd fd = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&fd, 1, 0) == 1 && read(0, &byte, 1) <= 0;
}

int main(int argc, char **argv) {
    int forever = argc > 2 && strcmp(argv[2], "forever") == 0;
    uint64_t rounds = forever ? UINT64_MAX : number(argc, argv, 2, 2), digest = 0;
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    memory = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, tag_of(i, 0));
    for (uint64_t round = 0; round < rounds && !(forever && stdin_ended()); round++) {
        for (uint64_t i = 0; round > 0 && i < pages; i++)
            if (rewritten(i, round)) fill_page(memory + i * PAGE, tag_of(i, round));
        digest = verify(round, digest);
        if (forever) {
            printf("round %lu\n", (unsigned long)round);
            fflush(stdout);
        }
    }
    if (forever) printf("ended, every page right\n");
    else printf("digest %016lx\n", (unsigned long)digest);
    return 0;
}
