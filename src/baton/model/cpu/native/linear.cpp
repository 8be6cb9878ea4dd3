// Matrix products with a weight that was packed when it was loaded: y = x Wᵀ + b, x [T, K], W [N, K].
//
// Layout.  A *panel* holds the weights of kPanel = 2 vectors of outputs, in the order in which they are used: for each
// step of the sum over K the kPanel outputs side by side.  A step is what one instruction multiplies: one float32, a
// pair of bfloat16, or four bytes (x uint8 with zero point 128, W int8).  N and K are padded with zeros.
//
// Arithmetic.  The kernel keeps the sums of some rows (a tile, `rows_of`) by one panel in registers and goes over K once:
// each step loads the panel's two vectors, broadcasts one step of each row, and adds the products.  So an output is
// summed in the order of K whatever T is: a token's result does not depend on who else is in the batch.  Sums of
// bytes are exact; they begin with -128 times the sum of the row of W, and the scales of row and output come last.
//
// Memory.  Rows of x are read where they lie: a broadcast costs the same wherever it is from, as long as a chunk of
// rows stays in the second-level cache.  With one tile of rows, weights are read once and the memory is the limit; a
// prefetch runs ahead of the sum.  With more, a panel is used for all tiles of a chunk, which bring in the next panel
// meanwhile, each its part.
//
// Matrix units, where they are, multiply bfloat16 and bytes (linear_tiles.h).  The order of the additions is theirs,
// and the same for all numbers of rows.
//
// Threads.  An item of work is a panel for some tiles (panels.h).  Each thread has a range of them, so that what it
// prefetches is what it needs next, and takes over from others when it is done (ranges.h): at the end, no thread is late by more
// than an item, which is some microseconds.
#include "kernels.h"
#include "linear_kinds.h"
#include "linear_tiles.h"
#include "panels.h"
#include "simd.h"

namespace {

// Rows of a tile: as many as the registers hold sums for, beside the panel's two vectors and an input.
template <class Kind> constexpr int rows_of() {
#if defined(__AVX512F__)
    return Kind::kMatrix ? 32 : 12;
#elif defined(__AVX2__)
    return sizeof(typename Kind::X) < 4 ? 4 : 6;  // what is widened takes registers, too
#else
    return 4;
#endif
}

// The compiler is not to compute it anew from something else.
#define KEEP(variable) __asm__("" : "+r"(variable))

// `count` tiles of `rows` rows, from `row` on, by the panel of outputs from n on.
template <int rows, class Kind>
void tiles_by_panel(const Task<Kind>& task, int64_t row, int64_t count, int64_t n, const char* panel, Ahead* ahead) {
    typedef typename Kind::Sum Sum;
    typedef typename Kind::Step Step;
    typedef typename Kind::X X;
    constexpr int inputs = sizeof(Step) / sizeof(X);
    const int64_t k = task.k, steps = k / inputs, rest = k % inputs, stride = k * (int64_t)sizeof(X);
    const int64_t left = task.n - n, fetched = ahead->bytes;
    const char* fetch = ahead->from;
    int64_t stride3 = 3 * stride, stride5 = 5 * stride;
    KEEP(stride3);
    KEEP(stride5);
    for (; count--; row += rows) {
        typename Kind::Out* to = task.out + row * task.n + n;
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < kPanel; i += 64 / sizeof *to) __builtin_prefetch(to + r * task.n + i, 1);
        const Step* w = (const Step*)panel;
        Sum sums[rows][2];
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            begin(&sums[r][0], task.row_sums + n);
            begin(&sums[r][1], task.row_sums + n + kLanes);
        }
        const auto add = [&](Step input, int r) {
            sums[r][0] = Kind::add(sums[r][0], input, w);
            sums[r][1] = Kind::add(sums[r][1], input, w + kLanes);
        };
        // Rows 0 and 6, and distances from them: else there are more addresses than registers.
        const char* near = (const char*)(task.x + row * k);
        const char* far = near + 6 * stride;
        const auto input_of = [&](int r) {
            const char* from = r < 6 ? near : far;
            const int i = r % 6;
            Step input;
            __builtin_memcpy(&input, from + (i == 3 ? stride3 : i == 5 ? stride5 : i * stride), sizeof input);
            return input;
        };
        for (int64_t s = 0; s < steps; ++s) {
            KEEP(near);
            KEEP(far);
            __builtin_prefetch(fetch, 0, 2);
            if (fetched > 64) __builtin_prefetch(fetch + 64, 0, 2);
            fetch += fetched;
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) add(input_of(r), r);
            w += kPanel;
            near += sizeof(Step);
            far += sizeof(Step);
        }
        if constexpr (inputs > 1) if (rest) {
            const X* last = task.x + row * k + steps * inputs;
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                Step input = 0;
                for (int64_t j = 0; j < rest; ++j) input |= (Step)last[r * k + j] << (32 / inputs * j);
                add(input, r);
            }
        }
        F bias[2];
        bias_of(task, n, bias);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r, to += task.n) {
            const float x_scale = task.x_scales ? task.x_scales[row + r] : 1.0f;
            F found[2];
            for (int half = 0; half < 2; ++half)
                found[half] = finish(sums[r][half], task.scales + n + half * kLanes, x_scale, bias[half]);
            put_row(to, found, left);
        }
    }
    ahead->from = fetch;
}

template <class Kind>
void by_panel(int64_t rows, const Task<Kind>& task, int64_t row, int64_t count, int64_t n, const char* panel,
              Ahead* ahead, TileShapes* shapes) {
#if defined(BATON_MATRIX_UNITS)
    if constexpr (Kind::kMatrix) {
        if (rows < 1) return;  // chunks may be smaller than a row
        const auto multiply = rows > kTileRows ? matrix_tiles_by_panel<Kind, true> : matrix_tiles_by_panel<Kind, false>;
        return multiply(rows, task, row, count, n, panel, ahead, shapes);
    }
#endif
    if constexpr (!Kind::kMatrix) switch (rows) {
#define CASE(rows) case rows: if constexpr (rows <= rows_of<Kind>()) return tiles_by_panel<rows, Kind>(task, row, count, n, panel, ahead);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

template <class Kind>
int64_t steps_of(const Task<Kind>& task) {
    return parts_of(task.k, sizeof(typename Kind::Step) / sizeof(typename Kind::X));
}

// `following`: where the threads go on after the last panel, or null.
template <class Kind>
INLINE void multiply_item(const Task<Kind>& task, const Item& item, const char* following, TileShapes* shapes) {
    const int64_t steps = steps_of(task), panels = parts_of(task.n, kPanel), panel_bytes = steps * kPanel * 4;
    const char* panel = (const char*)task.packed + item.panel * panel_bytes;
    const bool leaves = following && item.panel + 1 == panels && item.last_chunk;
    Ahead ahead = {panel + blocking.ahead, kPanel * 4};
    if (item.tiles > 1) {
        ahead.bytes = kPanel * 4 / item.tiles;
        ahead.from = (leaves ? following : panel + panel_bytes) + item.first * steps * ahead.bytes;
    } else if (leaves) {
        fetch_ahead(following);
    }
    for_tiles(item, [&](int64_t height, int64_t row, int64_t count) {
        by_panel(height, task, row, count, item.panel * kPanel, panel, &ahead, shapes);
    });
}

template <class Kind>
void linear(const Task<Kind>& task) {
    if (task.tokens < 1) return;
    const Cut cut(task.tokens, parts_of(task.n, kPanel), steps_of(task) * 4, rows_of<Kind>());
    parallel_ranges_keeping<TileShapes>(cut.items(), [&](int64_t item, bool, TileShapes& shapes) {
        multiply_item(task, cut.at(item), nullptr, &shapes);
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
         const void* bias, void* out, int64_t tokens, int64_t n, int64_t k) {
    typedef typename Kind::Out Out;
    const Task<Kind> task = {(const typename Kind::X*)x, (const typename Kind::Weight*)packed, (const Out*)bias,
                             (Out*)out, tokens, n, k, x_scales, scales, row_sums};
    linear(task);
}

template <class Kind>
void run_batches(const Batch* batches, int64_t count, const void* x, const float* x_scales, void* out) {
    typedef typename Kind::Out Out;
    typedef typename Kind::X X;
    const auto task_of = [&](const Batch& batch) {
        const Product& p = *batch.product;
        return Task<Kind>{(const X*)x + batch.first * p.k, (const typename Kind::Weight*)p.packed, (const Out*)p.bias,
                          (Out*)out + batch.first * p.n, batch.rows, p.n, p.k,
                          x_scales ? x_scales + batch.first : nullptr, p.scales, p.row_sums};
    };
    if (count < 1) return;
    const Task<Kind> any = task_of(*batches);
    const auto multiply = [&](int64_t b, const Item& item, TileShapes& shapes) {
        const void* following = b + 1 < count ? batches[b + 1].product->packed : nullptr;
        multiply_item(task_of(batches[b]), item, (const char*)following, &shapes);
    };
    for_items<TileShapes>(batches, count, parts_of(any.n, kPanel), steps_of(any) * 4, rows_of<Kind>(), multiply);
}

}  // namespace

BATON_EXPORT(linear)(int64_t is_bf16, int64_t to_bf16, const void* x, const void* packed, const void* bias, void* out,
                     int64_t tokens, int64_t n, int64_t k) {
    auto run_kind = !is_bf16 ? run<Floats<float>> : to_bf16 ? run<Floats<bf16>> : run<Floats<bf16, float>>;
    run_kind(x, nullptr, packed, nullptr, nullptr, bias, out, tokens, n, k);
}

BATON_EXPORT(linear_int8)(int64_t to_bf16, const void* x, const float* x_scales, const void* packed, const float* scales,
                          const int32_t* row_sums, const void* bias, void* out, int64_t tokens, int64_t n, int64_t k) {
    auto run_kind = to_bf16 ? run<Int8s<bf16>> : run<Int8s<float>>;
    run_kind(x, x_scales, packed, scales, row_sums, bias, out, tokens, n, k);
}

BATON_EXPORT(linear_batches)(int64_t is_bf16, const Batch* batches, int64_t count, const void* x, void* out) {
    (is_bf16 ? run_batches<Floats<bf16>> : run_batches<Floats<float>>)(batches, count, x, nullptr, out);
}

BATON_EXPORT(linear_int8_batches)(int64_t to_bf16, const Batch* batches, int64_t count, const void* x,
                                  const float* x_scales, void* out) {
    (to_bf16 ? run_batches<Int8s<bf16>> : run_batches<Int8s<float>>)(batches, count, x, x_scales, out);
}

BATON_EXPORT(pack_linear)(int64_t bytes, const void* w, void* packed, int64_t n, int64_t k) {
    if (bytes == 1) pack((const uint8_t*)w, (uint8_t*)packed, n, k);
    else if (bytes == 2) pack((const uint16_t*)w, (uint16_t*)packed, n, k);
    else pack((const float*)w, (float*)packed, n, k);
}
