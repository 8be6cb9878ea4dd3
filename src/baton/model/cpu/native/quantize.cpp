// From a weight in floating point to codes, scales and zero points of groups: what model/weights/quantize.py, which has
// the theory, computes in PyTorch.
//
// A lane is a group, so that all arithmetic of the search is between vectors.  kLanes groups are transposed into a tile
// that stays in the nearest cache, where each clip reads them once; codes are transposed back four at a time, as words.
// What is found for a group depends on its numbers alone: neither on its neighbours nor on the number of threads.
#include "grouped.h"
#include "parallel.h"
#include "transpose.h"

namespace {

constexpr int64_t kMostGroup = 128;
constexpr int64_t kItemGroups = 1024;  // model/cpu/quantizing.py has its twin
constexpr float kTiny = 1e-30f;
constexpr int kWordBits = 6;  // of the mantissa of a scale that is kept in a word, with the first

enum Source { kFloat32, kBfloat16, kFloat16 };

// What Python asks for; model/cpu/quantizing.py has its twin.
struct Quantizing {
    const void* weight;   // [rows, k], rows `stride` elements from each other
    int64_t source;       // Source
    int64_t stride;
    int64_t rows;
    int64_t k;
    int64_t group;        // divides k
    int64_t bits;
    int64_t symmetric;
    const double* clips;  // parts of the range to be tried
    int64_t num_clips;
    int64_t fits;         // of scale and zero point, by least squares, for each clip; 0: zero points are whole numbers
    uint8_t* codes;       // [rows, k]
    float* scales;        // [rows, k / group]
    float* zeros;         // the same; NaN where a weight is none or infinite
    double* errors;       // [items, 2]: the sums of squared errors and of squares, of kItemGroups groups each
};

INLINE F magnitude_of(F v) { return as_f(as_u(v) & 0x7fffffffu); }

// To the nearest integers, ties to even.
INLINE F nearest(F v) {
#if defined(__AVX512F__)
    return (F)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (F)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const F magic = splat(12582912.0f);  // 1.5 * 2^23
    return select(magnitude_of(v) < 4194304.0f, (v + magic) - magic, v);
#endif
}

// To 11 bits, as float16 has, whatever the exponent.
INLINE F scale_of(F v) {
    const U u = as_u(v);
    return as_f((u + 0xfff + ((u >> 13) & 1)) & ~0x1fffu);
}

template <int source>
INLINE F load_from(const char* at) {
    if constexpr (source == kFloat32) return load((const float*)at);
    else if constexpr (source == kBfloat16) return load((const bf16*)at);
    else {
        F v = load_half(at);
#if !defined(__AVX512F__) && !defined(__F16C__)
        H h;
        __builtin_memcpy(&h, at, sizeof h);
        const U special = (U)((widen(h) & 0x7c00u) == 0x7c00u);  // infinity or NaN
        v = as_f(as_u(v) | (special & 0x7f800000u));
#endif
        return v;
    }
}

// One number of each of kLanes groups at a time.
struct Tile {
    F values[kMostGroup];
    int64_t group;
    F low, high;  // of each group
    F invalid;    // 0, or NaN where a number is none or infinite
};

struct Found {
    F scale, zero, error;
};

template <int source>
INLINE void read(Tile* tile, const char* const* from) {
    constexpr int64_t size = source == kFloat32 ? 4 : 2;
    F low = splat(__builtin_inff()), high = -low, invalid = {};
    for (int64_t first = 0; first < tile->group; first += kLanes) {
        F block[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) block[lane] = load_from<source>(from[lane] + first * size);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            tile->values[first + i] = block[i];
            low = min(low, block[i]);
            high = max(high, block[i]);
            invalid += block[i] * 0.0f;
        }
    }
    tile->low = low;
    tile->high = high;
    tile->invalid = invalid;
}

// What codes are made of: code - zero is `exact` in steps of the scale, rounded and cut.
struct Steps {
    F inverse, least, most;
    INLINE_MEMBER Steps(F scale, F zero, float largest) : inverse(1.0f / scale), least(-zero), most(largest - zero) {}
    INLINE_MEMBER F operator()(F in_steps) const { return min(max(nearest(in_steps), least), most); }
};

INLINE F error_of(const Tile& tile, F scale, F zero, float most) {
    const Steps steps(scale, zero, most);
    F sums[4] = {};
    for (int64_t i = 0; i < tile.group; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const F exact = tile.values[i + j] * steps.inverse;
            const F wrong = steps(exact) - exact;
            sums[j] += wrong * wrong;
        }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale * scale;
}

INLINE Found tried(const Tile& tile, const Quantizing& q, double clip, float most, float middle) {
    Found found;
    if (q.symmetric) {  // the sign of the largest magnitude has one code more
        const F largest = select(tile.high > -tile.low, tile.high, tile.low) * (float)(-clip / middle);
        found.scale = scale_of(select(magnitude_of(largest) < kTiny, splat(kTiny), largest));
        found.zero = splat(middle);
    } else {
        const F low = min(tile.low, F{}), high = max(tile.high, F{});
        found.scale = scale_of(max((high - low) * (float)(clip / most), splat(kTiny)));
        found.zero = min(max(nearest(low * (float)-clip / found.scale), F{}), splat(most));
    }
    found.error = error_of(tile, found.scale, found.zero, most);
    return found;
}

// The scale that least squares fit to the codes, where it is better.
INLINE void fit(const Tile& tile, Found* found, float most) {
    const Steps steps(found->scale, found->zero, most);
    F products[2] = {}, squares[2] = {};
    for (int64_t i = 0; i < tile.group; i += 2)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const F whole = steps(tile.values[i + j] * steps.inverse);
            products[j] += whole * tile.values[i + j];
            squares[j] += whole * whole;
        }
    const F fitted = (products[0] + products[1]) / max(squares[0] + squares[1], splat(1.0f));
    const F scale = select(magnitude_of(fitted) < kTiny, found->scale, scale_of(fitted));
    const F error = error_of(tile, scale, found->zero, most);
    found->scale = select(error < found->error, scale, found->scale);
}

// With whole zero points.
INLINE Found searched(const Tile& tile, const Quantizing& q, float most) {
    const float middle = (float)(1 << (q.bits - 1));
    Found found = tried(tile, q, q.clips[0], most, middle);
    for (int64_t i = 1; i < q.num_clips; ++i) {
        const Found other = tried(tile, q, q.clips[i], most, middle);
        const I wins = other.error < found.error;
        found.scale = select(wins, other.scale, found.scale);
        found.zero = select(wins, other.zero, found.zero);
        found.error = select(wins, other.error, found.error);
    }
    fit(tile, &found, most);
    return found;
}

INLINE F code_of(F in_steps_from_least, float most) {
    return min(max(nearest(in_steps_from_least), F{}), splat(most));
}

// A scale and a zero point, their squared error, and sums over a group's codes: what a fit needs.
struct Fitted {
    F scale, zero, error, codes, squares, products;  // products: of code and number
};

INLINE Fitted measured(const Tile& tile, F scale, F zero, float most) {
    const F inverse = 1.0f / scale;
    F errors[2] = {}, codes[2] = {}, squares[2] = {}, products[2] = {};
    for (int64_t i = 0; i < tile.group; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const F value = tile.values[i + j], shifted = value * inverse + zero;
            const F code = code_of(shifted, most), wrong = code - shifted;
            errors[j % 2] += wrong * wrong;
            codes[j % 2] += code;
            squares[j % 2] += code * code;
            products[j % 2] += code * value;
        }
    return {scale, zero, (errors[0] + errors[1]) * scale * scale, codes[0] + codes[1], squares[0] + squares[1],
            products[0] + products[1]};
}

INLINE void keep_better(Fitted* best, const Fitted& other) {
    const I wins = other.error < best->error;
    best->scale = select(wins, other.scale, best->scale);
    best->zero = select(wins, other.zero, best->zero);
    best->error = select(wins, other.error, best->error);
    best->codes = select(wins, other.codes, best->codes);
    best->squares = select(wins, other.squares, best->squares);
    best->products = select(wins, other.products, best->products);
}

// The scale and the zero point that least squares fit to the codes of `from`, and what they give.  With `rounds`, the
// zero point is rounded to eighths, the scale is fitted to that, and of the two around it that a word holds (kWord of
// grouped.h) the better is taken.
INLINE Fitted refitted(const Tile& tile, const Fitted& from, F sum, float most, bool rounds) {
    const float n = (float)tile.group;
    const F mean = from.codes / n, spread = from.squares - from.codes * mean;
    const F slope = (from.products - mean * sum) / max(spread, splat(0.5f));
    const F free = mean - sum / (max(slope, splat(kTiny)) * n);
    F zero = select((spread > 0.5f) & (slope > kTiny), min(max(free, F{}), splat(most)), from.zero);
    if (rounds) zero = nearest(zero * 8.0f) * 0.125f;
    const F lengths = from.squares - 2.0f * zero * from.codes + zero * zero * n;
    F scale = (from.products - zero * sum) / max(lengths, splat(kTiny));
    scale = select((scale > kTiny) & (scale < __builtin_inff()), scale, from.scale);
    if (!rounds) return measured(tile, scale, zero, most);
    constexpr uint32_t step = 1u << (24 - kWordBits);
    const U below = as_u(scale) & ~(step - 1);
    Fitted better = measured(tile, as_f(below), zero, most);
    keep_better(&better, measured(tile, as_f(below + step), zero, most));
    return better;
}

// With zero points in eighths and scales of 6 bits: any while clips are tried, since rounded ones hold a fit where it
// began.
INLINE Found fitted(const Tile& tile, const Quantizing& q, float most) {
    F sums[4] = {};
    for (int64_t i = 0; i < tile.group; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] += tile.values[i + j];
    const F sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const F low = min(tile.low, F{}), high = max(tile.high, F{}), middle = (low + high) * 0.5f;
    Fitted best;
    for (int64_t i = 0; i < q.num_clips; ++i) {
        const F scale = max((high - low) * (float)(q.clips[i] / most), splat(kTiny));
        const F zero = min(max(0.5f * most - middle / scale, F{}), splat(most));
        Fitted last = measured(tile, scale, zero, most);
        if (i) keep_better(&best, last);
        else best = last;
        for (int64_t fits = 0; fits < q.fits; ++fits) {
            last = refitted(tile, last, sum, most, false);
            keep_better(&best, last);
        }
    }
    best = refitted(tile, best, sum, most, true);
    keep_better(&best, refitted(tile, best, sum, most, true));
    return {best.scale, best.zero, best.error};
}

// kLanes groups from number `first` on, of which `count` are there.
template <int source>
INLINE void quantize_groups(const Quantizing& q, int64_t first, int64_t count, double* errors) {
    constexpr int64_t size = source == kFloat32 ? 4 : 2;
    const int64_t in_row = q.k / q.group;
    const char* from[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t group = first + (lane < count ? lane : count - 1);
        from[lane] = (const char*)q.weight + (group / in_row * q.stride + group % in_row * q.group) * size;
    }
    Tile tile;
    tile.group = q.group;
    read<source>(&tile, from);
    const float most = (float)((1 << q.bits) - 1);
    Found found = q.fits ? fitted(tile, q, most) : searched(tile, q, most);

    const Steps steps(found.scale, found.zero, most);
    F words[kMostGroup / 4 + kLanes] = {};  // (a group of 32 fills half of the last block)
    F wrong = {}, squares = {};
    for (int64_t i = 0; i < q.group; i += 4) {
        U word = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const F exact = tile.values[i + j] * steps.inverse, shifted = exact + found.zero;
            const F code = q.fits ? code_of(shifted, most) : steps(exact) + found.zero;
            wrong += (code - shifted) * (code - shifted);
            squares += exact * exact;
            word |= (U)__builtin_convertvector(code, I) << (8 * j);
        }
        words[i / 4] = as_f(word);
    }
    uint8_t* codes = q.codes + first * q.group;
    for (int64_t at = 0; at < q.group / 4; at += kLanes) {
        transpose(words + at);
        const int64_t bytes = 4 * (q.group / 4 - at < kLanes ? q.group / 4 - at : kLanes);
        for (int64_t lane = 0; lane < count; ++lane)
            __builtin_memcpy(codes + lane * q.group + 4 * at, &words[at + lane], bytes);
    }
    // Without a range any scale serves: float16, in which scales are stored, holds this one.
    found.scale = select(max(tile.high, -tile.low) == F{}, F{}, found.scale);
    const F zero = found.zero + tile.invalid;
    for (int64_t lane = 0; lane < count; ++lane) {
        q.scales[first + lane] = found.scale[lane];
        q.zeros[first + lane] = zero[lane];
        const double unit = (double)found.scale[lane] * found.scale[lane];
        errors[0] += unit * wrong[lane];
        errors[1] += unit * squares[lane];
    }
}

template <int source>
void quantize_all(const Quantizing& q) {
    const int64_t groups = q.rows * (q.k / q.group);
    parallel_for((groups + kItemGroups - 1) / kItemGroups, [&](int64_t item, int) {
        const int64_t end = (item + 1) * kItemGroups < groups ? (item + 1) * kItemGroups : groups;
        double errors[2] = {};
        for (int64_t first = item * kItemGroups; first < end; first += kLanes)
            quantize_groups<source>(q, first, end - first < kLanes ? end - first : kLanes, errors);
        q.errors[2 * item] = errors[0];
        q.errors[2 * item + 1] = errors[1];
    });
}

}  // namespace

BATON_EXPORT(quantize_weight)(const Quantizing* q) {
    if (q->source == kFloat32) quantize_all<kFloat32>(*q);
    else if (q->source == kBfloat16) quantize_all<kBfloat16>(*q);
    else quantize_all<kFloat16>(*q);
}
