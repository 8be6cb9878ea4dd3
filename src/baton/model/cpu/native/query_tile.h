// A tile of queries while it walks over its blocks (attention.cpp): the queries, and what an online softmax keeps of
// each row.  One kind for each kind of pool.
#pragma once
#include "int8_product.h"
#include "product.h"

namespace {

#if defined(__AVX512BF16__)
typedef Pairs Products;
#else
typedef SplitPairs Products;
#endif

constexpr float kNothing = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896f;

// What all kinds have.
struct Rows32 {
    alignas(64) float scores[kRows * kScoreStride];
    alignas(64) float out[kRows * kOutStride];
    alignas(64) float merged[kRows * kOutStride];  // of the pieces before
    alignas(64) F sums[kRows];
    alignas(64) float largest[kRows];
    alignas(64) float fresh[kRows];
    alignas(64) float factors[kRows];

    void start_piece(int row) {
        sums[row] = F{};
        largest[row] = kNothing;
    }

    // Of the row's scores for the tokens [low, high) of the stretch; others in the same vectors are masked.
    void mark_largest(int r, int64_t low, int64_t high, float scale) {
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

    // Scores of tokens [low, high), which are to be multiplied by `scale` → those that give cap * tanh(score / cap) then:
    // cap - 2 cap / (1 + exp(2 score / cap)).
    void bend(int r, int64_t low, int64_t high, float scale, float cap) {
        float* row = scores + r * kScoreStride;
        const float turn = 2 * kLog2e * scale / cap, most = scale > 0 ? cap / scale : 0;
        for (int64_t i = low / kLanes * kLanes; i < high; i += kLanes) {
            const F y = max(min(load(row + i) * turn, splat(126.0f)), splat(-126.0f));
            store(row + i, most - 2 * most * reciprocal(exp2_of(y) + 1.0f));
        }
    }

    // A row's result of a piece as it is kept: [O, l, m].
    float* partial_of(int row, int64_t dim) {
        float* found = out + row * kOutStride;
        found[dim] = reduce_add(sums[row]);
        found[dim + 1] = largest[row];
        return found;
    }
};

// Keys and values as the model has them; M: how they are multiplied (product.h).
template <class M>
struct Tile : Rows32 {
    typedef typename M::Element Element;
    typedef Element Cell;
    typedef AsTheyAre<Element> Kept;
    typedef typename M::Operand Operand;

    alignas(64) Operand queries[kRows * M::kQueryStride];
    alignas(64) Element last_pair[kMaxDim * 2];

    // Weights take the place of the row's scores.
    Operand* weights(int row) { return reinterpret_cast<Operand*>(scores + row * kScoreStride); }

    void start(int row, const Element* from, int64_t dim) {
        Operand* to = queries + row * M::kQueryStride;
        if constexpr (sizeof(Element) == sizeof(Operand)) __builtin_memcpy(to, from, dim * sizeof(Operand));
        else for (int64_t i = 0; i < dim; ++i) to[i] = get(from + i);
        start_piece(row);
    }
    // A row that fills a register tile up; nobody reads its result.
    void start_empty(int row, int64_t dim) {
        __builtin_memset(queries + row * M::kQueryStride, 0, dim * sizeof(Operand));
        largest[row] = fresh[row] = 0;
    }

    float row_scale(int) const { return 1.0f; }
    void find_largest(int r, int64_t low, int64_t high, float scale) { mark_largest(r, low, high, scale); }

    // Scores → weights of tokens [begin, width); zero outside of [low, high).
    void find_weights(int r, int, int64_t begin, int64_t low, int64_t high, int64_t width, float scale) {
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

    // Scores of `columns` tokens of a block, which begins at `offset` of the stretch.
    void multiply_keys(const Geometry& g, int first_row, int rows, const Element* tile, int64_t columns, int64_t offset,
                       Prefetcher<Cell>* fetcher) {
        product<M, M::kQueryStride, kScoreStride>(rows, queries + first_row * M::kQueryStride, tile, g.block, columns,
                                                  0, g.dim / M::kStep, scores + first_row * kScoreStride + offset, nullptr,
                                                  fetcher);
    }

    void take_value_scales(const Geometry&, int, const Element*, int64_t, int64_t, int64_t) {}

    // Adds tokens [from, tokens) of a block.  `scaled`: what there is gets its factor first.
    void add_values(const Geometry& g, int first_row, int rows, const Element* tile, int64_t from, int64_t tokens,
                    int64_t offset, const float* scaled, Prefetcher<Cell>* fetcher) {
        const auto add = [&](const Element* values, int64_t weight, int64_t low, int64_t high, const float* factor) {
            product<M, M::kWeightStride, kOutStride>(rows, weights(first_row) + weight, values, g.dim, g.dim, low, high,
                                                     out + first_row * kOutStride, factor, fetcher);
        };
        add(tile, offset, from / M::kStep, tokens / M::kStep, scaled);
        if (tokens % M::kStep == 0) return;
        // The last pair has one token: the other counts as zero.
        const int64_t whole = tokens / M::kStep;
        const Element* last = tile + whole * g.dim * 2;
        for (int64_t i = 0; i < g.dim; ++i) {
            last_pair[i * 2] = last[i * 2];
            last_pair[i * 2 + 1] = 0;
        }
        for (int r = first_row; r < first_row + rows; ++r) factors[r] = 1;
        add(last_pair, offset + whole * 2, 0, 1, factors + first_row);
    }
};

// Keys and values in eight bits (int8.h): queries and weights become integers.  What a value is multiplied with has the
// value's scale in it; the largest one of the row in a stretch makes the scale of the row's weights.
template <class T>
struct ByteTile : Rows32 {
    typedef T Element;
    typedef uint8_t Cell;
    typedef InBytes<T> Kept;
    static constexpr int64_t kQueryStride = kMaxDim / 4 + 8;

    alignas(64) Query queries[kRows * kQueryStride];
    alignas(64) int32_t bias[kRows];
    alignas(64) float query_scales[kRows];
    alignas(64) float weight_scales[kRows];
    alignas(64) float value_scales[kRows * kScoreStride];  // of each KV head

    Words* weights(int row) { return reinterpret_cast<Words*>(scores + row * kScoreStride); }

    void start(int row, const Element* from, int64_t dim) {
        query_scales[row] = quantize_query(from, queries + row * kQueryStride, bias + row, dim);
        start_piece(row);
    }
    void start_empty(int row, int64_t dim) {
        __builtin_memset(queries + row * kQueryStride, 0, dim / 4 * sizeof(Query));
        bias[row] = 0;
        largest[row] = fresh[row] = weight_scales[row] = 0;
    }

    float row_scale(int r) const { return query_scales[r]; }
    void find_largest(int r, int64_t low, int64_t high, float scale) {
        mark_largest(r, low, high, scale * query_scales[r]);
    }

    // As above; h: the row's KV head, of the unit.
    void find_weights(int r, int h, int64_t begin, int64_t low, int64_t high, int64_t width, float scale) {
        float* row = scores + r * kScoreStride;
        const float* of_values = value_scales + h * kScoreStride;
        const int64_t first = begin / kLanes * kLanes;
        int64_t i = first;
        if (fresh[r] == kNothing) {
            low = high = i;
            factors[r] = 1;
        }
        const F shift = splat(-fresh[r]), of_row = splat(scale * query_scales[r]);
        F sum = sums[r] * factors[r];
        U most = {};
        for (; i + kLanes <= low; i += kLanes) store(row + i, F{});
        for (; i < high; i += kLanes) {
            const F p = exp2_of(load(row + i) * of_row + shift), weight = p * load(of_values + i);
            store(row + i, weight);
            most = max(most, magnitude(weight));
            sum += p;
        }
        const int64_t stop = i;
        sums[r] = sum;
        const Scaling scaling(largest_of(most), kMostWeight);
        weight_scales[r] = scaling.scale;
        for (i = first; i < stop; i += kLanes)
            store_row(weights(r) + i / 4, scaling.factor == 0 ? I{} : rounded(load(row + i), scaling.factor));
        for (; i < width; i += kLanes) store_row(weights(r) + i / 4, I{});
    }

    void multiply_keys(const Geometry& g, int first_row, int rows, uint8_t* tile, int64_t columns, int64_t offset,
                       Prefetcher<Cell>* fetcher) {
        byte_product<KeyRows, kScoreStride>(rows, {bias + first_row, scales_of(tile, g)},
                                            queries + first_row * kQueryStride, kQueryStride, tile, g.block, columns, 0,
                                            g.dim / 4, scores + first_row * kScoreStride + offset, fetcher);
        fetcher->take_scales();
    }

    // Of a block's tokens, for KV head h of the unit.  Those from `begin` on and after them, to the end of the vector,
    // are nobody's: zero.
    void take_value_scales(const Geometry& g, int h, uint8_t* tile, int64_t begin, int64_t tokens, int64_t offset) {
        float* to = value_scales + h * kScoreStride;
        for (int64_t i = begin; i < offset; ++i) to[i] = 0;
        __builtin_memcpy(to + offset, scales_of(tile, g), tokens * sizeof(float));
        for (int64_t i = offset + tokens; i % kLanes; ++i) to[i] = 0;
    }

    void add_values(const Geometry& g, int first_row, int rows, const uint8_t* tile, int64_t from, int64_t tokens,
                    int64_t offset, const float* scaled, Prefetcher<Cell>* fetcher) {
        byte_product<ValueRows, kOutStride>(rows, {scaled, weight_scales + first_row},
                                            weights(first_row) + offset / 4, kWordsStride, tile, g.dim, g.dim, from / 4,
                                            (tokens + 3) / 4, out + first_row * kOutStride, fetcher);
        fetcher->take_scales();
    }
};

}  // namespace
