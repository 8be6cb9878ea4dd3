// What attention will read, brought into the cache some time before.
//
// Theory.  The tiles that a thread reads lie in blocks all over the pool, so the processor cannot guess what comes
// next.  A Prefetcher goes through the tiles of a unit of work in the order in which they are read, one tile in front of
// the reader, and on into the next unit.  The reader asks for as many lines as it reads, at the moment when it does so:
// memory is busy all the time and never asked for more at once than it can take up.
//
// It counts in strides: two cache lines side by side, or one where a row of a tile of keys is read only that far.
#pragma once
#include "units.h"

namespace {

struct Lines {
    const char* at;
    int64_t second;  // where the second line of a stride is: 64, or 0 if there is none
    int64_t stride;

    __attribute__((always_inline)) void fetch() {
        __builtin_prefetch(at);
        __builtin_prefetch(at + second);
        at += stride;
    }
};

// Element: of the pool.
template <class Element>
class Prefetcher {
public:
    // `then`: the unit that this thread has after this one, or null.
    Prefetcher(const Call& of, const Unit& now, const Unit* then)
        : call(of), unit(&now), following(then), ahead((tile_elements<Element>(*of.g) * sizeof(Element) + 127) / 128) {
        begin();
        for (int64_t skip = ahead; unit == &now && skip > 0;) {  // has been fetched when the unit before was read
            refill();
            if (unit != &now) break;
            const int64_t skipped = left < skip ? left : skip;
            lines.at += skipped * lines.stride;
            left -= skipped;
            skip -= skipped;
        }
    }

    // For up to `steps` steps with `count` strides each: how many of them there are lines for, at least one.
    __attribute__((always_inline)) int64_t take(int64_t steps, int64_t count, Lines* found) {
        if (left <= 0) refill();
        const int64_t there = (left + count - 1) / count;
        if (steps > there) steps = there;
        *found = lines;
        lines.at += steps * count * lines.stride;
        left -= steps * count;
        return steps;
    }

    // For the scales behind a tile, which no step reads.
    void take_scales() {
        if constexpr (!kScales) return;
        for (int64_t strides = (call.g->block * 4 + 127) / 128; strides > 0;) {
            Lines now;
            for (int64_t i = take(strides, 1, &now); i; --i, --strides) now.fetch();
        }
    }

    // Fetches what is left, now.
    void finish() {
        while (unit) {
            Lines now;
            for (int64_t i = take(ahead, 1, &now); i && unit; --i) now.fetch();
        }
    }

private:
    static constexpr int64_t kStep = 4 / sizeof(Element);
    static constexpr bool kScales = sizeof(Element) == 1;

    const Call& call;
    const Unit* unit;  // whose tiles are fetched; null: nothing is
    const Unit* following;
    const int64_t ahead;  // strides in front of the reader
    int64_t allowed;  // strides of it
    // The next tile.
    int64_t first, stop, column;  // of the stretch
    int head;
    bool values;
    Lines lines;
    int64_t left = 0;  // strides of the tile before

    void begin() {
        allowed = unit == following ? ahead : INT64_MAX;
        first = column = unit->item->first_block;
        stop = unit->stretch_end(call, first);
        head = 0;
        values = false;
    }

    __attribute__((noinline)) void refill() {
        if (unit && first >= unit->item->last_block) {
            unit = unit == following ? nullptr : following;
            if (unit) begin();
        }
        if (!unit || !allowed) {
            unit = nullptr;
            lines = {reinterpret_cast<const char*>(&call), 0, 0};
            left = INT32_MAX;
            return;
        }
        const Geometry& g = *call.g;
        const int64_t end = unit->tokens(call, column), row = g.block * 4, steps = g.dim / kStep;
        Element* const tile = tile_of<Element>(call.layer, g, unit->block(call, column), unit->kv_head + head, values);
        lines.at = reinterpret_cast<const char*>(tile);
        if (!values && row > 128 && end * 4 <= 128) {
            lines.second = end * 4 > 64 ? 64 : 0;
            lines.stride = row;
            left = steps + (kScales ? 1 : 0);  // scales are a row more
        } else {
            int64_t bytes = values ? (end + kStep - 1) / kStep * g.dim * 4 : row * steps;
            if (kScales && (!values || end == g.block)) bytes += row;
            lines.second = 64;
            lines.stride = 128;
            left = (bytes + 127) / 128;
        }
        left = left < allowed ? left : allowed;
        allowed -= left;
        if (++head < unit->kv_heads) return;
        head = 0;
        if (++column < stop) return;
        column = values ? stop : first;
        if (values) {
            first = stop;
            if (first < unit->item->last_block) stop = unit->stretch_end(call, first);
        }
        values = !values;
    }
};

}  // namespace
