// How a product is cut into items of work, for linear.cpp and grouped.cpp; and a loop over the items of many products
// at once, such as those of a mixture's experts.
//
// Rows of x come in *chunks* that stay in the second-level cache, a chunk in *tiles* of at most so many rows as the
// kernel has registers for.  An item is one panel of outputs for some of the tiles of a chunk.  Neighbouring items
// have the same rows and follow each other in memory.
// How large they are suits the machine's caches (blocking.h) and changes no bit of a result.
//
// Many products: each has rows of its own.  In decode an expert has one row or two, and its bytes are the work; of a
// prompt, hundreds.  So what is shared out among the threads is the items of all of them, in their order.
#pragma once
#include "blocking.h"
#include "kernels.h"
#include "ranges.h"

namespace {

// Of `parts` parts of `whole`, equal or one less, the i-th begins here.
INLINE int64_t part(int64_t whole, int64_t parts, int64_t i) {
    const int64_t more = whole % parts;
    return whole / parts * i + (i < more ? i : more);
}

INLINE int64_t parts_of(int64_t whole, int64_t most) { return (whole + most - 1) / most; }

struct Item {
    int64_t panel;
    int64_t row, rows;    // of the chunk
    int64_t tiles;        // of the chunk
    int64_t first, last;  // of them: the item's
    bool last_chunk;
};

struct Cut {
    int64_t rows, panels, chunks, tiles, shares;

    Cut(int64_t rows, int64_t panels, int64_t row_bytes, int tile_rows) : rows(rows), panels(panels) {
        chunks = parts_of(rows * row_bytes, blocking.chunk);
        tiles = parts_of(parts_of(rows, chunks), tile_rows);
        const int64_t most = blocking.item / (row_bytes * tile_rows);
        shares = parts_of(tiles, most < 1 ? 1 : most);
    }
    int64_t items() const { return chunks * panels * shares; }
    INLINE_MEMBER Item at(int64_t item) const {
        const int64_t share = item % shares, chunk = item / shares / panels, row = part(rows, chunks, chunk);
        return {item / shares % panels, row, part(rows, chunks, chunk + 1) - row, tiles, part(tiles, shares, share),
                part(tiles, shares, share + 1), chunk + 1 == chunks};
    }
};

// Calls body(height, row, count) for the item's tiles of one height, which lie one after the other.
template <class Body>
INLINE void for_tiles(const Item& item, const Body& body) {
    // The tiles before `taller` have a row more.
    const int64_t least = item.rows / item.tiles, taller = item.rows % item.tiles;
    const int64_t middle = item.first > taller ? item.first : item.last < taller ? item.last : taller;
    const auto go = [&](int64_t height, int64_t from, int64_t to) {
        if (from < to) body(height, item.row + part(item.rows, item.tiles, from), to - from);
    };
    go(least + 1, item.first, middle);
    go(least, middle, item.last);
}

// Calls body(batch, item, kept) for all items of all batches, whose products have as many panels each; `kept`: see
// ranges.h.
template <class Kept, class Body>
void for_items(const Batch* batches, int64_t count, int64_t panels, int64_t row_bytes, int tile_rows,
               const Body& body) {
    if (count < 1) return;
    struct Place {
        Cut cut;
        int64_t end;  // of its items
    };
    alignas(Place) char room[count * sizeof(Place)];
    Place* places = (Place*)room;
    int64_t items = 0;
    for (int64_t b = 0; b < count; ++b) {
        const Cut cut(batches[b].rows, panels, row_bytes, tile_rows);
        items += cut.items();
        places[b] = {cut, items};
    }
    parallel_ranges_keeping<Kept>(items, [&](int64_t item, bool, Kept& kept) {
        int64_t low = 0, high = count - 1;  // the first place whose end is above `item`
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (places[middle].end > item) high = middle;
            else low = middle + 1;
        }
        const Cut& cut = places[low].cut;
        body(low, cut.at(item - (places[low].end - cut.items())), kept);
    });
}

// Where the threads go on after an item's panel, the last of a batch: the beginning of the next one's weight.
INLINE void fetch_ahead(const char* from) {
    for (int64_t i = 0; i < blocking.ahead; i += 64) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace
