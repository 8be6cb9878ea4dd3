// The products of attention: rows of Q (or weights) times a tile of K (or V), for every kind of element.
//
// Theory.  out[r, n] = sum over i of a[r, i] * b[i, n], where b is a tile: a vector of it holds one step of the sum
// for kLanes columns n, and a step is one pair of bfloat16 or one float32.  Up to 8 rows and 2 to 4 vectors
// of columns are summed in registers, so an element of b that was read serves all rows, and a step of `a` is
// broadcast.  A row's sums do not depend on what other rows there are.
//
// A tile comes from far away: while it is read, what is `ahead` bytes further is prefetched.
#pragma once
#include "tiles.h"

namespace {

constexpr int kRows = 32;  // of a tile of queries
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxBlock = 128;
constexpr int kGroup = kLanes == 16 ? 8 : 4;  // rows of a register tile
// Row strides of the scratch: odd numbers of cache lines, so that rows do not compete for the same ones.
constexpr int64_t kScoreStride = kMaxBlock + 16;
constexpr int64_t kOutStride = kMaxDim + 16;

// Ways to multiply: Element is what the pool holds, Operand the type of Q and P; one step of the sum covers
// kStep elements.
struct Pairs {  // bfloat16 by the product instruction
    typedef bf16 Element;
    typedef bf16 Operand;
    static constexpr int kStep = 2;
    static constexpr int64_t kQueryStride = kMaxDim + 32;
    static constexpr int64_t kWeightStride = kMaxBlock + 32;
#if defined(__AVX512BF16__)
    typedef __m512i Left;
    typedef __m512i Right;
    INLINE Left left(const Operand* p) { int32_t u; __builtin_memcpy(&u, p, 4); return _mm512_set1_epi32(u); }
    INLINE Right right(const Element* p) { return _mm512_loadu_si512(p); }
    INLINE F add(F sum, Left a, Right b) { return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#endif
};

struct SplitPairs {  // bfloat16 widened
    typedef bf16 Element;
    typedef float Operand;
    static constexpr int kStep = 2;
    static constexpr int64_t kQueryStride = kMaxDim + 16;
    static constexpr int64_t kWeightStride = kMaxBlock + 16;
    struct Left { float low, high; };
    struct Right { F low, high; };
    INLINE Left left(const Operand* p) { return {p[0], p[1]}; }
    INLINE Right right(const Element* p) {
        const U u = load_u(p);
        return {as_f(u << 16), as_f(u & 0xffff0000u)};
    }
    INLINE F add(F sum, Left a, Right b) { return b.high * a.high + (b.low * a.low + sum); }
};

struct Singles {  // float32
    typedef float Element;
    typedef float Operand;
    static constexpr int kStep = 1;
    static constexpr int64_t kQueryStride = kMaxDim + 16;
    static constexpr int64_t kWeightStride = kMaxBlock + 16;
    typedef float Left;
    typedef F Right;
    INLINE Left left(const Operand* p) { return *p; }
    INLINE Right right(const Element* p) { return load(p); }
    INLINE F add(F sum, Left a, Right b) { return b * a + sum; }
};

// R rows × C vectors of  out = out * factor + a b  (factor null: out = a b), summed over steps [begin, end).
// b: [steps, width, kStep]; `ahead` bytes further lies what to prefetch.
template <class M, int R, int C, bool Prefetch, int64_t LeftStride, int64_t OutStride>
INLINE void register_tile(const typename M::Operand* a, const typename M::Element* b, int64_t width, int64_t begin,
                          int64_t end, float* out, const float* factor, int64_t ahead) {
    F sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sum[r][c] = factor ? load(out + r * OutStride + c * kLanes) * factor[r] : F{};
    for (int64_t step = begin; step < end; ++step) {
        const typename M::Element* from = b + step * width * M::kStep;
        typename M::Right right[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            right[c] = M::right(from + c * kLanes * M::kStep);
            if (Prefetch && (c * kLanes * 4) % 64 == 0)
                __builtin_prefetch(reinterpret_cast<const char*>(from + c * kLanes * M::kStep) + ahead);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename M::Left left = M::left(a + r * LeftStride + step * M::kStep);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] = M::add(sum[r][c], left, right[c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + r * OutStride + c * kLanes, sum[r][c]);
}

// The same for R rows and `columns` columns; what is left of a vector is computed one by one.
template <class M, int R, bool Prefetch, int64_t LeftStride, int64_t OutStride>
void row_group(const typename M::Operand* a, const typename M::Element* b, int64_t width, int64_t columns,
               int64_t begin, int64_t end, float* out, const float* factor, int64_t ahead) {
    constexpr int kWide = R >= 8 ? 2 : kLanes == 16 ? 4 : 2;
    int64_t column = 0;
    for (; column + kWide * kLanes <= columns; column += kWide * kLanes)
        register_tile<M, R, kWide, Prefetch, LeftStride, OutStride>(a, b + column * M::kStep, width, begin, end,
                                                                    out + column, factor, ahead);
    for (; R < 8 && column + 2 * kLanes <= columns; column += 2 * kLanes)
        register_tile<M, R, 2, Prefetch, LeftStride, OutStride>(a, b + column * M::kStep, width, begin, end,
                                                                out + column, factor, ahead);
    for (; column + kLanes <= columns; column += kLanes)
        register_tile<M, R, 1, Prefetch, LeftStride, OutStride>(a, b + column * M::kStep, width, begin, end,
                                                                out + column, factor, ahead);
    for (; column < columns; ++column)
        for (int r = 0; r < R; ++r) {
            float sum = factor ? out[r * OutStride + column] * factor[r] : 0.0f;
            for (int64_t i = begin * M::kStep; i < end * M::kStep; ++i)
                sum += get(a + r * LeftStride + i) * get(b + (i / M::kStep * width + column) * M::kStep + i % M::kStep);
            out[r * OutStride + column] = sum;
        }
}

template <int N>
struct Constant {
    static constexpr int value = N;
};

// All rows: 1, 2 or a multiple of 4.  ahead = 0: nothing is prefetched.
template <class M, int64_t LeftStride, int64_t OutStride>
INLINE void product(int rows, const typename M::Operand* a, const typename M::Element* b, int64_t width,
                    int64_t columns, int64_t begin, int64_t end, float* out, const float* factor, int64_t ahead) {
    int row = 0;  // of the next group
    const auto group = [&](auto size, auto prefetch) {
        row_group<M, size.value, prefetch.value, LeftStride, OutStride>(
            a + row * LeftStride, b, width, columns, begin, end, out + row * OutStride,
            factor ? factor + row : nullptr, ahead);
        row += size.value;
    };
    const auto first = [&](auto prefetch) {
        if (rows == 1) group(Constant<1>{}, prefetch);
        else if (rows == 2) group(Constant<2>{}, prefetch);
        else if (rows == 4) group(Constant<4>{}, prefetch);
        else group(Constant<kGroup>{}, prefetch);
    };
    if (ahead) first(Constant<1>{});
    else first(Constant<0>{});
    while (row < rows) {
        if (rows - row == 4) group(Constant<4>{}, Constant<0>{});
        else group(Constant<kGroup>{}, Constant<0>{});
    }
}

// Rows of one KV head in a tile, such that register tiles are full.
INLINE int padded(int rows) { return rows <= 2 ? rows : (rows + 3) / 4 * 4; }

// Prefetches what a product over the first `end` tokens of a tile reads.
template <class Element>
void prefetch_keys(const Element* tile, const Geometry& g, int64_t end) {
    const int64_t row = g.block * 4, bytes = end * 4;  // a step of a product: block * kStep elements
    const char* from = reinterpret_cast<const char*>(tile);
    for (int64_t step = 0; step < g.dim * static_cast<int64_t>(sizeof(Element)) / 4; ++step)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + step * row + at);
}
template <class Element>
void prefetch_values(const Element* tile, const Geometry& g, int64_t end) {
    const char* from = reinterpret_cast<const char*>(tile);
    for (int64_t at = 0; at < end * g.dim * static_cast<int64_t>(sizeof(Element)); at += 64)
        __builtin_prefetch(from + at);
}

}  // namespace
