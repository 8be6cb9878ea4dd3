// A weight in small integers, packed, and activations for it: what grouped.cpp, steps.cpp and program.cpp share.
//
// w[n, k] = scale[n, g] * (code[n, k] - zero[n, g]) with g = k / group, group 32, 64 or 128, codes of 4, 6 or 8 bits.
//
// Weight.  A panel is 2 * kLanes outputs, as in linear.cpp; a step is four inputs.  A panel lies group by group: its
// steps, then the group's scales and zeros, so that all that a sum needs comes in one stream.  A step of 4 bits is one
// vector: byte (lane, j) has input j of output `lane` in its lower half and of output kLanes + lane in the upper one.
// A step of 8 bits is two vectors.  Eight steps of 6 bits are eight vectors of their lower four bits, as of 4 bits, and
// four of their upper two, two steps in each: of the first in bits 0 and 1 (2 and 3 for output kLanes + lane) of a
// byte, of the second in bits 4 and 5 (6 and 7).  Then come 2 * kLanes scales, and as many zeros, as `Meta` says.
//
// Activations.  x[t, k] ≈ q[t, k] * c[t, b], q signed bytes, c for each block b of 128 inputs.  Beside the bytes, a row
// of *factors* has, in this order: c of each block, float32; minus the sums of q over each 32, 64 and 128 inputs, int32.
// So one row of activations serves weights in any groups.
//
// Parts.  A product of several matrices may have some outputs in other bits or groups than others: it is a chain of
// weights with the same inputs, in the order of their outputs.  Each is packed by itself.
#pragma once
#include "simd.h"

namespace {

constexpr int64_t kBlock = 128;  // inputs that share a scale of activations

enum Meta {
    kHalf,         // scales in float16; all zeros are the same
    kHalfByte,     // scales in float16, zeros in a byte
    kHalfHalf,     // both in float16
    kFull,         // both in float32
    kHalfEighths,  // scales in float16, eight times the zeros in a byte, at most 8 * 15; codes of 4 bits
    kE2m1,         // MXFP4: scales are powers of two, in a byte as float32 has it; codes of 4 bits stand for kNumbers
    kWord,         // a word of 16 bits for both: a scale below 2 (scales_of_words), eight times the zero; codes of 4 bits
};

// Of kE2m1: 16 and twice the number that the code stands for.
constexpr uint8_t kNumbers[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr int kNumbersZero = 16;

// model/cpu/grouped.py has its twin.
struct GroupedWeight {
    const void* packed;
    int64_t bits;
    int64_t group;
    int64_t meta;
    int64_t n;  // outputs
    int64_t k;  // inputs, a multiple of the group
    double zero;   // of kHalf
    double scale;  // of all, a power of two: stored scales are multiplied by it
    const GroupedWeight* next;  // of the outputs that follow, or null
};

INLINE int64_t meta_bytes(int64_t meta) {
    constexpr int of_both[] = {2, 3, 4, 8, 3, 1, 2};  // by Meta
    return 2 * kLanes * of_both[meta];
}
INLINE int64_t step_bytes_of(int64_t bits) { return bits * kLanes; }  // (of 6 bits, on average)
INLINE int64_t group_bytes(const GroupedWeight& w) { return w.group / 4 * step_bytes_of(w.bits) + meta_bytes(w.meta); }

INLINE int64_t blocks_of(int64_t k) { return (k + kBlock - 1) / kBlock; }
// Floats of a row of factors, and where the sums of groups begin in it.
INLINE int64_t factors_of(int64_t k) { return 2 * blocks_of(k) + k / 32 + (k + 63) / 64; }
INLINE int64_t sums_at(int64_t k, int64_t group) {
    const int64_t first = blocks_of(k);
    return group == 32 ? first : group == 64 ? first + k / 32 : first + k / 32 + (k + 63) / 64;
}

// kLanes float16.
INLINE F load_half(const char* at) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
    H h;
    __builtin_memcpy(&h, at, sizeof h);
    const U u = widen(h), sign = (u & 0x8000u) << 16, rest = (u & 0x7fffu) << 13;
    // As the bits of a float32 whose exponent is 112 too small; a multiplication mends that, of subnormals too.
    return as_f(as_u(as_f(rest) * 5.192296858534828e33f) | sign);  // 2^112
#endif
}
// kLanes bytes (written out: GCC 12 makes some fifty instructions of a conversion).
INLINE U load_bytes(const char* at) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    typedef uint8_t B __attribute__((vector_size(kLanes)));
    B b;
    __builtin_memcpy(&b, at, sizeof b);
    return __builtin_convertvector(b, U);
#endif
}

// kLanes words of 16 bits.
INLINE U load_words(const char* at) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
#else
    H h;
    __builtin_memcpy(&h, at, sizeof h);
    return widen(h);
#endif
}
// Scales of kLanes words of kWord: their upper 9 bits are four of a float16's exponent and five of its mantissa.
INLINE F scales_of_words(const char* at) {
#if defined(__AVX512F__)
    const __m256i words = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)at), 2);
    return (F)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(0x3fe0)));
#elif defined(__AVX2__)
    const __m128i words = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)at), 2);
    return (F)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(0x3fe0)));
#else
    return as_f((load_words(at) >> 7) << 18) * 5.192296858534828e33f;  // 2^112
#endif
}

// Of kLanes outputs, the first or the second half of a panel.
INLINE F load_scales(const char* at, int64_t meta, int half) {
    if (meta == kWord) return scales_of_words(at + half * kLanes * 2);
    return meta == kFull ? load((const float*)at + half * kLanes) : load_half(at + half * kLanes * 2);
}
INLINE F load_exponents(const char* at, int half) { return as_f(load_bytes(at + half * kLanes) << 23); }
INLINE F load_zeros(const char* at, int64_t meta, int half) {
    if (meta == kFull) return load((const float*)at + (2 + half) * kLanes);
    if (meta == kWord) return __builtin_convertvector((I)(load_words(at + half * kLanes * 2) & 127), F) * 0.125f;
    at += 4 * kLanes;
    if (meta == kHalfByte || meta == kHalfEighths) {
        const F whole = __builtin_convertvector((I)load_bytes(at + half * kLanes), F);
        return meta == kHalfByte ? whole : whole * 0.125f;
    }
    return load_half(at + half * kLanes * 2);
}
// Whole numbers: of kHalfEighths and kWord, eight times the zeros.
INLINE U whole_zeros(const char* at, int64_t meta, float zero, int half) {
    if (meta == kWord) return load_words(at + half * kLanes * 2) & 127;
    if (meta == kHalf) return U{} + (uint32_t)zero;
    return load_bytes(at + (4 + half) * kLanes);
}

}  // namespace
