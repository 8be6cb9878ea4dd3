// The products of attention with keys and values in eight bits (arithmetic: int8.h), as product.h has them for others.
//
// A register tile is up to 8 rows and 2 to 4 vectors of columns; a step reads four bytes of each column.
#pragma once
#include "int8.h"
#include "product.h"

namespace {

constexpr int64_t kWordsStride = kScoreStride / 2;  // of weights, which take the place of scores

// out = (sum of the row and the column) * scales[column].
struct KeyRows {
    typedef Query Step;
    typedef QueryLeft Left;
    typedef Right<true> Bytes;
    static constexpr int kGroup = kLanes == 16 && Bytes::kParts == 1 ? 8 : 4;  // rows of a register tile
    const int32_t* bias;  // of the rows: what sums begin with
    const float* scales;  // of the columns

    KeyRows from(int row) const { return {bias + row, scales}; }
    INLINE_MEMBER int32_t begin(int row) const { return bias[row]; }
    static int32_t number(uint8_t byte) { return byte - 128; }
    INLINE_MEMBER F finish(F sum, int, const float*, int64_t column) const { return sum * load(scales + column); }
    float finish(float sum, int, float, int64_t column) const { return sum * scales[column]; }
};
// out = out * factors[row] + (sum of the row and the column) * scales[row]; factors null: nothing is in `out`.
struct ValueRows {
    typedef Words Step;
    typedef WeightLeft Left;
    typedef Right<false> Bytes;
    static constexpr int kGroup = kLanes == 16 && Bytes::kParts == 1 ? 8 : 4;
    const float* factors;
    const float* scales;

    ValueRows from(int row) const { return {factors ? factors + row : nullptr, scales + row}; }
    INLINE_MEMBER int32_t begin(int) const { return 0; }
    static int32_t number(uint8_t byte) { return (int8_t)byte; }
    INLINE_MEMBER F finish(F sum, int row, const float* out, int64_t) const {
        return multiply_add(sum, splat(scales[row]), factors ? load(out) * factors[row] : F{});
    }
    float finish(float sum, int row, float out, int64_t) const {
        return multiply_add(sum, scales[row], factors ? out * factors[row] : 0.0f);
    }
};

// One step of a register tile.
template <class Rows, int R, int C>
INLINE void add_step(I (&sums)[R][C][Rows::Bytes::kParts], const typename Rows::Step* a, int64_t stride,
                     const uint8_t* from) {
    typedef typename Rows::Bytes Bytes;
    typedef typename Rows::Left Left;
    if constexpr (C == 1) {
        const Bytes one(from);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) one.add(sums[r][0], Left(a[r * stride]));
    } else {
        const Bytes one(from), two(from + kLanes * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Left left(a[r * stride]);
            one.add(sums[r][0], left);
            two.add(sums[r][1], left);
            if constexpr (C == 4) {
                Bytes(from + 2 * kLanes * 4).add(sums[r][2], left);
                Bytes(from + 3 * kLanes * 4).add(sums[r][3], left);
            }
        }
    }
}

// R rows × C vectors, from `column` on, summed over steps [begin, end).  b: [steps, width, 4] bytes.
template <class Rows, int R, int C, bool Fetch, int64_t OutStride>
INLINE void byte_tile(const Rows& rows, const typename Rows::Step* a, int64_t stride, const uint8_t* b, int64_t width,
                      int64_t column, int64_t begin, int64_t end, float* out, Prefetcher<uint8_t>* fetcher) {
    constexpr int kParts = Rows::Bytes::kParts;
    I sums[R][C][kParts];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) sums[r][c][part] = I{} + rows.begin(r);
    for (int64_t step = begin; step < end;) {
        constexpr int kPairs = C * kLanes * 4 > 128 ? C * kLanes * 4 / 128 : 1;  // of lines, each step
        Lines lines = {};
        int64_t stop = end;
        if constexpr (Fetch) stop = step + fetcher->take(end - step, kPairs, &lines);
        for (; step < stop; ++step) {
            const uint8_t* from = b + (step * width + column) * 4;
            if constexpr (Fetch)
#pragma GCC unroll 4
                for (int i = 0; i < kPairs; ++i) lines.fetch();
            add_step<Rows, R, C>(sums, a + step, stride, from);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            float* to = out + r * OutStride + column + c * kLanes;
            store(to, rows.finish(sum_of<kParts>(sums[r][c]), r, to, column + c * kLanes));
        }
}

// R rows, all columns; what is left of a vector is computed one by one.
template <class Rows, int R, bool Fetch, int64_t OutStride>
void byte_rows(const Rows& rows, const typename Rows::Step* a, int64_t stride, const uint8_t* b, int64_t width,
               int64_t columns, int64_t begin, int64_t end, float* out, Prefetcher<uint8_t>* fetcher) {
    constexpr int kWide = kLanes == 16 && R <= 2 ? 4 : 2;
    int64_t column = 0;
    const auto vectors = [&](auto count) {
        for (; column + count.value * kLanes <= columns; column += count.value * kLanes)
            byte_tile<Rows, R, count.value, Fetch, OutStride>(rows, a, stride, b, width, column, begin, end, out,
                                                              fetcher);
    };
    vectors(Constant<kWide>{});
    if constexpr (kWide > 2) vectors(Constant<2>{});
    vectors(Constant<1>{});
    for (; column < columns; ++column)
        for (int r = 0; r < R; ++r) {
            int64_t sum = 0;
            for (int64_t i = begin * 4; i < end * 4; ++i) {
                const uint8_t byte = b[(i / 4 * width + column) * 4 + i % 4];
                sum += element_of(a + r * stride, i) * Rows::number(byte);
            }
            float* to = out + r * OutStride + column;
            *to = rows.finish((float)sum, r, *to, column);
        }
}

// All rows: 1, 2 or a multiple of 4, `stride` apart in a.
template <class Rows, int64_t OutStride>
INLINE void byte_product(int count, const Rows& rows, const typename Rows::Step* a, int64_t stride, const uint8_t* b,
                         int64_t width, int64_t columns, int64_t begin, int64_t end, float* out, Prefetcher<uint8_t>* fetcher) {
    const auto group = [&](int row, auto size, auto fetch) {
        byte_rows<Rows, size.value, fetch.value, OutStride>(rows.from(row), a + row * stride, stride, b, width, columns,
                                                            begin, end, out + row * OutStride, fetcher);
    };
    if (count == 1) return group(0, Constant<1>{}, Constant<1>{});
    if (count == 2) return group(0, Constant<2>{}, Constant<1>{});
    int row = Rows::kGroup <= count ? Rows::kGroup : 4;
    if (row == 4) group(0, Constant<4>{}, Constant<1>{});
    else group(0, Constant<Rows::kGroup>{}, Constant<1>{});
    for (; row + Rows::kGroup <= count; row += Rows::kGroup) group(row, Constant<Rows::kGroup>{}, Constant<0>{});
    if (row < count) group(row, Constant<4>{}, Constant<0>{});
}

}  // namespace
