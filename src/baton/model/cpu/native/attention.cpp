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
#include "product.h"
#include "ranges.h"

namespace {

#if defined(__AVX512BF16__)
typedef Pairs Products;
#else
typedef SplitPairs Products;
#endif

constexpr float kNothing = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896f;

template <class M>
struct Tile {
    typedef typename M::Element Element;
    typedef typename M::Operand Operand;

    alignas(64) Operand queries[kRows * M::kQueryStride];
    alignas(64) float scores[kRows * kScoreStride];
    alignas(64) float out[kRows * kOutStride];
    alignas(64) float merged[kRows * kOutStride];  // of the pieces before
    alignas(64) F sums[kRows];
    alignas(64) float largest[kRows];
    alignas(64) float fresh[kRows];
    alignas(64) float factors[kRows];
    alignas(64) Element last_pair[kMaxDim * 2];

    // Weights take the place of the row's scores.
    Operand* weights(int row) { return reinterpret_cast<Operand*>(scores + row * kScoreStride); }

    void start(int row, const Element* from, int64_t dim) {
        Operand* to = queries + row * M::kQueryStride;
        if constexpr (sizeof(Element) == sizeof(Operand)) __builtin_memcpy(to, from, dim * sizeof(Operand));
        else for (int64_t i = 0; i < dim; ++i) to[i] = get(from + i);
        start_piece(row);
    }
    void start_piece(int row) {
        sums[row] = F{};
        largest[row] = kNothing;
    }
    // A row that fills a register tile up; nobody reads its result.
    void start_empty(int row, int64_t dim) {
        __builtin_memset(queries + row * M::kQueryStride, 0, dim * sizeof(Operand));
        largest[row] = fresh[row] = 0;
    }

    // Of the row's scores for the tokens [low, high) of the stretch; others in the same vectors are masked.
    void find_largest(int r, int64_t low, int64_t high, float scale) {
        float* row = scores + r * kScoreStride;
        F best = splat(kNothing);
        for (int64_t i = low / kLanes * kLanes; i < high; i += kLanes) {
            F found = load(row + i);
            if (i < low || i + kLanes > high) {
                I at;
                for (int lane = 0; lane < kLanes; ++lane) at[lane] = static_cast<int32_t>(i) + lane;
                found = select((at >= static_cast<int32_t>(low)) & (at < static_cast<int32_t>(high)), found,
                               splat(kNothing));
                store(row + i, found);
            }
            best = max(best, found);
        }
        const float found = reduce_max(best) * scale;
        fresh[r] = found > largest[r] ? found : largest[r];
    }

    // A row's result of a piece as it is kept: [O, l, m].
    float* partial_of(int row, int64_t dim) {
        float* found = out + row * kOutStride;
        found[dim] = reduce_add(sums[row]);
        found[dim + 1] = largest[row];
        return found;
    }

    // Scores → weights of tokens [begin, width); zero outside of [low, high).
    void find_weights(int r, int64_t begin, int64_t low, int64_t high, int64_t width, float scale) {
        const float* row = scores + r * kScoreStride;
        Operand* to = weights(r);
        int64_t i = begin / kLanes * kLanes;
        if (fresh[r] == kNothing) {  // all masked so far
            low = high = i;
            factors[r] = 1;
        }
        const F shift = splat(-fresh[r]);
        F sum = sums[r] * factors[r];
        for (; i + kLanes <= low; i += kLanes) store(to + i, F{});
        for (; i < high; i += kLanes) {
            const F p = exp2_of(load(row + i) * scale + shift);
            store(to + i, p);
            sum += p;
        }
        for (; i < width; i += kLanes) store(to + i, F{});
        sums[r] = sum;
    }
};

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
template <class M>
void deliver(const Call& call, const Unit& unit, Tile<M>& t, const Row* row_list, int num_rows, bool merged) {
    typedef typename M::Element Element;
    const Geometry& g = *call.g;
    const int64_t dim = g.dim, per_kv = g.num_heads / g.num_kv_heads;
    const auto finish = [&](const Row& row, const float* from) {
        Element* to = static_cast<Element*>(call.out) + (row.token * g.num_heads + row.head) * dim;
        const float factor = 1.0f / from[dim];
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
template <class T>
class Fresh {
public:
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
            T* tile = tile_of<T>(call_.layer, g, unit_.block(call_, column), head, values);
            if (values) {
                put_values(tile, g.dim, offset, heads_.value(g, item.token, head), 0, 1);
            } else {
                T key[kMaxDim];
                heads_.turn_key(g, item.token, item.position, head, key);
                put_keys(tile, g.block, g.dim, offset, key, 0, 1);
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
template <class M, class New>
void attend_unit(const Call& call, const Unit& unit, const Unit* following, const New& own) {
    typedef typename M::Element Element;
    const Geometry& g = *call.g;
    const Item& item = *unit.item;
    const int64_t dim = g.dim, block = g.block, tile = block * dim;
    const int per_kv = static_cast<int>(g.num_heads / g.num_kv_heads);
    const int first_head = unit.chunk * kRows;
    const int heads = per_kv - first_head < kRows ? per_kv - first_head : kRows;
    const int used = item.count * heads, rows = padded(used);
    const float scale = static_cast<float>(g.scale) * kLog2e;
    Prefetcher<Element> fetcher(call, unit, following);

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
    bool fresh = true, merged = false;  // nothing is in t.out yet; something is in t.merged
    for (int64_t first = item.first_block; first < item.last_block;) {
        const int64_t stop = unit.stretch_end(call, first), base = Unit::stretch_begin(call, first) * block;
        // The stretch's tokens that any row sees.
        const int64_t lowest = item.position - call.window + 1 - base;
        const int64_t begin = lowest > 0 ? lowest : 0, end = (stop - 1) * block + unit.tokens(call, stop - 1) - base;
        for (int64_t column = first; column < stop; ++column) {
            own.store(column, false);
            const Element* keys = tile_of<Element>(call.layer, g, unit.block(call, column), unit.kv_head, false);
            const int64_t width = (unit.tokens(call, column) + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < unit.kv_heads; ++h)
                product<M, M::kQueryStride, kScoreStride>(
                    rows, t.queries + h * rows * M::kQueryStride, keys + h * tile, block, width < block ? width : block,
                    0, dim / M::kStep, t.scores + h * rows * kScoreStride + column * block - base, nullptr, &fetcher);
        }
        const auto seen = [&](const Row& row, auto then) {
            const int64_t low = row.position - call.window + 1 - base, high = row.position + 1 - base;
            then(row.tile_row, low > 0 ? low : 0, high < end ? high : end);
        };
        for (int r = 0; r < num_rows; ++r)
            seen(row_list[r], [&](int row, int64_t low, int64_t high) { t.find_largest(row, low, high, scale); });
        for (int r = 0; r < unit.kv_heads * rows; r += kLanes) {
            store(t.factors + r, exp2_of(load(t.largest + r) - load(t.fresh + r)));
            store(t.largest + r, load(t.fresh + r));
        }
        for (int r = 0; r < num_rows; ++r)
            seen(row_list[r],
                 [&](int row, int64_t low, int64_t high) { t.find_weights(row, begin, low, high, end, scale); });
        for (int64_t column = first; column < stop; ++column) {
            own.store(column, true);
            const Element* values = tile_of<Element>(call.layer, g, unit.block(call, column), unit.kv_head, true);
            const int64_t offset = column * block - base, tokens = unit.tokens(call, column);
            const int64_t from = begin > offset ? begin - offset : 0;
            const auto add = [&](int h, const Element* tile_values, int64_t weight, int64_t low, int64_t high) {
                product<M, M::kWeightStride, kOutStride>(rows, t.weights(h * rows) + weight, tile_values, dim, dim, low,
                                                         high, t.out + h * rows * kOutStride,
                                                         fresh ? nullptr : t.factors + h * rows, &fetcher);
            };
            for (int h = 0; h < unit.kv_heads; ++h)
                add(h, values + h * tile, offset, from / M::kStep, tokens / M::kStep);
            if (column == first)
                for (int r = 0; r < unit.kv_heads * rows; ++r) t.factors[r] = 1;
            fresh = false;
            if (tokens % M::kStep == 0) continue;
            // The last pair has one token: the other counts as zero.
            const int64_t whole = tokens / M::kStep;
            for (int h = 0; h < unit.kv_heads; ++h) {
                const Element* last = values + h * tile + whole * dim * 2;
                for (int64_t i = 0; i < dim; ++i) {
                    t.last_pair[i * 2] = last[i * 2];
                    t.last_pair[i * 2 + 1] = 0;
                }
                add(h, t.last_pair, offset + whole * 2, 0, 1);
            }
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
template <class M>
void attend(const Call& call, int64_t num_items, const Heads<typename M::Element>* heads) {
    const Units units(call, num_items, baton_num_threads());
    parallel_ranges(units.count, [&](int64_t index, bool more) {
        const Unit unit = units[index], next = units[more ? index + 1 : index];
        const Unit* following = more ? &next : nullptr;
        if (heads) attend_unit<M>(call, unit, following, Fresh<typename M::Element>(call, unit, *heads));
        else attend_unit<M>(call, unit, following, Stored{});
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
// partials: room for pieces, float32 [slots, heads, positions, dim + 2] with `positions` those of a full tile;
// finished: zeros [slots, heads], which are left as zeros.
BATON_EXPORT(attend)(const Geometry* g, void* layer, const void* queries, int64_t query_stride, void* out,
                     const void* items, int64_t num_items, const int32_t* tables, int64_t table_stride, int64_t window,
                     float* partials, int32_t* finished) {
    const Call call = {g,      layer,        queries, query_stride, out, static_cast<const Item*>(items),
                       tables, table_stride, window,  partials,     finished};
    if (!g->is_bf16) attend<Singles>(call, num_items, nullptr);
    else attend<Products>(call, num_items, nullptr);
}

// `rotate_and_write`, then `attend`, of the same tokens; `out` may be where the queries are.
BATON_EXPORT(store_and_attend)(const Geometry* g, void* layer, const void* qkv, void* queries, const float* cos,
                               const float* sin, int64_t rotary_stride, const void* query_norm, const void* key_norm,
                               float eps, const void* runs, int64_t num_runs, void* out, const void* items,
                               int64_t num_items, const int32_t* tables, int64_t table_stride, int64_t window,
                               float* partials, int32_t* finished) {
    const Call call = {g,      layer,        queries, g->num_heads * g->dim, out, static_cast<const Item*>(items),
                       tables, table_stride, window,  partials,              finished};
    if (num_items != num_runs || !only_decodes(call, num_items)) {
        BATON_JOIN(rotate_and_write, BATON_ISA)
        (g, layer, qkv, queries, cos, sin, rotary_stride, query_norm, key_norm, eps, runs, num_runs);
        BATON_JOIN(attend, BATON_ISA)
        (g, layer, queries, call.query_stride, out, items, num_items, tables, table_stride, window, partials, finished);
    } else if (g->is_bf16) {
        const auto heads = heads_of<bf16>(qkv, queries, cos, sin, rotary_stride, query_norm, key_norm, eps);
        attend<Products>(call, num_items, &heads);
    } else {
        const auto heads = heads_of<float>(qkv, queries, cos, sin, rotary_stride, query_norm, key_norm, eps);
        attend<Singles>(call, num_items, &heads);
    }
}
