// A step's rows → the work of its attention kernels, as model/attention/cpu_backend.py plans it: *runs* of tokens to
// write, each within a block, and *items* to read, each a tile of queries and the blocks that it walks over.  There it
// is done in numpy, for any kernels; here for the program, as two dozen numpy calls take longer than a small step.
//
// The pieces of a row with one tile only (a decode row) are items of their own.
#pragma once
#include "tiles.h"

namespace {

// The rows of a step, decode rows first.
struct Rows {
    int64_t count;
    int64_t num_decodes;
    const int32_t* starts;  // tokens that are in the row's blocks already
    const int32_t* counts;  // tokens of this step
    const int32_t* tables;  // [count, table_stride] block ids by position
    int64_t table_stride;
};

constexpr int kItemColumns = 9;  // see ITEM_COLUMNS in model/cpu/kernels.py

INLINE int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int32_t least(int64_t a, int64_t b) { return static_cast<int32_t>(a < b ? a : b); }
INLINE int32_t most(int64_t a, int64_t b) { return static_cast<int32_t>(a > b ? a : b); }

// Returns how many there are, and writes them unless `runs` is null.
INLINE int64_t plan_runs(const Rows& rows, int64_t block, Run* runs) {
    int64_t found = 0;
    int32_t token = 0;
    for (int64_t row = 0; row < rows.count; ++row) {
        const int64_t start = rows.starts[row], end = start + rows.counts[row];
        for (int64_t column = start / block; column < up(end, block); ++column, ++found) {
            if (!runs) continue;
            const int32_t first = most(column * block, start), stop = least((column + 1) * block, end);
            const int32_t id = rows.tables[row * rows.table_stride + column];
            runs[found] = {token, stop - first, id, first - static_cast<int32_t>(column * block), first};
            token += stop - first;
        }
    }
    return found;
}

struct Items {
    int64_t count;
    int64_t slots;  // of partial results
};

// As plan_runs.  `positions`: of a full tile.  `window`: 0, all is seen.
INLINE Items plan_items(const Rows& rows, int64_t block, int64_t positions, int64_t piece_blocks, int64_t window,
                        int32_t* items) {
    Items found = {0, 0};
    int64_t token = 0;
    // Where there are chunks, in reverse: the last tiles of a chunk see most, and should not come last.
    const bool reverse = items && rows.num_decodes < rows.count;
    const int64_t last_item = reverse ? plan_items(rows, block, positions, piece_blocks, window, nullptr).count - 1 : 0;
    for (int64_t row = 0; row < rows.count; token += rows.counts[row], ++row)
        for (int64_t at = 0; at < rows.counts[row]; at += positions) {
            const int64_t count = least(positions, rows.counts[row] - at), position = rows.starts[row] + at;
            const int64_t last = (position + count - 1) / block + 1;
            const int64_t first = window ? most(position - (window - 1), 0) / block : 0;
            const int64_t first_piece = first / piece_blocks;
            const int64_t pieces = rows.counts[row] <= positions ? (last - 1) / piece_blocks + 1 - first_piece : 1;
            for (int64_t piece = 0; piece < pieces; ++piece, ++found.count) {
                if (!items) continue;
                const int64_t cut = (first_piece + piece) * piece_blocks;
                const int32_t item[kItemColumns] = {
                    static_cast<int32_t>(token + at),
                    static_cast<int32_t>(count),
                    static_cast<int32_t>(position),
                    static_cast<int32_t>(row),
                    pieces > 1 ? most(first, cut) : static_cast<int32_t>(first),
                    pieces > 1 ? least(last, cut + piece_blocks) : static_cast<int32_t>(last),
                    static_cast<int32_t>(found.slots),
                    static_cast<int32_t>(piece),
                    static_cast<int32_t>(pieces),
                };
                const int64_t place = reverse ? last_item - found.count : found.count;
                __builtin_memcpy(items + place * kItemColumns, item, sizeof item);
            }
            if (pieces > 1) found.slots += pieces;
        }
    return found;
}

// The items with a token of `wanted`, which ascend; returns how many.
INLINE int64_t keep_items(const int32_t* items, int64_t count, const int64_t* wanted, int64_t num_wanted,
                          int32_t* kept) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* item = items + i * kItemColumns;
        int64_t low = 0, high = num_wanted;  // the first that is not before the item
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (wanted[middle] < item[0]) low = middle + 1;
            else high = middle;
        }
        if (low == num_wanted || wanted[low] >= item[0] + item[1]) continue;
        __builtin_memcpy(kept + found++ * kItemColumns, item, kItemColumns * sizeof *item);
    }
    return found;
}

// Zeroes blocks of `bytes` whose first position is written in this step and whose last one is not.
INLINE void clear_opened(const Rows& rows, int64_t block, char* pool, int64_t bytes) {
    for (int64_t row = 0; row < rows.count; ++row) {
        const int64_t end = rows.starts[row] + rows.counts[row], column = (end - 1) / block;
        if (column * block < rows.starts[row] || end % block == 0) continue;
        __builtin_memset(pool + rows.tables[row * rows.table_stride + column] * bytes, 0, bytes);
    }
}

}  // namespace
