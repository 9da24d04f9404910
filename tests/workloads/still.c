/* still MIB sleep|compute|discard [KEEP_MIB]: fills memory with a pattern and says "ready". Then it touches none of it, asleep, computing, or
 * filling and discarding other memory, until a line comes on stdin; then it checks every page ("right") and waits for the next line, until stdin ends ("ended"). With KEEP_MIB the
 * first line makes it free all but so much, read that, and say "kept"; the second line makes it fill as much again. */
#include "check.h"
#include <poll.h>
#include <sys/mman.h>

static char *memory, *more, *scratch;
static uint64_t pages, kept, added;

static void check_all(void) {
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, i + 1, "still");
    for (uint64_t i = 0; i < added; i++) check_page(more + i * PAGE, i + 1000003, "still, added");
}

/* False when stdin has ended. */
static int next_line(int computes) {
    struct pollfd fd = {.fd = 0, .events = POLLIN};
    volatile uint64_t sink = 0;
    char byte = 0;
    while (computes && poll(&fd, 1, 0) == 0)
        for (uint64_t i = 0; i < (scratch ? 64 : 1 << 20); i++) {
            sink = mix(sink);
            if (!scratch) continue;
            scratch[0] = 1;
            madvise(scratch, PAGE, MADV_DONTNEED);
        }
    while (byte != '\n')
        if (read(0, &byte, 1) <= 0) return 0;
    return 1;
}

static void say(const char *word) {
    printf("%s\n", word);
    fflush(stdout);
}

static void shrink(void) {
    munmap(memory + kept * PAGE, (pages - kept) * PAGE);
    pages = kept;
    check_all();
    say("kept");
}

static void grow(void) {
    added = kept;
    more = map_pages(added);
    for (uint64_t i = 0; i < added; i++) fill_page(more + i * PAGE, i + 1000003);
}

int main(int argc, char **argv) {
    int computes = argc > 2 && strcmp(argv[2], "sleep") != 0;
    if (argc > 2 && strcmp(argv[2], "discard") == 0) scratch = map_pages(64);
    pages = number(argc, argv, 1, 64) * MIB / PAGE;
    kept = number(argc, argv, 3, 0) * MIB / PAGE;
    memory = map_pages(pages);
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, i + 1);
    say("ready");
    if (kept && next_line(computes)) shrink();
    if (kept && next_line(computes)) grow();
    while (next_line(computes)) {
        check_all();
        say("right");
    }
    say("ended");
    _exit(0); /* touches nothing that was not touched all the time */
}
