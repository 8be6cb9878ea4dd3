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

// kLanes bfloat16 ↔ float32.
INLINE F load(const bf16* p) {
    H v;
    __builtin_memcpy(&v, p, sizeof v);
    return as_f(__builtin_convertvector(v, U) << 16);
}
INLINE void store(bf16* p, F v) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    __builtin_memcpy(p, &h, sizeof h);
#else
    const U u = as_u(v);
    const U even = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const U nan = (U)(v != v);
    const H h = __builtin_convertvector((nan & ((u >> 16) | 0x40)) | (~nan & even), H);
    __builtin_memcpy(p, &h, sizeof h);
#endif
}
INLINE float get(const float* p) { return *p; }
INLINE float get(const bf16* p) { return to_float(*p); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = to_bf16(x); }

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

// 2^x to about 2e-7 relative; 0 below 2^-126, -inf included.  x must not be NaN or above 127.
INLINE F exp2_of(F x) {
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const I tiny = x < -126.0f;
    const F y = select(tiny, F{}, x);
    const F whole = y + magic;
    const F n = whole - magic;
    const F f = y - n;  // in [-0.5, 0.5]
    F p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    const U shifted = as_u(p) + (as_u(whole) << 23);  // the low bits of `whole` hold n
    return as_f(shifted & ~(U)tiny);
}

}  // namespace
