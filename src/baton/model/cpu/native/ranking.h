// What sampling is made of: the order of tokens, weights, and sums that are the same for a row wherever it lies.
#pragma once
#include "simd.h"

#include <algorithm>

namespace {

// (Types of this name space make the templates of <algorithm> that are used with them our own: see parallel.h.)
struct Float {
    float value;
    friend bool operator<(Float a, Float b) { return a.value > b.value; }  // the largest first
};

// A token in the ranking: the smaller, the better.  Logit descending, then id ascending.
struct Rank {
    uint64_t key;
    static Rank of(float logit, int64_t id) {
        const float value = logit + 0.0f;  // -0 equals 0
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        bits = bits >> 31 ? bits : ~bits & 0x7FFFFFFF;
        return {(uint64_t)bits << 32 | (uint32_t)id};
    }
    uint32_t id() const { return (uint32_t)key; }
    float logit() const {
        uint32_t bits = (uint32_t)(key >> 32);
        bits = bits >> 31 ? bits : ~bits & 0x7FFFFFFF;
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
    friend bool operator<(Rank a, Rank b) { return a.key < b.key; }
};

struct ById {
    uint32_t id;
    float weight;
    friend bool operator<(ById a, ById b) { return a.id < b.id; }
};

// Where a prefix of the ranking ends: after `last`, which belongs to it.  `all`: it is everything.
struct Cut {
    Rank last;
    bool all;
};

// exp(x) for x <= 0, to about one unit in the last place; 0 below -87, where float32 ends.
// x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial for exp(r), and n goes into the exponent.
INLINE F exponential(F x) {
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const I tiny = x < -87.0f;
    const F y = select(tiny, F{}, x);
    const F shifted = y * 1.44269504f + magic;
    const F n = shifted - magic;
    const F r = (y - n * 0.693359375f) - n * -2.12194440e-4f;  // (the first product is exact)
    F p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const U scaled = as_u(p) + (as_u(shifted) << 23);  // the low bits of `shifted` hold n
    return as_f(scaled & ~(U)tiny);
}

INLINE bool any(I mask) {
    return reduce_max(select(mask, splat(1), F{})) > 0;
}

double total_of(const float* values, int64_t count) {
    double lanes[16] = {};
    for (int64_t i = 0; i < count; i += 16) {
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += values[i + lane];
    }
    for (int half = 8; half; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

}  // namespace
