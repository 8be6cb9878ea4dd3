// A mixture of experts: what experts.cpp, program.cpp and model/cpu/experts.py (its twin) share.
#pragma once
#include "kernels.h"

namespace {

enum Scores { kSoftmax, kSigmoid, kChosenSoftmax };

constexpr int64_t kMostChosen = 64;

// Which experts a token goes to; MoeConfig (model/description/model.py) says what the numbers mean.
struct Router {
    Product product;  // in float32; its row `experts` is the gate of the MLP that all tokens pass, if `shared_gate`
    int64_t experts;
    int64_t chosen;  // at most kMostChosen
    int64_t scores;
    const float* choice_bias;  // [experts], or null
    int64_t groups;
    int64_t chosen_groups;
    int64_t normalized;
    int64_t shared_gate;
    double least_sum;
    double factor;
};

// What a router finds.
struct Routed {
    int32_t* ids;    // [T, chosen], ascending in each row
    float* weights;  // [T, chosen]
    float* shared;   // [T]: what the MLP's result is multiplied by; `shared_gate` only
};

// The experts of a layer: products of one form and one size each, without order.
struct Experts {
    int64_t count;
    int64_t chosen;
    const Product* gate_up;  // [count]
    const Product* down;
    int64_t activation;
};

// A call: y [T, hidden] = the sum of what the chosen experts give, and of what is in y already if `adds`.
struct Mixing {
    int64_t is_bf16;
    const Experts* experts;
    int64_t tokens;
    const void* x;  // [T, hidden] as `gate_up` takes it
    const float* factors;
    Routed routed;
    void* y;
    int64_t adds;
    char* room;       // of mixing_bytes
    int64_t* counts;  // [count] tokens that an expert had, added to; or null
};

// The parts of a call, in their order.
enum MixingStage { kGather, kExpertsGateUp, kExpertsGate, kExpertsDown, kSum, kMixingStages };

INLINE int64_t router_room(const Router& router, int64_t tokens) {  // float32
    return tokens * (router.product.k + router.product.n);
}

}  // namespace

// x [T, hidden]; `room`: see router_room.
BATON_EXPORT(route)(int64_t is_bf16, const Router* router, const void* x, float* room, const Routed* routed,
                    int64_t tokens);
BATON_EXPORT(mixing_bytes)(const Mixing* mixing, int64_t* bytes);
// Stages [first, last).
BATON_EXPORT(mix)(const Mixing* mixing, int64_t first, int64_t last);
