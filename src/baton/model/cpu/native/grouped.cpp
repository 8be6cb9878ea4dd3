// Products with a weight in small integers: y = x Wᵀ + b, x in signed bytes (layouts: grouped.h).
//
// Arithmetic.  Codes are the unsigned operand of the byte dot product as they are stored, activations the signed one:
//
//     y[t, n] = sum over blocks b of  c[t, b] * sum over groups g of b of  s[n, g] * (sum of q * code - z[n, g] * sum of q)
//
// The inner sums are of integers and exact (below 2^24, so in float32 too), in whatever order; those over groups and
// blocks are in float32, in the order of the inputs, whatever the number of rows is.  So a token's result does not
// depend on who else is in the batch.  Each multiplication and addition says by itself whether it is rounded once or
// twice: a compiler would choose anew for each number of rows.
//
// No weight is ever written out as a float.  For three rows and more, whole zero points are taken from codes of 4 bits
// while these are unpacked, and 16 is added to keep them unsigned: what makes up for it is the same number for all
// outputs.  These are the same integers, so the sums are the same.
//
// Zero points in eighths cost no more: sums are of 8 * code - 8 * zero, which with 120 added fits into a byte just so,
// and the eighth goes into the scale.  Sixteenths would need a multiplication for each group and register.
//
// A tile's integer sums fill the registers, so its float sums are in memory.  When a group ends, each register is
// converted, scaled, and added to its place in memory, one register after the other: where a compiler converts
// all of them first, groups of 64 are 3 % slower.
//
// Threads, chunks, panels and prefetches are as in linear.cpp.  The panels of all parts of a chain are shared out at
// once, so a chain costs no more than one weight: what differs is only which function multiplies a panel.
#include "int8.h"
#include "kernels.h"
#include "panels.h"

namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kUnit = 8;  // steps in a row, without a branch; a group has one or more of them
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 2;
#endif

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

// `count` tiles of `rows` rows, from `row` on, by the panel of outputs from n on.
template <int rows, int bits, Way way>
void tiles_by_panel(const Task& task, int64_t row, int64_t count, int64_t n, const char* panel, Ahead* ahead) {
    // Added to codes less their zero point, so that they stay unsigned: at most 31 then, or 240 of eighths.
    constexpr int shift = way == kEighths ? 120 : 16;
    constexpr bool shifted = bits == 4 && rows > 2 && (way == kWhole || (way == kEighths && !kPairs));
    const GroupedWeight& w = *task.w;
    const int64_t k = w.k, steps = w.group / 4, left = w.n - n, fetched = ahead->bytes;
    const int64_t width = factors_of(k), sums_begin = sums_at(k, w.group), after = meta_bytes(w.meta);
    const int64_t groups = k / w.group, per_block = kBlock / w.group;
    const int64_t group_steps = steps * step_bytes_of(bits);
    const float zero = static_cast<float>(w.zero);
    const char* fetch = ahead->from;
    int64_t stride3 = 3 * k, stride5 = 5 * k;
    KEEP(stride3);
    KEEP(stride5);
    alignas(64) float memory[2][rows][2][kLanes];
    float(*sums)[2][kLanes] = memory[0];   // over blocks
    float(*parts)[2][kLanes] = memory[1];  // over groups of a block
    if constexpr (rows > 4) {
        KEEP(sums);
        KEEP(parts);
    }
    for (; count--; row += rows) {
        const char* at = panel;
        for (int r = 0; r < rows; ++r)
            for (int half = 0; half < 2; ++half) store(sums[r][half], F{});
        const char* near = (const char*)(task.x + row * k);
        const char* far = near + 6 * k;
        const auto input_of = [&](int r) INLINE_LAMBDA {
            const char* from = r < 6 ? near : far;
            const int i = r % 6;
            return input(from + (i == 3 ? stride3 : i == 5 ? stride5 : i * k));
        };
        const float* factors = task.factors + row * width;
        for (int64_t g = 0, block = 0; g < groups; ++block) {
            const int64_t begin = g, last = g + per_block < groups ? g + per_block : groups;
            for (; g < last; ++g) {
                const int32_t* less = (const int32_t*)factors + sums_begin + g;  // minus the sums of x
                I found[rows][2];
                U more[2];
                if constexpr (way == kFloats) {
                    each<rows>([&](auto r) INLINE_LAMBDA { found[r.value][0] = found[r.value][1] = I{}; });
                } else if constexpr (way == kTable) {
                    each<rows>([&](auto r) INLINE_LAMBDA {
                        found[r.value][0] = found[r.value][1] = I{} + kNumbersZero * less[r.value * width];
                    });
                } else {
                    U zeros[2];
                    for (int half = 0; half < 2; ++half) {
                        zeros[half] = whole_zeros(at + group_steps, w.meta, zero, half);
                        more[half] = (shift - zeros[half]) * 0x01010101u;
                    }
                    each<rows>([&](auto r) INLINE_LAMBDA {
                        const int32_t sum = less[r.value * width];
                        for (int half = 0; half < 2; ++half)
                            found[r.value][half] = shifted ? I{} + shift * sum : zero_times(zeros[half], sum);
                    });
                }
                for (int64_t unit = 0; unit < steps; unit += kUnit) {
#pragma GCC unroll 8
                    for (int s = 0; s < kUnit; ++s) {
                        KEEP(near);
                        KEEP(far);
                        __builtin_prefetch(fetch, 0, 2);
                        if (bits != 4 && fetched > 64) __builtin_prefetch(fetch + 64, 0, 2);
                        fetch += fetched;
                        U low, high;
                        codes_of<bits, way>(at, s, &low, &high);
                        if constexpr (shifted) low += more[0], high += more[1];
                        if constexpr (bits != 6) at += step_bytes_of(bits);
                        each<rows>([&](auto r) INLINE_LAMBDA {
                            const X x = input_of(r.value);
                            found[r.value][0] = add(found[r.value][0], low, x, bits == 8);
                            found[r.value][1] = add(found[r.value][1], high, x, bits == 8);
                        });
                        near += 4;
                        far += 4;
                    }
                    if constexpr (bits == 6) at += kUnit * step_bytes_of(bits);
                }
                if (ahead->lines) {
                    for (int64_t i = 0; i < after; i += 64) __builtin_prefetch(fetch + i, 0, 2);
                    fetch += after;
                }
                const float* factor = factors + block;
                F scales[2], minima[2];
                for (int half = 0; half < 2; ++half) {
                    scales[half] = way == kTable ? load_exponents(at, half) : load_scales(at, w.meta, half);
                    if constexpr (way == kFloats)
                        minima[half] = w.meta == kHalf ? splat(zero) : load_zeros(at, w.meta, half);
                }
                const auto end = [&](auto first, auto final) INLINE_LAMBDA {
                    each<2 * rows>([&](auto i) INLINE_LAMBDA {
                        constexpr int r = i.value / 2, half = i.value % 2;
                        F part = floats_of(found[r][half]);
                        if constexpr (way == kFloats)
                            part = multiply_add(minima[half], splat((float)less[r * width]), part);
                        if constexpr (first.value) part *= scales[half];
                        else part = multiply_add(scales[half], part, load(parts[r][half]));
                        if constexpr (!final.value) store(parts[r][half], part);
                        else store(sums[r][half], multiply_add(part, splat(factor[r * width]), load(sums[r][half])));
                    });
                };
                if (g == begin) g + 1 == last ? end(Number<1>{}, Number<1>{}) : end(Number<1>{}, Number<0>{});
                else g + 1 == last ? end(Number<0>{}, Number<1>{}) : end(Number<0>{}, Number<0>{});
                at += after;
            }
        }
        const float scale = static_cast<float>(w.scale) * (way == kEighths ? 0.125f : 1.0f);
        const auto finish = [&](auto* out, const auto* bias) {
            out += row * task.stride + n;
            for (int r = 0; r < rows; ++r, out += task.stride) {
                if (left < kPanel) {
                    float some[kPanel];
                    for (int half = 0; half < 2; ++half) store(some + half * kLanes, load(sums[r][half]));
                    for (int64_t i = 0; i < left; ++i)
                        put(out + i, multiply_add(some[i], scale, bias ? get(bias + n + i) : 0.0f));
                    continue;
                }
                for (int half = 0; half < 2; ++half) {
                    const F more = bias ? load(bias + n + half * kLanes) : F{};
                    store(out + half * kLanes, multiply_add(load(sums[r][half]), splat(scale), more));
                }
            }
        };
        if (task.to_bf16) finish((bf16*)task.out, (const bf16*)task.bias);
        else finish((float*)task.out, (const float*)task.bias);
    }
    ahead->from = fetch;
}

template <int bits, Way way>
void by_panel(int64_t rows, const Task& task, int64_t row, int64_t count, int64_t n, const char* panel, Ahead* ahead) {
    switch (rows) {
#define CASE(rows) case rows: if constexpr (rows <= kRows) return tiles_by_panel<rows, bits, way>(task, row, count, n, panel, ahead);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

typedef void (*ByPanel)(int64_t, const Task&, int64_t, int64_t, int64_t, const char*, Ahead*);

ByPanel by_panel_of(const GroupedWeight& w) {
    const double most = w.bits == 4 ? 16 : 255;  // (with bytes, too: model/cpu/grouped.py)
    const bool whole = w.meta == kHalfByte ||
                       (w.meta == kHalf && w.zero >= 0 && w.zero <= most && w.zero == (double)(int)w.zero);
    if (w.meta == kHalfEighths || w.meta == kWord) return by_panel<4, kEighths>;
    if (w.meta == kE2m1) return by_panel<4, kTable>;
    if (w.bits == 4) return whole ? by_panel<4, kWhole> : by_panel<4, kFloats>;
    if (w.bits == 6) return whole ? by_panel<6, kWhole> : by_panel<6, kFloats>;
    return whole ? by_panel<8, kWhole> : by_panel<8, kFloats>;
}

// Of outputs from `first` on, whose elements have `bytes`.
INLINE Task task_of_part(const Task& whole, const GroupedWeight* w, int64_t first, int64_t bytes) {
    Task task = whole;
    task.w = w;
    task.out = (char*)task.out + first * bytes;
    if (task.bias) task.bias = (const char*)task.bias + first * bytes;
    return task;
}

// `following`: where the threads go on after the last panel, or null.
INLINE void multiply_item(const Task& task, const Item& item, const char* following) {
    const GroupedWeight& w = *task.w;
    const ByPanel multiply = by_panel_of(w);
    const int64_t panel_bytes = w.k / w.group * group_bytes(w), panels = parts_of(w.n, kPanel);
    const char* panel = (const char*)w.packed + item.panel * panel_bytes;
    const bool leaves = following && item.panel + 1 == panels && item.last_chunk;
    Ahead ahead = {panel + blocking.ahead, step_bytes_of(w.bits), true};
    if (item.tiles > 1) {
        ahead.lines = false;
        ahead.bytes = panel_bytes / (w.k / 4 * item.tiles) + 1;
        ahead.from = (leaves ? following : panel + panel_bytes) + item.first * (w.k / 4) * ahead.bytes;
    } else if (leaves) {
        fetch_ahead(following);
    }
    for_tiles(item, [&](int64_t height, int64_t row, int64_t count) {
        multiply(height, task, row, count, item.panel * kPanel, panel, &ahead);
    });
}

// `whole`: its `w` is the first of the chain.
void linear(const Task& whole) {
    const GroupedWeight& w = *whole.w;  // its inputs are those of all parts
    if (whole.tokens < 1) return;
    int64_t panels = 0;
    for (const GroupedWeight* part = &w; part; part = part->next) panels += parts_of(part->n, kPanel);
    const Cut cut(whole.tokens, panels, w.k, kRows);
    parallel_ranges(cut.items(), [&](int64_t number, bool) {
        Item item = cut.at(number);
        int64_t output = 0;
        const GroupedWeight* one = &w;
        for (; item.panel >= parts_of(one->n, kPanel); one = one->next) {
            item.panel -= parts_of(one->n, kPanel);
            output += one->n;
        }
        multiply_item(task_of_part(whole, one, output, whole.to_bf16 ? 2 : 4), item, nullptr);
    });
}

}  // namespace

BATON_EXPORT(linear_grouped)(int64_t to_bf16, const GroupedWeight* w, const void* x, const float* factors,
                             const void* bias, void* out, int64_t tokens) {
    int64_t outputs = 0;
    for (const GroupedWeight* part = w; part; part = part->next) outputs += part->n;
    linear({w, (const int8_t*)x, factors, bias, out, outputs, tokens, to_bf16 != 0});
}

// Of weights without parts.
BATON_EXPORT(grouped_batches)(int64_t to_bf16, const Batch* batches, int64_t count, const void* x, const float* factors,
                              void* out) {
    if (count < 1) return;
    const GroupedWeight& any = *batches->product->groups;
    const int64_t element = to_bf16 ? 2 : 4, width = factors_of(any.k);
    for_items(batches, count, parts_of(any.n, kPanel), any.k, kRows, [&](int64_t b, const Item& item) {
        const Batch& batch = batches[b];
        const GroupedWeight& w = *batch.product->groups;
        const Task task = {&w, (const int8_t*)x + batch.first * w.k, factors + batch.first * width, batch.product->bias,
                           (char*)out + batch.first * w.n * element, w.n, batch.rows, to_bf16 != 0};
        multiply_item(task, item, b + 1 < count ? (const char*)batches[b + 1].product->groups->packed : nullptr);
    });
}

// out [count, k] = the rows of the weight.
BATON_EXPORT(grouped_rows)(int64_t to_bf16, const GroupedWeight* w, const int64_t* rows, void* out, int64_t count) {
    const int64_t groups = w->k / w->group, step = step_bytes_of(w->bits);
    const int threads = count * w->k < 1 << 14 ? 1 : baton_num_threads();
    parallel_for(count, threads, [&](int64_t t, int) {
        const int64_t column = rows[t] % kPanel, half = column / kLanes, lane = column % kLanes;
        const char* at = (const char*)w->packed + rows[t] / kPanel * groups * group_bytes(*w);
        for (int64_t g = 0; g < groups; ++g, at += group_bytes(*w)) {
            const char* meta = at + w->group / 4 * step;
            const bool table = w->meta == kE2m1;
            const F scales = table ? load_exponents(meta, (int)half) : load_scales(meta, w->meta, (int)half);
            const float scale = scales[lane] * (float)w->scale;
            const float zero = table             ? kNumbersZero
                               : w->meta == kHalf ? (float)w->zero
                                                  : load_zeros(meta, w->meta, (int)half)[lane];
            for (int64_t i = 0; i < w->group; ++i) {
                const int64_t place = lane * 4 + i % 4, s = i / 4 % kUnit;
                const char* from = at + (w->bits == 6 ? (i / 4 - s) * step + s * kLanes * 4 : i / 4 * step) + place;
                const uint8_t both = (uint8_t)from[w->bits == 8 ? half * kLanes * 4 : 0];
                int bits = w->bits == 8 ? both : both >> (4 * half) & 15;
                if (w->bits == 6) bits |= (from[(kUnit + s / 2 - s) * kLanes * 4] >> (s % 2 * 4 + half * 2) & 3) << 4;
                const int code = table ? kNumbers[bits] : bits;
                const float value = scale * ((float)code - zero);
                if (to_bf16) put((bf16*)out + t * w->k + g * w->group + i, value);
                else put((float*)out + t * w->k + g * w->group + i, value);
            }
        }
    });
}
