// Drafts by n-grams: a request's own text is searched for its last tokens, and what followed them there is guessed to
// follow again.  drafting/ngram.py tells the theory; numba/ngram.py is the twin.
//
// Each request has its tokens, a table of places and links between places.  A *place* is a position in the text,
// that of the token which followed an n-gram.  The table holds, for each n-gram of `shortest` to `key` tokens, its
// newest place: open addressing over (n, tokens), compared with the text, so that nothing is found that is not there.
// Links lead from a place of a `key`-gram to the one before it.  A token costs one look-up for each n and at most `depth`
// links, however long the text is.
#include "parallel.h"
#include "text.h"

namespace {

constexpr int64_t kProbes = 16;  // entries of the table that are looked at for an n-gram
constexpr int64_t kLeast = 4;    // tokens of a match that is gone on with behind a token that differs
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;

struct Options {
    int64_t shortest, key, longest;  // tokens of a match: of a useful one, of those that are linked, that are compared
    int64_t depth;                   // links that are followed
    int64_t most;                    // drafts
    int64_t learn;                   // whether guesses are judged by what comes
    int64_t levels;                  // classes of guesses
};

struct Learnt {
    const int32_t* level_of;  // [longest + 1] by length of match, then [longest] by tokens since one that differed
    const float* prior;       // by level: how probable a guess is
    float* all;               // [levels, 2], as `judged`, of all requests
    float prior_weight, all_weight, keep, keep_all;
};

int64_t equal_before(const int32_t* tokens, int64_t a, int64_t b, int64_t most) {
    if (most > a) most = a;
    int64_t count = 0;
    while (count < most && tokens[a - 1 - count] == tokens[b - 1 - count]) ++count;
    return count;
}

// The newest place of the last n tokens, or 0; from now on it is the end of the text.
int64_t swap_place(Text& text, int64_t n) {
    uint64_t hash = (uint64_t)n;
    for (int64_t back = 1; back <= n; ++back) {
        hash = (hash ^ (uint32_t)text.tokens[text.length - back]) * kFactor;
        hash ^= hash >> 32;
    }
    const int32_t mine = (int32_t)(text.length << 2 | n);
    for (int64_t probe = 0; probe < kProbes; ++probe) {
        int32_t& entry = text.table[(hash + probe) & text.mask];
        const int64_t place = entry >> 2;
        if (entry == 0 || ((entry & 3) == n && equal_before(text.tokens, place, text.length, n) == n)) {
            entry = mine;
            return place;
        }
    }
    text.table[hash & text.mask] = mine;  // an n-gram of the table is forgotten
    return 0;
}

// The end of the text becomes a place; if `search`, the guess is what followed its longest match.
void index_end(Text& text, const Options& options, bool search) {
    text.match = 0;
    if (text.length < options.shortest) return;
    const int64_t end = text.length;
    text.links[end] = 0;
    if (end >= options.key) {
        int64_t place = swap_place(text, options.key);
        text.links[end] = (int32_t)place;
        for (int64_t link = 0; search && place && link < options.depth && text.match < options.longest; ++link) {
            const int64_t match = equal_before(text.tokens, place, end, options.longest);
            if (match > text.match) {
                text.match = match;
                text.source = place;
            }
            place = text.links[place];
        }
    }
    for (int64_t n = options.key - 1; n >= options.shortest; --n) {
        if (end < n) continue;
        const int64_t place = swap_place(text, n);
        if (!search || !place || text.match >= n) continue;
        text.match = equal_before(text.tokens, place, end, options.longest);
        text.source = place;
    }
    if (text.match < options.shortest) text.match = 0;
}

void judge(const Text& text, const Learnt& learnt, int64_t level, bool right) {
    float* row = text.judged + 2 * level;
    float* all = learnt.all + 2 * level;
    row[0] = row[0] * learnt.keep + right;
    row[1] = row[1] * learnt.keep + 1;
    all[0] = all[0] * learnt.keep_all + right;
    all[1] = all[1] * learnt.keep_all + 1;
}

float chance(const Text& text, const Learnt& learnt, int64_t level) {
    const float* row = text.judged + 2 * level;
    const float* all = learnt.all + 2 * level;
    const float of_all = (all[0] + learnt.prior_weight * learnt.prior[level]) / (all[1] + learnt.prior_weight);
    return (row[0] + learnt.all_weight * of_all) / (row[1] + learnt.all_weight);
}

int64_t level_of_match(const Options& options, const Learnt& learnt, int64_t match) {
    return learnt.level_of[match < options.longest ? match : options.longest];
}

// So many tokens behind the one that differed; from `longest` on it is a match as any other.
int64_t level_behind(const Options& options, const Learnt& learnt, int64_t since) {
    return learnt.level_of[since < options.longest ? options.longest + 1 + since : options.longest];
}

// The token that is about to be appended is not the one at `place`, where `before` tokens had been right: it stands
// there instead of that one or, if it is the one behind it, that one was left out.
void differ(Text& text, int64_t place, int64_t before, int32_t token) {
    const bool left_out = place + 1 < text.length && text.tokens[place + 1] == token;
    text.differed = place;
    text.before = before;
    text.since = left_out ? 1 : 0;
    text.along = place + 1 + text.since;
}

// Both guesses are judged by the token that is about to be appended, and what goes on behind differences follows it.
void compare(Text& text, const Options& options, const Learnt& learnt, int32_t token) {
    const bool right = text.match && text.tokens[text.source] == token;
    if (text.match) judge(text, learnt, level_of_match(options, learnt, text.match), right);
    if (text.along) {
        const bool along = text.tokens[text.along] == token;
        judge(text, learnt, level_behind(options, learnt, text.since), along);
        if (along) {
            ++text.along;
            if (++text.since >= options.longest) text.along = 0;  // the index finds it as well
            return;
        }
        if (!right && text.since > 1) return differ(text, text.along, text.before + text.since, token);
        if (!right && !text.since && text.tokens[text.differed] == token) {  // a token had been put in before it
            text.along = text.differed + 1;
            text.since = 1;
            return;
        }
        text.along = 0;
    }
    const int64_t least = options.longest < kLeast ? options.longest : kLeast;
    if (!right && text.match >= least) differ(text, text.source, text.match, token);
}

}  // namespace

// Appends runs[row] tokens to the text of slots[row], row by row, and guesses what follows each: drafts [rows, most],
// chances [rows, most] that a draft and all before it are right (0 beyond the last draft), counts [rows] of drafts.
BATON_EXPORT(ngram)(const void* options_of, const void* learnt_of, void* texts, const int32_t* slots,
                    const int32_t* runs, const int32_t* tokens, int64_t rows, int32_t* drafts, float* chances,
                    int32_t* counts) {
    const Options& options = *(const Options*)options_of;
    const Learnt& learnt = *(const Learnt*)learnt_of;
    for (int64_t row = 0; row < rows; ++row) {
        Text& text = ((Text*)texts)[slots[row]];
        for (int64_t left = runs[row]; left > 0; --left) {
            const int32_t token = *tokens++;
            if (options.learn) compare(text, options, learnt, token);
            text.tokens[text.length++] = token;
            index_end(text, options, options.learn || left == 1);
        }
        const bool along =
            text.along && (!text.match || chance(text, learnt, level_behind(options, learnt, text.since)) >
                                              chance(text, learnt, level_of_match(options, learnt, text.match)));
        const int64_t source = along ? text.along : text.source;
        text.stands_on = along ? text.before + text.since : text.match;
        counts[row] = along || text.match ? (int32_t)options.most : 0;
        int32_t* draft = drafts + row * options.most;
        float together = 1;
        for (int64_t index = 0; index < counts[row]; ++index) {
            const int64_t level = along ? level_behind(options, learnt, text.since + index)
                                        : level_of_match(options, learnt, text.match + index);
            together *= chance(text, learnt, level);
            // What would be beyond the end repeats itself.
            draft[index] = source + index < text.length ? text.tokens[source + index]
                                                        : draft[source + index - text.length];
            chances[row * options.most + index] = together;
        }
        for (int64_t index = counts[row]; index < options.most; ++index) chances[row * options.most + index] = 0;
    }
}
