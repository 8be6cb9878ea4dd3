// Work shared by threads, and the names of exported functions.
//
// A source that includes this is compiled once for each instruction set, with -DBATON_ISA=<name>:
//   * BATON_EXPORT(attend)(…) defines the C function baton_attend_<name>;
//   * everything else goes into `namespace {}`: an inline function or a template of external linkage would be
//     merged by the linker with its twin of another instruction set.  So no templates of the standard library.
#pragma once
#include <stdint.h>

// What a thread of a team runs.
typedef void (*BatonBody)(void* context, int thread);

// team.cpp: runs body(context, thread) on the caller (thread 0) and on as many others below `threads` as come in time;
// returns when all have.
extern "C" int baton_num_threads();
void baton_team(BatonBody body, void* context, int threads);

#ifdef BATON_ISA
#define BATON_JOIN_(name, isa) baton_##name##_##isa
#define BATON_JOIN(name, isa) BATON_JOIN_(name, isa)
#define BATON_EXPORT(name) extern "C" __attribute__((visibility("default"))) void BATON_JOIN(name, BATON_ISA)

namespace {

// Calls body(item, thread) for each item in [0, items), at most `threads` at once; a free thread takes the
// next one.  Which thread has an item must not matter for the result.
template <class Body>
struct Loop {
    const Body* body;
    int64_t items;
    int64_t next;

    static void run(void* context, int thread) {
        Loop* loop = static_cast<Loop*>(context);
        for (;;) {
            const int64_t item = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
            if (item >= loop->items) return;
            (*loop->body)(item, thread);
        }
    }
};

template <class Body>
inline void parallel_for(int64_t items, int threads, const Body& body) {
    if (threads > items) threads = static_cast<int>(items);
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) body(item, 0);
        return;
    }
    Loop<Body> loop = {&body, items, 0};
    baton_team(Loop<Body>::run, &loop, threads);
}

template <class Body>
inline void parallel_for(int64_t items, const Body& body) {
    parallel_for(items, baton_num_threads(), body);
}

}  // namespace
#endif
