// A loop whose items the threads of a team share out among themselves in contiguous ranges.
//
// Theory.  `parallel_for` hands out one item after the other: neighbours go to different threads, and nobody knows
// which item it will get next.  Where an item streams memory that is a loss, for what follows an item in memory is
// what a thread wants to fetch in advance.  Here each thread begins with a range of its own and goes through it in
// order; when it is done, it takes over the upper half of what another one has left, down to a single item.  So a
// thread that comes late, or never, delays nobody by more than an item, and there are few such thefts.
//
// A range is one word, [next, end).  Its owner and thieves change it by compare-and-swap.  An item that has been
// taken is in no range ever again, so a range that is found unchanged has not changed in between either.
#pragma once
#include "parallel.h"

namespace {

constexpr int kMaxRanges = 256;

struct alignas(64) Range {
    uint64_t word;  // next in the upper half, end in the lower one
};

inline uint64_t range_word(int64_t next, int64_t end) { return (uint64_t)next << 32 | (uint64_t)end; }

template <class Kept, class Body>
struct Ranges {
    const Body* body;
    int threads;
    Range ranges[kMaxRanges];

    // Takes the first item of the thread's own range: its number, or -1.  `end`: where the range ends.
    int64_t take(int thread, int64_t* end) {
        uint64_t* word = &ranges[thread].word;
        uint64_t found = __atomic_load_n(word, __ATOMIC_RELAXED);
        for (;;) {
            const int64_t next = (int64_t)(found >> 32);
            *end = (int64_t)(uint32_t)found;
            if (next >= *end) return -1;
            if (__atomic_compare_exchange_n(word, &found, range_word(next + 1, *end), true, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED))
                return next;
        }
    }

    // Moves the upper half of some other range into the thread's own, which is empty.  Whether there was one.
    bool steal(int thread) {
        for (int other = 1; other < threads; ++other) {
            uint64_t* word = &ranges[(thread + other) % threads].word;
            uint64_t found = __atomic_load_n(word, __ATOMIC_RELAXED);
            for (;;) {
                const int64_t next = (int64_t)(found >> 32), end = (int64_t)(uint32_t)found;
                if (next >= end) break;
                const int64_t middle = next + (end - next) / 2;
                if (__atomic_compare_exchange_n(word, &found, range_word(next, middle), true, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED)) {
                    __atomic_store_n(&ranges[thread].word, range_word(middle, end), __ATOMIC_RELAXED);
                    return true;
                }
            }
        }
        return false;
    }

    static void run(void* context, int thread) {
        Ranges* all = static_cast<Ranges*>(context);
        int64_t end = 0;
        Kept kept;
        do {
            for (int64_t item; (item = all->take(thread, &end)) >= 0;) (*all->body)(item, item + 1 < end, kept);
        } while (all->steal(thread));
    }
};

// Calls body(item, more, kept) for each item in [0, items), items < 2^31, `more`: the next item is, as yet, the same
// thread's; `kept`: what this thread has from its first item to its last.
template <class Kept, class Body>
inline void parallel_ranges_keeping(int64_t items, const Body& body) {
    int threads = baton_num_threads();
    if (threads > items) threads = static_cast<int>(items);
    if (threads > kMaxRanges) threads = kMaxRanges;
    if (threads <= 1) {
        Kept kept;
        for (int64_t item = 0; item < items; ++item) body(item, item + 1 < items, kept);
        return;
    }
    Ranges<Kept, Body> all;
    all.body = &body;
    all.threads = threads;
    for (int t = 0; t < threads; ++t) all.ranges[t].word = range_word(items * t / threads, items * (t + 1) / threads);
    baton_team(Ranges<Kept, Body>::run, &all, threads);
}

struct Nothing {};

// Calls body(item, more), as above.
template <class Body>
inline void parallel_ranges(int64_t items, const Body& body) {
    parallel_ranges_keeping<Nothing>(items, [&](int64_t item, bool more, Nothing&) { body(item, more); });
}

}  // namespace
