// Matrix units (AMX): one instruction multiplies a tile of x by a tile of weights and adds the products to a tile of sums.
//
// A tile is up to 16 rows of up to 64 bytes.  In a tile of x they are rows of x; in one of weights a row is a step of 16
// outputs (pairs of bfloat16 or four bytes side by side), as a panel has it (linear.cpp): 16 steps of a panel are two
// such tiles, 128 bytes from row to row.  Rows of sums are 16 float32 or int32.
//
// What a row of x gives does not depend on the other rows of its tile, nor on how many there are; an instruction takes
// the longer the more there are.  Sums of bfloat16 are added in an order of their own, other than that of the
// vector instructions: so a build multiplies all numbers of rows here, or none.
//
// A thread has to say how large its tiles are (TileShapes).  It does so when they change, and gives the unit
// back after its last item: a thread that sleeps or is switched away then has no 8 KiB of tiles to be kept.
//
// The instructions are written out: compilers of 2022 do not know that a load reads memory.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define BATON_MATRIX_UNITS
#endif

namespace {

constexpr int kTileRows = 16;

#if defined(BATON_MATRIX_UNITS)

constexpr bool kMatrixUnits = true;
constexpr int kTileBytes = 64;  // of a row

// Which tile is which, for `upper` and `lower` rows of x by two tiles of weights.
//   0, 1  sums of the upper rows       4  upper rows of x       6, 7  weights
//   2, 3  sums of the lower rows       5  lower rows of x
class TileShapes {
public:
    // `bytes` of a row of x: four for each row of weights.
    void use(int64_t upper, int64_t lower, int64_t bytes) {
        if (upper_ == upper && lower_ == lower && bytes_ == bytes) return;
        upper_ = upper;
        lower_ = lower;
        bytes_ = bytes;
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        const auto set = [&](int tile, int64_t rows, int64_t row_bytes) {
            config.rows[tile] = (uint8_t)rows;
            config.row_bytes[tile] = (uint16_t)(rows ? row_bytes : 0);
        };
        for (int half = 0; half < 2; ++half) {
            set(half, upper, kTileBytes);
            set(2 + half, lower, kTileBytes);
            set(4 + half, half ? lower : upper, bytes);
            set(6 + half, bytes / 4, kTileBytes);
        }
        __asm__ volatile("ldtilecfg %0" : : "m"(config));
    }
    ~TileShapes() {
        if (upper_) __asm__ volatile("tilerelease");
    }

private:
    int64_t upper_ = 0, lower_ = 0, bytes_ = 0;
};

// `stride`: bytes from row to row.
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)))
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
// sums += x * weights, by `instruction`.
#define TILE_MULTIPLY(instruction, sums, x, weights) \
    __asm__ volatile(instruction " %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums : :)
// What has been written before is in memory for the loads that follow.
#define TILE_BARRIER() __asm__ volatile("" : : : "memory")

// The first `bytes` bytes, below 64, then zeros.
INLINE void copy_tail(void* to, const void* from, int64_t bytes) {
    const __mmask64 mask = ((uint64_t)1 << bytes) - 1;
    _mm512_store_si512(to, _mm512_maskz_loadu_epi8(mask, from));
}

#else

constexpr bool kMatrixUnits = false;
struct TileShapes {};

#endif

}  // namespace
