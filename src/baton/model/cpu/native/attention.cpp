// Causal attention over the paged KV pool (layout: tiles.h): decode, prefill and chunks over a cached prefix.
//
// Theory.  A *tile of queries* is up to 32 rows: all query heads that share a KV head, of one or several
// consecutive positions of a request.  It walks over the request's blocks in *stretches* of some of them, and keeps,
// for each row, an online softmax: the largest score so far m, the sum l of 2^(score - m), and the sum O of
// 2^(score - m) * value.  With a stretch's keys K and values V:
//
//     S = Q K            scores, times scale * log2(e), so that 2^x serves for e^x
//     m' = max(m, S)     P = 2^(S - m')      l = l * 2^(m - m') + sum P
//     O = O * 2^(m - m') + P V
//
// and the result is O / l.  Both products are one routine (product.h): lanes are tokens in S and dims in O.  The
// longer a stretch, the rarer a row's maximum and factor; its scores should stay in the first-level cache.
//
// A context is cut into *pieces* of a fixed length.  Each has a softmax of its own, and they are added up one after the
// other, from the first on (`merge`).  Where a request has only one tile (decode), its pieces are work for several
// threads, and the one that finishes last adds them up; else the thread that has the tile does, on its way.
//
// A unit of work is a tile of queries of one KV head, or of several that lie side by side in memory, if there is
// work enough for all threads (units.h).
//
// Stretches and pieces begin at fixed positions, and what a position does not see adds exact zeros to it.  So a result
// depends on the position and its context alone: not on the positions that are computed with it, nor on the batch, nor
// on the number of threads.
//
// A step that only decodes can rotate and write its tokens on the way (`store_and_attend`): a token's key and value go
// into their tiles just before these are read, when they are in the cache anyway; alone, the lines of a key, one for
// each pair of its elements, would come from memory one by one.
//
// What lies past the last position may hold anything: scores are selected, not added to, and values there are
// not read, or replaced by zero.
#include "kernels.h"
#include "kv_rows.h"
#include "query_tile.h"
#include "ranges.h"

namespace {

// A row that somebody wants: its place in the tile, and whose it is.
struct Row {
    int tile_row;
    int token;  // of the step
    int head;
    int position;
};

// Adds a piece's [O, l, m] to those of the pieces before it.  One that saw nothing changes nothing.
__attribute__((noinline)) void merge(float* to, const float* from, int64_t dim) {
    const float before = to[dim + 1], now = from[dim + 1];
    if (now == kNothing) return;
    if (before == kNothing) {
        __builtin_memcpy(to, from, (dim + 2) * sizeof(float));
        return;
    }
    const float most = before > now ? before : now;
    const F old_factor = exp2_of(splat(before - most)), factor = exp2_of(splat(now - most));
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(to + i, load(to + i) * old_factor + load(from + i) * factor);
    for (; i <= dim; ++i) to[i] = to[i] * old_factor[0] + from[i] * factor[0];  // and l
    to[dim + 1] = most;
}

// Writes the results of a unit; of a piece, only once all others are there.  `merged`: they are in t.merged.
template <class Queries>
void deliver(const Call& call, const Unit& unit, Queries& t, const Row* row_list, int num_rows, bool merged) {
    typedef typename Queries::Element Element;
    const Geometry& g = *call.g;
    const int64_t dim = g.dim, per_kv = g.num_heads / g.num_kv_heads;
    const auto finish = [&](const Row& row, const float* from) {
        Element* to = static_cast<Element*>(call.out) + (row.token * g.num_heads + row.head) * dim;
        float sum = from[dim];
        if (call.sinks) {
            const float above = call.sinks[row.head] * kLog2e - from[dim + 1];
            sum += exp2_of(splat(above < 126.0f ? above : 126.0f))[0];
        }
        const float factor = 1.0f / sum;
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) store(to + i, load(from + i) * factor);
        for (; i < dim; ++i) put(to + i, from[i] * factor);
    };
    const Item& item = *unit.item;
    if (item.pieces == 1) {
        for (int r = 0; r < num_rows; ++r) {
            const int row = row_list[r].tile_row;
            finish(row_list[r], merged ? t.merged + row * kOutStride : t.partial_of(row, dim));
        }
        return;
    }
    // A piece: [heads, positions, dim + 2].
    const int64_t positions = per_kv < kRows ? kRows / per_kv : 1;
    const int64_t row_size = dim + 2, piece_size = g.num_heads * positions * row_size;
    float* first = call.partials + item.slot * piece_size;
    const auto partial = [&](const Row& row, int64_t piece) {
        return first + piece * piece_size + (row.head * positions + row.token - item.token) * row_size;
    };
    for (int r = 0; r < num_rows; ++r) {
        const float* from = t.partial_of(row_list[r].tile_row, dim);
        __builtin_memcpy(partial(row_list[r], item.piece), from, row_size * sizeof(float));
    }
    int32_t* finished = call.finished + item.slot * g.num_heads + row_list[0].head;
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) < item.pieces) return;
    *finished = 0;
    for (int r = 0; r < num_rows; ++r) {
        float* sum = partial(row_list[r], 0);
        for (int piece = 1; piece < item.pieces; ++piece) merge(sum, partial(row_list[r], piece), dim);
        finish(row_list[r], sum);
    }
}

// A unit's own token is not stored yet: its heads are turned and put into their tiles when these are about to be read.
template <class Kept>
class Fresh {
public:
    typedef typename Kept::Head T;
    typedef typename Kept::Cell Cell;

    Fresh(const Call& call, const Unit& unit, const Heads<T>& heads) : call_(call), unit_(unit), heads_(heads) {
        for (int h = 0; h < unit.kv_heads; ++h)
            heads.turn_queries(*call.g, unit.item->token, unit.item->position, unit.kv_head + h);
    }
    void store(int64_t column, bool values) const {
        const Item& item = *unit_.item;
        if (column + 1 < item.last_block) return;
        const Geometry& g = *call_.g;
        const int64_t offset = item.position - column * g.block;
        for (int head = unit_.kv_head; head < unit_.kv_head + unit_.kv_heads; ++head) {
            Cell* tile = tile_of<Cell>(call_.layer, g, unit_.block(call_, column), head, values);
            if (values) {
                Kept::values(g, tile, offset, heads_.value(g, item.token, head), 0, 1);
            } else {
                T key[kMaxDim];
                heads_.turn_key(g, item.token, item.position, head, key);
                Kept::keys(g, tile, offset, key, 0, 1);
            }
        }
    }

private:
    const Call& call_;
    const Unit& unit_;
    const Heads<T>& heads_;
};
struct Stored {  // everything is
    void store(int64_t, bool) const {}
};

// `following`: what this thread does next, or null.
template <class Queries, class New>
void attend_unit(const Call& call, const Unit& unit, const Unit* following, const New& own) {
    typedef typename Queries::Element Element;
    typedef typename Queries::Cell Cell;
    const Geometry& g = *call.g;
    const Item& item = *unit.item;
    const int64_t dim = g.dim, block = g.block, tile = tile_elements<Cell>(g);
    const int per_kv = static_cast<int>(g.num_heads / g.num_kv_heads);
    const int first_head = unit.chunk * kRows;
    const int heads = per_kv - first_head < kRows ? per_kv - first_head : kRows;
    const int used = item.count * heads, rows = padded(used);
    const float scale = static_cast<float>(g.scale) * kLog2e;
    Prefetcher<Cell> fetcher(call, unit, following);

    // Row r of the tile is row r % rows of KV head r / rows; rows [used, rows) of each are empty.
    Queries t;
    Row row_list[kRows];
    int num_rows = 0;
    for (int h = 0; h < unit.kv_heads; ++h)
        for (int i = 0; i < rows; ++i) {
            const int head = (unit.kv_head + h) * per_kv + first_head + i % heads;
            if (i >= used) {
                t.start_empty(h * rows + i, dim);
                continue;
            }
            const int token = item.token + i / heads;
            row_list[num_rows++] = {h * rows + i, token, head, item.position + i / heads};
            t.start(h * rows + i, static_cast<const Element*>(call.queries) + token * call.query_stride + head * dim,
                    dim);
        }
    bool fresh = true, merged = false;  // nothing is in t.out yet; something is in t.merged
    for (int64_t first = item.first_block; first < item.last_block;) {
        const int64_t stop = unit.stretch_end(call, first), base = Unit::stretch_begin(call, first) * block;
        // The stretch's tokens that any row sees.
        const int64_t lowest = item.position - call.window + 1 - base;
        const int64_t begin = lowest > 0 ? lowest : 0, end = (stop - 1) * block + unit.tokens(call, stop - 1) - base;
        for (int64_t column = first; column < stop; ++column) {
            own.store(column, false);
            Cell* keys = tile_of<Cell>(call.layer, g, unit.block(call, column), unit.kv_head, false);
            const int64_t width = (unit.tokens(call, column) + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < unit.kv_heads; ++h)
                t.multiply_keys(g, h * rows, rows, keys + h * tile, width < block ? width : block,
                                column * block - base, &fetcher);
        }
        const auto seen = [&](const Row& row, auto then) {
            const int64_t low = row.position - call.window + 1 - base, high = row.position + 1 - base;
            then(row.tile_row, low > 0 ? low : 0, high < end ? high : end);
        };
        if (g.soft_cap > 0)
            for (int r = 0; r < num_rows; ++r)
                seen(row_list[r], [&](int row, int64_t low, int64_t high) {
                    t.bend(row, low, high, static_cast<float>(g.scale) * t.row_scale(row), static_cast<float>(g.soft_cap));
                });
        for (int r = 0; r < num_rows; ++r)
            seen(row_list[r], [&](int row, int64_t low, int64_t high) { t.find_largest(row, low, high, scale); });
        for (int r = 0; r < unit.kv_heads * rows; r += kLanes) {
            store(t.factors + r, exp2_of(load(t.largest + r) - load(t.fresh + r)));
            store(t.largest + r, load(t.fresh + r));
        }
        for (int64_t column = first; column < stop; ++column) {
            own.store(column, true);
            Cell* values = tile_of<Cell>(call.layer, g, unit.block(call, column), unit.kv_head, true);
            const int64_t offset = column * block - base, before = column == first ? begin / kLanes * kLanes : offset;
            for (int h = 0; h < unit.kv_heads; ++h)
                t.take_value_scales(g, h, values + h * tile, before, unit.tokens(call, column), offset);
        }
        for (int r = 0; r < num_rows; ++r)
            seen(row_list[r], [&](int row, int64_t low, int64_t high) {
                t.find_weights(row, row / rows, begin, low, high, end, scale);
            });
        for (int64_t column = first; column < stop; ++column) {
            Cell* values = tile_of<Cell>(call.layer, g, unit.block(call, column), unit.kv_head, true);
            const int64_t offset = column * block - base, tokens = unit.tokens(call, column);
            const int64_t from = begin > offset ? begin - offset : 0;
            for (int h = 0; h < unit.kv_heads; ++h)
                t.add_values(g, h * rows, rows, values + h * tile, from, tokens, offset,
                             fresh ? nullptr : t.factors + h * rows, &fetcher);
            if (column == first)
                for (int r = 0; r < unit.kv_heads * rows; ++r) t.factors[r] = 1;
            fresh = false;
        }
        first = stop;
        const bool last = first == item.last_block;
        if (last ? !merged : first % g.piece_blocks != 0) continue;
        for (int r = 0; r < num_rows; ++r) {
            const int row = row_list[r].tile_row;
            float* sum = t.merged + row * kOutStride;
            const float* piece = t.partial_of(row, dim);
            if (merged) merge(sum, piece, dim);
            else __builtin_memcpy(sum, piece, (dim + 2) * sizeof(float));
            t.start_piece(row);
        }
        fresh = merged = true;
    }
    fetcher.finish();
    deliver(call, unit, t, row_list, num_rows, merged);
}

// `heads`: of tokens that are not stored yet, or null.
template <class Queries>
void attend(const Call& call, int64_t num_items, const Heads<typename Queries::Element>* heads) {
    const Units units(call, num_items, baton_num_threads());
    parallel_ranges(units.count, [&](int64_t index, bool more) {
        const Unit unit = units[index], next = units[more ? index + 1 : index];
        const Unit* following = more ? &next : nullptr;
        if (heads) attend_unit<Queries>(call, unit, following, Fresh<typename Queries::Kept>(call, unit, *heads));
        else attend_unit<Queries>(call, unit, following, Stored{});
    });
}

// Whether each unit has a token of its own, so that nobody waits for another one's.
bool only_decodes(const Call& call, int64_t num_items) {
    if (call.g->num_heads / call.g->num_kv_heads > kRows) return false;
    for (int64_t i = 0; i < num_items; ++i)
        if (call.items[i].count != 1 || call.items[i].pieces != 1 || call.items[i].token != i) return false;
    return true;
}

}  // namespace

// queries: [T, heads, dim], `query_stride` elements from one token to the next → out [T, heads * dim].
// `layer`: the address of the layer's first K tile in block 0.  items: [num_items, 9] int32 (Item).
// tables: block ids [R, table_stride].  A position sees the `window` last ones up to itself.
// sinks: [heads], or null: a score that takes part in the softmax of each of the head's queries, and sees nothing.
// partials: room for pieces, float32 [slots, heads, positions, dim + 2] with `positions` those of a full tile;
// finished: zeros [slots, heads], which are left as zeros.
BATON_EXPORT(attend)(const Geometry* g, void* layer, const void* queries, int64_t query_stride, void* out,
                     const void* items, int64_t num_items, const int32_t* tables, int64_t table_stride, int64_t window,
                     const float* sinks, float* partials, int32_t* finished) {
    const Call call = {g,      layer,        queries, query_stride, out,      static_cast<const Item*>(items),
                       tables, table_stride, window,  sinks,        partials, finished};
    if (g->kv_int8)
        g->is_bf16 ? attend<ByteTile<bf16>>(call, num_items, nullptr)
                   : attend<ByteTile<float>>(call, num_items, nullptr);
    else
        g->is_bf16 ? attend<Tile<Products>>(call, num_items, nullptr) : attend<Tile<Singles>>(call, num_items, nullptr);
}

// `rotate_and_write`, then `attend`, of the same tokens; `out` may be where the queries are.
BATON_EXPORT(store_and_attend)(const Geometry* g, void* layer, const void* qkv, void* queries, const Turn* turn,
                               const void* runs, int64_t num_runs, void* out, const void* items, int64_t num_items,
                               const int32_t* tables, int64_t table_stride, int64_t window, const float* sinks,
                               float* partials, int32_t* finished) {
    const Call call = {g,      layer,        queries, g->num_heads * g->dim, out,      static_cast<const Item*>(items),
                       tables, table_stride, window,  sinks,                 partials, finished};
    if (num_items != num_runs || !only_decodes(call, num_items)) {
        BATON_JOIN(rotate_and_write, BATON_ISA)(g, layer, qkv, queries, turn, runs, num_runs);
        BATON_JOIN(attend, BATON_ISA)
        (g, layer, queries, call.query_stride, out, items, num_items, tables, table_stride, window, sinks, partials,
         finished);
        return;
    }
    const auto both = [&](auto* tile) {
        typedef __typeof__(*tile) Queries;
        typedef typename Queries::Element T;
        const Heads<T> heads = {static_cast<const T*>(qkv), static_cast<T*>(queries), *turn};
        attend<Queries>(call, num_items, &heads);
    };
    if (g->kv_int8) g->is_bf16 ? both((ByteTile<bf16>*)nullptr) : both((ByteTile<float>*)nullptr);
    else g->is_bf16 ? both((Tile<Products>*)nullptr) : both((Tile<Singles>*)nullptr);
}
