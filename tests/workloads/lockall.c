/* lockall MIB: fills MIB, locks all memory that there is (mlockall), and fills and checks twice as much, which is not locked. All must be right. */
#include "check.h"

static char *fill(uint64_t pages, uint64_t base) {
    char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("mmap: %s", strerror(errno));
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    for (uint64_t i = 0; i < pages; i++) fill_page(memory + i * PAGE, base + i);
    return memory;
}

static void check(const char *memory, uint64_t pages, uint64_t base, const char *what) {
    for (uint64_t i = 0; i < pages; i++) check_page(memory + i * PAGE, base + i, what);
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 32) * MIB / PAGE;
    char *locked = fill(pages, 1);
    check(locked, pages, 1, "memory before it is locked");
    if (mlockall(MCL_CURRENT)) die("mlockall: %s", strerror(errno));
    char *other = fill(2 * pages, 1000000);
    for (int round = 0; round < 2; round++) {
        check(other, 2 * pages, 1000000, "memory that is not locked");
        check(locked, pages, 1, "locked memory");
    }
    printf("lockall ok %lu pages\n", (unsigned long)pages);
    return 0;
}
