// Which instruction sets this CPU has, and how products are cut for its caches: the kernels are compiled for several
// (see hatch_build.py), this file for none in particular.
#include "blocking.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

// Instruction sets that were compiled, best first, with commas between.
EXPORT const char* baton_instruction_sets() { return BATON_ISAS; }

// What it was made of: see hatch_build.py.
EXPORT const char* baton_sources() { return BATON_SOURCES; }

// For a second-level cache of a MiB.
Blocking baton_blocking = {384 << 10, 256 << 10, 8192};

EXPORT void baton_set_blocking(int64_t chunk, int64_t item, int64_t ahead) { baton_blocking = {chunk, item, ahead}; }

#if defined(__x86_64__)
// Byte dot products of 256 bits in AVX's own encoding (compilers of 2021 know no name for them).
static bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(__x86_64__)
// Tiles, their products of bytes and of bfloat16, and Linux's permission to use them, which a process has to ask for: its
// threads have it too, and processes that it forks.  (Linux refuses where a thread's stack for signals has no room
// for tiles, and a container may forbid the question.)
static bool has_matrix_units() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
#if defined(__linux__)
    constexpr long kAskedFor = 0x1022, kAsk = 0x1023, kTiles = 18;  // of arch_prctl; a part of a thread's state
    unsigned long granted = 0;
    return !syscall(SYS_arch_prctl, kAsk, kTiles) && !syscall(SYS_arch_prctl, kAskedFor, &granted) &&
           (granted >> kTiles & 1);
#else
    return false;
#endif
}
#endif

// Whether this CPU (and its operating system) has what `name` needs.
EXPORT int baton_cpu_has(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx2vnni")) return avx2 && has_avx_vnni();
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx512vnni")) return vnni;
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(name, "avx512bf16")) return bf16;
    if (!strcmp(name, "amx")) return bf16 && has_matrix_units();
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return 1;
#endif
    return !strcmp(name, "plain");
}
