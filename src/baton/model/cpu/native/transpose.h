// kLanes vectors of kLanes words, transposed in registers.
//
// Theory.  Interleaving vector i with vector i + kLanes / 2, for all i, rotates the bits of (vector, lane) by one.
// After as many rotations as a lane's number has bits, vector and lane have changed places.
#pragma once
#include "simd.h"

namespace {

INLINE void interleave(F a, F b, F* low, F* high) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *low = (F)_mm512_permutex2var_ps((__m512)a, first, (__m512)b);
    *high = (F)_mm512_permutex2var_ps((__m512)a, last, (__m512)b);
#elif defined(__AVX2__)
    const __m256 even = _mm256_unpacklo_ps((__m256)a, (__m256)b), odd = _mm256_unpackhi_ps((__m256)a, (__m256)b);
    *low = (F)_mm256_permute2f128_ps(even, odd, 0x20);
    *high = (F)_mm256_permute2f128_ps(even, odd, 0x31);
#else
    for (int i = 0; i < kLanes / 2; ++i) {
        (*low)[2 * i] = a[i];
        (*low)[2 * i + 1] = b[i];
        (*high)[2 * i] = a[kLanes / 2 + i];
        (*high)[2 * i + 1] = b[kLanes / 2 + i];
    }
#endif
}

INLINE void transpose(F* v) {
#pragma GCC unroll 4
    for (int bits = kLanes; bits > 1; bits /= 2) {
        F next[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) interleave(v[i], v[i + kLanes / 2], &next[2 * i], &next[2 * i + 1]);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = next[i];
    }
}

}  // namespace
