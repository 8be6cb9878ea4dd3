// Matrix products with a weight that was packed when it was loaded: y = x Wᵀ + b, x [T, K], W [N, K].
//
// Layout.  A *panel* holds the weights of kPanel = 2 vectors of outputs, in the order in which they are used: for each
// step of the sum over K the kPanel outputs side by side.  A step is what one instruction multiplies: one float32, a
// pair of bfloat16, or four bytes (x uint8 with zero point 128, W int8).  N and K are padded with zeros.
//
// Arithmetic.  The kernel keeps the sums of up to kRows rows by one panel in registers and goes over K once: each step
// loads the panel's two vectors, broadcasts one step of each row, and adds the products.  So an output is summed in
// the order of K whatever T is: a token's result does not depend on who else is in the batch.  Sums of bytes are
// exact; x - 128 is accounted for by the sum of each row of W, and the scales of row and output come last.
//
// Memory.  With one row, weights are read once and the memory is the limit; a prefetch runs ahead of the sum.  With
// many, the rows of x are copied into tiles of kRows, step by step, in a chunk that stays in the second-level cache
// (else their distance, a power of two, would put them into few sets of it), and every panel is used for all of them,
// while the next one is fetched.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int kPanel = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 4;
#endif
constexpr int kThreads = 512;
constexpr int kAhead = 4096;  // bytes that the prefetch is ahead where a panel is used once

// Of float32 and bfloat16: X is the element of x, W and y.
template <class T> struct Floats;
template <> struct Floats<float> {
    typedef float X; typedef float Weight; typedef float Out; typedef float Step; typedef F Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) { return sum + splat(x) * load(w); }
};
template <> struct Floats<bf16> {
    typedef bf16 X; typedef bf16 Weight; typedef bf16 Out; typedef uint32_t Step; typedef F Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) {
#if defined(__AVX512BF16__)
        return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)_mm512_loadu_si512(w));
#else
        const U pairs = load_u(w);
        return sum + as_f(pairs << 16) * splat(to_float((bf16)x)) + as_f(pairs & 0xffff0000u) * splat(to_float((bf16)(x >> 16)));
#endif
    }
};
// Of bytes, giving T.
template <class T> struct Int8s {
    typedef uint8_t X; typedef int8_t Weight; typedef T Out; typedef uint32_t Step; typedef I Sum;
    INLINE Sum add(Sum sum, Step x, const Step* w) {
#if defined(__AVX512VNNI__)
        return (I)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)x), _mm512_loadu_si512(w));
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

INLINE F finish(F sum, const float*, const int32_t*, float) { return sum; }
INLINE F finish(I sum, const float* scales, const int32_t* row_sums, float x_scale) {
    I rows;
    __builtin_memcpy(&rows, row_sums, sizeof rows);
    return __builtin_convertvector(sum - 128 * rows, F) * (load(scales) * x_scale);
}

// Rows row … by the panel of outputs from n on; step s of a row r is x[s * x_step + r * x_row].
template <int rows, class Kind>
void tile(const Task<Kind>& task, int64_t row, int64_t n, const typename Kind::Step* x, int64_t x_row, int64_t x_step,
          const typename Kind::Step* panel, int64_t steps, Ahead ahead) {
    typedef typename Kind::Sum Sum;
    Sum sums[rows][2];
    for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = Sum{};
    for (int64_t s = 0; s < steps; ++s) {
        const typename Kind::Step* w = panel + s * kPanel;
        __builtin_prefetch(ahead.from + s * ahead.bytes, 0, 2);
        if (ahead.bytes > 64) __builtin_prefetch(ahead.from + s * ahead.bytes + 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const typename Kind::Step input = x[s * x_step + r * x_row];
            sums[r][0] = Kind::add(sums[r][0], input, w);
            sums[r][1] = Kind::add(sums[r][1], input, w + kLanes);
        }
    }
    for (int r = 0; r < rows; ++r) {
        const float x_scale = task.x_scales ? task.x_scales[row + r] : 1.0f;
        for (int half = 0; half < 2; ++half) {
            const int64_t first = n + half * kLanes, left = task.n - first;
            if (left <= 0) continue;
            typename Kind::Out* to = task.out + (row + r) * task.n + first;
            F sum = finish(sums[r][half], task.scales + first, task.row_sums + first, x_scale);
            if (left >= kLanes) {
                if (task.bias) sum += load(task.bias + first);
                store(to, sum);
            } else {
                float single[kLanes];
                store(single, sum);
                for (int64_t i = 0; i < left; ++i) put(to + i, single[i] + (task.bias ? get(task.bias + first + i) : 0.0f));
            }
        }
    }
}

template <class Kind, class S>
void rows_by_panel(int rows, const Task<Kind>& task, int64_t row, int64_t n, const S* x, int64_t x_row, int64_t x_step,
                   const S* panel, int64_t steps, Ahead ahead) {
    switch (rows) {
#define CASE(count) case count: return tile<count, Kind>(task, row, n, x, x_row, x_step, panel, steps, ahead);
        CASE(1) CASE(2) CASE(3) CASE(4)
#if defined(__AVX512F__)
        CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

// The t-th of `tiles` nearly equal parts of `rows` begins here.
INLINE int64_t part(int64_t rows, int64_t tiles, int64_t t) { return rows * t / tiles; }

#if defined(__AVX512F__)
// 16 steps of up to 16 rows, `stride` bytes apart: to[s * count + r] = step s of row r.
INLINE void transpose_16(const char* x, int64_t stride, int64_t count, uint32_t* to) {
    __m512i row[16], pair[16];
    for (int r = 0; r < 16; ++r) row[r] = r < count ? _mm512_loadu_si512(x + r * stride) : _mm512_setzero_si512();
    for (int r = 0; r < 16; r += 2) {  // 2 x 2 of 4 bytes
        pair[r] = _mm512_unpacklo_epi32(row[r], row[r + 1]);
        pair[r + 1] = _mm512_unpackhi_epi32(row[r], row[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {  // 4 x 4: row[r + i] holds steps i, i + 4, i + 8, i + 12 of rows r … r + 3
        row[r] = _mm512_unpacklo_epi64(pair[r], pair[r + 2]);
        row[r + 1] = _mm512_unpackhi_epi64(pair[r], pair[r + 2]);
        row[r + 2] = _mm512_unpacklo_epi64(pair[r + 1], pair[r + 3]);
        row[r + 3] = _mm512_unpackhi_epi64(pair[r + 1], pair[r + 3]);
    }
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    for (int i = 0; i < 4; ++i) {
        const __m512i low0 = _mm512_shuffle_i32x4(row[i], row[4 + i], 0x88), high0 = _mm512_shuffle_i32x4(row[i], row[4 + i], 0xdd);
        const __m512i low1 = _mm512_shuffle_i32x4(row[8 + i], row[12 + i], 0x88), high1 = _mm512_shuffle_i32x4(row[8 + i], row[12 + i], 0xdd);
        _mm512_mask_storeu_epi32(to + i * count, mask, _mm512_shuffle_i32x4(low0, low1, 0x88));
        _mm512_mask_storeu_epi32(to + (i + 4) * count, mask, _mm512_shuffle_i32x4(high0, high1, 0x88));
        _mm512_mask_storeu_epi32(to + (i + 8) * count, mask, _mm512_shuffle_i32x4(low0, low1, 0xdd));
        _mm512_mask_storeu_epi32(to + (i + 12) * count, mask, _mm512_shuffle_i32x4(high0, high1, 0xdd));
    }
}
#endif

// `count` rows of x, step by step.
template <class X, class S>
void copy_tile(const X* x, int64_t count, int64_t k, int64_t steps, S* to) {
    constexpr int inputs = sizeof(S) / sizeof(X);
    int64_t s = 0;
#if defined(__AVX512F__)
    for (; s + 16 <= k / inputs; s += 16)
        transpose_16((const char*)(x + s * inputs), k * (int64_t)sizeof(X), count, (uint32_t*)(to + s * count));
#endif
    for (; s < k / inputs; ++s)
        for (int64_t r = 0; r < count; ++r) __builtin_memcpy(to + s * count + r, x + r * k + s * inputs, sizeof(S));
    for (int64_t r = 0; k % inputs && r < count; ++r) {
        to[(steps - 1) * count + r] = 0;
        __builtin_memcpy(to + (steps - 1) * count + r, x + r * k + k - k % inputs, k % inputs * sizeof(X));
    }
}

// `scratch`: `room` bytes for each of `threads` threads, enough for kRows rows of x.
template <class Kind>
void linear(const Task<Kind>& task, char* scratch, int64_t room, int threads) {
    typedef typename Kind::Step S;
    constexpr int inputs = sizeof(S) / sizeof(typename Kind::X);
    const int64_t tokens = task.tokens, k = task.k;
    const int64_t steps = (k + inputs - 1) / inputs;
    const int64_t panels = (task.n + kPanel - 1) / kPanel;
    const bool direct = tokens <= 2 && k % inputs == 0;
    const int64_t chunk = room / (steps * (int64_t)sizeof(S)) / kRows * kRows;
    const int64_t chunks = direct ? 1 : (tokens + chunk - 1) / chunk;
    // Panels that a thread takes at a time.
    int64_t group = panels / (threads * 8);
    group = group < 1 ? 1 : group > 4 ? 4 : group;
    const int64_t groups = (panels + group - 1) / group;
    int64_t have[kThreads];
    if (threads > kThreads) threads = kThreads;
    for (int t = 0; t < threads; ++t) have[t] = -1;
    parallel_for(chunks * groups, threads, [&](int64_t item, int thread) {
        const int64_t first = item / groups * chunk;
        const int64_t rows = direct || tokens - first < chunk ? tokens - first : chunk;
        const int64_t tiles = (rows + kRows - 1) / kRows;
        S* mine = (S*)(scratch + thread * room);
        if (!direct && have[thread] != first) {
            have[thread] = first;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t begin = part(rows, tiles, t), count = part(rows, tiles, t + 1) - begin;
                copy_tile(task.x + (first + begin) * k, count, k, steps, mine + begin * steps);
            }
        }
        const int64_t stop = (item % groups + 1) * group;
        for (int64_t p = item % groups * group; p < (stop < panels ? stop : panels); ++p) {
            const S* panel = (const S*)task.packed + p * steps * kPanel;
            if (direct) {
                const Ahead ahead = {(const char*)panel + kAhead, kPanel * 4};
                rows_by_panel((int)rows, task, first, p * kPanel, (const S*)task.x, steps, (int64_t)1, panel, steps, ahead);
                continue;
            }
            const int64_t share = kPanel * 4 / tiles;  // of the next panel, by each tile
            const char* next = (const char*)(panel + steps * kPanel);
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t begin = part(rows, tiles, t), count = part(rows, tiles, t + 1) - begin;
                const Ahead ahead = {next + t * steps * share, share};
                rows_by_panel((int)count, task, first + begin, p * kPanel, (const S*)mine + begin * steps, (int64_t)1,
                              count, panel, steps, ahead);
            }
        }
    });
}

template <class W>
void pack(const W* w, W* packed, int64_t n, int64_t k) {
    constexpr int inputs = 4 / sizeof(W);
    const int64_t steps = (k + inputs - 1) / inputs;
    parallel_for((n + kPanel - 1) / kPanel, [&](int64_t p, int) {
        W* panel = packed + p * steps * kPanel * inputs;
        for (int64_t s = 0; s < steps; ++s)
            for (int64_t c = 0; c < kPanel; ++c)
                for (int64_t j = 0; j < inputs; ++j) {
                    const bool inside = p * kPanel + c < n && s * inputs + j < k;
                    panel[(s * kPanel + c) * inputs + j] = inside ? w[(p * kPanel + c) * k + s * inputs + j] : (W)0;
                }
    });
}

template <class Kind>
void run(const void* x, const float* x_scales, const void* packed, const float* scales, const int32_t* row_sums,
         const void* bias, void* out, int64_t tokens, int64_t n, int64_t k, char* scratch, int64_t room, int64_t threads) {
    typedef typename Kind::Out Out;
    const Task<Kind> task = {(const typename Kind::X*)x, (const typename Kind::Weight*)packed, (const Out*)bias,
                             (Out*)out, tokens, n, k, x_scales, scales, row_sums};
    linear(task, scratch, room, (int)threads);
}

}  // namespace

BATON_EXPORT(linear)(int64_t is_bf16, const void* x, const void* packed, const void* bias, void* out, int64_t tokens,
                     int64_t n, int64_t k, char* scratch, int64_t room, int64_t threads) {
    auto run_kind = is_bf16 ? run<Floats<bf16>> : run<Floats<float>>;
    run_kind(x, nullptr, packed, nullptr, nullptr, bias, out, tokens, n, k, scratch, room, threads);
}

BATON_EXPORT(linear_int8)(int64_t to_bf16, const void* x, const float* x_scales, const void* packed, const float* scales,
                          const int32_t* row_sums, const void* bias, void* out, int64_t tokens, int64_t n, int64_t k,
                          char* scratch, int64_t room, int64_t threads) {
    auto run_kind = to_bf16 ? run<Int8s<bf16>> : run<Int8s<float>>;
    run_kind(x, x_scales, packed, scales, row_sums, bias, out, tokens, n, k, scratch, room, threads);
}

BATON_EXPORT(pack_linear)(int64_t bytes, const void* w, void* packed, int64_t n, int64_t k) {
    if (bytes == 1) pack((const uint8_t*)w, (uint8_t*)packed, n, k);
    else if (bytes == 2) pack((const uint16_t*)w, (uint16_t*)packed, n, k);
    else pack((const float*)w, (float*)packed, n, k);
}
