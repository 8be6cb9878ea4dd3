// How a call of attention is cut into units of work, each for one thread (attention.cpp says what is done with one).
#pragma once
#include "tiles.h"

namespace {

constexpr int kRows = 32;  // of a tile of queries
constexpr int64_t kMaxBlock = 128;
constexpr int64_t kStretch = 256;  // tokens of a stretch, rounded down to whole blocks

// Rows of one KV head in a tile, such that register tiles are full.
INLINE int padded(int rows) { return rows <= 2 ? rows : (rows + 3) / 4 * 4; }

// A tile of queries and the blocks that it walks over; see Reads in model/cpu/kernels.py.
struct Item {
    int32_t token;        // the tile's first position, in the step
    int32_t count;        // positions
    int32_t position;     // of the first
    int32_t row;          // of the block tables
    int32_t first_block;  // columns of the block table
    int32_t last_block;   // exclusive
    int32_t slot;         // of its tile's first piece in `partials`, if there are several
    int32_t piece;
    int32_t pieces;       // items that share the tile's blocks: one piece each if there are several, else all pieces
};

struct Call {
    const Geometry* g;
    void* layer;
    const void* queries;
    int64_t query_stride;
    void* out;
    const Item* items;
    const int32_t* tables;
    int64_t table_stride;
    int64_t window;
    const float* sinks;  // of each head: what its softmax counts besides; or null
    float* partials;
    int32_t* finished;
};

// A unit of work: an item, for `kv_heads` consecutive KV heads and (up to 32 of) their query heads.
struct Unit {
    const Item* item;
    int kv_head;  // the first
    int kv_heads;
    int chunk;

    int64_t block(const Call& call, int64_t column) const {
        return call.tables[item->row * call.table_stride + column];
    }
    // Tokens of a block that any of the positions sees.
    int64_t tokens(const Call& call, int64_t column) const {
        const int64_t left = item->position + item->count - column * call.g->block;
        return left < call.g->block ? left : call.g->block;
    }
    // The first column of the stretch that a column belongs to, whether or not the item has it.
    static int64_t stretch_begin(const Call& call, int64_t column) {
        const int64_t blocks = stretch_blocks(call), begin = column / blocks * blocks;
        const int64_t piece = column / call.g->piece_blocks * call.g->piece_blocks;
        return begin > piece ? begin : piece;
    }
    // The column after the last one that the item has of it.
    int64_t stretch_end(const Call& call, int64_t column) const {
        const int64_t blocks = stretch_blocks(call), pieces = call.g->piece_blocks;
        int64_t end = (column / blocks + 1) * blocks;
        const int64_t piece_end = (column / pieces + 1) * pieces;
        if (piece_end < end) end = piece_end;
        return end < item->last_block ? end : item->last_block;
    }

private:
    static int64_t stretch_blocks(const Call& call) { return call.g->block < kStretch ? kStretch / call.g->block : 1; }
};

// How a call is cut into units.
struct Units {
    const Call& call;
    int64_t chunks;    // of 32 query heads of a KV head
    int64_t kv_heads;  // of a unit
    int64_t per_item;
    int64_t count;

    // Several KV heads together if that leaves enough units for the threads: their tiles lie side by side, and
    // memory gives more in longer stretches.
    Units(const Call& of, int64_t num_items, int threads) : call(of) {
        const Geometry& g = *call.g;
        const int64_t per_kv = g.num_heads / g.num_kv_heads;
        chunks = (per_kv + kRows - 1) / kRows;
        int64_t most = 1;
        for (int64_t i = 0; i < num_items; ++i) most = call.items[i].count > most ? call.items[i].count : most;
        kv_heads = chunks > 1 ? 1 : kRows / padded(static_cast<int>(most * per_kv));
        if (kv_heads > g.num_kv_heads) kv_heads = g.num_kv_heads;
        while (kv_heads > 1 && num_items * (g.num_kv_heads / kv_heads) < 4 * threads) kv_heads /= 2;
        per_item = (g.num_kv_heads + kv_heads - 1) / kv_heads * chunks;
        count = num_items * per_item;
    }
    Unit operator[](int64_t index) const {
        const int64_t place = index % per_item, first = place / chunks * kv_heads;
        const int64_t left = call.g->num_kv_heads - first;
        return {call.items + index / per_item, static_cast<int>(first),
                static_cast<int>(left < kv_heads ? left : kv_heads), static_cast<int>(place % chunks)};
    }
};

}  // namespace
