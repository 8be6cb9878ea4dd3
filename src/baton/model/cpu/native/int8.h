// Keys and values in eight bits, and their products with queries and weights.
//
// Theory.  A head of a position is kept as integers q in -127 … 127 and a scale, its largest magnitude / 127
// (model/attention/kv_int8.py).  Queries are quantized in the same way.  Weights, which span many magnitudes, become
// integers of 15 bits.  So products are sums of integers: exact, in whatever order, on every instruction set; then they
// are rounded once and multiplied with the scales.
//
// AVX-512 VNNI multiplies four unsigned with four signed bytes and adds the products to a lane.  A byte of a key is
// 128 + q; sums begin with -128 * (the sum of the query's) to make up for it.  A weight is two unsigned bytes,
// 256 * high + low, with a sum for each, and values are signed.  Elsewhere bytes are widened to 16 bits and pairs are
// multiplied: even ones of four, then odd ones.
#pragma once
#include "tiles.h"

namespace {

// Four elements of a row: what one step of a sum takes.
struct Words {  // of 16 bits
#if defined(__AVX512VNNI__)
    uint32_t high, low;  // bytes
#else
    uint32_t even, odd;  // pairs: elements 0 and 2, 1 and 3
#endif
};
#if defined(__AVX512VNNI__)
struct Query {
    uint32_t bytes;
};
#else
typedef Words Query;
#endif
constexpr int32_t kMostQuery = 127;
constexpr int32_t kMostWeight = 32767;
constexpr float kLeastScaled = 7.888609e-31f;  // 2^-100: what is not above counts as nothing

INLINE U max(U a, U b) {
#if defined(__AVX512F__)
    return (U)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (U)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    const U above = (U)(a > b);
    return (a & above) | (b & ~above);
#endif
}
// Magnitudes as bits, in which a NaN is above infinity, and that above all numbers.
INLINE float largest_of(U bits) {
    uint32_t most = 0;
#if defined(__AVX512F__)
    most = _mm512_reduce_max_epu32((__m512i)bits);
#else
    for (int i = 0; i < kLanes; ++i) most = bits[i] > most ? bits[i] : most;
#endif
    float found;
    __builtin_memcpy(&found, &most, sizeof found);
    return found;
}
INLINE U magnitude(F v) { return as_u(v) & 0x7fffffffu; }

// a * b + c with one rounding where there is such an instruction, and never otherwise: what a compiler fuses differs.
INLINE F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < kLanes; ++i) c[i] = multiply_add(a[i], b[i], c[i]);
    return c;
#endif
}

// x * factor as the nearest integers, ties to even; |x * factor| < 2^22.
INLINE I rounded(F x, float factor) {
#if defined(__AVX512F__)
    return (I)_mm512_cvtps_epi32((__m512)(x * factor));
#elif defined(__AVX2__)
    return (I)_mm256_cvtps_epi32((__m256)(x * factor));
#else
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (I)as_u(multiply_add(x, splat(factor), magic)) - (I)as_u(magic);
#endif
}
INLINE int32_t rounded(float x, float factor) { return rounded(splat(x), factor)[0]; }

// The largest magnitude of x [dim].
template <class T>
INLINE float largest(const T* x, int64_t dim) {
    U most = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) most = max(most, magnitude(load(x + i)));
    for (; i < dim; ++i) most = max(most, magnitude(splat(get(x + i))));
    return largest_of(most);
}

// The factor that makes integers up to `most` of numbers up to `largest`, and the scale that undoes it: NaN if that is
// none.
struct Scaling {
    float factor, scale;

    Scaling(float largest, int32_t most) : factor(0), scale(0) {
        if (!(largest <= 3.4028235e38f)) scale = __builtin_nanf("");
        else if (largest > kLeastScaled) factor = (float)most / largest, scale = largest / (float)most;
    }
};

// x [dim] → bytes bias + q, and their scale.
template <class T>
INLINE float quantize_head(const T* x, uint8_t* to, int64_t dim, int32_t bias) {
    const Scaling scaling(largest(x, dim), 127);
    const float factor = scaling.factor;
    if (factor == 0) {
        __builtin_memset(to, bias, dim);
        return scaling.scale;
    }
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        const Bytes bytes = __builtin_convertvector((U)(rounded(load(x + i), factor) + bias) & 255u, Bytes);
        __builtin_memcpy(to + i, &bytes, sizeof bytes);
    }
    for (; i < dim; ++i) to[i] = static_cast<uint8_t>(rounded(get(x + i), factor) + bias);
    return scaling.scale;
}

// kLanes integers → kLanes / 4 of a row.
INLINE void store_row(Words* to, I x) {
#if defined(__AVX512F__)
#if defined(__AVX512VNNI__)
    const __m128i order = _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14);
#else
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
#endif
    const __m256i words = _mm512_cvtepi32_epi16((__m512i)x);
    _mm256_storeu_si256((__m256i*)to, _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order)));
#elif defined(__AVX2__)
    const __m256i words = _mm256_shufflelo_epi16(_mm256_packs_epi32((__m256i)x, (__m256i)x), 0xd8);
    _mm_storel_epi64((__m128i*)to, _mm256_castsi256_si128(words));
    _mm_storel_epi64((__m128i*)(to + 1), _mm256_extracti128_si256(words, 1));
#else
    for (int i = 0; i < kLanes; i += 4) {
        to[i / 4].even = ((uint32_t)x[i] & 0xffffu) | (uint32_t)x[i + 2] << 16;
        to[i / 4].odd = ((uint32_t)x[i + 1] & 0xffffu) | (uint32_t)x[i + 3] << 16;
    }
#endif
}
#if defined(__AVX512VNNI__)
INLINE void store_row(Query* to, I x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
#endif

// Element i of a row.
INLINE int32_t element_of(const Words* row, int64_t i) {
    const Words& four = row[i / 4];
    const int j = i % 4;
#if defined(__AVX512VNNI__)
    return (four.high >> 8 * j & 255u) * 256 + (four.low >> 8 * j & 255u);
#else
    return (int16_t)((j % 2 ? four.odd : four.even) >> (j / 2 * 16));
#endif
}
#if defined(__AVX512VNNI__)
INLINE int32_t element_of(const Query* row, int64_t i) { return (int8_t)(row[i / 4].bytes >> 8 * (i % 4)); }
#endif

// Four elements in each lane.
#if defined(__AVX512VNNI__)
struct QueryLeft {
    __m512i bytes;
    INLINE_MEMBER explicit QueryLeft(const Query& x) { bytes = _mm512_set1_epi32((int)x.bytes); }
};
struct WeightLeft {
    __m512i high, low;
    INLINE_MEMBER explicit WeightLeft(const Words& x) {
        high = _mm512_set1_epi32((int)x.high);
        low = _mm512_set1_epi32((int)x.low);
    }
};
#else
struct QueryLeft {
#if defined(__AVX512F__)
    __m512i even, odd;
    INLINE_MEMBER explicit QueryLeft(const Words& x) {
        even = _mm512_set1_epi32((int)x.even);
        odd = _mm512_set1_epi32((int)x.odd);
    }
#elif defined(__AVX2__)
    __m256i even, odd;
    INLINE_MEMBER explicit QueryLeft(const Words& x) {
        even = _mm256_set1_epi32((int)x.even);
        odd = _mm256_set1_epi32((int)x.odd);
    }
#else
    int32_t even, odd;
    INLINE_MEMBER explicit QueryLeft(const Words& x) : even((int32_t)x.even), odd((int32_t)x.odd) {}
#endif
};
typedef QueryLeft WeightLeft;
#endif

// Four bytes of each of kLanes columns as they are multiplied.  `Keys`: 128 + q; else values.
template <bool Keys>
struct Right {
#if defined(__AVX512VNNI__)
    static constexpr int kParts = Keys ? 1 : 2;  // sums of high and of low bytes
    __m512i bytes;
    INLINE_MEMBER explicit Right(const uint8_t* from) { bytes = _mm512_loadu_si512(from); }
    INLINE_MEMBER void add(I* sums, const QueryLeft& x) const {
        *sums = (I)_mm512_dpbusd_epi32((__m512i)*sums, bytes, x.bytes);
    }
    INLINE_MEMBER void add(I* sums, const WeightLeft& x) const {
        sums[0] = (I)_mm512_dpbusd_epi32((__m512i)sums[0], x.high, bytes);
        sums[1] = (I)_mm512_dpbusd_epi32((__m512i)sums[1], x.low, bytes);
    }
#elif defined(__AVX512BW__)
    static constexpr int kParts = 1;
    __m512i even, odd;
    INLINE_MEMBER explicit Right(const uint8_t* from) {
        const __m512i b = _mm512_loadu_si512(from);
        even = Keys ? _mm512_and_si512(b, _mm512_set1_epi16(255)) : _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8);
        odd = Keys ? _mm512_srli_epi16(b, 8) : _mm512_srai_epi16(b, 8);
    }
    INLINE_MEMBER void add(I* sums, const QueryLeft& x) const {
        *sums += (I)_mm512_madd_epi16(even, x.even) + (I)_mm512_madd_epi16(odd, x.odd);
    }
#elif defined(__AVX2__)
    static constexpr int kParts = 1;
    __m256i even, odd;
    INLINE_MEMBER explicit Right(const uint8_t* from) {
        const __m256i b = _mm256_loadu_si256((const __m256i*)from);
        even = Keys ? _mm256_and_si256(b, _mm256_set1_epi16(255)) : _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
        odd = Keys ? _mm256_srli_epi16(b, 8) : _mm256_srai_epi16(b, 8);
    }
    INLINE_MEMBER void add(I* sums, const QueryLeft& x) const {
        *sums += (I)_mm256_madd_epi16(even, x.even) + (I)_mm256_madd_epi16(odd, x.odd);
    }
#else
    static constexpr int kParts = 1;
    I parts[4];
    INLINE_MEMBER explicit Right(const uint8_t* from) {
        const U bytes = load_u(from);
        for (int i = 0; i < 4; ++i) parts[i] = Keys ? (I)(bytes >> 8 * i & 255u) : (I)(bytes << (24 - 8 * i)) >> 24;
    }
    INLINE_MEMBER void add(I* sums, const QueryLeft& x) const {
        *sums += parts[0] * (int32_t)(int16_t)x.even + parts[2] * (x.even >> 16) +
                 parts[1] * (int32_t)(int16_t)x.odd + parts[3] * (x.odd >> 16);
    }
#endif
};

// A sum of all parts, rounded once.
template <int Parts>
INLINE F sum_of(const I* sums) {
    if constexpr (Parts == 1) return __builtin_convertvector(*sums, F);
    else return multiply_add(__builtin_convertvector(sums[0], F), splat(256.0f), __builtin_convertvector(sums[1], F));
}

INLINE int32_t total_of(I v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#endif
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += v[i];
    return sum;
}

// A row of queries [dim], a multiple of 4; what makes up for the 128 of keys' bytes; their scale, which is not 0: it is
// multiplied with -inf where nothing is seen.
template <class T>
float quantize_query(const T* x, Query* to, int32_t* bias, int64_t dim) {
    const Scaling scaling(largest(x, dim), kMostQuery);
    I sums = {};
    for (int64_t first = 0; first < dim; first += kLanes) {
        I lanes = {};
        if (scaling.factor != 0) {
            if (first + kLanes <= dim) lanes = rounded(load(x + first), scaling.factor);
            else for (int64_t i = first; i < dim; ++i) lanes[i - first] = rounded(get(x + i), scaling.factor);
        }
        sums += lanes;
        store_row(to + first / 4, lanes);
    }
    *bias = -128 * total_of(sums);
    return scaling.scale == 0 ? 1 : scaling.scale;
}

}  // namespace
