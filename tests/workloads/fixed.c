/* fixed locked|pinned MIB OTHER: fills MIB, has the kernel keep all of it in its place (mlockall, or io_uring's fixed buffers), and fills and checks OTHER
 * MIB, which may leave. All must be right. */
#include "check.h"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BUFFERS_MAX 64

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

static void pin(char *memory, uint64_t mib) {
    struct io_uring_params params = {0};
    struct iovec buffers[BUFFERS_MAX];
    int ring = syscall(SYS_io_uring_setup, 8, &params);
    if (ring < 0) die("io_uring_setup: %s", strerror(errno));
    if (mib > BUFFERS_MAX) die("at most %d MiB", BUFFERS_MAX);
    for (uint64_t i = 0; i < mib; i++) buffers[i] = (struct iovec){memory + i * MIB, MIB};
    if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, buffers, mib)) die("pinning: %s", strerror(errno));
}

int main(int argc, char **argv) {
    uint64_t mib = number(argc, argv, 2, 32), pages = mib * MIB / PAGE, others = number(argc, argv, 3, 64) * MIB / PAGE;
    int locks = argc > 1 && strcmp(argv[1], "locked") == 0;
    char *fixed = fill(pages, 1);
    check(fixed, pages, 1, "memory before it is fixed");
    if (!locks) pin(fixed, mib);
    if (locks && mlockall(MCL_CURRENT)) die("mlockall: %s", strerror(errno));
    char *other = fill(others, 1000000);
    for (int round = 0; round < 2; round++) {
        check(other, others, 1000000, "memory that may leave");
        check(fixed, pages, 1, "fixed memory");
    }
    printf("fixed ok %lu pages\n", (unsigned long)pages);
    return 0;
}
