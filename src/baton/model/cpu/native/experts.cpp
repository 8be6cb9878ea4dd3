// Mixtures of experts: the router, and the MLPs of the experts that it chooses.
//
// Router.  Logits are a product in float32 of what a layer's norm gives, in the model's elements.  Scores, the choice,
// and weights are computed for each token by itself; of equal scores the lowest expert wins.  Chosen experts stand in
// the order of their numbers, and sums over them are in that order.
//
// Experts.  A pair of a token and an expert is a row.  Pairs are sorted by expert, and activations, which have been
// quantized once for each token, are copied in that order: so each expert has rows side by side, as the kernels of
// linear.cpp and grouped.cpp take them, and all experts' products are one loop over all cores (panels.h).  A row's
// result does not depend on other rows, so a token's result does not depend on who else is in the batch.  Copies are a
// hundredth of the work where there are many tokens; with few, weights are.
//
// Sum.  What the experts of a token give is weighted and added in float32 in the order of their numbers, and the MLP
// that all tokens pass comes last.  Each multiplication is rounded before it is added (as model/decoder/moe.py does in
// PyTorch).
#include "experts.h"
#include "rows.h"
#include "simd.h"

namespace {

// a * b, rounded: not to be fused with what it is added to.
INLINE F apart(F product) {
#if defined(__x86_64__)
    __asm__("" : "+v"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#endif
    return product;
}
INLINE float apart(float product) {
#if defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#endif
    return product;
}

constexpr float kLog2E = 1.44269504088896f;

// In place: exp(v - most) of v [n], n a multiple of kLanes; their sum.
float exponentials(float* v, int64_t n, float most) {
    F sum = {};
    for (int64_t i = 0; i < n; i += kLanes) {
        const F found = exp2_of(min((load(v + i) - most) * kLog2E, F{}));
        store(v + i, found);
        sum += found;
    }
    return reduce_add(sum);
}

float largest_of(const float* v, int64_t n) {
    float most = v[0];
    for (int64_t i = 1; i < n; ++i) most = v[i] > most ? v[i] : most;
    return most;
}

float sigmoid(float x) {
    float lanes[kLanes];
    store(lanes, 1.0f / (exp2_of(max(min(splat(x) * -kLog2E, splat(126.0f)), splat(-126.0f))) + 1.0f));
    return lanes[0];
}

// The `count` largest of v [n]: their places, the largest first; of equal ones, the first.
void take_largest(const float* v, int64_t n, int64_t count, int32_t* places) {
    float best[kMostChosen];
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float value = v[i];
        if (found == count && !(value > best[count - 1])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && value > best[at - 1]; --at) {
            best[at] = best[at - 1];
            places[at] = places[at - 1];
        }
        best[at] = value;
        places[at] = (int32_t)i;
    }
}

void sort(int32_t* ids, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const int32_t id = ids[i];
        int64_t at = i;
        for (; at > 0 && ids[at - 1] > id; --at) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

// Leaves -inf where a group is not among the best, by the sum of its two best.
void keep_groups(const Router& r, float* choice) {
    const int64_t size = r.experts / r.groups;
    float sums[r.groups];
    for (int64_t g = 0; g < r.groups; ++g) {
        int32_t two[2];
        const int64_t counted = size < 2 ? size : 2;
        take_largest(choice + g * size, size, counted, two);
        sums[g] = choice[g * size + two[0]];
        if (counted == 2) sums[g] += choice[g * size + two[1]];
    }
    int32_t best[kMostChosen];
    take_largest(sums, r.groups, r.chosen_groups, best);
    for (int64_t g = 0; g < r.groups; ++g) {
        bool kept = false;
        for (int64_t i = 0; i < r.chosen_groups; ++i) kept |= best[i] == g;
        for (int64_t i = 0; !kept && i < size; ++i) choice[g * size + i] = -__builtin_inff();
    }
}

// Of one token.
void choose(const Router& r, const float* logits, int32_t* ids, float* weights, float* shared) {
    const int64_t n = r.experts, padded = (n + kLanes - 1) / kLanes * kLanes;
    float scores[padded], choice[padded];
    for (int64_t i = 0; i < padded; ++i) scores[i] = i < n ? logits[i] : -__builtin_inff();
    if (r.scores == kSoftmax) {
        const float sum = exponentials(scores, padded, largest_of(scores, n));
        for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) / splat(sum));
    } else if (r.scores == kSigmoid) {
        for (int64_t i = 0; i < n; ++i) scores[i] = sigmoid(scores[i]);
    }
    for (int64_t i = 0; i < n; ++i) choice[i] = scores[i] + (r.choice_bias ? r.choice_bias[i] : 0.0f);
    if (r.groups > 1) keep_groups(r, choice);
    take_largest(choice, n, r.chosen, ids);
    sort(ids, r.chosen);
    float found[(kMostChosen + kLanes - 1) / kLanes * kLanes];
    for (int64_t i = 0; i < r.chosen; ++i) found[i] = scores[ids[i]];
    if (r.scores == kChosenSoftmax) {
        const int64_t room = (r.chosen + kLanes - 1) / kLanes * kLanes;
        for (int64_t i = r.chosen; i < room; ++i) found[i] = -__builtin_inff();
        const float sum = exponentials(found, room, largest_of(found, r.chosen));
        for (int64_t i = 0; i < r.chosen; ++i) found[i] /= sum;
    }
    float divisor = 1.0f;
    if (r.normalized && r.scores != kChosenSoftmax) {
        float sum = 0.0f;
        for (int64_t i = 0; i < r.chosen; ++i) sum += found[i];
        const float least = (float)r.least_sum;
        divisor = sum > least ? sum : least;
    }
    for (int64_t i = 0; i < r.chosen; ++i) weights[i] = found[i] / divisor * (float)r.factor;
    if (shared) *shared = sigmoid(logits[n]);
}

void widen_rows(const bf16* from, float* to, int64_t rows, int64_t n) {
    for_rows(rows, n, [=](int64_t row) {
        const bf16* x = from + row * n;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(to + row * n + i, load(x + i));
        for (; i < n; ++i) to[row * n + i] = get(x + i);
    });
}

// Where things lie in a call's room.
struct Room {
    int32_t* place;     // [T, chosen]: the row of a pair
    int32_t* token;     // [pairs]: of a row
    Batch* gate_batches;  // [count], those with rows first
    Batch* down_batches;
    int64_t* num_batches;
    char* x;  // [pairs, hidden] as it is taken; its factors
    float* factors;
    char* gate_up;
    char* activated;
    float* activated_factors;
    char* results;  // [pairs, hidden]
    int64_t bytes;

    explicit Room(const Mixing& m) : at_(m.room) {
        const Product &first = *m.experts->gate_up, &second = *m.experts->down;
        const int64_t pairs = m.tokens * m.experts->chosen, element = m.is_bf16 ? 2 : 4;
        place = (int32_t*)take(pairs * 4);
        token = (int32_t*)take(pairs * 4);
        gate_batches = (Batch*)take(m.experts->count * sizeof(Batch));
        down_batches = (Batch*)take(m.experts->count * sizeof(Batch));
        num_batches = (int64_t*)take(sizeof(int64_t));
        activated = take(pairs * second.k * (second.form == kAsIs ? element : 1));
        activated_factors = (float*)take(pairs * factors_in(second) * 4);
        char* both = at_;  // what gate and up take and give is not needed when results come
        x = take(pairs * first.k * (first.form == kAsIs ? element : 1));
        factors = (float*)take(pairs * factors_in(first) * 4);
        gate_up = take(pairs * first.n * element);
        char* end = at_;
        at_ = both;
        results = take(pairs * second.n * element);
        bytes = (at_ > end ? at_ : end) - m.room;
    }
    static int64_t factors_in(const Product& p) {
        return p.form == kInGroups ? factors_of(p.k) : p.form == kInt8 ? 1 : 0;
    }

private:
    char* take(int64_t size) {
        char* place = at_;
        at_ += (size + 63) / 64 * 64;
        return place;
    }
    char* at_;
};

// Pairs by expert, then by token.
void sort_pairs(const Mixing& m, const Room& room) {
    const Experts& e = *m.experts;
    const int64_t pairs = m.tokens * e.chosen;
    int64_t next[e.count];
    for (int64_t i = 0; i < e.count; ++i) next[i] = 0;
    for (int64_t p = 0; p < pairs; ++p) ++next[m.routed.ids[p]];
    int64_t begin = 0, batches = 0;
    for (int64_t i = 0; i < e.count; ++i) {
        const int64_t rows = next[i];
        next[i] = begin;
        if (!rows) continue;
        room.gate_batches[batches] = {e.gate_up + i, begin, rows};
        room.down_batches[batches++] = {e.down + i, begin, rows};
        begin += rows;
        if (m.counts) m.counts[i] += rows;
    }
    *room.num_batches = batches;
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t row = next[m.routed.ids[p]]++;
        room.place[p] = (int32_t)row;
        room.token[row] = (int32_t)(p / e.chosen);
    }
}

void gather(const Mixing& m, const Room& room) {
    const Product& first = *m.experts->gate_up;
    const int64_t bytes = first.k * (first.form != kAsIs ? 1 : m.is_bf16 ? 2 : 4), width = Room::factors_in(first);
    for_rows(m.tokens * m.experts->chosen, bytes / 4, [&](int64_t row) {
        const int64_t token = room.token[row];
        __builtin_memcpy(room.x + row * bytes, (const char*)m.x + token * bytes, bytes);
        if (width) __builtin_memcpy(room.factors + row * width, m.factors + token * width, width * 4);
    });
}

void multiply(const Mixing& m, const Room& room, const Batch* batches, const char* x, const float* factors, char* out) {
    const int64_t count = *room.num_batches, form = count ? batches->product->form : 0;
    if (form == kInGroups) BATON_JOIN(grouped_batches, BATON_ISA)(m.is_bf16, batches, count, x, factors, out);
    else if (form == kInt8) BATON_JOIN(linear_int8_batches, BATON_ISA)(m.is_bf16, batches, count, x, factors, out);
    else BATON_JOIN(linear_batches, BATON_ISA)(m.is_bf16, batches, count, x, out);
}

template <class T>
void add_up(const Mixing& m, const Room& room, T* y) {
    const int64_t n = m.experts->down->n, chosen = m.experts->chosen;
    for_rows(m.tokens, n * (chosen + 1), [=](int64_t t) {
        const T* from[kMostChosen];
        const float* weights = m.routed.weights + t * chosen;
        for (int64_t j = 0; j < chosen; ++j) from[j] = (const T*)room.results + room.place[t * chosen + j] * n;
        T* to = y + t * n;
        const float gate = m.routed.shared ? m.routed.shared[t] : 1.0f;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            F sum = apart(load(from[0] + i) * weights[0]);
            for (int64_t j = 1; j < chosen; ++j) sum += apart(load(from[j] + i) * weights[j]);
            if (m.adds) sum += apart(load(to + i) * gate);
            store(to + i, sum);
        }
        for (; i < n; ++i) {
            float sum = apart(get(from[0] + i) * weights[0]);
            for (int64_t j = 1; j < chosen; ++j) sum += apart(get(from[j] + i) * weights[j]);
            if (m.adds) sum += apart(get(to + i) * gate);
            put(to + i, sum);
        }
    });
}

}  // namespace

BATON_EXPORT(route)(int64_t is_bf16, const Router* router, const void* x, float* room, const Routed* routed,
                    int64_t tokens) {
    const Product& p = router->product;
    const float* wide = (const float*)x;
    float* logits = room + tokens * p.k;
    if (is_bf16) {
        widen_rows((const bf16*)x, room, tokens, p.k);
        wide = room;
    }
    BATON_JOIN(linear, BATON_ISA)(0, 0, wide, p.packed, p.bias, logits, tokens, p.n, p.k);
    for_rows(tokens, 32 * router->experts, [=](int64_t t) {
        choose(*router, logits + t * p.n, routed->ids + t * router->chosen, routed->weights + t * router->chosen,
               router->shared_gate ? routed->shared + t : nullptr);
    });
}

BATON_EXPORT(mixing_bytes)(const Mixing* mixing, int64_t* bytes) { *bytes = Room(*mixing).bytes; }

BATON_EXPORT(mix)(const Mixing* mixing, int64_t first, int64_t last) {
    const Mixing& m = *mixing;
    const Room room(m);
    const Product& down = *m.experts->down;
    for (int64_t stage = first; stage < last; ++stage) switch (stage) {
        case kGather:
            sort_pairs(m, room);
            gather(m, room);
            break;
        case kExpertsGateUp: multiply(m, room, room.gate_batches, room.x, room.factors, room.gate_up); break;
        case kExpertsGate:
            BATON_JOIN(gated_mul, BATON_ISA)
            (m.is_bf16, m.experts->activation, room.gate_up, nullptr, down.form, nullptr, room.activated,
             room.activated_factors, m.tokens * m.experts->chosen, down.k);
            break;
        case kExpertsDown:
            multiply(m, room, room.down_batches, room.activated, room.activated_factors, room.results);
            break;
        case kSum:
            if (m.is_bf16) add_up(m, room, (bf16*)m.y);
            else add_up(m, room, (float*)m.y);
            break;
    }
}
