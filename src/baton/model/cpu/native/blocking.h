// How products are cut for this machine's caches: model/cpu/blocking.py measures it.  One for all instruction sets, set
// while no product is computed.
#pragma once
#include <stdint.h>

struct Blocking {
    int64_t chunk;  // bytes of x that stay in the second-level cache
    int64_t item;   // bytes of x that an item multiplies, about
    int64_t ahead;  // bytes that the prefetch is ahead where a panel is used once
};

extern "C" __attribute__((visibility("hidden"))) Blocking baton_blocking;

static const Blocking& blocking = baton_blocking;
