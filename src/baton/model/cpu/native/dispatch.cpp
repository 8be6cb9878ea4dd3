// Which instruction sets this CPU has: the kernels are compiled for several (see hatch_build.py), this file for none
// in particular.
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Instruction sets that were compiled, best first, with commas between.
EXPORT const char* baton_instruction_sets() { return BATON_ISAS; }

// What it was made of: see hatch_build.py.
EXPORT const char* baton_sources() { return BATON_SOURCES; }

// Whether this CPU (and its operating system) has what `name` needs.
EXPORT int baton_cpu_has(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx512bf16"))
        return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return 1;
#endif
    return !strcmp(name, "plain");
}
