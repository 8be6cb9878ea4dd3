// What happens to activations between two products, each in one go over a row that stays in the first-level cache.
//
// Rows [T, n] are independent; sums are in float32 and in an order that depends on n only.  A result of a product
// of quantized activations comes with one factor a row (`scales`, else null), which is applied when it is read.
// A result for a quantized product is written as bytes 128 + round(x / c) with c = max|x| / 127 of the row; for a weight
// in groups as signed bytes with a scale for 128 inputs, and the sums that such a product needs (grouped.h).
#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

INLINE F absolute(F v) { return as_f(as_u(v) & 0x7fffffffu); }
INLINE float absolute(float v) { return v < 0 ? -v : v; }
INLINE float larger(float a, float b) { return a > b ? a : b; }

// x / (1 + 2^-y); the exponential is cut where it no longer matters.
INLINE F gated(F x, F y) { return x * reciprocal(exp2_of(min(-y, splat(126.0f))) + 1.0f); }

// silu(x) = x / (1 + exp(-x)).
struct Silu {
    INLINE F both(F gate, F up) { return gated(gate, gate * 1.44269504088896f) * up; }
};
// gelu as a tanh: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
    INLINE F both(F gate, F up) {
        return gated(gate, (gate + gate * gate * gate * 0.044715f) * 2.30220820192366f) * up;
    }
};
// gpt-oss: gate / (1 + exp(-1.702 gate)) * (up + 1), with gates of 7 at most, and up within 7 of zero.
struct SwigluOai {
    INLINE F both(F gate, F up) {
        const F x = min(gate, splat(7.0f));
        return gated(x, x * 2.45546696f) * (min(max(up, splat(-7.0f)), splat(7.0f)) + 1.0f);
    }
};
template <class Activation>
INLINE float activated(float gate, float up) {
    float lanes[kLanes];
    store(lanes, Activation::both(splat(gate), splat(up)));
    return lanes[0];
}

// value(i) for lanes i … and for one element; the quantized form of the row and its scale.
template <class T>
float quantize_row(const T* x, uint8_t* out, int64_t n) {
    F most = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) most = max(most, absolute(load(x + i)));
    for (; i < n; ++i) rest = larger(rest, absolute(get(x + i)));
    const float scale = larger(larger(reduce_max(most), rest) / 127.0f, 1e-30f);
    const float inverse = 1.0f / scale;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and the low byte is the integer
    for (i = 0; i + kLanes <= n; i += kLanes) {
        const Bytes bytes = __builtin_convertvector((as_u(load(x + i) * inverse + magic) + 128) & 255, Bytes);
        __builtin_memcpy(out + i, &bytes, sizeof bytes);
    }
    for (; i < n; ++i) {
        const float rounded = get(x + i) * inverse + magic;
        uint32_t bits;
        __builtin_memcpy(&bits, &rounded, 4);
        out[i] = static_cast<uint8_t>(bits + 128);
    }
    return scale;
}

// (A loop over lanes becomes some thirty instructions, for each 32 inputs.)
INLINE int32_t total(I v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += v[i];
    return sum;
#endif
}

// The row in signed bytes and its factors, as grouped.h says.  `order`: whose element comes where, or null.  n is a
// multiple of 32.
template <class T>
void quantize_row_in_blocks(const T* x, const int32_t* order, int8_t* out, float* factors, int64_t n) {
    float ordered[kBlock];
    int32_t* less = (int32_t*)factors + sums_at(n, 32);
    const float magic = 12582912.0f;
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = n - first < kBlock ? n - first : kBlock;
        if (order)
            for (int64_t i = 0; i < count; ++i) ordered[i] = get(x + order[first + i]);
        else
            for (int64_t i = 0; i < count; i += kLanes) store(ordered + i, load(x + first + i));
        F most = splat(0.0f);
        for (int64_t i = 0; i < count; i += kLanes) most = max(most, absolute(load(ordered + i)));
        const float scale = larger(reduce_max(most) / 127.0f, 1e-30f), inverse = 1.0f / scale;
        factors[first / kBlock] = scale;
        for (int64_t group = 0; group < count; group += 32) {
            I sums = {};
            for (int64_t i = group; i < group + 32; i += kLanes) {
                const U bits = as_u(load(ordered + i) * inverse + magic);
                sums += (I)(bits - as_u(splat(magic)));
                const Bytes bytes = __builtin_convertvector(bits & 255, Bytes);
                __builtin_memcpy(out + first + i, &bytes, sizeof bytes);
            }
            less[(first + group) / 32] = -total(sums);
        }
    }
    const int64_t all = n / 32;
    for (int64_t size = 64; size <= 128; size *= 2) {
        int32_t* to = (int32_t*)factors + sums_at(n, size);
        for (int64_t i = 0; i < all; i += size / 32) {
            int32_t sum = 0;
            for (int64_t j = i; j < i + size / 32 && j < all; ++j) sum += less[j];
            to[i * 32 / size] = sum;
        }
    }
}

// A row as a product takes it; `out` and `factors` are those of all rows.
template <class T>
INLINE void write_row(const T* x, Form form, const int32_t* order, void* out, float* factors, int64_t row, int64_t n) {
    if (form == kInGroups)
        quantize_row_in_blocks(x, order, static_cast<int8_t*>(out) + row * n, factors + row * factors_of(n), n);
    else
        factors[row] = quantize_row(x, static_cast<uint8_t*>(out) + row * n, n);
}

constexpr int kSums = 4;  // independent ones, so that an addition does not wait for the one before

// A row of x as the next product takes it, without a norm.
template <class T>
INLINE void give_row(const T* xs, Form form, const int32_t* order, void* out, float* out_scales, int64_t row, int64_t n) {
    if (form == kAsIs) __builtin_memcpy(static_cast<T*>(out) + row * n, xs, n * sizeof(T));
    else write_row(xs, form, order, out, out_scales, row, n);
}

// x += y * y_factor; out = x / sqrt(mean(x²) + eps) * (weight + plus); out = x without a weight.
template <class T>
void add_norm(T* x, const T* y, const float* y_scales, float y_factor, const T* weight, float plus, Form form,
              const int32_t* order, void* out, float* out_scales, int64_t rows, int64_t n, float eps) {
    for_rows(rows, n, [=](int64_t row) {
        T* xs = x + row * n;
        F squares[kSums] = {};
        float rest = 0.0f;
        int64_t i = 0;
        const T* ys = y + row * n;
        const float factor = y_scales ? y_scales[row] * y_factor : y_factor;
        const auto vector = [&](int64_t at) {
            F v = load(xs + at);
            if (y) {
                v = rounded<T>(v + load(ys + at) * factor);
                store(xs + at, v);
            }
            return v * v;
        };
        for (; i + kSums * kLanes <= n; i += kSums * kLanes)
            for (int j = 0; j < kSums; ++j) squares[j] += vector(i + j * kLanes);
        for (; i + kLanes <= n; i += kLanes) squares[0] += vector(i);
        for (; i < n; ++i) {
            if (y) put(xs + i, get(xs + i) + get(ys + i) * factor);
            rest += get(xs + i) * get(xs + i);
        }
        if (!weight) {
            give_row(xs, form, order, out, out_scales, row, n);
            return;
        }
        const float sum = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
        const float inverse = 1.0f / __builtin_sqrtf(sum / n + eps);
        if (form != kAsIs) {
            float normed[n];
            for (i = 0; i + kLanes <= n; i += kLanes) store(normed + i, load(xs + i) * inverse * (load(weight + i) + plus));
            for (; i < n; ++i) normed[i] = get(xs + i) * inverse * (get(weight + i) + plus);
            write_row(normed, form, order, out, out_scales, row, n);
        } else {
            T* os = static_cast<T*>(out) + row * n;
            for (i = 0; i + kLanes <= n; i += kLanes) store(os + i, load(xs + i) * inverse * (load(weight + i) + plus));
            for (; i < n; ++i) put(os + i, get(xs + i) * inverse * (get(weight + i) + plus));
        }
    });
}

// x / sqrt(mean(x²) + eps) * (weight + plus), in place, for rows `stride` elements apart.
template <class T>
void norm_rows(T* x, const T* weight, float plus, int64_t rows, int64_t n, int64_t stride, float eps) {
    for_rows(rows, n, [=](int64_t row) {
        T* xs = x + row * stride;
        F squares = {};
        float rest = 0.0f;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            const F v = load(xs + i);
            squares += v * v;
        }
        for (; i < n; ++i) rest += get(xs + i) * get(xs + i);
        const float inverse = 1.0f / __builtin_sqrtf((reduce_add(squares) + rest) / n + eps);
        for (i = 0; i + kLanes <= n; i += kLanes) store(xs + i, load(xs + i) * inverse * (load(weight + i) + plus));
        for (; i < n; ++i) put(xs + i, get(xs + i) * inverse * (get(weight + i) + plus));
    });
}

// x = x * factor; then cap * tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)), if there is a cap.
template <class T>
void temper_rows(T* x, float factor, float cap, int64_t rows, int64_t n) {
    const float turn = cap > 0.0f ? 2.88539008177793f / cap : 0.0f;
    const auto bent = [=](F v) {
        return cap - 2.0f * cap * reciprocal(exp2_of(max(min(v * turn, splat(126.0f)), splat(-126.0f))) + 1.0f);
    };
    for_rows(rows, n, [=](int64_t row) {
        T* xs = x + row * n;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            const F v = load(xs + i) * factor;
            store(xs + i, cap > 0.0f ? bent(v) : v);
        }
        for (; i < n; ++i) {
            const float v = get(xs + i) * factor;
            put(xs + i, cap > 0.0f ? bent(splat(v))[0] : v);
        }
    });
}

template <class Activation, class T, class Out>
void gated_row(const T* gates, const T* ups, float factor, Out* out, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        store(out + i, Activation::both(load(gates + i) * factor, load(ups + i) * factor));
    for (; i < n; ++i) put(out + i, activated<Activation>(get(gates + i) * factor, get(ups + i) * factor));
}

// out [rows, n] = activation(gate) * up of rows [gate (n), up (n)].
template <class Activation, class T>
void gated_mul(const T* gate_up, const float* scales, Form form, const int32_t* order, void* out, float* out_scales,
              int64_t rows, int64_t n) {
    for_rows(rows, 4 * n, [=](int64_t row) {
        const T* gates = gate_up + row * 2 * n;
        const float factor = scales ? scales[row] : 1.0f;
        if (form != kAsIs) {
            float values[n];
            gated_row<Activation>(gates, gates + n, factor, values, n);
            write_row(values, form, order, out, out_scales, row, n);
        } else {
            gated_row<Activation>(gates, gates + n, factor, static_cast<T*>(out) + row * n, n);
        }
    });
}

template <class T>
void quantize(const T* x, Form form, const int32_t* order, void* out, float* scales, int64_t rows, int64_t n) {
    for_rows(rows, n, [=](int64_t row) { write_row(x + row * n, form, order, out, scales, row, n); });
}

// x = x * scale of the row + bias, in place.
template <class T>
void scale_rows(T* x, const float* scales, const T* bias, int64_t rows, int64_t n) {
    for_rows(rows, n, [=](int64_t row) {
        T* xs = x + row * n;
        const float factor = scales[row];
        int64_t i = 0;
        if (bias) {
            for (; i + kLanes <= n; i += kLanes) store(xs + i, load(xs + i) * factor + load(bias + i));
            for (; i < n; ++i) put(xs + i, get(xs + i) * factor + get(bias + i));
        } else {
            for (; i + kLanes <= n; i += kLanes) store(xs + i, load(xs + i) * factor);
            for (; i < n; ++i) put(xs + i, get(xs + i) * factor);
        }
    });
}

// out[t, k] = elements[row_places[rows[t]] + column_places[k]]: rows of a packed matrix (model/layers/packed.py).
template <class T>
void take_rows(const T* elements, const int64_t* row_places, const int64_t* column_places, const int64_t* rows,
               T* out, int64_t count, int64_t n) {
    for_rows(count, 4 * n, [=](int64_t t) {
        const T* row = elements + row_places[rows[t]];
        for (int64_t k = 0; k < n; ++k) out[t * n + k] = row[column_places[k]];
    });
}

}  // namespace

BATON_EXPORT(add_norm)(int64_t is_bf16, void* x, const void* y, const float* y_scales, float y_factor,
                       const void* weight, float plus, int64_t form, const int32_t* order, void* out, float* out_scales,
                       int64_t rows, int64_t n, float eps) {
    const Form to = (Form)form;
    if (is_bf16)
        add_norm((bf16*)x, (const bf16*)y, y_scales, y_factor, (const bf16*)weight, plus, to, order, out, out_scales,
                 rows, n, eps);
    else
        add_norm((float*)x, (const float*)y, y_scales, y_factor, (const float*)weight, plus, to, order, out, out_scales,
                 rows, n, eps);
}

BATON_EXPORT(norm_rows)(int64_t is_bf16, void* x, const void* weight, float plus, int64_t rows, int64_t n,
                        int64_t stride, float eps) {
    if (is_bf16) norm_rows((bf16*)x, (const bf16*)weight, plus, rows, n, stride, eps);
    else norm_rows((float*)x, (const float*)weight, plus, rows, n, stride, eps);
}

BATON_EXPORT(temper_rows)(int64_t is_bf16, void* x, float factor, float cap, int64_t rows, int64_t n) {
    if (is_bf16) temper_rows((bf16*)x, factor, cap, rows, n);
    else temper_rows((float*)x, factor, cap, rows, n);
}

BATON_EXPORT(gated_mul)(int64_t is_bf16, int64_t activation, const void* gate_up, const float* scales, int64_t form,
                        const int32_t* order, void* out, float* out_scales, int64_t rows, int64_t n) {
    const Form to = (Form)form;
    const auto all = [&](auto* x) {
        if (activation == kGeluTanh) gated_mul<GeluTanh>(x, scales, to, order, out, out_scales, rows, n);
        else if (activation == kSwigluOai) gated_mul<SwigluOai>(x, scales, to, order, out, out_scales, rows, n);
        else gated_mul<Silu>(x, scales, to, order, out, out_scales, rows, n);
    };
    if (is_bf16) all((const bf16*)gate_up);
    else all((const float*)gate_up);
}

BATON_EXPORT(quantize)(int64_t is_bf16, const void* x, int64_t form, const int32_t* order, void* out, float* scales,
                       int64_t rows, int64_t n) {
    if (is_bf16) quantize((const bf16*)x, (Form)form, order, out, scales, rows, n);
    else quantize((const float*)x, (Form)form, order, out, scales, rows, n);
}

BATON_EXPORT(scale_rows)(int64_t is_bf16, void* x, const float* scales, const void* bias, int64_t rows, int64_t n) {
    if (is_bf16) scale_rows((bf16*)x, scales, (const bf16*)bias, rows, n);
    else scale_rows((float*)x, scales, (const float*)bias, rows, n);
}

BATON_EXPORT(take_rows)(int64_t is_bf16, const void* elements, const int64_t* row_places,
                        const int64_t* column_places, const int64_t* rows, void* out, int64_t count, int64_t n) {
    if (is_bf16) take_rows((const bf16*)elements, row_places, column_places, rows, (bf16*)out, count, n);
    else take_rows((const float*)elements, row_places, column_places, rows, (float*)out, count, n);
}
