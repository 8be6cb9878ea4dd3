// A barrier for the ranks of an instance that are on one host, in memory that they share
// (`model/layers/shared_ranks.py`).
//
// Each rank has a line of its own: the number of the last barrier that it has come to, and how many threads sleep until
// it comes to the next one.  A rank that waits looks for `spin_ns`, and offers its core to others all the while; then it
// sleeps in a futex.  A rank that comes and one that goes to sleep look at each other's word after they have written
// their own, both in one order for all (SEQ_CST), so no sleeper is missed; and a futex does not sleep if the number is
// another one by then.
//
// Beside it stands what the rank computes there, of even and of odd barriers: ranks that have come to the same barrier for
// different things would compute nonsense.  A rank writes it again two barriers later, when all have read it.
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "glibc.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct alignas(64) Line {
    uint32_t number;
    uint32_t sleepers;
    int64_t what[2];
};

constexpr int kPauses = 32;  // between two offers of the core: about a microsecond

inline uint32_t load(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }

inline bool has_come(const Line& line, uint32_t number) { return int32_t(load(line.number) - number) >= 0; }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void wake(Line& line) {
#if defined(__linux__)
    if (load(line.sleepers)) syscall(SYS_futex, &line.number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)line;
#endif
}

// At most `left_ns`, while the number is `seen`.
void sleep_while(Line& line, uint32_t seen, int64_t left_ns) {
#if defined(__linux__)
    const timespec time = {time_t(left_ns / 1'000'000'000), long(left_ns % 1'000'000'000)};
    syscall(SYS_futex, &line.number, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    (void)line, (void)seen, (void)left_ns;
    sched_yield();
#endif
}

bool wait_for(Line& line, uint32_t number, int64_t spin_until, int64_t until) {
    do {
        for (int i = 0; i < kPauses; ++i) {
            if (has_come(line, number)) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        }
        sched_yield();
    } while (now_ns() < spin_until);
    __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
    bool come;
    for (int64_t now; !(come = has_come(line, number)) && (now = now_ns()) < until;) {
        const uint32_t seen = load(line.number);
        if (int32_t(seen - number) < 0) sleep_while(line, seen, until - now);
    }
    __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
    return come;
}

inline float wide(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// To the nearest, to the even one of two.
inline uint16_t narrow(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    const uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

void add(float* to, const float* more, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += more[i];
}

void add(uint16_t* to, const uint16_t* more, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = narrow(wide(to[i]) + wide(more[i]));
}

// In the order of ranks, rounded after each.
template <class T>
void add_up(T* data, int64_t count, const char* slots, int64_t slot_bytes, int64_t size) {
    memcpy(data, slots, count * sizeof(T));
    for (int64_t rank = 1; rank < size; ++rank) add(data, reinterpret_cast<const T*>(slots + rank * slot_bytes), count);
}

int64_t come(Line* of, int64_t rank, int64_t size, int64_t number, int64_t what, int64_t spin_ns, int64_t wait_ns) {
    of[rank].what[number & 1] = what;
    __atomic_store_n(&of[rank].number, uint32_t(number), __ATOMIC_SEQ_CST);
    wake(of[rank]);
    const int64_t now = now_ns();
    for (int64_t other = 0; other < size; ++other)
        if (other != rank && !wait_for(of[other], uint32_t(number), now + spin_ns, now + wait_ns)) return other;
    for (int64_t other = 0; other < size; ++other)
        if (of[other].what[number & 1] != what) return -2 - other;
    return -1;
}

}  // namespace

// Rank `rank` of `size` comes to barrier `number`, and waits until all have.  Returns -1; or a rank that has not within
// `wait_ns`: then it may be called again with the same number; or -2 - r for a rank r that came for something else than
// `what`.  All see afterwards what each wrote before it came.
EXPORT int64_t baton_barrier(void* lines, int64_t rank, int64_t size, int64_t number, int64_t what, int64_t spin_ns,
                             int64_t wait_ns) {
    return come(static_cast<Line*>(lines), rank, size, number, what, spin_ns, wait_ns);
}

// Sums `count` numbers at `data` over the ranks, in place: each copies its own into its slot, and behind the barrier
// reads all slots.  Otherwise as `baton_barrier`.  `bfloat16`: else they are float32.
EXPORT int64_t baton_all_reduce(void* lines, int64_t rank, int64_t size, int64_t number, int64_t what, int64_t spin_ns,
                                int64_t wait_ns, void* data, int64_t count, int64_t bfloat16, void* slots, int64_t slot_bytes) {
    char* const first = static_cast<char*>(slots);
    memcpy(first + rank * slot_bytes, data, count * (bfloat16 ? 2 : 4));
    const int64_t found = come(static_cast<Line*>(lines), rank, size, number, what, spin_ns, wait_ns);
    if (found != -1) return found;
    if (bfloat16)
        add_up(static_cast<uint16_t*>(data), count, first, slot_bytes, size);
    else
        add_up(static_cast<float*>(data), count, first, slot_bytes, size);
    return -1;
}
