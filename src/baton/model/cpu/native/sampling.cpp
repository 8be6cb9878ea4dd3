// From logits to tokens, one row after the other: what model/sampling/sampler.py does, without its temporaries.
//
// A row is one request's logits over the vocabulary, in float32.  It is looked at in chunks of 1,024.  What a row asks
// for decides how often it is read:
//
//   greedy             once: the largest logit, the smallest id among equals
//   small top-k        once: the maxima of blocks of 64.  At least k logits are as large as the k-th largest
//                      of these maxima, so only blocks that reach it are searched; the rest works on k numbers
//   no truncation      twice: the maximum; then weights exp((logit - max) / temperature) and their sum in each
//                      chunk, which tells the chunk that holds u * total, and only that one is walked through
//   top-p, large top-k a few times more.  Min-p, top-k and top-p each keep a *prefix of the ranking* (logit
//                      descending, id ascending).  Where it ends is searched with eight pivots a pass: count
//                      and mass of what lies above each, then again between two of them, until what lies
//                      between is so little that it is sorted
//
// A row may have a mask, a bit for each token: what it leaves out is as -inf.  Where 32 neighbours are left out, as is
// most often the case, their logits are not read, and chunks that are left out whole are passed over.
//
// Sums over the vocabulary are in float64, in an order that the row alone decides, and rows share nothing.  So a
// row's token does not depend on the batch, on the number of threads, or on where the row lies in memory.
//
// Against the PyTorch form: ranking, limits and u are the same.  Two things may differ in the last bit: the
// exponential (another polynomial) and the order of the additions in long sums.  So a token can differ where u
// falls within about 1e-7 of the border between two tokens, as it can between two of PyTorch's devices.
#include "glibc.h"
#include "parallel.h"
#include "ranking.h"

#include <math.h>

namespace {

constexpr int kBlock = 64;
constexpr int kChunk = 1024;
constexpr int kBlocks = kChunk / kBlock;
constexpr int kPivots = 8;
constexpr int kFew = 512;
constexpr int64_t kAtATime = 32768;  // logits
constexpr float kNothing = -__builtin_inff();
constexpr uint32_t kAllIds = 0xFFFFFFFF;

struct Wishes {
    float temperature;  // 0: greedy
    int64_t top_k;      // the size of the vocabulary or more: all
    double top_p;
    float min_p;
    double uniform;
};

// What a thread works in, for one row after the other: `baton_sample`'s caller sizes it.
struct Scratch {
    Rank* ranks;      // [size]; as ById too
    double* masses;   // [chunks]
    float* weights;   // [size]
    float* maxima;    // [blocks]
    Float* best;      // [blocks]

    Scratch(char* memory, int64_t chunks) {
        ranks = (Rank*)memory;
        masses = (double*)(ranks + chunks * kChunk);
        weights = (float*)(masses + chunks);
        maxima = weights + chunks * kChunk;
        best = (Float*)(maxima + chunks * kBlocks);
    }
};

struct Row {
    const float* logits;
    const uint32_t* mask;  // null: all
    int64_t size, chunks;
    Scratch scratch;
    float max_logit, temperature;

    Row(const float* row, const uint32_t* allowed, int64_t vocab, const Scratch& memory)
        : logits(row), mask(allowed), size(vocab), chunks((vocab + kChunk - 1) / kChunk), scratch(memory),
          temperature(1) {
        F most = splat(kNothing);
        alignas(64) float buffer[kChunk];
        for (int64_t c = 0; c < chunks; ++c) {
            if (left_out(c)) {
                for (int b = 0; b < kBlocks; ++b) scratch.maxima[c * kBlocks + b] = kNothing;
                continue;
            }
            const bool whole = size - c * kChunk >= kChunk && !mask;
            if (!whole) read(c, buffer);
            most = max(most, whole ? find_maxima(c, logits + c * kChunk) : find_maxima(c, buffer));
        }
        max_logit = reduce_max(most);
    }

    // Of the chunk's blocks; returns lane by lane the maximum of all.
    F find_maxima(int64_t c, const float* from) {
        F all = splat(kNothing);
        for (int b = 0; b < kBlocks; ++b) {
            F most = load(from + b * kBlock);
            for (int i = kLanes; i < kBlock; i += kLanes) most = max(most, load(from + b * kBlock + i));
            scratch.maxima[c * kBlocks + b] = reduce_max(most);
            all = max(all, most);
        }
        return all;
    }

    int64_t sample(const Wishes& wishes) {
        if (!(wishes.temperature > 0) || !(__builtin_fabsf(max_logit) < __builtin_inff())) return argmax();
        temperature = wishes.temperature;
        const bool ranked = wishes.top_k < size;
        if (ranked && wishes.top_k <= chunks * kBlocks / 4) return among_best(wishes);
        double total = weigh(wishes.min_p);
        Cut cut = {{}, true};
        if (ranked) {
            cut = find_cut((double)wishes.top_k, true, lowest());
            if (!cut.all) total = drop_after(cut.last);
        }
        if (wishes.top_p < 1) {
            // All tokens lighter than this together are lighter than what is left out.
            const double unneeded = (1 - wishes.top_p) * total / (double)size;
            const float least = max_logit + temperature * ((float)log(unneeded) - 0.01f);
            const float low = lowest();
            cut = find_cut(wishes.top_p * total, false, least > low ? least : low);
            if (!cut.all) total = drop_after(cut.last);
        }
        return draw(wishes.uniform * total);
    }

    bool allows(int64_t id) const { return !mask || (mask[id >> 5] >> (id & 31) & 1); }

    // Chunk `c` as float32; what lies past the end of the row is -inf, and what its mask leaves out.
    void read(int64_t c, float* out) const {
        const float* from = logits + c * kChunk;
        const int64_t count = size - c * kChunk;
        if (mask) return read_masked(from, mask + c * (kChunk / 32), count < kChunk ? count : kChunk, out);
        if (count >= kChunk) {
            for (int i = 0; i < kChunk; i += kLanes) store(out + i, load(from + i));
            return;
        }
        for (int i = 0; i < kChunk; ++i) out[i] = i < count ? from[i] : kNothing;
    }

    static void read_masked(const float* from, const uint32_t* words, int64_t count, float* out) {
        for (int i = 0; i < kChunk; i += 32) {
            const uint32_t word = i < count ? words[i / 32] : 0;
            if (i + 32 <= count && word) {
                for (int j = 0; j < 32; j += kLanes) store(out + i + j, allowed_lanes(word >> j, load(from + i + j)));
                continue;
            }
            for (int j = 0; j < 32; j += kLanes) store(out + i + j, splat(kNothing));
            for (uint32_t left = word; left; left &= left - 1) {  // where the row ends
                const int j = i + __builtin_ctz(left);
                if (j < count) out[j] = from[j];
            }
        }
    }

    // The lanes whose bits are set, -inf in the others.
    static F allowed_lanes(uint32_t bits, F logits) {
#if defined(__AVX512F__)
        return (F)_mm512_mask_mov_ps((__m512)splat(kNothing), (__mmask16)bits, (__m512)logits);
#else
        U of = {};
        for (int lane = 0; lane < kLanes; ++lane) of[lane] = 1u << lane;
        return select((I)((bits & of) != 0), logits, splat(kNothing));
#endif
    }

    // Whether the mask leaves out all of chunk `c`.
    bool left_out(int64_t c) const {
        if (!mask) return false;
        const uint32_t* words = mask + c * (kChunk / 32);
        const int64_t left = (size - c * kChunk + 31) / 32, count = left < kChunk / 32 ? left : kChunk / 32;
        uint32_t some = 0;
        for (int64_t i = 0; i < count; ++i) some |= words[i];
        return !some;
    }

    int64_t argmax() const {
        for (int64_t b = 0; b < chunks * kBlocks; ++b) {
            if (scratch.maxima[b] != max_logit) continue;
            const int64_t end = (b + 1) * kBlock < size ? (b + 1) * kBlock : size;
            for (int64_t i = b * kBlock; i < end; ++i) {
                if (logits[i] == max_logit && allows(i)) return i;
            }
        }
        return 0;
    }

    F weight(F logit) const { return exponential((logit - max_logit) / temperature); }

    // Logits up to this one have weight 0.
    float lowest() const { return max_logit - 88.0f * temperature; }

    // -- a small top-k

    int64_t among_best(const Wishes& wishes) {
        const int64_t k = wishes.top_k, blocks = chunks * kBlocks;
        for (int64_t b = 0; b < blocks; ++b) scratch.best[b].value = scratch.maxima[b];
        std::nth_element(scratch.best, scratch.best + (k - 1), scratch.best + blocks);
        const float least = scratch.best[k - 1].value;
        Rank* ranks = scratch.ranks;
        int64_t count = 0;
        for (int64_t b = 0; b < blocks; ++b) {
            if (scratch.maxima[b] < least) continue;
            const int64_t end = (b + 1) * kBlock < size ? (b + 1) * kBlock : size;
            for (int64_t i = b * kBlock; i < end; ++i) {
                const float logit = logits[i];
                if (logit >= least && allows(i)) ranks[count++] = Rank::of(logit, i);
            }
        }
        if (count > k) {
            std::nth_element(ranks, ranks + (k - 1), ranks + count);
            count = k;
        }
        std::sort(ranks, ranks + count);
        float* weights = scratch.weights;
        for (int64_t i = 0; i < count; ++i) weights[i] = ranks[i].logit();
        for (int64_t i = count; i % kLanes; ++i) weights[i] = kNothing;
        for (int64_t i = 0; i < count; i += kLanes) store(weights + i, weight(load(weights + i)));
        return draw_ranked(wishes, count);
    }

    // From the best `count` tokens, ranked and weighed.
    int64_t draw_ranked(const Wishes& wishes, int64_t count) {
        const float* weights = scratch.weights;
        int64_t kept = 1;
        double total = weights[0];
        while (kept < count && weights[kept] >= wishes.min_p) total += weights[kept++];
        if (wishes.top_p < 1) {
            const double limit = wishes.top_p * total;
            count = kept;
            kept = 1;
            for (double mass = weights[0]; kept < count && mass < limit;) mass += weights[kept++];
        }
        ById* chosen = (ById*)scratch.ranks;
        for (int64_t i = 0; i < kept; ++i) chosen[i] = ById{scratch.ranks[i].id(), weights[i]};
        std::sort(chosen, chosen + kept);
        total = 0;
        for (int64_t i = 0; i < kept; ++i) total += chosen[i].weight;
        double reached = 0;
        uint32_t last = chosen[0].id;
        for (int64_t i = 0; i < kept; ++i) {
            reached += chosen[i].weight;
            if (reached > wishes.uniform * total) return chosen[i].id;
            if (chosen[i].weight > 0) last = chosen[i].id;
        }
        return last;
    }

    // -- the whole vocabulary

    // Computes all weights, 0 for those that min-p leaves out.  Returns their sum.
    double weigh(float min_p) {
        alignas(64) float buffer[kChunk];
        double total = 0;
        for (int64_t c = 0; c < chunks; ++c) {
            if (left_out(c)) {  // (weights of a chunk without mass are not looked at)
                scratch.masses[c] = 0;
                continue;
            }
            read(c, buffer);
            float* weights = scratch.weights + c * kChunk;
            for (int i = 0; i < kChunk; i += kLanes) {
                const F each = weight(load(buffer + i));
                store(weights + i, select(each >= min_p, each, F{}));
            }
            total += scratch.masses[c] = total_of(weights, kChunk);
        }
        return total;
    }

    // Sets the weights of what is ranked after `last` to 0.  Returns the sum of the others.
    double drop_after(Rank last) {
        const float limit = last.logit();
        double total = 0;
        alignas(64) float buffer[kChunk];
        for (int64_t c = 0; c < chunks; ++c) {
            float* weights = scratch.weights + c * kChunk;
            if (chunk_max(c) < limit) {
                for (int i = 0; i < kChunk; ++i) weights[i] = 0;
                scratch.masses[c] = 0;
                continue;
            }
            read(c, buffer);
            const int64_t equals = (int64_t)last.id() - c * kChunk;  // up to this one they belong to it
            for (int i = 0; i < kChunk; ++i) {
                const bool kept = buffer[i] > limit || (buffer[i] == limit && i <= equals);
                weights[i] = kept ? weights[i] : 0;
            }
            total += scratch.masses[c] = total_of(weights, kChunk);
        }
        return total;
    }

    float chunk_max(int64_t c) const {
        float most = kNothing;
        const float* maxima = scratch.maxima + c * kBlocks;
        for (int b = 0; b < kBlocks; ++b) most = maxima[b] > most ? maxima[b] : most;
        return most;
    }

    // The shortest prefix of the ranking that reaches `limit`, in tokens (`counts`) or in mass; all if what
    // lies above the logit `low` does not.
    Cut find_cut(double limit, bool counts, float low) {
        float high = max_logit;  // what lies above `high` does not reach the limit, what lies above `low` does
        bool reached = false;
        for (double between = (double)size; between > kFew;) {
            float pivots[kPivots];
            for (int p = 0; p < kPivots; ++p) pivots[p] = low + (high - low) * ((float)p / kPivots);
            if (reached && !(pivots[kPivots - 1] < high && pivots[1] > low)) break;  // no float32 lies between
            double above[kPivots] = {};
            for (int64_t c = 0; c < chunks; ++c) add_above(c, pivots, counts, above);
            int p = kPivots - 1;
            while (p >= 0 && above[p] < limit) --p;
            if (p < 0 && !reached) return Cut{{}, true};
            if (p < 0) break;
            reached = true;
            low = pivots[p];
            between = above[p] - (p + 1 < kPivots ? above[p + 1] : 0);
            if (!counts) between /= weight(splat(low))[0];  // (none of them is lighter)
            if (p + 1 < kPivots) high = pivots[p + 1];
        }
        return walk(limit, counts, low, high);
    }

    // Adds the number or the mass of what of chunk `c` lies above each pivot; pivots ascend.
    void add_above(int64_t c, const float* pivots, bool counts, double* above) const {
        if (chunk_max(c) <= pivots[0]) return;
        alignas(64) float buffer[kChunk];
        read(c, buffer);
        const float* weights = scratch.weights + c * kChunk;
        F sums[kPivots] = {};
        for (int i = 0; i < kChunk; i += kLanes) {
            const F logit = load(buffer + i), each = counts ? splat(1) : load(weights + i);
            for (int p = 0; p < kPivots; ++p) sums[p] += logit > splat(pivots[p]) ? each : F{};
        }
        for (int p = 0; p < kPivots; ++p) {
            for (int lane = 0; lane < kLanes; ++lane) above[p] += sums[p][lane];
        }
    }

    // Ranks what lies in (low, high] and goes through it until the limit is reached.
    Cut walk(double limit, bool counts, float low, float high) {
        Rank* ranks = scratch.ranks;
        int64_t count = 0;
        double reached = 0;
        alignas(64) float buffer[kChunk], above[kChunk];
        for (int64_t c = 0; c < chunks; ++c) {
            const float most = chunk_max(c);
            if (most <= low) continue;
            read(c, buffer);
            if (most > high) {
                const float* weights = scratch.weights + c * kChunk;
                for (int i = 0; i < kChunk; i += kLanes) {
                    const F each = counts ? splat(1) : load(weights + i);
                    store(above + i, load(buffer + i) > splat(high) ? each : F{});
                }
                reached += total_of(above, kChunk);
            }
            for (int b = 0; b < kChunk; b += kBlock) {
                I found = {};
                for (int i = b; i < b + kBlock; i += kLanes) {
                    found |= (load(buffer + i) > splat(low)) & (load(buffer + i) <= splat(high));
                }
                if (!any(found)) continue;
                for (int i = b; i < b + kBlock; ++i) {
                    if (buffer[i] > low && buffer[i] <= high) ranks[count++] = Rank::of(buffer[i], c * kChunk + i);
                }
            }
        }
        std::sort(ranks, ranks + count);
        Cut cut = {Rank::of(high, kAllIds), false};
        for (int64_t i = 0; i < count && (i == 0 || reached < limit); ++i) {
            cut.last = ranks[i];
            reached += counts ? 1.0 : scratch.weights[ranks[i].id()];
        }
        return cut;
    }

    // The first token, in order of ids, with which the sum of the weights exceeds `target`.
    int64_t draw(double target) const {
        double reached = 0;
        int64_t last = -1;  // a chunk with any weight
        for (int64_t c = 0; c < chunks; ++c) {
            if (scratch.masses[c] > 0) last = c;
            if (reached + scratch.masses[c] <= target) {
                reached += scratch.masses[c];
                continue;
            }
            for (int i = 0; i < kChunk; ++i) {
                reached += scratch.weights[c * kChunk + i];
                if (reached > target) return c * kChunk + i;
            }
        }
        // Rounding may put the target at the total itself: then it is the last one of positive weight.
        int64_t i = last < 0 ? 0 : (last + 1) * kChunk - 1;
        while (i > 0 && !(scratch.weights[i] > 0)) --i;
        return i;
    }
};

uint64_t mix(uint64_t x) {  // as in counter_random.py
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

double uniform(uint64_t stream, uint64_t position) {
    return (double)(mix(stream + (position + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
}

// What every slot's request asks for: arrays with one entry a slot.  As `SlotParameters` in model/cpu/sampling.py.
struct SlotParameters {
    const float* temperature;
    const int64_t* top_k;
    const double* top_p;
    const float* min_p;
    const uint64_t* streams;
    const uint8_t* masked;
    const uint32_t* masks;  // [slots, vocab / 32 + 1]
};

void sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const SlotParameters& slots_have,
            const int32_t* slots, const int32_t* positions, int32_t* tokens, char* scratch, int64_t scratch_bytes,
            int threads) {
    const int64_t chunks = (vocab + kChunk - 1) / kChunk;
    // Of small vocabularies several rows at a time: to take the next ones costs as much as a row.
    int64_t group = kAtATime / vocab;
    if (group > rows / (2 * threads)) group = rows / (2 * threads);
    if (group < 1) group = 1;
    parallel_for((rows + group - 1) / group, threads, [&](int64_t index, int thread) {
        for (int64_t row = index * group; row < rows && row < (index + 1) * group; ++row) {
            const int32_t slot = slots[row];
            const Wishes wishes = {slots_have.temperature[slot], slots_have.top_k[slot], slots_have.top_p[slot],
                                   slots_have.min_p[slot], uniform(slots_have.streams[slot], (uint64_t)positions[row])};
            const uint32_t* mask = slots_have.masked[slot] ? slots_have.masks + slot * (vocab / 32 + 1) : nullptr;
            Row one(logits + row * stride, mask, vocab, Scratch(scratch + thread * scratch_bytes, chunks));
            tokens[row] = (int32_t)one.sample(wishes);
        }
    });
}

}  // namespace

// logits [rows, vocab] with `stride` elements between rows; slots, positions (of the new tokens), tokens (out): [rows].
BATON_EXPORT(sample)(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const void* parameters,
                     const int32_t* slots, const int32_t* positions, int32_t* tokens, char* scratch,
                     int64_t scratch_bytes, int64_t threads) {
    sample(logits, rows, vocab, stride, *(const SlotParameters*)parameters, slots, positions, tokens, scratch,
           scratch_bytes, (int)threads);
}
