// What linear.cpp multiplies, and what becomes of the sums; linear.cpp explains the layout and the arithmetic.
#pragma once
#include "amx.h"
#include "int8.h"
#include "panels.h"
#include "simd.h"

namespace {

constexpr int kPanel = 2 * kLanes;

// Of float32 and bfloat16: T is the element of x and W, O that of y and b.
template <class T, class O = T> struct Floats;
template <> struct Floats<float> {
    static constexpr bool kMatrix = false;  // whether matrix units multiply
    typedef float X; typedef float Weight; typedef float Out; typedef float Step; typedef F Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) { return sum + splat(x) * load(w); }
};
template <class O> struct Floats<bf16, O> {
    static constexpr bool kMatrix = kMatrixUnits;
    typedef bf16 X; typedef bf16 Weight; typedef O Out; typedef uint32_t Step; typedef F Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) {
#if defined(__AVX512BF16__)
        return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)_mm512_loadu_si512(w));
#else
        const U pairs = load_u(w);
        return sum + as_f(pairs << 16) * splat(to_float((bf16)x)) + as_f(pairs & 0xffff0000u) * splat(to_float((bf16)(x >> 16)));
#endif
    }
};
// Of bytes, giving T.  Where no instruction multiplies unsigned with signed bytes and adds up exactly, even and odd bytes
// are widened to 16 bits, and pairs are multiplied; the compiler widens a panel's step once for all rows.
template <class T> struct Int8s {
    static constexpr bool kMatrix = kMatrixUnits;
    typedef uint8_t X; typedef int8_t Weight; typedef T Out; typedef uint32_t Step; typedef I Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) {
#if defined(__AVX512VNNI__)
        return (I)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)x), _mm512_loadu_si512(w));
#elif defined(__AVX512BW__)
        const __m512i inputs = _mm512_set1_epi32((int)x), bytes = _mm512_loadu_si512(w);
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512(inputs, _mm512_set1_epi16(255)),
                                               _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(inputs, 8), _mm512_srai_epi16(bytes, 8));
        return sum + (I)_mm512_add_epi32(even, odd);
#elif defined(__AVXVNNI__)
        return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32((int)x), _mm256_loadu_si256((const __m256i*)w));
#elif defined(__AVX2__)
        const __m256i inputs = _mm256_set1_epi32((int)x), bytes = _mm256_loadu_si256((const __m256i*)w);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(inputs, _mm256_set1_epi16(255)),
                                               _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(inputs, 8), _mm256_srai_epi16(bytes, 8));
        return sum + (I)_mm256_add_epi32(even, odd);
#else
        const U bytes = load_u(w);
        for (int j = 0; j < 32; j += 8) sum += (int32_t)((x >> j) & 255) * ((I)(bytes << (24 - j)) >> 24);
        return sum;
#endif
    }
};

template <class Kind> struct Task {
    const typename Kind::X* x;
    const typename Kind::Weight* packed;
    const typename Kind::Out* bias;  // or null
    typename Kind::Out* out;
    int64_t tokens, n, k;
    // Of bytes only: the scale of each row of x; the scale of each output and the sum of its weights, padded to panels.
    const float* x_scales;
    const float* scales;
    const int32_t* row_sums;
};

// What to bring into the cache: `bytes` from `from` on in each step, 128 at most.
struct Ahead {
    const char* from;
    int64_t bytes;
};

// What a sum begins with, and what becomes of it in the end.
INLINE void begin(F* sum, const int32_t*) { *sum = F{}; }
INLINE void begin(I* sum, const int32_t* row_sums) {
    __builtin_memcpy(sum, row_sums, sizeof *sum);
    *sum *= -128;
}
INLINE F finish(F sum, const float*, float, F bias) { return sum + bias; }
INLINE F finish(I sum, const float* scales, float x_scale, F bias) {
    return multiply_add(__builtin_convertvector(sum, F), load(scales) * x_scale, bias);
}

// Of the panel of outputs from n on; zeros where there is none.
template <class Kind>
INLINE void bias_of(const Task<Kind>& task, int64_t n, F* bias) {
    if (!task.bias || task.n - n >= kPanel) {
        for (int half = 0; half < 2; ++half) bias[half] = task.bias ? load(task.bias + n + half * kLanes) : F{};
        return;
    }
    float some[kPanel] = {};
    for (int64_t i = 0; n + i < task.n; ++i) some[i] = get(task.bias + n + i);
    for (int half = 0; half < 2; ++half) bias[half] = load(some + half * kLanes);
}

// A row of results: `left` of a panel's outputs.
template <class Out>
INLINE void put_row(Out* to, const F* found, int64_t left) {
    if (left >= kPanel) {
        store(to, found[0]);
        store(to + kLanes, found[1]);
        return;
    }
    float some[kPanel];
    store(some, found[0]);
    store(some + kLanes, found[1]);
    for (int64_t i = 0; i < left; ++i) put(to + i, some[i]);
}

}  // namespace
