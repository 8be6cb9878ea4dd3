// The KV pool as kernels see it.
//
// The pool is [block, layer, K/V, kv head, tile].  A tile holds `block` positions (tokens) of one KV head, of
// `dim` elements each, laid out so that what a vector needs is adjacent:
//
//   bfloat16   K [dim / 2, block, 2]   a vector: one pair of dims of many tokens
//              V [block / 2, dim, 2]   a vector: one pair of tokens of many dims
//   float32    K [dim, block]          V [block, dim]
//
// The bfloat16 product instruction multiplies two adjacent elements and adds both products to one float32 lane.
#pragma once
#include <stdint.h>

#include "simd.h"

// Sizes of one rank; model/cpu/native_kernels.py has its twin.  Strides count elements.
struct Geometry {
    int64_t is_bf16;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t dim;           // even
    int64_t block;         // even for bfloat16
    int64_t block_stride;  // from a block's tile to the same tile of the next block
    double scale;          // of the dot products
    int64_t piece_blocks;  // blocks of a piece of a context; see attention.cpp
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

// The element type of the pool and of queries, keys and values.
template <class T>
INLINE T* tile_of(void* layer, const Geometry& g, int64_t block, int64_t kv_head, bool values) {
    return static_cast<T*>(layer) + block * g.block_stride +
           ((values ? g.num_kv_heads : 0) + kv_head) * g.block * g.dim;
}

}  // namespace
