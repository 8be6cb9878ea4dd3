// A token's heads: the norm and rotation of queries and keys, and how keys and values are put into their tiles
// (layout: tiles.h).
//
// The optional head norm, x / sqrt(mean(x²) + eps) * weight, and the rotation are computed in float32 and rounded
// once.  In a K tile of bfloat16 a token is a column of pairs: 16 tokens at a time are transposed.  In a V tile two
// tokens share a row: where only one is new, the other's halves stay.
#pragma once
#include "int8.h"

namespace {

INLINE uint32_t pair_at(const bf16* p) { uint32_t u; __builtin_memcpy(&u, p, 4); return u; }

#if defined(__AVX512F__)
// 16 pairs of up to 16 tokens, `stride` elements apart → 16 rows of a K tile, 2 * `block` elements apart.
INLINE void transpose_pairs(const bf16* keys, int64_t stride, int64_t count, bf16* to, int64_t block) {
    __m512i token[16], two[16];
    for (int t = 0; t < 16; ++t) token[t] = t < count ? _mm512_loadu_si512(keys + t * stride) : _mm512_setzero_si512();
    for (int t = 0; t < 16; t += 2) {  // pairs 0 1 4 5 … of two tokens side by side, then 2 3 6 7 …
        two[t] = _mm512_unpacklo_epi32(token[t], token[t + 1]);
        two[t + 1] = _mm512_unpackhi_epi32(token[t], token[t + 1]);
    }
    for (int t = 0; t < 16; t += 4) {  // token[t + i]: pairs i, i + 4, i + 8, i + 12 of four tokens
        token[t] = _mm512_unpacklo_epi64(two[t], two[t + 2]);
        token[t + 1] = _mm512_unpackhi_epi64(two[t], two[t + 2]);
        token[t + 2] = _mm512_unpacklo_epi64(two[t + 1], two[t + 3]);
        token[t + 3] = _mm512_unpackhi_epi64(two[t + 1], two[t + 3]);
    }
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    for (int i = 0; i < 4; ++i) {  // 4 x 4 blocks of four
        const __m512i even = _mm512_shuffle_i32x4(token[i], token[4 + i], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(token[i], token[4 + i], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(token[8 + i], token[12 + i], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(token[8 + i], token[12 + i], 0xdd);
        const auto put_row = [&](int pair, __m512i row) { _mm512_mask_storeu_epi32(to + pair * block * 2, mask, row); };
        put_row(i, _mm512_shuffle_i32x4(even, even2, 0x88));
        put_row(i + 4, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        put_row(i + 8, _mm512_shuffle_i32x4(even, even2, 0xdd));
        put_row(i + 12, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}
#endif

// Keys [count, dim] (`stride` elements from one token to the next) → their columns of a K tile.
void put_keys(bf16* tile, int64_t block, int64_t dim, int64_t offset, const bf16* keys, int64_t stride,
              int64_t count) {
    int64_t pair = 0;
#if defined(__AVX512F__)
    for (; count > 1 && pair + 16 <= dim / 2; pair += 16)
        for (int64_t first = 0; first < count; first += 16)
            transpose_pairs(keys + first * stride + pair * 2, stride, count - first < 16 ? count - first : 16,
                            tile + (pair * block + offset + first) * 2, block);
#endif
    for (; pair < dim / 2; ++pair) {
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

INLINE U widened(const bf16* p) { H v; __builtin_memcpy(&v, p, sizeof v); return widen(v); }
INLINE void store_u(bf16* p, U v) { __builtin_memcpy(p, &v, sizeof v); }

// Values [count, dim] → their rows of a V tile: two tokens at a time, or one beside what is there.
void put_values(bf16* tile, int64_t dim, int64_t offset, const bf16* values, int64_t stride, int64_t count) {
    for (int64_t token = 0; token < count;) {
        const int64_t at = offset + token;
        bf16* to = tile + at / 2 * dim * 2;
        const bf16* from = values + token * stride;
        const bool second = at % 2, both = !second && token + 1 < count;
        int64_t i = 0;
        if (both) {
            for (; i + kLanes <= dim; i += kLanes)
                store_u(to + i * 2, widened(from + i) | widened(from + stride + i) << 16);
        } else if (second) {
            for (; i + kLanes <= dim; i += kLanes)
                store_u(to + i * 2, (load_u(to + i * 2) & 0xffffu) | widened(from + i) << 16);
        } else {
            for (; i + kLanes <= dim; i += kLanes)
                store_u(to + i * 2, (load_u(to + i * 2) & 0xffff0000u) | widened(from + i));
        }
        for (; i < dim; ++i) {
            to[i * 2 + second] = from[i];
            if (both) to[i * 2 + 1] = from[stride + i];
        }
        token += both ? 2 : 1;
    }
}
void put_values(float* tile, int64_t dim, int64_t offset, const float* values, int64_t stride, int64_t count) {
    for (int64_t token = 0; token < count; ++token)
        __builtin_memcpy(tile + (offset + token) * dim, values + token * stride, dim * sizeof(float));
}

// kLanes bytes, in the low ones of kLanes lanes.
INLINE U widened(const uint8_t* p) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, U);
}

// Signed bytes [count, dim] → their places in a V tile: up to four tokens at a time, beside what is there.
INLINE void put_value_bytes(uint8_t* tile, int64_t dim, int64_t offset, const uint8_t* values, int64_t count) {
    for (int64_t token = 0; token < count;) {
        const int64_t place = (offset + token) % 4, some = 4 - place < count - token ? 4 - place : count - token;
        uint8_t* to = tile + (offset + token) / 4 * dim * 4;
        const uint8_t* from = values + token * dim;
        const uint32_t kept = ~((some == 4 ? ~0u : (1u << 8 * some) - 1) << 8 * place);
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) {
            U unit = load_u(to + i * 4) & kept;
            for (int64_t t = 0; t < some; ++t) unit |= widened(from + t * dim + i) << (uint32_t)(8 * (place + t));
            __builtin_memcpy(to + i * 4, &unit, sizeof unit);
        }
        for (; i < dim; ++i)
            for (int64_t t = 0; t < some; ++t) to[i * 4 + place + t] = from[t * dim + i];
        token += some;
    }
}

// How the pool keeps heads of type T.
template <class T>
struct AsTheyAre {
    typedef T Head;
    typedef T Cell;
    static void keys(const Geometry& g, T* tile, int64_t offset, const T* keys, int64_t stride, int64_t count) {
        put_keys(tile, g.block, g.dim, offset, keys, stride, count);
    }
    static void values(const Geometry& g, T* tile, int64_t offset, const T* values, int64_t stride, int64_t count) {
        put_values(tile, g.dim, offset, values, stride, count);
    }
};
template <class T>
struct InBytes {
    typedef T Head;
    typedef uint8_t Cell;
    static void keys(const Geometry& g, uint8_t* tile, int64_t offset, const T* keys, int64_t stride, int64_t count) {
        some(g, tile, offset, keys, stride, count, 128, [&](int64_t at, const uint8_t* bytes, int64_t tokens) {
            // Four bytes have the place of a pair.
            put_keys(reinterpret_cast<bf16*>(tile), g.block, g.dim / 2, at, reinterpret_cast<const bf16*>(bytes),
                     g.dim / 2, tokens);
        });
    }
    static void values(const Geometry& g, uint8_t* tile, int64_t offset, const T* values, int64_t stride,
                       int64_t count) {
        some(g, tile, offset, values, stride, count, 0, [&](int64_t at, const uint8_t* bytes, int64_t tokens) {
            put_value_bytes(tile, g.dim, at, bytes, tokens);
        });
    }

private:
    // A few tokens at a time: put(offset in the block, bytes, tokens).
    template <class Put>
    static void some(const Geometry& g, uint8_t* tile, int64_t offset, const T* heads, int64_t stride, int64_t count,
                     int32_t bias, const Put& put) {
        constexpr int64_t kTokens = 16;
        alignas(64) uint8_t bytes[kTokens * kMaxDim];
        for (int64_t first = 0; first < count; first += kTokens) {
            const int64_t tokens = count - first < kTokens ? count - first : kTokens;
            for (int64_t i = 0; i < tokens; ++i)
                scales_of(tile, g)[offset + first + i] =
                    quantize_head(heads + (first + i) * stride, bytes + i * g.dim, g.dim, bias);
            put(offset + first, bytes, tokens);
        }
    }
};

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

// One head: halves (a, b) → (a cos - b sin, b cos + a sin), times `grown`.  `weight`: of the head norm, or null.
// cos and sin: [dim / 2] of the token's position.
template <class T>
void rotate(const T* x, T* out, int64_t dim, const float* cos, const float* sin, const T* weight, float eps, float plus,
            float grown) {
    const int64_t half = dim / 2;
    const float factor = weight ? inverse_rms(x, dim, eps) : 1.0f;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        F a = load(x + i), b = load(x + half + i);
        if (weight) {
            a = a * factor * (load(weight + i) + plus);
            b = b * factor * (load(weight + half + i) + plus);
        }
        const F c = load(cos + i), s = load(sin + i);
        store(out + i, (a * c - b * s) * grown);
        store(out + half + i, (b * c + a * s) * grown);
    }
    for (; i < half; ++i) {
        float a = get(x + i), b = get(x + half + i);
        if (weight) {
            a = a * factor * (get(weight + i) + plus);
            b = b * factor * (get(weight + half + i) + plus);
        }
        put(out + i, (a * cos[i] - b * sin[i]) * grown);
        put(out + half + i, (b * cos[i] + a * sin[i]) * grown);
    }
}

// The rows of a step's qkv product, and what turns them.
template <class T>
struct Heads {
    const T* qkv;
    T* queries;
    const Turn& turn;

    const T* row(const Geometry& g, int64_t token) const {
        return qkv + token * (g.num_heads + 2 * g.num_kv_heads) * g.dim;
    }
    const T* value(const Geometry& g, int64_t token, int64_t kv_head) const {
        return row(g, token) + (g.num_heads + g.num_kv_heads + kv_head) * g.dim;
    }
    // The query heads of a KV head, into their place.
    void turn_queries(const Geometry& g, int64_t token, int64_t position, int64_t kv_head) const {
        const int64_t per_kv = g.num_heads / g.num_kv_heads;
        const float grown = turn.query_factors ? turn.query_factors[position] : 1.0f;
        for (int64_t q = kv_head * per_kv; q < (kv_head + 1) * per_kv; ++q)
            one(g, row(g, token) + q * g.dim, queries + (token * g.num_heads + q) * g.dim, position, turn.query_norm,
                grown);
    }
    void turn_key(const Geometry& g, int64_t token, int64_t position, int64_t kv_head, T* to) const {
        one(g, row(g, token) + (g.num_heads + kv_head) * g.dim, to, position, turn.key_norm, 1.0f);
    }

private:
    void one(const Geometry& g, const T* from, T* to, int64_t position, const void* norm, float grown) const {
        rotate(from, to, g.dim, turn.cos + position * turn.stride, turn.sin + position * turn.stride,
               static_cast<const T*>(norm), static_cast<float>(turn.eps), static_cast<float>(turn.plus), grown);
    }
};

}  // namespace
