/* comings ROUNDS: threads that come and go, one after the other; each end is awaited. */
#include "check.h"
#include <pthread.h>

static void *end(void *p) { return p; }

int main(int argc, char **argv) {
    uint64_t rounds = number(argc, argv, 1, 20000);
    for (uint64_t i = 0; i < rounds; i++) {
        pthread_t threads[2];
        void *result;
        for (int k = 0; k < 2; k++)
            if (pthread_create(&threads[k], NULL, end, (void *)(i + k))) die("pthread_create");
        for (int k = 0; k < 2; k++)
            if (pthread_join(threads[k], &result) || result != (void *)(i + k)) die("pthread_join");
    }
    printf("comings ok %lu\n", (unsigned long)rounds);
    return 0;
}
