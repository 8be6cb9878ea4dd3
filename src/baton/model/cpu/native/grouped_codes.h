// What multiplying by a panel of codes is made of, for grouped.cpp and grouped_tiles.h: the products of codes and bytes,
// unpacking, zero points.  grouped.cpp explains the arithmetic.
#pragma once
#include "int8.h"
#include "kernels.h"

namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kUnit = 8;  // steps in a row, without a branch; a group has one or more of them

struct Task {
    const GroupedWeight* w;
    const int8_t* x;       // [tokens, k]
    const float* factors;  // [tokens, factors_of(k)]
    const void* bias;      // of the type of `out`, or null
    void* out;             // [tokens, stride], from the first output of `w` on; `bias` likewise
    int64_t stride;
    int64_t tokens;
    bool to_bf16;
};

struct Ahead {
    const char* from;
    int64_t bytes;  // in each step
    bool lines;     // a panel is used once: everything between its steps as well
};

#define KEEP(variable) __asm__("" : "+r"(variable))

// sum += the products of four codes and four bytes of x, in each lane.  With kPairs, two products are added in 16 bits,
// which codes above 127 overflow: these are `wide`.
#if defined(__AVX512VNNI__)
constexpr bool kPairs = false;
typedef __m512i X;
INLINE X input(const char* x) { int32_t v; __builtin_memcpy(&v, x, 4); return _mm512_set1_epi32(v); }
INLINE I add(I sum, U codes, X x, bool) { return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, x); }
#elif defined(__AVX512BW__)
constexpr bool kPairs = true;
typedef __m512i X;
INLINE X input(const char* x) { int32_t v; __builtin_memcpy(&v, x, 4); return _mm512_set1_epi32(v); }
INLINE I add(I sum, U codes, X x, bool wide) {
    const __m512i ones = _mm512_set1_epi16(1);
    // Pairs of 8-bit codes overflow 16 bits: even and odd ones by themselves then.
    if (!wide) return sum + (I)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, x), ones);
    const __m512i even = _mm512_set1_epi16(255);
    return sum + (I)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_and_si512((__m512i)codes, even), x), ones) +
           (I)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_andnot_si512(even, (__m512i)codes), x), ones);
}
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
constexpr bool kPairs = false;
#else
constexpr bool kPairs = true;
#endif
typedef __m256i X;
INLINE X input(const char* x) { int32_t v; __builtin_memcpy(&v, x, 4); return _mm256_set1_epi32(v); }
INLINE I add(I sum, U codes, X x, bool wide) {
#if defined(__AVXVNNI__)
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, x);
#else
    const __m256i ones = _mm256_set1_epi16(1);
    if (!wide) return sum + (I)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, x), ones);
    const __m256i even = _mm256_set1_epi16(255);
    return sum + (I)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256((__m256i)codes, even), x), ones) +
           (I)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_andnot_si256(even, (__m256i)codes), x), ones);
#endif
}
#else
constexpr bool kPairs = false;
typedef uint32_t X;
INLINE X input(const char* x) { uint32_t v; __builtin_memcpy(&v, x, 4); return v; }
INLINE I add(I sum, U codes, X x, bool) {
    for (int j = 0; j < 32; j += 8) sum += (int32_t)(int8_t)(x >> j) * (I)((codes >> j) & 255);
    return sum;
}
#endif

// How zero points enter.
enum Way {
    kWhole,    // whole numbers
    kEighths,  // eighths, of codes of 4 bits
    kTable,    // kNumbersZero, and codes of 4 bits stand for kNumbers
    kFloats,   // any numbers
};

// kNumbers of each byte of `codes`, which are 0 … 15.
INLINE U numbers_of(U codes) {
#if defined(__AVX512BW__)
    const __m128i table = _mm_loadu_si128((const __m128i*)kNumbers);
    return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i table = _mm_loadu_si128((const __m128i*)kNumbers);
    return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
    uint8_t bytes[sizeof(U)];
    __builtin_memcpy(bytes, &codes, sizeof codes);
    for (size_t i = 0; i < sizeof(U); ++i) bytes[i] = kNumbers[bytes[i]];
    __builtin_memcpy(&codes, bytes, sizeof codes);
    return codes;
#endif
}

// Of step `s` of the unit, or of the step, that begins here; of eighths, 8 * code.
template <int bits, Way way>
INLINE void codes_of(const char* at, int s, U* low, U* high) {
    if constexpr (way == kEighths) {
        const U both = load_u(at);
        *low = (both << 3) & 0x78787878u;
        *high = (both >> 1) & 0x78787878u;
    } else if constexpr (bits == 4) {
        const U both = load_u(at);
        *low = both & 0x0f0f0f0fu;
        *high = (both >> 4) & 0x0f0f0f0fu;
        if constexpr (way == kTable) *low = numbers_of(*low), *high = numbers_of(*high);
    } else if constexpr (bits == 6) {
        const U both = load_u(at + s * kLanes * 4), upper = load_u(at + (kUnit + s / 2) * kLanes * 4);
        *low = (both & 0x0f0f0f0fu) | ((s % 2 ? upper : upper << 4) & 0x30303030u);
        *high = ((both >> 4) & 0x0f0f0f0fu) | ((s % 2 ? upper >> 2 : upper << 2) & 0x30303030u);
    } else {
        *low = load_u(at);
        *high = load_u(at + kLanes * 4);
    }
}

// Calls body(Number<0>{}), …, body(Number<n - 1>{}): indices that the compiler knows before it gives out registers.
template <int v> struct Number { static constexpr int value = v; };
#define INLINE_LAMBDA __attribute__((always_inline))
template <int n, int i = 0, class Body>
INLINE void each(const Body& body) {
    if constexpr (i < n) {
        body(Number<i>{});
        each<n, i + 1>(body);
    }
}

// zero * sum, for zero in 0 … 255 and a sum of up to 128 bytes.
INLINE I zero_times(U zero, int32_t sum) {
#if defined(__AVX512BW__)
    return (I)_mm512_madd_epi16((__m512i)zero, _mm512_set1_epi32(sum));
#elif defined(__AVX2__)
    return (I)_mm256_madd_epi16((__m256i)zero, _mm256_set1_epi32(sum));
#else
    return (I)zero * sum;
#endif
}

// As float32; nothing is moved from before to after it, or back.
INLINE F floats_of(I v) {
#if defined(__AVX512F__)
    __m512 found;
    __asm__ volatile("vcvtdq2ps %1, %0" : "=v"(found) : "v"(v));
    return (F)found;
#else
    return __builtin_convertvector(v, F);
#endif
}

// `rows` rows of results, from `row` and output n on; `sums`: [rows, kPanel] over blocks.
template <Way way>
INLINE void put_results(const Task& task, int64_t row, int64_t rows, int64_t n, const float* sums) {
    const int64_t left = task.w->n - n;
    const float scale = static_cast<float>(task.w->scale) * (way == kEighths ? 0.125f : 1.0f);
    const auto put_all = [&](auto* out, const auto* bias) {
        out += row * task.stride + n;
        for (int64_t r = 0; r < rows; ++r, out += task.stride, sums += kPanel) {
            if (left < kPanel) {
                for (int64_t i = 0; i < left; ++i)
                    put(out + i, multiply_add(sums[i], scale, bias ? get(bias + n + i) : 0.0f));
                continue;
            }
            for (int half = 0; half < 2; ++half) {
                const F more = bias ? load(bias + n + half * kLanes) : F{};
                store(out + half * kLanes, multiply_add(load(sums + half * kLanes), splat(scale), more));
            }
        }
    };
    if (task.to_bf16) put_all((bf16*)task.out, (const bf16*)task.bias);
    else put_all((float*)task.out, (const float*)task.bias);
}

// Calls body(first, last): whether a group is the first of its block, and whether the last.
template <class Body>
INLINE void in_block(bool first, bool last, const Body& body) {
    if (first) last ? body(Number<1>{}, Number<1>{}) : body(Number<1>{}, Number<0>{});
    else last ? body(Number<0>{}, Number<1>{}) : body(Number<0>{}, Number<0>{});
}

}  // namespace
