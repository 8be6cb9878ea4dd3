// The threads that share a kernel's work: the caller, and helpers that this library keeps.
//
// A step is a few hundred kernels of some microseconds each, and between two of them the caller needs a moment.
// Waking a sleeping thread takes 30 us and more in a virtual machine; a thread that spins takes a core from the
// processes that serve requests.  So:
//
//   * A helper that has just worked looks for more for kSpinNs (BATON_SPIN_US in the environment), and offers its core
//     to others all the while (sched_yield); then it sleeps.  An idle worker uses no CPU.
//   * Nobody waits for a helper that has not begun.  A job has seats.  A helper takes one, if it is there in time; the
//     caller works from the start and, when nothing is left, closes the job and waits for those seated only.  A helper
//     that is asleep, or whose core others have, costs nothing but its help.
//
// Hence the contract of `baton_team`: a body is run by at most `threads` threads, perhaps by the caller alone; it
// takes its work from a shared counter, and must not wait for another thread.
//
// State.  One word: the number of the job (upper half) and its free seats (lower half).  Posting a job stores a new
// number with seats = helpers wanted.  Taking a seat lowers it by one; whoever takes seat s is thread s of the job.
// Closing swaps the seats for zero; what was missing then is how many sit.  A helper reads the job only after it has
// its seat, when the caller can no longer leave.  A number comes back after 65,536 jobs: at worst, a helper that slept
// through all of them misses one.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "glibc.h"
#include "parallel.h"

namespace {

constexpr uint32_t kSeats = 0xffff;
constexpr int kMostHelpers = 511;
constexpr int kPauses = 8;            // between two looks at the state
constexpr int64_t kSpinNs = 200'000;  // a helper without work

typedef int (*GetInt)(void);

struct alignas(64) Line {
    uint32_t value;
};

GetInt max_threads = nullptr;

Line state;     // job number << 16 | free seats
Line finished;  // of those seated, who have done their share
Line sleeping;  // helpers in pthread_cond_wait, or about to be
Line busy;      // a caller has the team
int helpers = 0;  // that were started; touched by who is busy

BatonBody job_body;
void* job_context;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

inline uint32_t load(const Line& line) { return __atomic_load_n(&line.value, __ATOMIC_SEQ_CST); }

inline void pause_briefly() {
#if defined(__x86_64__)
    for (int i = 0; i < kPauses; ++i) __builtin_ia32_pause();
#elif defined(__aarch64__)
    for (int i = 0; i < kPauses; ++i) __asm__ volatile("yield");
#endif
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

int64_t spin_time() {
    const char* set = getenv("BATON_SPIN_US");
    return set ? atoll(set) * 1000 : kSpinNs;
}

// Set when the library is loaded: a static of a function would need a lock of libstdc++, and nothing else here needs it.
const int64_t spin_ns = spin_time();

// Returns when the state is no longer `seen`.
void await_change(uint32_t seen) {
    const int64_t deadline = now_ns() + spin_ns;
    do {
        for (int i = 0; i < 16; ++i) {
            if (load(state) != seen) return;
            pause_briefly();
        }
        sched_yield();
    } while (now_ns() < deadline);
    pthread_mutex_lock(&mutex);
    __atomic_add_fetch(&sleeping.value, 1, __ATOMIC_SEQ_CST);
    while (load(state) == seen) pthread_cond_wait(&bell, &mutex);
    __atomic_sub_fetch(&sleeping.value, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mutex);
}

void* help(void*) {
    uint32_t last = 0;  // the number of the job that this thread has worked on
    for (uint32_t seen = load(state);; seen = load(state)) {
        const uint32_t seat = seen & kSeats;
        if (!seat || seen >> 16 == last) {
            await_change(seen);
            continue;
        }
        if (!__atomic_compare_exchange_n(&state.value, &seen, seen - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        last = seen >> 16;
        job_body(job_context, static_cast<int>(seat));
        __atomic_add_fetch(&finished.value, 1, __ATOMIC_RELEASE);
    }
    return nullptr;
}

// As many helpers as there can be, `wanted` at most.
int start_helpers(int wanted) {
    if (wanted > kMostHelpers) wanted = kMostHelpers;
    while (helpers < wanted) {
        // Signals are for the threads of Python.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        const bool failed = pthread_create(&thread, nullptr, help, nullptr) != 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (failed) break;
        pthread_detach(thread);
        ++helpers;
    }
    return helpers < wanted ? helpers : wanted;
}

void open_job(int seats) {
    __atomic_store_n(&finished.value, 0, __ATOMIC_RELAXED);
    const uint32_t number = (state.value >> 16) + 1;
    __atomic_store_n(&state.value, number << 16 | static_cast<uint32_t>(seats), __ATOMIC_SEQ_CST);
    if (!load(sleeping)) return;
    pthread_mutex_lock(&mutex);  // whoever is about to sleep sleeps now, or has seen the job
    pthread_mutex_unlock(&mutex);
    if (seats == 1) pthread_cond_signal(&bell);
    else pthread_cond_broadcast(&bell);
}

void close_job(int seats) {
    const uint32_t left = __atomic_fetch_and(&state.value, ~kSeats, __ATOMIC_SEQ_CST) & kSeats;
    const uint32_t seated = static_cast<uint32_t>(seats) - left;
    for (int looks = 1; __atomic_load_n(&finished.value, __ATOMIC_ACQUIRE) != seated; ++looks) {
        pause_briefly();
        if (looks % 16 == 0) sched_yield();
    }
}

}  // namespace

// omp_get_max_threads of PyTorch's OpenMP runtime; null: one thread.
extern "C" __attribute__((visibility("default"))) void baton_bind_max_threads(void* threads) {
    max_threads = reinterpret_cast<GetInt>(threads);
}

// Threads that a kernel may use: what torch.set_num_threads said.
extern "C" __attribute__((visibility("default"))) int baton_num_threads() { return max_threads ? max_threads() : 1; }

void baton_team(BatonBody body, void* context, int threads) {
    // A second caller at the same time works alone.
    if (threads <= 1 || __atomic_exchange_n(&busy.value, 1, __ATOMIC_ACQUIRE)) return body(context, 0);
    const int seats = start_helpers(threads - 1);
    job_body = body;
    job_context = context;
    open_job(seats);
    body(context, 0);
    close_job(seats);
    __atomic_store_n(&busy.value, 0, __ATOMIC_RELEASE);
}
