// What the library asks of the machine: its instruction sets, and PyTorch's threads.
//
// The kernels are compiled for several instruction sets (see hatch_build.py); this file, compiled for none in
// particular, says which of them the CPU has.  It also runs a function on the threads of the OpenMP runtime
// that PyTorch has loaded already: the library is not linked to one, Python hands over the runtime's
// functions (baton_bind_openmp), because two pools of threads in a process disturb each other.
#include <stdint.h>
#include <string.h>

#include "parallel.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*GetInt)(void);

GompParallel gomp_parallel = nullptr;
GetInt thread_num = nullptr;
GetInt max_threads = nullptr;

struct Team {
    BatonBody body;
    void* context;
};

void member(void* data) {
    Team* team = static_cast<Team*>(data);
    team->body(team->context, thread_num());
}

}  // namespace

// Instruction sets that were compiled, best first, with commas between.
EXPORT const char* baton_instruction_sets() { return BATON_ISAS; }

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

// GOMP_parallel, omp_get_thread_num and omp_get_max_threads of the runtime to use; nulls: one thread.
EXPORT void baton_bind_openmp(void* parallel, void* thread, void* threads) {
    gomp_parallel = reinterpret_cast<GompParallel>(parallel);
    thread_num = reinterpret_cast<GetInt>(thread);
    max_threads = reinterpret_cast<GetInt>(threads);
}

// Threads that a kernel may use: what torch.set_num_threads said.
EXPORT int baton_num_threads() { return gomp_parallel ? max_threads() : 1; }

void baton_team(BatonBody body, void* context, int threads) {
    if (threads <= 1 || !gomp_parallel) {
        body(context, 0);
        return;
    }
    Team team = {body, context};
    gomp_parallel(member, &team, static_cast<unsigned>(threads), 0);
}
