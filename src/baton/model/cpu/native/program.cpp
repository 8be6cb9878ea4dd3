// A step's layers as one call: the kernels of the other sources one after the other, without Python between them.
//
// Why.  A layer is nine kernels, and a call from Python (its arguments, the tensor for its result) takes some
// microseconds, more while weights stream through the caches and evict the interpreter: with a small model, as much as
// the work itself.  So Python describes the model once, as addresses and sizes (`Model`; model/decoder/program.py has its
// twin), and for each step what it reads and writes (`Step`), and this file plans the step and calls the kernels in the
// order of model/decoder/blocks.py with the same arguments.  Results are the same, bit for bit.
//
// Memory.  Activations live in an arena that Python owns; `Buffers` divides it for the step's tokens.  What attention
// needs and what the MLP needs lie in the same place, as they are never needed together:
//
//     x (the residual stream) | y (a sublayer's result) | normed | qkv; queries, which `mixed` takes over
//                                                                | gate and up; activated
//                                                                | what a router needs | what experts need
//
// What the last layer computes after the KV is written is needed for those tokens only whose logits are wanted: of a
// prompt, one.  The others are dropped there, unless somebody wants the hidden states of the whole step.
//
// What goes into a product (normed, mixed, activated) has the form that the product takes: as it is, or as bytes with
// factors (`Form`).  Products of one model may take different ones.
#include <time.h>

#include "experts.h"
#include "plan.h"

namespace {

constexpr int kWindows = 2;   // a model has at most
constexpr int kRotaries = 2;  // likewise
constexpr int64_t kNoWindow = 1 << 30;

// In place of an MLP: experts, each token some of them, and perhaps an MLP that all tokens pass (the layer's `gate_up`
// and `down`).
struct Mixture {
    Router router;
    Experts experts;
    int64_t shared;   // there is such an MLP
    int64_t number;   // among the model's mixtures
    int64_t* counts;  // [experts] tokens that each had, added to
};

struct Layer {
    const void* attention_norm;  // or null
    Product qkv;
    const void* query_norm;  // of each head or, if `wide`, of all together; or null
    const void* key_norm;
    int64_t wide;
    const float* sinks;  // of heads, or null: see attend
    Product output;
    const void* attention_out_norm;  // or null
    const void* mlp_norm;            // or null
    const Mixture* mixture;          // or null; then `gate_up` and `down` may be nothing
    Product gate_up;
    int64_t activation;
    Product down;
    const void* mlp_out_norm;  // or null
    int64_t window;            // which of the model's
    int64_t rotary;            // likewise
};

struct Model {
    int64_t is_bf16;
    int64_t forms;  // that products take: bits 1 << Form
    int64_t num_layers;
    int64_t hidden;
    int64_t intermediate;
    double eps;
    double plus;  // to the weights of norms
    double residual;  // what a sublayer gives is multiplied by
    double embedding_factor;
    double logits_factor;
    double logits_cap;  // 0: none
    const Geometry* geometry;
    int64_t tile_positions;  // of attention's query tiles
    int64_t num_windows;
    int64_t windows[kWindows];  // positions that one sees; 0: all
    const float* cos[kRotaries];  // [positions, rotary_stride]
    const float* sin[kRotaries];
    int64_t rotary_stride;
    const float* query_factors;  // [positions], or null
    const Layer* layers;
    const Mixture* mixture;  // any of the layers', which are of one shape; or null
    // Rows of the embedding: in groups; see take_rows; or, without places, [vocabulary, hidden].
    const GroupedWeight* embedding_groups;
    const void* embedding;
    const int64_t* row_places;
    const int64_t* column_places;
    const void* norm;
    Product head;
};

struct Step {
    int64_t tokens;
    const int32_t* ids;
    Rows rows;
    char* pool;  // the first layer's first K tile in block 0
    char* arena;
    const int64_t* wanted;  // tokens whose logits are wanted; null: all
    int64_t num_wanted;
    int64_t whole;  // the hidden states of all tokens are to be kept
    float* logits;  // [num_wanted, vocabulary]
    int32_t* chosen;  // [mixtures, tokens, chosen] experts of each token, to be written; or null
    int64_t* nanoseconds;  // by Operation, added to; or null
    int64_t clock;         // by which
    // Found by `plan_step`:
    int64_t num_runs;
    int64_t num_items[kWindows];
    int64_t num_last_items;
    int64_t slots;
    // Room for partial results of `slots`: see attend.
    float* partials;
    int32_t* finished;
};

enum Operation {
    kEmbedding, kAddNorm, kQkv, kAttend, kQuantize, kOutput, kGateUp, kGate, kDown, kHead,
    kRouter, kMixing  // the first of the stages of `mix`
};

// Adds the time since the last look to an operation.
class Clock {
public:
    explicit Clock(const Step& step)
        : sums_(step.nanoseconds), clock_(static_cast<clockid_t>(step.clock)), last_(sums_ ? now() : 0) {}
    void count(int64_t operation) {
        if (!sums_) return;
        const int64_t time = now();
        sums_[operation] += time - last_;
        last_ = time;
    }

private:
    int64_t now() const {
        timespec t;
        clock_gettime(clock_, &t);
        return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
    }
    int64_t* sums_;
    clockid_t clock_;
    int64_t last_;
};

// Room for [T, n] of what a product takes: elements, or bytes and factors.
struct Activations {
    char* values;
    float* factors;
};

// Where things lie in the arena.
struct Buffers {
    char* x;  // first
    Run* runs;
    int32_t* items[kWindows];
    int32_t* last_items;  // of the last layer, if it drops tokens
    int64_t* ids;
    char* y;
    Activations normed;
    char* qkv;
    char* queries;
    Activations mixed;
    char* gate_up;
    Activations activated;
    Activations wanted;  // rows of `normed`
    char* plain;         // [T, hidden]: what a router takes
    float* router;
    Routed routed;
    char* mixing;
    int64_t bytes;

    Buffers(const Model& m, const Step& s) : at_(s.arena) {
        const int64_t tokens = s.tokens, rows = s.num_wanted;
        const int64_t element = m.is_bf16 ? 2 : 4;
        const Geometry& g = *m.geometry;
        const int64_t queries_size = g.num_heads * g.dim, qkv_size = queries_size + 2 * g.num_kv_heads * g.dim;
        x = take(tokens * m.hidden * element);
        const int64_t blocks = s.rows.table_stride, tiles = tokens / m.tile_positions + s.rows.count;
        runs = reinterpret_cast<Run*>(take((tokens / g.block + 2 * s.rows.count) * sizeof(Run)));
        const int64_t most_items = tiles + s.rows.count * (blocks / g.piece_blocks + 2);
        const auto take_items = [&] {
            return reinterpret_cast<int32_t*>(take(most_items * kItemColumns * sizeof(int32_t)));
        };
        for (int64_t w = 0; w < m.num_windows; ++w) items[w] = take_items();
        last_items = take_items();
        ids = reinterpret_cast<int64_t*>(take(tokens * sizeof(int64_t)));
        y = take(tokens * m.hidden * element);
        normed = take_input(m, tokens, m.hidden, element);
        wanted = take_input(m, rows, m.hidden, element);
        if (m.mixture) {
            plain = take(tokens * m.hidden * element);
            const int64_t chosen = m.mixture->experts.chosen;
            routed.ids = (int32_t*)take(tokens * chosen * 4);
            routed.weights = (float*)take(tokens * chosen * 4);
            routed.shared = m.mixture->router.shared_gate ? (float*)take(tokens * 4) : nullptr;
        }
        char* shared = at_;
        qkv = take(tokens * qkv_size * element);
        queries = take(tokens * queries_size * element);
        if (m.forms != 1 << kAsIs) mixed = take_input(m, tokens, queries_size, element);
        char* end = at_;
        at_ = shared;
        gate_up = take(tokens * 2 * m.intermediate * element);
        activated = take_input(m, tokens, m.intermediate, element);
        if (at_ > end) end = at_;
        if (m.mixture) {
            at_ = shared;
            router = (float*)take(router_room(m.mixture->router, tokens) * 4);
            if (at_ > end) end = at_;
            at_ = mixing = shared;
            Mixing call = {m.is_bf16, &m.mixture->experts, tokens};
            int64_t room;
            BATON_JOIN(mixing_bytes, BATON_ISA)(&call, &room);
            take(room);
            if (at_ > end) end = at_;
        }
        bytes = end - s.arena;
    }

private:
    char* take(int64_t size) {
        char* place = at_;
        at_ += (size + 63) / 64 * 64;
        return place;
    }
    // The largest of the forms.
    Activations take_input(const Model& m, int64_t rows, int64_t n, int64_t element) {
        char* values = take(rows * n * (m.forms & 1 << kAsIs ? element : 1));
        const int64_t factors = m.forms & 1 << kInGroups ? factors_of(n) : m.forms & 1 << kInt8 ? 1 : 0;
        return {values, reinterpret_cast<float*>(take(rows * factors * sizeof(float)))};
    }
    char* at_;
};

// Whether the last layer gives only what is wanted.
INLINE bool drops_tokens(const Step& s) { return s.wanted && !s.whole && !s.chosen && s.num_wanted < s.tokens; }

class Pass {
public:
    Pass(const Model& model, const Step& step)
        : m_(model), s_(step), b_(model, step), clock_(step), tokens_(step.tokens) {}

    void embed() {
        const int64_t row = m_.hidden * (m_.is_bf16 ? 2 : 4);
        for (int64_t t = 0; t < s_.tokens; ++t) b_.ids[t] = s_.ids[t];
        if (m_.embedding_groups)
            BATON_JOIN(grouped_rows, BATON_ISA)(m_.is_bf16, m_.embedding_groups, b_.ids, b_.x, s_.tokens);
        else if (m_.row_places)
            BATON_JOIN(take_rows, BATON_ISA)
            (m_.is_bf16, m_.embedding, m_.row_places, m_.column_places, b_.ids, b_.x, s_.tokens, m_.hidden);
        else
            copy_rows(static_cast<const char*>(m_.embedding), b_.ids, b_.x, s_.tokens, row);
        if (m_.embedding_factor != 1.0)
            BATON_JOIN(temper_rows, BATON_ISA)
            (m_.is_bf16, b_.x, static_cast<float>(m_.embedding_factor), 0.0f, s_.tokens, m_.hidden);
        clock_.count(kEmbedding);
    }

    void layer(int64_t index) {
        const Layer& layer = m_.layers[index];
        const Geometry& g = *m_.geometry;
        const int64_t layer_bytes = 2 * g.num_kv_heads * tile_bytes(g);
        char* const tiles = s_.pool + index * layer_bytes;
        add_norm(index ? b_.y : nullptr, layer.attention_norm, layer.qkv);
        multiply(layer.qkv, b_.normed, b_.qkv);
        clock_.count(kQkv);
        const int64_t window = m_.windows[layer.window] ? m_.windows[layer.window] : kNoWindow;
        const Turn turn = {m_.cos[layer.rotary],
                           m_.sin[layer.rotary],
                           m_.rotary_stride,
                           layer.wide ? nullptr : layer.query_norm,
                           layer.wide ? nullptr : layer.key_norm,
                           m_.eps,
                           m_.plus,
                           m_.query_factors};
        if (layer.wide) {
            const int64_t queries = g.num_heads * g.dim, keys = g.num_kv_heads * g.dim;
            norm_rows(b_.qkv, layer.query_norm, tokens_, queries, queries + 2 * keys);
            norm_rows(b_.qkv + queries * element(), layer.key_norm, tokens_, keys, queries + 2 * keys);
        }
        if (index + 1 == m_.num_layers && drops_tokens(s_)) {
            BATON_JOIN(rotate_and_write, BATON_ISA)(&g, tiles, b_.qkv, b_.queries, &turn, b_.runs, s_.num_runs);
            BATON_JOIN(attend, BATON_ISA)
            (&g, tiles, b_.queries, g.num_heads * g.dim, b_.queries, b_.last_items, s_.num_last_items, s_.rows.tables,
             s_.rows.table_stride, window, layer.sinks, s_.partials, s_.finished);
            drop_tokens();
        } else {
            BATON_JOIN(store_and_attend, BATON_ISA)
            (&g, tiles, b_.qkv, b_.queries, &turn, b_.runs, s_.num_runs, b_.queries, b_.items[layer.window],
             s_.num_items[layer.window], s_.rows.tables, s_.rows.table_stride, window, layer.sinks, s_.partials,
             s_.finished);
        }
        clock_.count(kAttend);
        if (!tokens_) return;
        Activations mixed = {b_.queries, nullptr};
        if (layer.output.form != kAsIs) {
            mixed = b_.mixed;
            BATON_JOIN(quantize, BATON_ISA)
            (m_.is_bf16, b_.queries, layer.output.form, layer.output.order, mixed.values, mixed.factors, tokens_,
             g.num_heads * g.dim);
            clock_.count(kQuantize);
        }
        multiply(layer.output, mixed, b_.y);
        clock_.count(kOutput);
        if (layer.attention_out_norm) norm_rows(b_.y, layer.attention_out_norm, tokens_, m_.hidden, m_.hidden);
        if (layer.mixture) {
            mixture(layer);
        } else {
            add_norm(b_.y, layer.mlp_norm, layer.gate_up);
            mlp(layer, b_.normed);
        }
        if (layer.mlp_out_norm) norm_rows(b_.y, layer.mlp_out_norm, tokens_, m_.hidden, m_.hidden);
    }

    // Completes x, and gives the logits of the wanted rows: the head's sums, which nothing rounds.
    void finish() {
        if (drops_tokens(s_)) tokens_ = s_.num_wanted;
        if (tokens_) add_norm(b_.y, m_.norm, m_.head);
        if (!s_.num_wanted) return;
        const bool some = tokens_ > s_.num_wanted;
        if (some) {
            const int64_t form = m_.head.form, element = form != kAsIs ? 1 : m_.is_bf16 ? 2 : 4;
            const int64_t factors = form == kInGroups ? factors_of(m_.hidden) : form == kInt8 ? 1 : 0;
            copy_rows(b_.normed.values, s_.wanted, b_.wanted.values, s_.num_wanted, m_.hidden * element);
            copy_rows(reinterpret_cast<const char*>(b_.normed.factors), s_.wanted,
                      reinterpret_cast<char*>(b_.wanted.factors), s_.num_wanted, factors * sizeof(float));
        }
        tokens_ = s_.num_wanted;
        multiply(m_.head, some ? b_.wanted : b_.normed, s_.logits, false);
        if (m_.logits_factor != 1.0 || m_.logits_cap > 0)
            BATON_JOIN(temper_rows, BATON_ISA)
            (0, s_.logits, static_cast<float>(m_.logits_factor), static_cast<float>(m_.logits_cap), tokens_,
             m_.head.n);
        clock_.count(kHead);
    }

private:
    int64_t element() const { return m_.is_bf16 ? 2 : 4; }

    void mlp(const Layer& layer, const Activations& x) {
        multiply(layer.gate_up, x, b_.gate_up);
        clock_.count(kGateUp);
        BATON_JOIN(gated_mul, BATON_ISA)
        (m_.is_bf16, layer.activation, b_.gate_up, nullptr, layer.down.form, layer.down.order, b_.activated.values,
         b_.activated.factors, tokens_, layer.down.k);
        clock_.count(kGate);
        multiply(layer.down, b_.activated, b_.y);
        clock_.count(kDown);
    }

    void mixture(const Layer& layer) {
        const Mixture& mixture = *layer.mixture;
        const int64_t chosen = mixture.experts.chosen;
        const Product& first = *mixture.experts.gate_up;
        const Product plain = {kAsIs};
        add_norm(b_.y, layer.mlp_norm, plain, {b_.plain, nullptr});
        BATON_JOIN(route, BATON_ISA)(m_.is_bf16, &mixture.router, b_.plain, b_.router, &b_.routed, tokens_);
        if (s_.chosen)
            __builtin_memcpy(s_.chosen + mixture.number * s_.tokens * chosen, b_.routed.ids,
                             tokens_ * chosen * sizeof(int32_t));
        clock_.count(kRouter);
        Activations x = taken(first);
        if (mixture.shared) {
            // What the experts take serves here as well, if it is the same.
            const bool same = first.form == layer.gate_up.form && !layer.gate_up.order;
            mlp(layer, same ? x : taken(layer.gate_up));
            if (!same) x = taken(first);
        }
        const Mixing call = {m_.is_bf16, &mixture.experts, tokens_, x.values,  x.factors,
                             b_.routed,  b_.y,             mixture.shared, b_.mixing, mixture.counts};
        for (int64_t stage = 0; stage < kMixingStages; ++stage) {
            BATON_JOIN(mix, BATON_ISA)(&call, stage, stage + 1);
            clock_.count(kMixing + stage);
        }
    }

    // `plain` as a product takes it.
    Activations taken(const Product& next) {
        if (next.form == kAsIs) return {b_.plain, nullptr};
        BATON_JOIN(quantize, BATON_ISA)
        (m_.is_bf16, b_.plain, next.form, next.order, b_.normed.values, b_.normed.factors, tokens_, m_.hidden);
        clock_.count(kQuantize);
        return b_.normed;
    }

    // Those wanted, in their order, move to the front.
    void drop_tokens() {
        const int64_t element = m_.is_bf16 ? 2 : 4;
        tokens_ = s_.num_wanted;
        copy_rows(b_.x, s_.wanted, b_.x, tokens_, m_.hidden * element);
        copy_rows(b_.queries, s_.wanted, b_.queries, tokens_, m_.geometry->num_heads * m_.geometry->dim * element);
    }

    // `rows` ascend; they may be copied within the same memory.
    static void copy_rows(const char* from, const int64_t* rows, char* to, int64_t count, int64_t bytes) {
        for (int64_t i = 0; i < count; ++i) __builtin_memmove(to + i * bytes, from + rows[i] * bytes, bytes);
    }

    // Gives what `next` takes.
    void add_norm(const void* y, const void* weight, const Product& next) { add_norm(y, weight, next, b_.normed); }

    void add_norm(const void* y, const void* weight, const Product& next, const Activations& to) {
        BATON_JOIN(add_norm, BATON_ISA)
        (m_.is_bf16, b_.x, y, nullptr, static_cast<float>(m_.residual), weight, static_cast<float>(m_.plus), next.form,
         next.order, to.values, to.factors, tokens_, m_.hidden, static_cast<float>(m_.eps));
        clock_.count(kAddNorm);
    }

    // In place.
    void norm_rows(char* x, const void* weight, int64_t rows, int64_t n, int64_t stride) {
        BATON_JOIN(norm_rows, BATON_ISA)
        (m_.is_bf16, x, weight, static_cast<float>(m_.plus), rows, n, stride, static_cast<float>(m_.eps));
        clock_.count(kAddNorm);
    }

    void multiply(const Product& p, const Activations& x, void* out) { multiply(p, x, out, m_.is_bf16); }

    // Not `to_bf16`: results are float32.
    void multiply(const Product& p, const Activations& x, void* out, bool to_bf16) {
        if (p.form == kInGroups)
            BATON_JOIN(linear_grouped, BATON_ISA)(to_bf16, p.groups, x.values, x.factors, p.bias, out, tokens_);
        else if (p.form == kInt8)
            BATON_JOIN(linear_int8, BATON_ISA)
            (to_bf16, x.values, x.factors, p.packed, p.scales, p.row_sums, p.bias, out, tokens_, p.n, p.k);
        else
            BATON_JOIN(linear, BATON_ISA)
            (m_.is_bf16, to_bf16, x.values, p.packed, p.bias, out, tokens_, p.n, p.k);
    }

    const Model& m_;
    const Step& s_;
    const Buffers b_;
    Clock clock_;
    int64_t tokens_;  // that are computed
};

}  // namespace

// The first call of a step: what attention has to do.  `slots` tells how much room `partials` needs.
BATON_EXPORT(plan_step)(const Model* model, Step* step) {
    const Geometry& g = *model->geometry;
    const Buffers buffers(*model, *step);
    step->num_runs = plan_runs(step->rows, g.block, buffers.runs);
    step->slots = 0;
    for (int64_t w = 0; w < model->num_windows; ++w) {
        const Items items = plan_items(step->rows, g.block, model->tile_positions, g.piece_blocks,
                                       model->windows[w], buffers.items[w]);
        step->num_items[w] = items.count;
        if (items.slots > step->slots) step->slots = items.slots;
    }
    if (drops_tokens(*step)) {
        const int64_t w = model->layers[model->num_layers - 1].window;
        step->num_last_items =
            keep_items(buffers.items[w], step->num_items[w], step->wanted, step->num_wanted, buffers.last_items);
    }
    clear_opened(step->rows, g.block, step->pool, g.block_stride * element_bytes(g));
}

// Parts [first, last) of a step: part i is layer i (with layer 0 comes the embedding), part `num_layers` the last norm
// and the logits.
BATON_EXPORT(run_program)(const Model* model, const Step* step, int64_t first, int64_t last) {
    const int64_t layers = model->num_layers;
    Pass pass(*model, *step);
    if (first == 0) pass.embed();
    for (int64_t i = first; i < last && i < layers; ++i) pass.layer(i);
    if (last > layers) pass.finish();
}

// How large the arena must be for a step of these sizes.
BATON_EXPORT(step_bytes)(const Model* model, const Step* step, int64_t* bytes) {
    *bytes = Buffers(*model, *step).bytes;
}
