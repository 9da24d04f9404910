/* unable: a binary that says that it could go on in the place of a gms, and when it is executed in its place executes the gms at GMS_TEST_BEFORE
 * again, as a gms does that cannot use what it is given. With GMS_TEST_HANGS it says nothing, and does not end; with GMS_TEST_STALLS it does not end once it
 * is in that place. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (getenv("GMS_TEST_HANGS")) pause();
    if (argc < 3 || strcmp(argv[1], "adopt")) return 2;
    if (!strncmp(argv[2], "--probe=", 8)) return puts("knows versions: 0 4") < 0;
    if (getenv("GMS_TEST_STALLS")) pause();
    const char *before = getenv("GMS_TEST_BEFORE");
    if (before) execl(before, "gms", "adopt", argv[2], "--instead=it is unable", (char *)NULL);
    return 3;
}
