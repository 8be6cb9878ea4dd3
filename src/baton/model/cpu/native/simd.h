// Vectors of the instruction set that a source is compiled for, written once with the compiler's vector types.
//
// F holds kLanes float32 (16 with AVX-512, 8 with AVX2, else 4); + - * / and comparisons are the compiler's,
// a * b + c becomes one fused multiply-add where there is one.  A bfloat16 is the upper half of a float32.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512BF16__)
constexpr bool kPairProducts = true;  // one instruction multiplies and adds pairs of bfloat16
#else
constexpr bool kPairProducts = false;
#endif

typedef uint16_t bf16;
typedef float F __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef uint16_t H __attribute__((vector_size(kLanes * 2)));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

INLINE F load(const float* p) { F v; __builtin_memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE U load_u(const void* p) { U v; __builtin_memcpy(&v, p, sizeof v); return v; }
INLINE F splat(float x) { return F{} + x; }
INLINE F as_f(U v) { return (F)v; }
INLINE U as_u(F v) { return (U)v; }
INLINE float to_float(bf16 x) { const uint32_t u = (uint32_t)x << 16; float f; __builtin_memcpy(&f, &u, 4); return f; }

// Rounds to nearest, ties to even; a NaN stays one.
INLINE bf16 to_bf16(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    if (x != x) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// kLanes of 16 bits ↔ of 32, which are below 2^16 (written out, because GCC 12 makes four instructions of one).
INLINE U widen(H v) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, U);
#endif
}
INLINE H narrow(U v) {
#if defined(__AVX512F__)
    return (H)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);  // cuts above 65,535: there is nothing
    return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x88));
#else
    return __builtin_convertvector(v, H);
#endif
}

// kLanes bfloat16 ↔ float32.
INLINE F from_bf16(H v) { return as_f(widen(v) << 16); }
INLINE H to_bf16(F v) {
#if defined(__AVX512BF16__)
    return (H)_mm512_cvtneps_pbh((__m512)v);
#else
    const U u = as_u(v);
    const U even = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const U nan = (U)(v != v);
    return narrow((nan & ((u >> 16) | 0x40)) | (~nan & even));
#endif
}
INLINE F load(const bf16* p) { H v; __builtin_memcpy(&v, p, sizeof v); return from_bf16(v); }
INLINE void store(bf16* p, F v) { const H h = to_bf16(v); __builtin_memcpy(p, &h, sizeof h); }
INLINE float get(const float* p) { return *p; }
INLINE float get(const bf16* p) { bf16 x; __builtin_memcpy(&x, p, sizeof x); return to_float(x); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = to_bf16(x); }

// a * b + c, rounded once where there is such an instruction.  (In a loop that adds up, the compiler may multiply some
// terms with vectors and others with it, so that a sum would depend on where the loop begins.)
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE F select(I mask, F yes, F no) { return as_f(((U)mask & as_u(yes)) | (~(U)mask & as_u(no))); }
INLINE F max(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}
INLINE float reduce_max(F v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}
// The order of additions is that of a tree: lane i with lane i + half.
INLINE float reduce_add(F v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float part[kLanes];
    __builtin_memcpy(part, &v, sizeof v);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
#endif
}

INLINE F min(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

// v rounded to what is stored as a T.
template <class T>
INLINE F rounded(F v) {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    else return from_bf16(to_bf16(v));
}

// 1 / x to about 2e-7 relative; x in [1e-38, 1e38].
INLINE F reciprocal(F x) {
#if defined(__AVX512F__)
    const F guess = (F)_mm512_rcp14_ps((__m512)x);
    return guess * (2.0f - x * guess);  // a step of Newton's method
#else
    return 1.0f / x;
#endif
}

// 2^x to about 2e-7 relative: 2^n for the nearest integer n, times a polynomial of the rest f in [-0.5, 0.5], whose
// largest relative error is smallest; 2^0 is exact.  0 where that is below 2^-126, -inf included.  x must not be
// NaN or above 127.
INLINE F exp2_of(F x) {
#if defined(__AVX512F__)
    const F f = (F)_mm512_reduce_ps((__m512)x, 8);  // 0 of -inf
    const F n = x - f;
#else
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const I tiny = x < -126.0f;
    const F y = select(tiny, F{}, x);
    const F whole = y + magic;
    const F f = y - (whole - magic);
#endif
    F p = splat(1.3264727e-3f);
    p = p * f + 9.6715127e-3f;
    p = p * f + 5.5507337e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.9314698e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const U shifted = as_u(p) + (as_u(whole) << 23);  // the low bits of `whole` hold n
    return as_f(shifted & ~(U)tiny);
#endif
}

}  // namespace
