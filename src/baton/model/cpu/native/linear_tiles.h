// Products by matrix units (amx.h), of bfloat16 and bytes, for any number of rows; the layout is linear.cpp's.
//
// A tile of up to 32 rows by a panel are up to four tiles of sums.  Their K goes in blocks of 16 steps, the same for all
// numbers of rows.  Where there are several tiles, 16 blocks of the panel (32 KiB, which stay in the first-level cache)
// are multiplied by each of them before the next 16: sums wait in memory, which changes no bit of them.  Of what is left of K, copies are filled up with zeros, which
// add nothing: neither a row's end nor a panel's may be read beyond, for what lies there times zero may be NaN.
#pragma once
#include "linear_kinds.h"

#if defined(BATON_MATRIX_UNITS)
namespace {

// Sums of a block: of upper rows and, if there are any, lower ones, `stride` bytes from row to row, by 16 steps.
template <class Kind, bool both>
INLINE void multiply_block(const char* upper, const char* lower, int64_t stride, const char* steps) {
    TILE_LOAD(6, steps, kPanel * 4);
    TILE_LOAD(4, upper, stride);
    TILE_LOAD(7, steps + kTileBytes, kPanel * 4);
    if constexpr (both) TILE_LOAD(5, lower, stride);
#define MULTIPLY(instruction) {                                \
        TILE_MULTIPLY(instruction, 0, 4, 6);                   \
        TILE_MULTIPLY(instruction, 1, 4, 7);                   \
        if constexpr (both) TILE_MULTIPLY(instruction, 2, 5, 6); \
        if constexpr (both) TILE_MULTIPLY(instruction, 3, 5, 7); \
    }
    if constexpr (sizeof(typename Kind::X) == 2) MULTIPLY("tdpbf16ps") else MULTIPLY("tdpbusd")
#undef MULTIPLY
}

constexpr int64_t kRowsTogether = 128;
constexpr int64_t kBlocksTogether = 16;

// `count` tiles of `rows` rows, 32 at most, from `row` on, by the panel of outputs from n on.  `both`: more than 16.
template <class Kind, bool both>
void matrix_tiles_by_panel(int64_t rows, const Task<Kind>& task, int64_t row, int64_t count, int64_t n,
                           const char* panel, Ahead* ahead, TileShapes* shapes) {
    typedef typename Kind::Sum Sum;
    constexpr int64_t kBlock = kTileRows * kPanel * 4;  // bytes of a panel
    const int64_t stride = task.k * (int64_t)sizeof(typename Kind::X), blocks = stride / kTileBytes;
    const int64_t tail = stride % kTileBytes, tail_steps = parts_of(tail, 4);
    const int64_t left = task.n - n, fetched = ahead->bytes, upper = both ? (rows + 1) / 2 : rows;
    const char* fetch = ahead->from;
    const auto fetch_steps = [&](int64_t steps) {
        for (int64_t i = 0; i < steps * fetched; i += 64) __builtin_prefetch(fetch + i, 0, 2);
        fetch += steps * fetched;
    };
    shapes->use(upper, rows - upper, kTileBytes);
    alignas(64) char x_tail[2 * kTileRows][kTileBytes], panel_tail[kBlock], sums[kRowsTogether][kPanel * 4];
    if (tail) {
        __builtin_memcpy(panel_tail, panel + blocks * kBlock, tail_steps * kPanel * 4);
        __builtin_memset(panel_tail + tail_steps * kPanel * 4, 0, kBlock - tail_steps * kPanel * 4);
    }
    F bias[2];
    bias_of(task, n, bias);
    Sum first[2];
    begin(&first[0], task.row_sums + n);
    begin(&first[1], task.row_sums + n + kLanes);
    // Adds blocks [begin, end), and what is left after the last one, to the sums of a tile.
    const auto add = [&](const char* x, int64_t begin, int64_t end, char (*to)[kPanel * 4]) {
        if (begin) {
            TILE_LOAD(0, to[0], kPanel * 4);
            TILE_LOAD(1, to[0] + kTileBytes, kPanel * 4);
            if constexpr (both) TILE_LOAD(2, to[upper], kPanel * 4);
            if constexpr (both) TILE_LOAD(3, to[upper] + kTileBytes, kPanel * 4);
        } else {
            TILE_ZERO(0);
            TILE_ZERO(1);
            if constexpr (both) TILE_ZERO(2);
            if constexpr (both) TILE_ZERO(3);
        }
        for (int64_t b = begin; b < end; ++b) {
            fetch_steps(kTileRows);
            const char* at = x + b * kTileBytes;
            multiply_block<Kind, both>(at, at + upper * stride, stride, panel + b * kBlock);
        }
        if (tail && end == blocks) {
            fetch_steps(tail_steps);
            for (int64_t r = 0; r < rows; ++r) copy_tail(x_tail[r], x + r * stride + blocks * kTileBytes, tail);
            TILE_BARRIER();
            multiply_block<Kind, both>(x_tail[0], x_tail[upper], kTileBytes, panel_tail);
        }
        TILE_STORE(0, to[0], kPanel * 4);
        TILE_STORE(1, to[0] + kTileBytes, kPanel * 4);
        if constexpr (both) TILE_STORE(2, to[upper], kPanel * 4);
        if constexpr (both) TILE_STORE(3, to[upper] + kTileBytes, kPanel * 4);
    };
    while (count > 0) {
        const int64_t most = kRowsTogether / rows, tiles = count < most ? count : most, all = tiles * rows;
        const char* x = (const char*)(task.x + row * task.k);
        typename Kind::Out* to = task.out + row * task.n + n;
        const int64_t together = tiles > 1 ? kBlocksTogether : blocks;
        for (int64_t begin = 0, end; ; begin = end) {
            end = begin + together < blocks ? begin + together : blocks;
            for (int64_t r = 0; r < all; r += rows) {
                for (int64_t i = r; end == blocks && i < r + rows; ++i) __builtin_prefetch(to + i * task.n, 1);
                add(x + r * stride, begin, end, sums + r);
            }
            if (end == blocks) break;
        }
        for (int64_t r = 0; r < all; ++r, to += task.n) {
            const float x_scale = task.x_scales ? task.x_scales[row + r] : 1.0f;
            F found[2];
            for (int half = 0; half < 2; ++half) {
                Sum sum;
                __builtin_memcpy(&sum, sums[r] + half * kTileBytes, sizeof sum);
                found[half] = finish(sum + first[half], task.scales + n + half * kLanes, x_scale, bias[half]);
            }
            put_row(to, found, left);
        }
        row += all;
        count -= tiles;
    }
    ahead->from = fetch;
}

}  // namespace
#endif
