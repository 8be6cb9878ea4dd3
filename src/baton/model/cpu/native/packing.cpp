// From codes, scales and zero points, as files have them, to a weight in panels (layout: grouped.h).
//
// A weight may be several matrices, the outputs of one after those of the other: each is read where it lies.  A panel is
// made by one thread, which transposes kLanes words of kLanes rows at a time.
#include "grouped.h"
#include "parallel.h"
#include "transpose.h"

namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kUnit = 8;  // steps of 6 bits that lie together

// model/cpu/packing.py has twins of these.
struct Rows {
    const uint8_t* codes;  // [count, k], a byte each; or [count, k / 2], two in a byte, the first in its lower half
    const float* scales;   // [count, k / group]
    const float* zeros;    // the same
    int64_t count;
};
struct Packing {
    const GroupedWeight* weight;
    const Rows* parts;
    int64_t num_parts;
    int64_t nibbles;  // two codes in a byte
    double factor;    // scales are stored times this
};
// What scales and zero points are like.  Scales are looked at times 2^-exponent, which brings the largest below 2^15.
struct Survey {
    const Rows* parts;
    int64_t num_parts;
    int64_t groups;  // of a row
    double least, most;            // of zero points
    int64_t exponent;              // 0 without scales but zero
    int64_t halves;                // float16 holds all scales; the following count only then
    int64_t words;                 // so do nine bits, of those of float16 that are below two (kWord)
    int64_t whole;                 // zero points are whole numbers
    int64_t eighths;               // eight times zero points are
    int64_t half_zeros;            // float16 holds all zero points
};

struct Row {
    const uint8_t* codes;  // null: there is none
    const float* scales;
    const float* zeros;
};

// kLanes words of each of kLanes rows, of which `bytes` are there, as vectors of one word of each row.
template <bool nibbles>
INLINE void words_of(const Row* rows, int64_t first, int64_t bytes, F* words) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        words[lane] = F{};
        if (!rows[lane].codes) continue;
        if constexpr (nibbles) {
            const uint8_t* const from = rows[lane].codes + first / 2;
            H fours = {};
            if (bytes == 4 * kLanes) __builtin_memcpy(&fours, from, sizeof fours);
            else __builtin_memcpy(&fours, from, bytes / 2);
            const U four = widen(fours);
            words[lane] = as_f((four & 0xfu) | (four & 0xf0u) << 4 | (four & 0xf00u) << 8 | (four & 0xf000u) << 12);
        } else {
            if (bytes == 4 * kLanes) __builtin_memcpy(&words[lane], rows[lane].codes + first, sizeof(F));
            else __builtin_memcpy(&words[lane], rows[lane].codes + first, bytes);
        }
    }
    transpose(words);
}

// kLanes numbers as they are stored; returns what comes behind them.
INLINE char* store_halves(char* to, const F& numbers) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT));
#else
    const U bits = as_u(numbers), rest = as_u(as_f(bits & 0x7fffffffu) * 1.925929944387236e-34f);  // 2^-112
    const H halves = narrow(((bits >> 16) & 0x8000u) | (rest >> 13));  // float16 holds them exactly
    __builtin_memcpy(to, &halves, sizeof halves);
#endif
    return to + 2 * kLanes;
}

// Step `s` of a unit of 6 bits; steps come in their order.
INLINE void put_six(char* unit, int64_t s, U low, U high) {
    float* const upper = (float*)(unit + (kUnit + s / 2) * kLanes * 4);
    const U two = (low >> 4 & 0x03030303u) | (high >> 2 & 0x0c0c0c0cu);
    store((float*)(unit + s * kLanes * 4), as_f((low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u)));
    store(upper, as_f(s % 2 ? as_u(load(upper)) | two << 4 : two));
}

// Scales and zero points of group g of a panel; returns what comes behind them.
INLINE char* put_meta(const GroupedWeight& w, const Row* rows, int64_t g, float factor, char* to) {
    const auto column = [&](bool zeros, int half) {
        F found = {};
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Row& row = rows[half * kLanes + lane];
            if (row.codes) found[lane] = zeros ? row.zeros[g] : row.scales[g] * factor;
        }
        return found;
    };
    const bool one = w.meta == kHalf || w.meta == kE2m1 || w.meta == kWord;
    for (int part = 0; part < (one ? 1 : 2); ++part)
        for (int half = 0; half < 2; ++half) {
            const F numbers = column(part, half);
            if (w.meta == kWord) {
                const F eighths = column(true, half) * 8.0f;
                char* const end = store_halves(to, numbers);
                for (int lane = 0; lane < kLanes; ++lane, to += 2) {
                    uint16_t word;
                    __builtin_memcpy(&word, to, 2);
                    word = (uint16_t)(word << 2 | (uint8_t)eighths[lane]);
                    __builtin_memcpy(to, &word, 2);
                }
                to = end;
            } else if (w.meta == kFull) {
                store((float*)to, numbers);
                to += 4 * kLanes;
            } else if (w.meta == kE2m1) {
                const U exponents = as_u(numbers) >> 23;
                for (int lane = 0; lane < kLanes; ++lane) *to++ = (char)(uint8_t)exponents[lane];
            } else if (part && (w.meta == kHalfByte || w.meta == kHalfEighths)) {
                const F bytes = w.meta == kHalfByte ? numbers : numbers * 8.0f;
                for (int lane = 0; lane < kLanes; ++lane) *to++ = (char)(uint8_t)bytes[lane];
            } else {
                to = store_halves(to, numbers);
            }
        }
    return to;
}

template <bool nibbles>
void pack_panel(const Packing& task, const Row* rows, char* to) {
    const GroupedWeight& w = *task.weight;
    const int64_t groups = w.k / w.group, step = step_bytes_of(w.bits);
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t first = 0; first < w.group; first += 4 * kLanes) {
            const int64_t bytes = w.group - first < 4 * kLanes ? w.group - first : 4 * kLanes;
            F low[kLanes], high[kLanes];
            words_of<nibbles>(rows, g * w.group + first, bytes, low);
            words_of<nibbles>(rows + kLanes, g * w.group + first, bytes, high);
            if (w.bits == 4) {
                for (int64_t s = 0; s < bytes / 4; ++s, to += step)
                    store((float*)to, as_f(as_u(low[s]) | as_u(high[s]) << 4));
            } else if (w.bits == 6) {
                for (int64_t s = 0; s < bytes / 4; ++s, to += step) {
                    const int64_t of_unit = (first / 4 + s) % kUnit;
                    put_six(to - of_unit * step, of_unit, as_u(low[s]), as_u(high[s]));
                }
            } else {
                for (int64_t s = 0; s < bytes / 4; ++s, to += step) {
                    store((float*)to, low[s]);
                    store((float*)to + kLanes, high[s]);
                }
            }
        }
        to = put_meta(w, rows, g, (float)task.factor, to);
    }
}

void find_rows(const Packing& task, int64_t first, Row* rows) {
    const GroupedWeight& w = *task.weight;
    const int64_t groups = w.k / w.group, row_bytes = task.nibbles ? w.k / 2 : w.k;
    const Rows* part = task.parts;
    const Rows* const end = part + task.num_parts;
    for (int64_t lane = 0, n = first; lane < kPanel; ++lane, ++n) {
        for (; part < end && n >= part->count; ++part) n -= part->count;
        if (part < end) rows[lane] = {part->codes + n * row_bytes, part->scales + n * groups, part->zeros + n * groups};
        else rows[lane] = {};
    }
}

// Whether float16, or nine of its bits, hold each number.
INLINE I fits(F v, uint32_t below, float subnormal) {
    const F magnitude = as_f(as_u(v) & 0x7fffffffu), fine = magnitude * subnormal;
    const I normal = (as_u(v) & below) == 0u;
    const I small = __builtin_convertvector(__builtin_convertvector(fine, I), F) == fine;
    const I is_small = magnitude < 6.103515625e-5f;  // 2^-14
    return (is_small & small) | (~is_small & normal & (magnitude < 65536.0f));
}
INLINE I half_holds(F v) { return fits(v, 0x1fffu, 16777216.0f); }
INLINE I word_holds(F v) { return fits(v, 0x3ffffu, 524288.0f) & (v >= 0.0f); }
INLINE I is_whole(F v) {
    const I small = as_f(as_u(v) & 0x7fffffffu) < 8388608.0f;  // others are whole in any case
    const F some = as_f(as_u(v) & (U)small);
    return __builtin_convertvector(__builtin_convertvector(some, I), F) == some;
}
INLINE bool all(I mask) {
    int32_t found = -1;
    for (int lane = 0; lane < kLanes; ++lane) found &= mask[lane];
    return found;
}

// Calls body(scales, zeros) for all, kLanes at a time; of the last ones some come again.
template <class Body>
INLINE void for_all(const Survey& s, const Body& body) {
    for (int64_t p = 0; p < s.num_parts; ++p) {
        const Rows& part = s.parts[p];
        const int64_t count = part.count * s.groups;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) body(load(part.scales + i), load(part.zeros + i));
        if (i == count) continue;
        F scales, zeros;
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t at = i + lane < count ? i + lane : count - 1;
            scales[lane] = part.scales[at];
            zeros[lane] = part.zeros[at];
        }
        body(scales, zeros);
    }
}

// That `largest` is below two to the power of it, and no smaller one.
int64_t exponent_of(float largest) {
    int64_t less = 0;
    if (largest < 1.17549435e-38f) largest *= 16777216.0f, less = 24;
    uint32_t bits;
    __builtin_memcpy(&bits, &largest, 4);
    return (int64_t)(bits >> 23) - 126 - less;
}

}  // namespace

BATON_EXPORT(pack_groups)(const Packing* task) {
    const GroupedWeight& w = *task->weight;
    const int64_t panel_bytes = w.k / w.group * group_bytes(w);
    parallel_for((w.n + kPanel - 1) / kPanel, [&](int64_t p, int) {
        Row rows[kPanel];
        find_rows(*task, p * kPanel, rows);
        char* const to = (char*)w.packed + p * panel_bytes;
        if (task->nibbles) pack_panel<true>(*task, rows, to);
        else pack_panel<false>(*task, rows, to);
    });
}

BATON_EXPORT(survey_groups)(Survey* s) {
    F largest = {}, least = splat(__builtin_inff()), most = -least;
    for_all(*s, [&](F scales, F zeros) {
        largest = max(largest, as_f(as_u(scales) & 0x7fffffffu));
        least = min(least, zeros);
        most = max(most, zeros);
    });
    s->least = -(double)reduce_max(-least);
    s->most = reduce_max(most);
    const float ends = reduce_max(largest);
    s->exponent = ends > 0 ? exponent_of(ends) - 15 : 0;
    s->halves = s->words = s->whole = s->eighths = s->half_zeros = 0;
    if (s->exponent < -120 || s->exponent > 120) return;  // float32 does not hold the factor, or may not
    const uint32_t bits = (uint32_t)(127 - s->exponent) << 23;
    float factor;
    __builtin_memcpy(&factor, &bits, 4);
    I halves = ~I{}, words = ~I{}, whole = ~I{}, eighths = ~I{}, half_zeros = ~I{};
    for_all(*s, [&](F scales, F zeros) {
        const F stored = scales * factor;
        halves &= half_holds(stored);
        words &= word_holds(stored * 6.103515625e-5f);  // 2^-14
        whole &= is_whole(zeros);
        eighths &= is_whole(zeros * 8.0f);
        half_zeros &= half_holds(zeros);
    });
    s->halves = all(halves);
    s->words = all(words);
    s->whole = all(whole);
    s->eighths = all(eighths);
    s->half_zeros = all(half_zeros);
}
