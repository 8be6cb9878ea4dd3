// The products of attention: rows of Q (or weights) times a tile of K (or V), for every kind of element.
//
// Theory.  out[r, n] = sum over i of a[r, i] * b[i, n], where b is a tile: a vector of it holds one step of the sum
// for kLanes columns n, and a step is one pair of bfloat16 or one float32.  Up to 8 rows and 2 to 4 vectors
// of columns are summed in registers, so an element of b that was read serves all rows, and a step of `a` is
// broadcast.  A row's sums do not depend on what other rows there are.
//
// A tile comes from far away: for every cache line of it that the first rows read, one is prefetched that will be
// needed some time later (prefetch.h).
#pragma once
#include "prefetch.h"

namespace {

constexpr int kGroup = kLanes == 16 ? 8 : 4;  // rows of a register tile
// Row strides of the scratch: odd numbers of cache lines, so that rows do not compete for the same ones.
constexpr int64_t kScoreStride = kStretch + 16;
constexpr int64_t kOutStride = kMaxDim + 16;

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Ways to multiply: Element is what the pool holds, Operand the type of Q and P; one step of the sum covers
// kStep elements.
struct Pairs {  // bfloat16 by the product instruction
    typedef bf16 Element;
    typedef bf16 Operand;
    static constexpr int kStep = 2;
    static constexpr int64_t kQueryStride = kMaxDim + 32;
    static constexpr int64_t kWeightStride = kScoreStride * 2;  // weights take the place of scores
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
    static constexpr int64_t kWeightStride = kScoreStride;
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
    static constexpr int64_t kWeightStride = kScoreStride;
    typedef float Left;
    typedef F Right;
    INLINE Left left(const Operand* p) { return *p; }
    INLINE Right right(const Element* p) { return load(p); }
    INLINE F add(F sum, Left a, Right b) { return b * a + sum; }
};

// R rows × C vectors of  out = out * factor + a b  (factor null: out = a b), summed over steps [begin, end).
// b: [steps, width, kStep].
template <class M, int R, int C, bool Fetch, int64_t LeftStride, int64_t OutStride>
INLINE void register_tile(const typename M::Operand* a, const typename M::Element* b, int64_t width, int64_t begin,
                          int64_t end, float* out, const float* factor, Prefetcher<typename M::Element>* fetcher) {
    F sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
            sum[r][c] = factor ? load(out + r * OutStride + c * kLanes) * factor[r] : F{};
    for (int64_t step = begin; step < end;) {
        constexpr int kPairs = C * kLanes * 4 > 128 ? C * kLanes * 4 / 128 : 1;  // of lines, each step
        Lines lines = {};
        int64_t stop = end;
        if constexpr (Fetch) {
            const int64_t steps = fetcher->take(end - step, kPairs, &lines);
            stop = step + steps;
        }
        for (; step < stop; ++step) {
            const typename M::Element* from = b + step * width * M::kStep;
            typename M::Right right[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) right[c] = M::right(from + c * kLanes * M::kStep);
            if constexpr (Fetch)
#pragma GCC unroll 4
                for (int i = 0; i < kPairs; ++i) lines.fetch();
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const typename M::Left left = M::left(a + r * LeftStride + step * M::kStep);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) sum[r][c] = M::add(sum[r][c], left, right[c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + r * OutStride + c * kLanes, sum[r][c]);
}

// The same for R rows and `columns` columns; what is left of a vector is computed one by one.
template <class M, int R, bool Fetch, int64_t LeftStride, int64_t OutStride>
void row_group(const typename M::Operand* a, const typename M::Element* b, int64_t width, int64_t columns,
               int64_t begin, int64_t end, float* out, const float* factor, Prefetcher<typename M::Element>* fetcher) {
    constexpr int kWide = R >= 8 ? 2 : kLanes == 16 ? 4 : 2;
    int64_t column = 0;
    const auto vectors = [&](auto count) {
        for (; column + count.value * kLanes <= columns; column += count.value * kLanes)
            register_tile<M, R, count.value, Fetch, LeftStride, OutStride>(a, b + column * M::kStep, width, begin, end,
                                                                          out + column, factor, fetcher);
    };
    vectors(Constant<kWide>{});
    if constexpr (kWide > 2) vectors(Constant<2>{});
    vectors(Constant<1>{});
    for (; column < columns; ++column)
        for (int r = 0; r < R; ++r) {
            float sum = factor ? out[r * OutStride + column] * factor[r] : 0.0f;
            for (int64_t i = begin * M::kStep; i < end * M::kStep; ++i)
                sum = multiply_add(get(a + r * LeftStride + i),
                                   get(b + (i / M::kStep * width + column) * M::kStep + i % M::kStep), sum);
            out[r * OutStride + column] = sum;
        }
}

// All rows: 1, 2 or a multiple of 4.
template <class M, int64_t LeftStride, int64_t OutStride>
INLINE void product(int rows, const typename M::Operand* a, const typename M::Element* b, int64_t width,
                    int64_t columns, int64_t begin, int64_t end, float* out, const float* factor,
                    Prefetcher<typename M::Element>* fetcher) {
    int row = 0;  // of the next group
    const auto group = [&](auto size, auto fetch) {
        row_group<M, size.value, fetch.value, LeftStride, OutStride>(
            a + row * LeftStride, b, width, columns, begin, end, out + row * OutStride,
            factor ? factor + row : nullptr, fetcher);
        row += size.value;
    };
    if (rows == 1) group(Constant<1>{}, Constant<1>{});
    else if (rows == 2) group(Constant<2>{}, Constant<1>{});
    else if (rows == 4) group(Constant<4>{}, Constant<1>{});
    else group(Constant<kGroup>{}, Constant<1>{});
    while (row < rows) {
        if (rows - row == 4) group(Constant<4>{}, Constant<0>{});
        else group(Constant<kGroup>{}, Constant<0>{});
    }
}

}  // namespace
