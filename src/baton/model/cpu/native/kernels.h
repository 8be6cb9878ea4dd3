// The exported functions that program.cpp calls as well as Python.  The sources that define them include this file, so
// that a definition and its callers cannot differ.
#pragma once
#include "grouped.h"
#include "parallel.h"
#include "tiles.h"

namespace {

// How a product takes its activations: model/ops/fused.py has its twin.
enum Form {
    kAsIs,
    kInt8,      // bytes 128 + q and a scale a row
    kInGroups,  // bytes and factors, as grouped.h says, in `order` if there is one
};

// Of an MLP's gate: ACTIVATIONS of model/ops/fused.py.
enum Activation { kSilu, kGeluTanh, kSwigluOai };

// y = x Wᵀ + b, packed as linear.cpp says, or in groups.  model/cpu/products.py has its twin.
struct Product {
    int64_t form;  // of x
    const GroupedWeight* groups;  // kInGroups only; else:
    const void* packed;
    const void* bias;         // or null
    const float* scales;      // of outputs; int8 only
    const int32_t* row_sums;  // int8 only
    const int32_t* order;     // of inputs; in groups only, or null
    int64_t n;
    int64_t k;
};

// Rows [first, first + rows) of x and of the result are the product's.
struct Batch {
    const Product* product;
    int64_t first;
    int64_t rows;
};

}  // namespace

// Elements of y and b are bfloat16 with `to_bf16`, which float32 never has, else float32.
BATON_EXPORT(linear)(int64_t is_bf16, int64_t to_bf16, const void* x, const void* packed, const void* bias, void* out,
                     int64_t tokens, int64_t n, int64_t k);
BATON_EXPORT(linear_int8)(int64_t to_bf16, const void* x, const float* x_scales, const void* packed, const float* scales,
                          const int32_t* row_sums, const void* bias, void* out, int64_t tokens, int64_t n, int64_t k);
BATON_EXPORT(linear_grouped)(int64_t to_bf16, const GroupedWeight* w, const void* x, const float* factors,
                             const void* bias, void* out, int64_t tokens);
BATON_EXPORT(grouped_rows)(int64_t to_bf16, const GroupedWeight* w, const int64_t* rows, void* out, int64_t count);

// Products of the same form, sizes and elements at once, each with rows of its own.
BATON_EXPORT(linear_batches)(int64_t is_bf16, const Batch* batches, int64_t count, const void* x, void* out);
BATON_EXPORT(linear_int8_batches)(int64_t to_bf16, const Batch* batches, int64_t count, const void* x,
                                  const float* x_scales, void* out);
BATON_EXPORT(grouped_batches)(int64_t to_bf16, const Batch* batches, int64_t count, const void* x, const float* factors,
                              void* out);

BATON_EXPORT(add_norm)(int64_t is_bf16, void* x, const void* y, const float* y_scales, float y_factor,
                       const void* weight, float plus, int64_t form, const int32_t* order, void* out, float* out_scales,
                       int64_t rows, int64_t n, float eps);
BATON_EXPORT(norm_rows)(int64_t is_bf16, void* x, const void* weight, float plus, int64_t rows, int64_t n,
                        int64_t stride, float eps);
BATON_EXPORT(temper_rows)(int64_t is_bf16, void* x, float factor, float cap, int64_t rows, int64_t n);
BATON_EXPORT(gated_mul)(int64_t is_bf16, int64_t activation, const void* gate_up, const float* scales, int64_t form,
                        const int32_t* order, void* out, float* out_scales, int64_t rows, int64_t n);
BATON_EXPORT(quantize)(int64_t is_bf16, const void* x, int64_t form, const int32_t* order, void* out, float* scales,
                       int64_t rows, int64_t n);
BATON_EXPORT(take_rows)(int64_t is_bf16, const void* elements, const int64_t* row_places, const int64_t* column_places,
                        const int64_t* rows, void* out, int64_t count, int64_t n);

BATON_EXPORT(rotate_and_write)(const Geometry* g, void* layer, const void* qkv, void* queries, const Turn* turn,
                               const void* runs, int64_t num_runs);
BATON_EXPORT(attend)(const Geometry* g, void* layer, const void* queries, int64_t query_stride, void* out,
                     const void* items, int64_t num_items, const int32_t* tables, int64_t table_stride, int64_t window,
                     const float* sinks, float* partials, int32_t* finished);
BATON_EXPORT(store_and_attend)(const Geometry* g, void* layer, const void* qkv, void* queries, const Turn* turn,
                               const void* runs, int64_t num_runs, void* out, const void* items, int64_t num_items,
                               const int32_t* tables, int64_t table_stride, int64_t window, const float* sinks,
                               float* partials, int32_t* finished);
