// Storing keys and values in their tiles, and the rotary embedding on the way.
//
// Work is cut into (run, KV head): a run is up to a block's worth of consecutive tokens of one request, so the tile's
// cache lines stay close while a chunk of a prompt is written.  `rotate_and_write` takes the rows of the qkv product as
// they are.  (A step that only decodes writes its tokens while it attends: attention.cpp.)
#include "kernels.h"
#include "kv_rows.h"
#include "ranges.h"

namespace {

// body(run, head) for all of them.
template <class Body>
void for_runs(const Geometry& g, const Run* runs, int64_t num_runs, const Body& body) {
    parallel_ranges(num_runs * g.num_kv_heads,
                    [&](int64_t item, bool) { body(runs[item / g.num_kv_heads], item % g.num_kv_heads); });
}

template <class Kept>
void write(const Geometry& g, void* layer, const void* all_keys, int64_t key_stride, const void* all_values,
           int64_t value_stride, const Run* runs, int64_t num_runs) {
    typedef typename Kept::Head T;
    const T *keys = static_cast<const T*>(all_keys), *values = static_cast<const T*>(all_values);
    for_runs(g, runs, num_runs, [&](const Run& run, int64_t head) {
        Kept::keys(g, tile_of<typename Kept::Cell>(layer, g, run.block, head, false), run.offset,
                   keys + run.token * key_stride + head * g.dim, key_stride, run.count);
        Kept::values(g, tile_of<typename Kept::Cell>(layer, g, run.block, head, true), run.offset,
                     values + run.token * value_stride + head * g.dim, value_stride, run.count);
    });
}

template <class Kept, class T>
void rotate_and_write(const Geometry& g, void* layer, const Heads<T>& heads, const Run* runs, int64_t num_runs) {
    typedef typename Kept::Cell Cell;
    constexpr int64_t kTokens = 16;
    const int64_t stride = (g.num_heads + 2 * g.num_kv_heads) * g.dim;
    for_runs(g, runs, num_runs, [&](const Run& run, int64_t head) {
        Cell* key_tile = tile_of<Cell>(layer, g, run.block, head, false);
        T keys[kTokens * kMaxDim];
        for (int64_t first = 0; first < run.count; first += kTokens) {
            const int64_t count = run.count - first < kTokens ? run.count - first : kTokens;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t token = run.token + first + i, position = run.position + first + i;
                heads.turn_queries(g, token, position, head);
                heads.turn_key(g, token, position, head, keys + i * g.dim);
            }
            Kept::keys(g, key_tile, run.offset + first, keys, g.dim, count);
        }
        Kept::values(g, tile_of<Cell>(layer, g, run.block, head, true), run.offset, heads.value(g, run.token, head),
                     stride, run.count);
    });
}

}  // namespace

// keys, values: [T, kv heads, dim]; `layer`: the address of the layer's first K tile in block 0.
BATON_EXPORT(write)(const Geometry* g, void* layer, const void* keys, int64_t key_stride, const void* values,
                    int64_t value_stride, const void* runs, int64_t num_runs) {
    const Run* where = static_cast<const Run*>(runs);
    const auto all = [&](auto kept) {
        write<decltype(kept)>(*g, layer, keys, key_stride, values, value_stride, where, num_runs);
    };
    if (g->kv_int8) g->is_bf16 ? all(InBytes<bf16>{}) : all(InBytes<float>{});
    else g->is_bf16 ? all(AsTheyAre<bf16>{}) : all(AsTheyAre<float>{});
}

// qkv: [T, heads + 2 * kv heads, dim], contiguous → queries [T, heads, dim] turned; keys and values stored.
BATON_EXPORT(rotate_and_write)(const Geometry* g, void* layer, const void* qkv, void* queries, const Turn* turn,
                               const void* runs, int64_t num_runs) {
    const Run* where = static_cast<const Run*>(runs);
    const auto all = [&](auto kept) {
        typedef decltype(kept) Kept;
        typedef typename Kept::Head T;
        const Heads<T> heads = {static_cast<const T*>(qkv), static_cast<T*>(queries), *turn};
        rotate_and_write<Kept>(*g, layer, heads, where, num_runs);
    };
    if (g->kv_int8) g->is_bf16 ? all(InBytes<bf16>{}) : all(InBytes<float>{});
    else g->is_bf16 ? all(AsTheyAre<bf16>{}) : all(AsTheyAre<float>{});
}
