/* follow ROUNDS: two threads have a block each. The second moves its block to where the first's was as soon as the kernel has moved that, before the
 * pager can have been told, and back; then the first comes back. Another thread forks meanwhile. Each child finds both blocks whole. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define BLOCK 24UL
#define PLACES 3

/* Where the kernel maps nothing by itself. */
static char *place(int n) { return (char *)(1UL << 40) + ((long)n << 30); }

static uint64_t rounds;
static pthread_barrier_t begin, end;
static atomic_int followed;

static int is_mapped(int n) {
    unsigned char there;
    return mincore(place(n), PAGE, &there) == 0;
}

static void move(char *from, char *to) {
    char *at = mremap(from, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (at != to) die("mremap: %s", strerror(errno));
}

static void *first(void *unused) {
    for (uint64_t i = 0; i < rounds; i++) {
        pthread_barrier_wait(&begin);
        move(place(0), place(2));
        while (!followed || is_mapped(0)) continue;
        move(place(2), place(0));
        pthread_barrier_wait(&end);
    }
    return unused;
}

static void *second(void *unused) {
    for (uint64_t i = 0; i < rounds; i++) {
        pthread_barrier_wait(&begin);
        while (is_mapped(0)) continue;
        move(place(1), place(0));
        followed = 1;
        move(place(0), place(1));
        pthread_barrier_wait(&end);
    }
    return unused;
}

static void check(const char *who) {
    int seen = 0;
    for (int n = 0; n < PLACES; n++) {
        if (!is_mapped(n)) continue;
        int second = *(volatile uint64_t *)place(n) == word_of(1 + BLOCK, 0);
        if (seen & (1 << second)) die("a block is twice %s", who);
        seen |= 1 << second;
        for (uint64_t i = 0; i < BLOCK; i++) check_page(place(n) + i * PAGE, 1 + second * BLOCK + i, who);
    }
    if (seen != 3) die("a block is nowhere %s", who);
}

int main(int argc, char **argv) {
    rounds = number(argc, argv, 1, 200);
    pthread_barrier_init(&begin, NULL, 3);
    pthread_barrier_init(&end, NULL, 3);
    for (int n = 0; n < 2; n++) {
        move(map_pages(BLOCK), place(n));
        for (uint64_t i = 0; i < BLOCK; i++) fill_page(place(n) + i * PAGE, 1 + n * BLOCK + i);
    }
    pthread_t threads[2];
    if (pthread_create(&threads[0], NULL, first, NULL)) die("no thread");
    if (pthread_create(&threads[1], NULL, second, NULL)) die("no thread");
    for (uint64_t i = 0; i < rounds; i++) {
        followed = 0;
        pthread_barrier_wait(&begin);
        for (volatile uint64_t wait = mix(i) % 20000; wait > 0; wait--) continue;
        pid_t child = fork();
        if (child < 0) die("fork: %s", strerror(errno));
        if (child == 0) {
            check("in a child");
            _exit(0);
        }
        pthread_barrier_wait(&end);
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) die("a child failed");
    }
    for (int n = 0; n < 2; n++) pthread_join(threads[n], NULL);
    check("in the parent");
    printf("follow ok\n");
    return 0;
}
