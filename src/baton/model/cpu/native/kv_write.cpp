// Storing keys and values in their tiles, and the rotary embedding on the way (layout: tiles.h).
//
// Work is cut into (run, KV head): a run is up to a block's worth of consecutive tokens of one request, so
// the tile's cache lines stay close while a chunk of a prompt is written.  `rotate_and_write` takes the rows of
// the qkv product as they are: for each head of queries and keys it computes the optional head norm
// (x / sqrt(mean(x²) + eps) * weight) and the rotation in float32 and rounds once.
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int64_t kMaxDim = 512;

INLINE uint32_t pair_at(const bf16* p) { uint32_t u; __builtin_memcpy(&u, p, 4); return u; }

// Keys [count, dim] (`stride` elements from one token to the next) → their columns of a K tile.
void put_keys(bf16* tile, int64_t block, int64_t dim, int64_t offset, const bf16* keys, int64_t stride,
              int64_t count) {
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
        bf16* to = tile + (pair * block + offset) * 2;
        for (int64_t token = 0; token < count; ++token) {
            const uint32_t value = pair_at(keys + token * stride + pair * 2);
            __builtin_memcpy(to + token * 2, &value, 4);
        }
    }
}
void put_keys(float* tile, int64_t block, int64_t dim, int64_t offset, const float* keys, int64_t stride,
              int64_t count) {
    for (int64_t i = 0; i < dim; ++i)
        for (int64_t token = 0; token < count; ++token)
            tile[i * block + offset + token] = keys[token * stride + i];
}

void put_values(bf16* tile, int64_t dim, int64_t offset, const bf16* values, int64_t stride, int64_t count) {
    for (int64_t token = 0; token < count; ++token) {
        const int64_t at = offset + token;
        bf16* to = tile + (at / 2) * dim * 2 + at % 2;
        const bf16* from = values + token * stride;
        for (int64_t i = 0; i < dim; ++i) to[i * 2] = from[i];
    }
}
void put_values(float* tile, int64_t dim, int64_t offset, const float* values, int64_t stride, int64_t count) {
    for (int64_t token = 0; token < count; ++token)
        __builtin_memcpy(tile + (offset + token) * dim, values + token * stride, dim * sizeof(float));
}

template <class T>
void write(const Geometry& g, void* layer, const T* keys, int64_t key_stride, const T* values, int64_t value_stride,
           const Run* runs, int64_t num_runs) {
    parallel_for(num_runs * g.num_kv_heads, [&](int64_t item, int) {
        const Run run = runs[item / g.num_kv_heads];
        const int64_t head = item % g.num_kv_heads;
        put_keys(tile_of<T>(layer, g, run.block, head, false), g.block, g.dim, run.offset,
                 keys + run.token * key_stride + head * g.dim, key_stride, run.count);
        put_values(tile_of<T>(layer, g, run.block, head, true), g.dim, run.offset,
                   values + run.token * value_stride + head * g.dim, value_stride, run.count);
    });
}

// 1 / sqrt(mean(x²) + eps).
template <class T>
float inverse_rms(const T* x, int64_t dim, float eps) {
    F sums = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        const F v = load(x + i);
        sums += v * v;
    }
    float sum = reduce_add(sums);
    for (; i < dim; ++i) sum += get(x + i) * get(x + i);
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
}

// One head: halves (a, b) → (a cos - b sin, b cos + a sin).  `weight`: of the head norm, or null.
// cos and sin: [dim / 2] of the token's position.
template <class T>
void rotate(const T* x, T* out, int64_t dim, const float* cos, const float* sin, const T* weight, float eps) {
    const int64_t half = dim / 2;
    const float factor = weight ? inverse_rms(x, dim, eps) : 1.0f;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        F a = load(x + i), b = load(x + half + i);
        if (weight) {
            a = a * factor * load(weight + i);
            b = b * factor * load(weight + half + i);
        }
        const F c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = get(x + i), b = get(x + half + i);
        if (weight) {
            a = a * factor * get(weight + i);
            b = b * factor * get(weight + half + i);
        }
        put(out + i, a * cos[i] - b * sin[i]);
        put(out + half + i, b * cos[i] + a * sin[i]);
    }
}

template <class T>
void rotate_and_write(const Geometry& g, void* layer, const T* qkv, T* queries, const float* cos, const float* sin,
                      int64_t rotary_stride, const T* query_norm, const T* key_norm, float eps, const Run* runs,
                      int64_t num_runs) {
    const int64_t heads_per_kv = g.num_heads / g.num_kv_heads;
    const int64_t stride = (g.num_heads + 2 * g.num_kv_heads) * g.dim;
    constexpr int64_t kTokens = 16;
    parallel_for(num_runs * g.num_kv_heads, [&](int64_t item, int) {
        const Run run = runs[item / g.num_kv_heads];
        const int64_t head = item % g.num_kv_heads;
        T* key_tile = tile_of<T>(layer, g, run.block, head, false);
        T rotated[kTokens * kMaxDim];
        for (int64_t first = 0; first < run.count; first += kTokens) {
            const int64_t count = run.count - first < kTokens ? run.count - first : kTokens;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t token = run.token + first + i;
                const T* row = qkv + token * stride;
                const float* c = cos + (run.position + first + i) * rotary_stride;
                const float* s = sin + (run.position + first + i) * rotary_stride;
                for (int64_t q = head * heads_per_kv; q < (head + 1) * heads_per_kv; ++q)
                    rotate(row + q * g.dim, queries + (token * g.num_heads + q) * g.dim, g.dim, c, s, query_norm, eps);
                rotate(row + (g.num_heads + head) * g.dim, rotated + i * g.dim, g.dim, c, s, key_norm, eps);
            }
            put_keys(key_tile, g.block, g.dim, run.offset + first, rotated, g.dim, count);
        }
        put_values(tile_of<T>(layer, g, run.block, head, true), g.dim, run.offset,
                   qkv + run.token * stride + (g.num_heads + g.num_kv_heads + head) * g.dim, stride, run.count);
    });
}

}  // namespace

// keys, values: [T, kv heads, dim]; `layer`: the address of the layer's first K tile in block 0.
BATON_EXPORT(write)(const Geometry* g, void* layer, const void* keys, int64_t key_stride, const void* values,
                    int64_t value_stride, const void* runs, int64_t num_runs) {
    const Run* where = static_cast<const Run*>(runs);
    if (g->is_bf16)
        write(*g, layer, static_cast<const bf16*>(keys), key_stride, static_cast<const bf16*>(values), value_stride,
              where, num_runs);
    else
        write(*g, layer, static_cast<const float*>(keys), key_stride, static_cast<const float*>(values), value_stride,
              where, num_runs);
}

// qkv: [T, heads + 2 * kv heads, dim], contiguous → queries [T, heads, dim] rotated; keys and values stored.
// cos, sin: float32 [positions, rotary_stride], of which the first dim / 2 columns are used.
// query_norm, key_norm: [dim] in the element type, or null.
BATON_EXPORT(rotate_and_write)(const Geometry* g, void* layer, const void* qkv, void* queries, const float* cos,
                               const float* sin, int64_t rotary_stride, const void* query_norm, const void* key_norm,
                               float eps, const void* runs, int64_t num_runs) {
    const Run* where = static_cast<const Run*>(runs);
    if (g->is_bf16)
        rotate_and_write(*g, layer, static_cast<const bf16*>(qkv), static_cast<bf16*>(queries), cos, sin, rotary_stride,
                         static_cast<const bf16*>(query_norm), static_cast<const bf16*>(key_norm), eps, where,
                         num_runs);
    else
        rotate_and_write(*g, layer, static_cast<const float*>(qkv), static_cast<float*>(queries), cos, sin,
                         rotary_stride, static_cast<const float*>(query_norm), static_cast<const float*>(key_norm), eps,
                         where, num_runs);
}
