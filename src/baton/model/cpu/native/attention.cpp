// Causal attention over the paged KV pool (layout: tiles.h): decode, prefill and chunks over a cached prefix.
//
// Theory.  A *tile of queries* is up to 32 rows: all query heads that share a KV head, of one or several
// consecutive positions of a request.  It walks over the request's blocks and keeps, for each row, an online
// softmax: the largest score so far m, the sum l of 2^(score - m), and the sum O of 2^(score - m) * value.
// With a block's keys K and values V:
//
//     S = Q K            scores, times scale * log2(e), so that 2^x serves for e^x
//     m' = max(m, S)     P = 2^(S - m')      l = l * 2^(m - m') + sum P
//     O = O * 2^(m - m') + P V
//
// and the result is O / l.  Both products are one routine (product.h): lanes are tokens in S and dims in O.
//
// A unit of work is a tile of queries of one KV head, or of several that lie side by side in memory, if there is
// work enough for all threads.  Where a request has only one tile (decode), its blocks are cut into pieces of
// a fixed length; whoever finishes the last piece adds all of them up, in order.  So a result depends on
// the request alone: not on the batch, not on the number of threads.
//
// What lies past the last position may hold anything: scores are selected, not added to, and values there are
// not read, or replaced by zero.
#include "parallel.h"
#include "product.h"

namespace {

constexpr float kNothing = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896f;

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
    int32_t pieces;
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
    float* partials;
    int32_t* finished;
};

template <class M>
struct Tile {
    typedef typename M::Element Element;
    typedef typename M::Operand Operand;

    alignas(64) Operand queries[kRows * M::kQueryStride];
    alignas(64) float scores[kRows * kScoreStride];
    alignas(64) Operand weights[kRows * M::kWeightStride];
    alignas(64) float out[kRows * kOutStride];
    alignas(64) F sums[kRows];
    alignas(64) float largest[kRows];
    alignas(64) float fresh[kRows];
    alignas(64) float factors[kRows];
    alignas(64) Element last_pair[kMaxDim * 2];

    void start(int row, const Element* from, int64_t dim) {
        Operand* to = queries + row * M::kQueryStride;
        if constexpr (sizeof(Element) == sizeof(Operand)) __builtin_memcpy(to, from, dim * sizeof(Operand));
        else for (int64_t i = 0; i < dim; ++i) to[i] = get(from + i);
        __builtin_memset(out + row * kOutStride, 0, dim * sizeof(float));
        sums[row] = F{};
        largest[row] = kNothing;
    }
    // A row that fills a register tile up: it is zero and stays so; nobody reads its result.
    void start_empty(int row, int64_t dim) {
        __builtin_memset(queries + row * M::kQueryStride, 0, dim * sizeof(Operand));
        __builtin_memset(weights + row * M::kWeightStride, 0, kMaxBlock * sizeof(Operand));
        __builtin_memset(out + row * kOutStride, 0, dim * sizeof(float));
        largest[row] = fresh[row] = 0;
    }

    // Scores → weights, for the row's tokens [low, high) of the block; `width` columns are written.
    void find_largest(int r, int64_t low, int64_t high, int64_t width, float scale) {
        float* row = scores + r * kScoreStride;
        F best = splat(kNothing);
        if (low <= 0 && high >= width) {
            for (int64_t i = 0; i < width; i += kLanes) best = max(best, load(row + i));
        } else {
            I lanes;
            for (int i = 0; i < kLanes; ++i) lanes[i] = i;
            for (int64_t i = 0; i < width; i += kLanes) {
                const I at = lanes + static_cast<int32_t>(i);
                const I seen = (at >= static_cast<int32_t>(low)) & (at < static_cast<int32_t>(high));
                const F kept = select(seen, load(row + i), splat(kNothing));
                store(row + i, kept);
                best = max(best, kept);
            }
        }
        const float found = reduce_max(best) * scale;
        fresh[r] = found > largest[r] ? found : largest[r];
    }

    void find_weights(int r, int64_t width, float scale) {
        const float* row = scores + r * kScoreStride;
        Operand* to = weights + r * M::kWeightStride;
        if (fresh[r] == kNothing) {  // all masked so far
            for (int64_t i = 0; i < width; ++i) to[i] = 0;
            factors[r] = 1;
            return;
        }
        const F shift = splat(-fresh[r]);
        F sum = sums[r] * factors[r];
        for (int64_t i = 0; i < width; i += kLanes) {
            const F p = exp2_of(load(row + i) * scale + shift);
            store(to + i, p);
            sum += p;
        }
        sums[r] = sum;
    }
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

// A row that somebody wants: its place in the tile, and whose it is.
struct Row {
    int tile_row;
    int token;  // of the step
    int head;
    int position;
};

// Writes the results of a unit; of a piece, only once all others are there.
template <class M>
void deliver(const Call& call, const Unit& unit, Tile<M>& t, const Row* row_list, int num_rows) {
    typedef typename M::Element Element;
    const Geometry& g = *call.g;
    const int64_t dim = g.dim, per_kv = g.num_heads / g.num_kv_heads;
    const auto finish = [&](const Row& row, float sum) {
        const float* from = t.out + row.tile_row * kOutStride;
        Element* to = static_cast<Element*>(call.out) + (row.token * g.num_heads + row.head) * dim;
        const float factor = 1.0f / sum;
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) store(to + i, load(from + i) * factor);
        for (; i < dim; ++i) put(to + i, from[i] * factor);
    };
    const Item& item = *unit.item;
    if (item.pieces == 1) {
        for (int r = 0; r < num_rows; ++r) finish(row_list[r], reduce_add(t.sums[row_list[r].tile_row]));
        return;
    }
    // A piece: [heads, positions, dim + 2], O and l and m of each row.
    const int64_t positions = per_kv < kRows ? kRows / per_kv : 1;
    const int64_t row_size = dim + 2, piece_size = g.num_heads * positions * row_size;
    float* first = call.partials + item.slot * piece_size;
    const auto partial = [&](const Row& row, int64_t piece) {
        return first + piece * piece_size + (row.head * positions + row.token - item.token) * row_size;
    };
    for (int r = 0; r < num_rows; ++r) {
        const int row = row_list[r].tile_row;
        float* to = partial(row_list[r], item.piece);
        __builtin_memcpy(to, t.out + row * kOutStride, dim * sizeof(float));
        to[dim] = reduce_add(t.sums[row]);
        to[dim + 1] = t.largest[row];
    }
    int32_t* finished = call.finished + item.slot * g.num_heads + row_list[0].head;
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) < item.pieces) return;
    *finished = 0;
    for (int r = 0; r < num_rows; ++r) {
        float most = kNothing, sum = 0;
        float* to = t.out + row_list[r].tile_row * kOutStride;
        for (int piece = 0; piece < item.pieces; ++piece) {
            const float m = partial(row_list[r], piece)[dim + 1];
            most = m > most ? m : most;
        }
        __builtin_memset(to, 0, dim * sizeof(float));
        for (int piece = 0; piece < item.pieces; ++piece) {
            const float* from = partial(row_list[r], piece);
            const float factor = exp2_of(splat(from[dim + 1] - most))[0];
            sum += from[dim] * factor;
            for (int64_t i = 0; i < dim; ++i) to[i] += from[i] * factor;
        }
        finish(row_list[r], sum);
    }
}

// `following`: what this thread does next, or null.
template <class M>
void attend_unit(const Call& call, const Unit& unit, const Unit* following) {
    typedef typename M::Element Element;
    const Geometry& g = *call.g;
    const Item& item = *unit.item;
    const int64_t dim = g.dim, block = g.block, tile = block * dim;
    const int per_kv = static_cast<int>(g.num_heads / g.num_kv_heads);
    const int first_head = unit.chunk * kRows;
    const int heads = per_kv - first_head < kRows ? per_kv - first_head : kRows;
    const int used = item.count * heads, rows = padded(used);
    const float scale = static_cast<float>(g.scale) * kLog2e;

    // Row r of the tile is row r % rows of KV head r / rows; rows [used, rows) of each are empty.
    Tile<M> t;
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
    const auto tile_at = [&](const Unit& of, int64_t column) {
        return tile_of<Element>(call.layer, g, of.block(call, column), of.kv_head, false);
    };
    const Element* keys = tile_at(unit, item.first_block);
    for (int64_t index = item.first_block; index < item.last_block; ++index) {
        const int64_t base = index * block;
        // The block's tokens that any row sees, and the vectors that hold them.
        const int64_t lowest = item.position - call.window + 1 - base;
        const int64_t begin = lowest > 0 ? lowest : 0, end = unit.tokens(call, index);
        const int64_t width = (end + kLanes - 1) / kLanes * kLanes;
        const int64_t columns = width < block ? width : block;
        const Element* values = keys + g.num_kv_heads * tile;
        // The next tile of keys, if any, and how many of its tokens are needed.
        const Unit* owner = index + 1 < item.last_block ? &unit : following;
        const int64_t next_index = owner == &unit ? index + 1 : owner ? owner->item->first_block : 0;
        const Element* next = owner ? tile_at(*owner, next_index) : nullptr;
        const int64_t needed = owner ? owner->tokens(call, next_index) : 0;
        // While a tile is worked on, the next one is prefetched: by the product, if both are whole.
        for (int h = 0; h < unit.kv_heads; ++h) {
            const Element* from = keys + h * tile;
            const Element* then = h + 1 < unit.kv_heads ? from + tile : values;
            if (end < block && then == values) prefetch_values(then, g, end);
            else if (end < block) prefetch_keys(then, g, end);
            product<M, M::kQueryStride, kScoreStride>(
                rows, t.queries + h * rows * M::kQueryStride, from, block, columns, 0, dim / M::kStep,
                t.scores + h * rows * kScoreStride, nullptr, end < block ? 0 : (then - from) * sizeof(Element));
        }
        for (int r = 0; r < num_rows; ++r) {
            const int64_t position = row_list[r].position - base;
            t.find_largest(row_list[r].tile_row, position - call.window + 1,
                           position + 1 < block ? position + 1 : block, width, scale);
        }
        for (int r = 0; r < unit.kv_heads * rows; r += kLanes) {
            store(t.factors + r, exp2_of(load(t.largest + r) - load(t.fresh + r)));
            store(t.largest + r, load(t.fresh + r));
        }
        for (int r = 0; r < num_rows; ++r) t.find_weights(row_list[r].tile_row, width, scale);
        const int64_t whole = end / M::kStep;
        for (int h = 0; h < unit.kv_heads; ++h) {
            const Element* from = values + h * tile;
            const bool last = h + 1 == unit.kv_heads;
            const Element* then = last ? next : from + tile;
            const bool all = begin == 0 && end == block && (!last || needed == block);
            if (!all && !last) prefetch_values(then, g, end);
            else if (!all && needed) prefetch_keys(then, g, needed);
            typename M::Operand* weights = t.weights + h * rows * M::kWeightStride;
            float* out = t.out + h * rows * kOutStride;
            float* factors = t.factors + h * rows;
            product<M, M::kWeightStride, kOutStride>(rows, weights, from, dim, dim, begin / M::kStep, whole, out,
                                                     factors, all ? (then - from) * sizeof(Element) : 0);
            if (whole * M::kStep == end) continue;
            // The last pair has one token: the other counts as zero.
            for (int64_t i = 0; i < dim; ++i) {
                t.last_pair[i * 2] = from[(whole * dim + i) * 2];
                t.last_pair[i * 2 + 1] = 0;
            }
            for (int r = 0; r < rows; ++r) factors[r] = 1;
            product<M, M::kWeightStride, kOutStride>(rows, weights + whole * 2, t.last_pair, dim, dim, 0, 1, out,
                                                     factors, 0);
        }
        keys = next;
    }

    deliver(call, unit, t, row_list, num_rows);
}

template <class M>
void attend(const Call& call, int64_t num_items) {
    const int threads = baton_num_threads();
    const Units units(call, num_items, threads);
    // A thread takes several units at once, if there are many: it prefetches from one to the next.
    const int64_t share = units.count / (8 * threads);
    const int64_t grain = share < 1 ? 1 : share > 16 ? 16 : share;
    parallel_for((units.count + grain - 1) / grain, [&](int64_t index, int) {
        const int64_t stop = (index + 1) * grain < units.count ? (index + 1) * grain : units.count;
        for (int64_t i = index * grain; i < stop; ++i) {
            const Unit unit = units[i], following = units[i + 1 < stop ? i + 1 : i];
            attend_unit<M>(call, unit, i + 1 < stop ? &following : nullptr);
        }
    });
}

}  // namespace

// queries: [T, heads, dim], `query_stride` elements from one token to the next → out [T, heads * dim].
// `layer`: the address of the layer's first K tile in block 0.  items: [num_items, 9] int32 (Item).
// tables: block ids [R, table_stride].  A position sees the `window` last ones up to itself.
// partials: room for pieces, float32 [slots, heads, positions, dim + 2] with `positions` those of a full tile;
// finished: zeros [slots, heads], which are left as zeros.
BATON_EXPORT(attend)(const Geometry* g, void* layer, const void* queries, int64_t query_stride, void* out,
                     const void* items, int64_t num_items, const int32_t* tables, int64_t table_stride, int64_t window,
                     float* partials, int32_t* finished) {
    const Call call = {g,      layer,        queries, query_stride, out, static_cast<const Item*>(items),
                       tables, table_stride, window,  partials,     finished};
    if (!g->is_bf16) attend<Singles>(call, num_items);
#if defined(__AVX512BF16__)
    else attend<Pairs>(call, num_items);
#else
    else attend<SplitPairs>(call, num_items);
#endif
}
