/* verify MIB [ROUNDS|forever]: fills memory with a pattern of page and generation, then reads it back in
 * sequential order, half of it in strided order (the other half in the next round) and a quarter in random order,
 * rewriting a third of the pages each round. Prints a digest which depends on every byte read. With `forever` it
 * prints "round N" after each round; when stdin ends it looks at every page once more, and stops. */
#include "check.h"
#include <poll.h>

static uint64_t pages;
static int forever, ended;
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

static int goes_on(void) {
    struct pollfd fd = {.fd = 0, .events = POLLIN};
    char byte;
    ended = ended || (forever && poll(&fd, 1, 0) == 1 && read(0, &byte, 1) <= 0);
    return !ended;
}

static uint64_t in_order(uint64_t round, uint64_t digest) {
    for (uint64_t i = 0; i < pages; i++) digest = visit(i, round, digest, "sequential");
    return digest;
}

static uint64_t verify(uint64_t round, uint64_t digest) {
    digest = in_order(round, digest);
    uint64_t stride = 67; /* pages; none is met twice because it is coprime with a multiple of 256 */
    uint64_t strided = goes_on() ? pages / 2 : 0;
    for (uint64_t i = 0, first = round % 2 * strided; i < strided; i++) digest = visit((first + i) * stride % pages, round, digest, "strided");
    uint64_t state = 42 + round, random = goes_on() ? pages / 4 : 0;
    for (uint64_t i = 0; i < random; i++) digest = visit(next(&state) % pages, round, digest, "random");
    return digest;
}

int main(int argc, char **argv) {
    forever = argc > 2 && strcmp(argv[2], "forever") == 0;
    uint64_t rounds = forever ? UINT64_MAX : number(argc, argv, 2, 2), digest = 0;
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    memory = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, tag_of(i, 0));
    uint64_t round = 0;
    for (;;) {
        digest = verify(round, digest);
        if (!goes_on()) break;
        if (forever) {
            printf("round %lu\n", (unsigned long)round);
            fflush(stdout);
        }
        if (round + 1 == rounds) break;
        round++;
        for (uint64_t i = 0; i < pages; i++)
            if (rewritten(i, round)) fill_page(memory + i * PAGE, tag_of(i, round));
    }
    if (forever) {
        in_order(round, digest);
        printf("ended, every page right\n");
    } else {
        printf("digest %016lx\n", (unsigned long)digest);
    }
    return 0;
}
