/* pairs MIB: fills memory, then touches one page of aligned pairs of which both are absent, in random order, and counts how often the other page
 * came along ("pairs N together K"). Nothing but the page size makes it come: no distance between two touches is that of others. */
#include "check.h"
#include <fcntl.h>
#include <sched.h>

#define TOUCHES 2000
#define WITHIN_MS 2 /* for the other page of a pair to come */
#define ABSENT_WITHIN_MS 20000

static int pagemap;

static int present(const char *page) {
    uint64_t entry;
    off_t at = (uint64_t)page / PAGE * 8;
    if (pread(pagemap, &entry, 8, at) != 8) die("pagemap: %s", strerror(errno));
    return entry >> 63;
}

int main(int argc, char **argv) {
    uint64_t pairs = number(argc, argv, 1, 64) * MIB / PAGE / 2, random = 1, together = 0;
    char *memory = map_pages(2 * pairs + 1);
    memory += (uint64_t)memory & PAGE; /* pairs begin at multiples of 8 KiB */
    madvise(memory, 2 * pairs * PAGE, MADV_NOHUGEPAGE);
    if ((pagemap = open("/proc/self/pagemap", O_RDONLY)) < 0) die("pagemap: %s", strerror(errno));
    for (uint64_t i = 0; i < 2 * pairs; i++) fill_page(memory + i * PAGE, i + 1);
    uint64_t start = now_ms();
    for (int touched = 0; touched < TOUCHES;) {
        uint64_t first = next(&random) % pairs * 2, one = first + (next(&random) & 1), other = one ^ 1;
        if (present(memory + one * PAGE) || present(memory + other * PAGE)) {
            if (now_ms() - start > ABSENT_WITHIN_MS) die("hardly any pair is absent");
            continue;
        }
        check_page(memory + one * PAGE, one + 1, "one");
        /* The thread goes on as soon as its own page is there. Then the pager needs the CPU for the other. */
        int came = 0;
        for (uint64_t until = now_ms() + WITHIN_MS; !came && now_ms() < until;) {
            sched_yield();
            came = present(memory + other * PAGE);
        }
        together += came;
        check_page(memory + other * PAGE, other + 1, "the other");
        touched++;
        start = now_ms();
    }
    printf("pairs %d together %lu\n", TOUCHES, (unsigned long)together);
    return 0;
}
