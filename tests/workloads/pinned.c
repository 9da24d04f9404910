/* pinned MIB: fills MIB, has io_uring pin it all (fixed buffers), and fills and checks four times as much, which is not pinned. All must be right. */
#include "check.h"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BUFFER (1 * MIB)

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
    uint64_t mib = number(argc, argv, 1, 8), pages = mib * MIB / PAGE;
    char *pinned = fill(pages, 1);
    struct io_uring_params params = {0};
    int ring = syscall(SYS_io_uring_setup, 8, &params);
    if (ring < 0) die("io_uring_setup: %s", strerror(errno));
    struct iovec parts[64];
    for (uint64_t i = 0; i < mib; i++) parts[i] = (struct iovec){pinned + i * BUFFER, BUFFER};
    if (mib > 64 || syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, parts, mib)) die("pinning: %s", strerror(errno));
    char *other = fill(4 * pages, 1000000);
    for (int round = 0; round < 2; round++) {
        check(other, 4 * pages, 1000000, "memory that is not pinned");
        check(pinned, pages, 1, "pinned memory");
    }
    printf("pinned ok %lu pages\n", (unsigned long)pages);
    return 0;
}
