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
// Matrix units, where they are, multiply many rows (grouped_tiles.h): in the same steps, so the results are the same.
//
// Threads, chunks, panels and prefetches are as in linear.cpp.  The panels of all parts of a chain are shared out at
// once, so a chain costs no more than one weight: what differs is only which function multiplies a panel.
#include "grouped_codes.h"
#include "grouped_tiles.h"
#include "kernels.h"
#include "panels.h"

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 2;
#endif
// More are multiplied by matrix units, where they are.
constexpr int64_t kFewRows = 8;

// `count` tiles of `rows` rows, from `row` on, by the panel of outputs from n on.
template <int rows, int bits, Way way>
void tiles_by_panel(const Task& task, int64_t row, int64_t count, int64_t n, const char* panel, Ahead* ahead) {
    // Added to codes less their zero point, so that they stay unsigned: at most 31 then, or 240 of eighths.
    constexpr int shift = way == kEighths ? 120 : 16;
    constexpr bool shifted = bits == 4 && rows > 2 && (way == kWhole || (way == kEighths && !kPairs));
    const GroupedWeight& w = *task.w;
    const int64_t k = w.k, steps = w.group / 4, fetched = ahead->bytes;
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
                in_block(g == begin, g + 1 == last, end);
                at += after;
            }
        }
        put_results<way>(task, row, rows, n, sums[0][0]);
    }
    ahead->from = fetch;
}

template <int bits, Way way>
void by_panel(int64_t rows, const Task& task, int64_t row, int64_t count, int64_t n, const char* panel, Ahead* ahead,
              TileShapes* shapes) {
#if defined(BATON_MATRIX_UNITS)
    if (rows > kFewRows) return matrix_tiles_by_panel<bits, way>(rows, task, row, count, n, panel, ahead, shapes);
#endif
    switch (rows) {
#define CASE(rows) case rows: if constexpr (rows <= kRows) return tiles_by_panel<rows, bits, way>(task, row, count, n, panel, ahead);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

typedef void (*ByPanel)(int64_t, const Task&, int64_t, int64_t, int64_t, const char*, Ahead*, TileShapes*);

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
INLINE void multiply_item(const Task& task, const Item& item, const char* following, TileShapes* shapes) {
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
        multiply(height, task, row, count, item.panel * kPanel, panel, &ahead, shapes);
    });
}

// `whole`: its `w` is the first of the chain.
void linear(const Task& whole) {
    const GroupedWeight& w = *whole.w;  // its inputs are those of all parts
    if (whole.tokens < 1) return;
    int64_t panels = 0;
    for (const GroupedWeight* part = &w; part; part = part->next) panels += parts_of(part->n, kPanel);
    const Cut cut(whole.tokens, panels, w.k, kMatrixUnits ? 2 * kTileRows : kRows);
    parallel_ranges_keeping<TileShapes>(cut.items(), [&](int64_t number, bool, TileShapes& shapes) {
        Item item = cut.at(number);
        int64_t output = 0;
        const GroupedWeight* one = &w;
        for (; item.panel >= parts_of(one->n, kPanel); one = one->next) {
            item.panel -= parts_of(one->n, kPanel);
            output += one->n;
        }
        multiply_item(task_of_part(whole, one, output, whole.to_bf16 ? 2 : 4), item, nullptr, &shapes);
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
    const int tile_rows = kMatrixUnits ? 2 * kTileRows : kRows;
    for_items<TileShapes>(batches, count, parts_of(any.n, kPanel), any.k, tile_rows, [&](int64_t b, const Item& item, TileShapes& shapes) {
        const Batch& batch = batches[b];
        const GroupedWeight& w = *batch.product->groups;
        const Task task = {&w, (const int8_t*)x + batch.first * w.k, factors + batch.first * width, batch.product->bias,
                           (char*)out + batch.first * w.n * element, w.n, batch.rows, to_bf16 != 0};
        const void* following = b + 1 < count ? batches[b + 1].product->groups->packed : nullptr;
        multiply_item(task, item, (const char*)following, &shapes);
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
