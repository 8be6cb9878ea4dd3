// The KV pool as kernels see it.
//
// The pool is [block, layer, K/V, kv head, tile].  A tile holds `block` positions (tokens) of one KV head, of
// `dim` elements each, laid out so that what a vector needs is adjacent:
//
//   bfloat16   K [dim / 2, block, 2]   a vector: one pair of dims of many tokens
//              V [block / 2, dim, 2]   a vector: one pair of tokens of many dims
//   float32    K [dim, block]          V [block, dim]
//   eight bits K [dim / 4, block, 4]   a vector: four dims of many tokens, bytes 128 + q
//              V [block / 4, dim, 4]   a vector: four tokens of many dims, signed bytes
//              and behind each a float32 scale for each token [block]: see int8.h
//
// The bfloat16 product instruction multiplies two adjacent elements and adds both products to one float32 lane.
#pragma once
#include <stdint.h>

#include "simd.h"

// Sizes of one rank; model/cpu/native_kernels.py has its twin.  Strides count elements.
struct Geometry {
    int64_t is_bf16;  // queries, keys and values, and the pool unless kv_int8
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t dim;           // even; a multiple of 4 in eight bits
    int64_t block;         // even for bfloat16; a multiple of 4 in eight bits
    int64_t block_stride;  // from a block's tile to the same tile of the next block
    double scale;          // of the dot products
    int64_t piece_blocks;  // blocks of a piece of a context; see attention.cpp
    int64_t kv_int8;       // the pool's elements are bytes
    double soft_cap;       // of the scores: cap * tanh(score / cap); 0: none
};

// What a layer does to its queries and keys before they are used; model/cpu/native_kernels.py has its twin.
struct Turn {
    const float* cos;  // [positions, stride], of which the first dim / 2 columns are used
    const float* sin;
    int64_t stride;
    const void* query_norm;  // of each head: [dim] in the element type, or null
    const void* key_norm;
    double eps;
    double plus;                 // to the weights of the norms
    const float* query_factors;  // by position, or null
};

// Where a run of tokens that lie in one block goes: [runs, 5] int32.
struct Run {
    int32_t token;  // the first, in the step
    int32_t count;
    int32_t block;
    int32_t offset;  // of the first token in the block
    int32_t position;
};

namespace {

constexpr int64_t kMaxDim = 256;

// T: the pool's elements.
template <class T>
INLINE int64_t tile_elements(const Geometry& g) {
    return g.block * (g.dim + (sizeof(T) == 1 ? (int64_t)sizeof(float) : 0));
}
INLINE int64_t element_bytes(const Geometry& g) { return g.kv_int8 ? 1 : g.is_bf16 ? 2 : 4; }
INLINE int64_t tile_bytes(const Geometry& g) {
    return g.kv_int8 ? tile_elements<uint8_t>(g) : tile_elements<float>(g) * element_bytes(g);
}
INLINE float* scales_of(uint8_t* tile, const Geometry& g) { return reinterpret_cast<float*>(tile + g.block * g.dim); }

template <class T>
INLINE T* tile_of(void* layer, const Geometry& g, int64_t block, int64_t kv_head, bool values) {
    return static_cast<T*>(layer) + block * g.block_stride +
           ((values ? g.num_kv_heads : 0) + kv_head) * tile_elements<T>(g);
}

}  // namespace
