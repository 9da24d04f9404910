/* shmover MIB: shared memory is attached over the middle third of MIB of plain memory (shmat with SHM_REMAP, of which the kernel tells no
 * userfaultfd), detached again, and plain memory mapped in its place. What is written there, and what was beside it, must survive pressure. */
#include "check.h"
#include <sys/ipc.h>
#include <sys/shm.h>

static char *plain;

static void fill(uint64_t from, uint64_t to, uint64_t sweep) {
    for (uint64_t i = from; i < to; i++) fill_page(plain + i * PAGE, (i + 1) * 8 + sweep);
}

static void check(uint64_t from, uint64_t to, uint64_t sweep, const char *where) {
    for (uint64_t i = from; i < to; i++) check_page(plain + i * PAGE, (i + 1) * 8 + sweep, where);
}

static void pressure(uint64_t pages) {
    char *more = map_pages(pages);
    for (uint64_t i = 0; i < pages; i++) fill_page(more + i * PAGE, i + 1);
    for (uint64_t i = 0; i < pages; i++) check_page(more + i * PAGE, i + 1, "other memory");
    munmap(more, pages * PAGE);
}

int main(int argc, char **argv) {
    uint64_t pages = number(argc, argv, 1, 48) * MIB / PAGE, from = pages / 3, to = 2 * from;
    uint64_t bytes = (to - from) * PAGE;
    plain = map_pages(pages);
    char *middle = plain + from * PAGE;
    fill(0, pages, 0);
    pressure(pages);
    for (uint64_t round = 1; round < 4; round++) {
        int id = shmget(IPC_PRIVATE, bytes, 0600);
        if (id < 0) die("shmget: %s", strerror(errno));
        void *at = shmat(id, middle, SHM_REMAP);
        shmctl(id, IPC_RMID, NULL);
        if (at != middle) die("shmat: %s", strerror(errno));
        if (round == 2) {
            /* Long enough to be noticed. */
            fill_page(middle, 7);
            pressure(pages);
            check_page(middle, 7, "shared memory");
        }
        /* What was on its way out when it was replaced has gone by then: if memory is replaced twice meanwhile, gms ends the program. */
        check(0, from, 0, "before");
        if (shmdt(at)) die("shmdt: %s", strerror(errno));
        void *again = mmap(middle, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (again != middle) die("mmap: %s", strerror(errno));
        /* A quarter is never written. */
        uint64_t written = to - (to - from) / 4;
        fill(from, written, round);
        pressure(pages);
        check(0, from, 0, "before");
        check(from, written, round, "in the middle");
        for (uint64_t i = written; i < to; i++) check_page(plain + i * PAGE, 0, "never written");
        check(to, pages, 0, "behind");
    }
    printf("shmover ok\n");
    return 0;
}
