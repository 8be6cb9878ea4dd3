// Products with weights in groups by matrix units (amx.h), for many rows; grouped.cpp explains the arithmetic.
//
// A group's codes are unpacked into bytes once for some hundred rows: 4 KiB at most, which stay in the first-level cache.
// Whole zero points and eighths are taken off meanwhile, from codes of 4 bits, so that these are signed bytes.  Then
// each tile of rows is multiplied by the group; its integers are stored, converted, scaled, and added to sums in memory, in the
// same steps as for few rows.  The integers are the same, so the results are.
#pragma once
#include "amx.h"
#include "grouped_codes.h"

#if defined(BATON_MATRIX_UNITS)
namespace {

constexpr int64_t kMostRows = 128;   // that share a group's unpacked codes
constexpr int64_t kMostSteps = 32;   // of a group

// Codes of the group that begins at `at`, each step of which is `to[step]`: kPanel outputs of four bytes.
template <int bits, Way way>
INLINE void unpack(const GroupedWeight& w, const char* at, const char* meta, char (*to)[kPanel * 4]) {
    const int64_t steps = w.group / 4;
    __m512i less[2] = {};
    if constexpr (bits == 4 && way != kFloats)
        for (int half = 0; half < 2; ++half)
            less[half] = (__m512i)((way == kTable ? U{} + kNumbersZero
                                                  : whole_zeros(meta, w.meta, static_cast<float>(w.zero), half)) *
                                   0x01010101u);
    for (int64_t unit = 0; unit < steps; unit += kUnit, at += bits == 6 ? kUnit * step_bytes_of(bits) : 0)
#pragma GCC unroll 8
        for (int s = 0; s < kUnit; ++s) {
            U low, high;
            codes_of<bits, way>(at, s, &low, &high);
            if constexpr (bits != 6) at += step_bytes_of(bits);
            _mm512_store_si512(to[unit + s], _mm512_sub_epi8((__m512i)low, less[0]));
            _mm512_store_si512(to[unit + s] + kTileBytes, _mm512_sub_epi8((__m512i)high, less[1]));
        }
}

// `found` [rows, kPanel] = the products of upper and lower rows of x, `k` bytes apart, and a group.
template <int bits, Way way, bool both>
INLINE void multiply_group(const int8_t* upper, const int8_t* lower, int64_t k, int64_t group,
                           const char (*codes)[kPanel * 4], int32_t (*found)[kPanel], int64_t upper_rows) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (both) TILE_ZERO(2);
    if constexpr (both) TILE_ZERO(3);
    for (int64_t i = 0; i < group; i += kTileBytes) {
        TILE_LOAD(6, codes[i / 4], kPanel * 4);
        TILE_LOAD(4, upper + i, k);
        TILE_LOAD(7, codes[i / 4] + kTileBytes, kPanel * 4);
        if constexpr (both) TILE_LOAD(5, lower + i, k);
#define MULTIPLY(instruction) {                                  \
            TILE_MULTIPLY(instruction, 0, 4, 6);                     \
            TILE_MULTIPLY(instruction, 1, 4, 7);                     \
            if constexpr (both) TILE_MULTIPLY(instruction, 2, 5, 6); \
            if constexpr (both) TILE_MULTIPLY(instruction, 3, 5, 7); \
        }
        if constexpr (bits == 4 && way != kFloats) MULTIPLY("tdpbssd") else MULTIPLY("tdpbsud")
#undef MULTIPLY
    }
    TILE_STORE(0, found[0], kPanel * 4);
    TILE_STORE(1, found[0] + kLanes, kPanel * 4);
    if constexpr (both) TILE_STORE(2, found[upper_rows], kPanel * 4);
    if constexpr (both) TILE_STORE(3, found[upper_rows] + kLanes, kPanel * 4);
}

// `count` tiles of `rows` rows, 32 at most, from `row` on, by the panel of outputs from n on.  `both`: more than 16.
template <int bits, Way way, bool both>
void some_tiles_by_panel(int64_t rows, const Task& task, int64_t row, int64_t count, int64_t n, const char* panel,
                         Ahead* ahead, TileShapes* shapes) {
    const GroupedWeight& w = *task.w;
    const int64_t k = w.k, group = w.group, groups = k / group, per_block = kBlock / group, after = meta_bytes(w.meta);
    const int64_t width = factors_of(k), sums_begin = sums_at(k, group), group_steps = group / 4 * step_bytes_of(bits);
    const int64_t fetched = group / 4 * ahead->bytes + (ahead->lines ? after : 0);  // for each tile
    const int64_t upper = both ? (rows + 1) / 2 : rows;
    const float zero = static_cast<float>(w.zero);
    const char *fetch = ahead->from, *at = panel;
    alignas(64) char codes[kMostSteps][kPanel * 4];
    alignas(64) int32_t found[2 * kTileRows][kPanel];
    alignas(64) float sums[kMostRows][kPanel], parts[kMostRows][kPanel];
    shapes->use(upper, rows - upper, group < kTileBytes ? group : kTileBytes);
    __builtin_memset(sums, 0, count * rows * kPanel * 4);
    for (int64_t g = 0; g < groups; ++g, at += group_steps + after) {
        const char* meta = at + group_steps;
        unpack<bits, way>(w, at, meta, codes);
        TILE_BARRIER();
        F scales[2], minima[2] = {};
        U zeros[2] = {};
        for (int half = 0; half < 2; ++half) {
            scales[half] = way == kTable ? load_exponents(meta, half) : load_scales(meta, w.meta, half);
            if constexpr (way == kFloats) minima[half] = w.meta == kHalf ? splat(zero) : load_zeros(meta, w.meta, half);
            if constexpr (way == kWhole && bits != 4) zeros[half] = whole_zeros(meta, w.meta, zero, half);
        }
        const int64_t block = g / per_block;
        in_block(g % per_block == 0, (g + 1) % per_block == 0 || g + 1 == groups, [&](auto first, auto last) {
            for (int64_t tile = 0; tile < count; ++tile) {
                for (int64_t i = 0; i < fetched; i += 64) __builtin_prefetch(fetch + i, 0, 2);
                fetch += fetched;
                const int8_t* x = task.x + (row + tile * rows) * k + g * group;
                multiply_group<bits, way, both>(x, x + upper * k, k, group, codes, found, upper);
                const float* factors = task.factors + (row + tile * rows) * width;
                for (int64_t r = 0; r < rows; ++r, factors += width) {
                    const int32_t less = ((const int32_t*)factors)[sums_begin + g];  // minus the sum of x
                    for (int half = 0; half < 2; ++half) {
                        float* part_at = parts[tile * rows + r] + half * kLanes;
                        float* sum_at = sums[tile * rows + r] + half * kLanes;
                        I sum;
                        __builtin_memcpy(&sum, found[r] + half * kLanes, sizeof sum);
                        if constexpr (way == kWhole && bits != 4) sum += zero_times(zeros[half], less);
                        F part = __builtin_convertvector(sum, F);
                        if constexpr (way == kFloats) part = multiply_add(minima[half], splat((float)less), part);
                        if constexpr (first.value) part *= scales[half];
                        else part = multiply_add(scales[half], part, load(part_at));
                        if constexpr (!last.value) store(part_at, part);
                        else store(sum_at, multiply_add(part, splat(factors[block]), load(sum_at)));
                    }
                }
            }
        });
    }
    put_results<way>(task, row, count * rows, n, sums[0]);
    ahead->from = fetch;
}

template <int bits, Way way>
void matrix_tiles_by_panel(int64_t rows, const Task& task, int64_t row, int64_t count, int64_t n, const char* panel,
                           Ahead* ahead, TileShapes* shapes) {
    const auto multiply = rows > kTileRows ? some_tiles_by_panel<bits, way, true> : some_tiles_by_panel<bits, way, false>;
    for (const int64_t most = kMostRows / rows; count > 0; count -= most, row += most * rows)
        multiply(rows, task, row, count < most ? count : most, n, panel, ahead, shapes);
}

}  // namespace
#endif
