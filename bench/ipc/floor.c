/* The floor of the machine: an 8-byte token between two processes, no Python.
   usage: floor spin|eventfd SAMPLES IDLE_US CORE_A CORE_B (-1: not pinned); prints ns, one per line */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pin(int core) {
    cpu_set_t set;
    if (core < 0) return;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void token(int fd, int out) {
    uint64_t value = 1;
    if ((out ? write(fd, &value, 8) : read(fd, &value, 8)) != 8) exit(1);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int spin = !strcmp(argv[1], "spin"), samples = atoi(argv[2]), idle = atoi(argv[3]);
    volatile uint64_t *words = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t *out = calloc(samples, sizeof *out);
    int request = eventfd(0, 0), reply = eventfd(0, 0);
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin(atoi(argv[5]));
        for (uint64_t i = 1; i <= (uint64_t)samples; i++) {
            if (spin) {
                while (__atomic_load_n(&words[0], __ATOMIC_ACQUIRE) != i) ;
                __atomic_store_n(&words[16], i, __ATOMIC_RELEASE);
            } else {
                token(request, 0);
                token(reply, 1);
            }
        }
        _exit(0);
    }
    pin(atoi(argv[4]));
    for (uint64_t i = 1; i <= (uint64_t)samples; i++) {
        if (idle) usleep(idle);
        int64_t start = now();
        if (spin) {
            __atomic_store_n(&words[0], i, __ATOMIC_RELEASE);
            while (__atomic_load_n(&words[16], __ATOMIC_ACQUIRE) != i) ;
        } else {
            token(request, 1);
            token(reply, 0);
        }
        out[i - 1] = now() - start;
    }
    for (int i = 0; i < samples; i++) printf("%lld\n", (long long)out[i]);
    return 0;
}
