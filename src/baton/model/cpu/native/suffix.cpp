// Drafts from other requests' answers: the last tokens of a request are looked for in what earlier requests of the
// same salt answered, and what followed them there is guessed to follow again.  drafting/suffix.py tells the theory;
// numba/suffix.py is the twin.
//
// A ring holds the tokens of all *documents*: an answer each, with some tokens before it.  A *place* is the number of
// a token, counted from the first that ever was; its low 32 bits are kept, as none is alive that is older than the ring
// is long.  For each length of 2, 4, 8 … tokens there is a table with the newest place behind each run of so many tokens
// of one salt, and a link from each place to the one before it.  What a table says is compared with the ring, salt and
// tokens, so nothing is found that is not there, of another salt, or gone.
#include "parallel.h"
#include "text.h"

namespace {

constexpr int64_t kProbes = 16;  // entries of a table that are looked at
constexpr int64_t kWidth = 16;   // places that say what follows
constexpr int64_t kGroup = 16;   // tokens: a document begins at a multiple of it
constexpr int64_t kDeepest = 64;
constexpr int64_t kMostLevels = 6;
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;

struct Salt {
    uint64_t low, high;  // both 0: there is none
};

struct Document {
    int64_t start, length;  // its tokens, in the ring
    int64_t first;          // those before it are no answer
    Salt salt;
};

// Of one slot.
struct Row {
    Salt salt;
    float* judged;   // [classes, 2]: guesses that were right, and what was expected of them
    int64_t opened;  // tokens of its guess, which nobody has judged
    int64_t match;   // tokens before that guess
    int64_t newest;  // the last row of a call that is of this slot
};

struct Store {
    int32_t* tokens;   // [mask + 1]
    uint32_t* links;   // [levels, mask + 1]
    uint32_t* tables;  // [levels, 2 * (mask + 1)]
    int32_t* owners;   // [(mask + 1) / kGroup] which document
    Document* documents;
    Row* rows;              // by slot
    int32_t* opened;        // [slots, most] the guess that nobody has judged
    float* opened_shares;   // [slots, most] of the places that said so
    int64_t mask;           // tokens of the ring less 1
    int64_t end, oldest;    // places
    int64_t most_documents, num_documents;  // that there is room for, that ever were
    int64_t pending, offset;                // the document, and the place in it, that is to be indexed next
    int64_t levels, depth, most;            // lengths; tokens that are compared; drafts
    int64_t limited;                        // whether the request's own guesses are limited too
};

struct Learnt {
    const int32_t* class_of;  // by length of match
    const float* prior;       // by class
    float* all;               // [classes, 2], as `judged`, of all requests
    float prior_weight, all_weight, keep, keep_all;
    float factor, least;  // drafts for each token of the match, at most; the least chance of all drafts together
};

bool known(const Salt& salt) { return (salt.low | salt.high) != 0; }

// The place whose low bits these are, or -1.
int64_t place_of(const Store& store, uint32_t low) {
    const int64_t age = (uint32_t)((uint32_t)store.end - low);
    return low != 0 && age > 0 && age <= store.end - store.oldest ? store.end - age : -1;
}

const Document& document_of(const Store& store, int64_t place) {
    return store.documents[store.owners[(place & store.mask) / kGroup]];
}

// So many of the tokens before a place are these (the newest first), of the same salt.
int64_t equal_before(const Store& store, int64_t place, const int32_t* newest, int64_t most, const Salt& salt) {
    const Document& document = document_of(store, place);
    if (document.salt.low != salt.low || document.salt.high != salt.high) return 0;
    if (most > place - document.start) most = place - document.start;
    int64_t count = 0;
    while (count < most && store.tokens[(place - 1 - count) & store.mask] == newest[count]) ++count;
    return count;
}

// Hashes of the newest 2, 4, 8 … of these tokens; returns how many lengths there are.
int64_t hashes_of(const Store& store, const int32_t* newest, int64_t count, const Salt& salt, uint64_t* hashes) {
    uint64_t hash = salt.low ^ salt.high * kFactor;
    int64_t level = 0;
    for (int64_t back = 0; back < count && level < store.levels; ++back) {
        hash = (hash ^ (uint32_t)newest[back]) * kFactor;
        hash ^= hash >> 32;
        if (back + 1 == (int64_t)2 << level) hashes[level++] = hash;
    }
    return level;
}

struct Found {
    uint32_t* entry;  // the one, or where it is to be put
    int64_t place;    // or -1
};

Found find(const Store& store, int64_t level, uint64_t hash, const int32_t* newest, const Salt& salt) {
    const int64_t n = (int64_t)2 << level;
    const uint64_t mask = 2 * (uint64_t)store.mask + 1;
    uint32_t* table = store.tables + level * 2 * (store.mask + 1);
    uint32_t* room = nullptr;
    for (int64_t probe = 0; probe < kProbes; ++probe) {
        uint32_t* entry = table + ((hash + probe) & mask);
        const int64_t place = place_of(store, *entry);
        if (place < 0) {
            if (!room) room = entry;
            if (*entry == 0) break;
        } else if (equal_before(store, place, newest, n, salt) == n) {
            return {entry, place};
        }
    }
    return {room ? room : table + (hash & mask), -1};
}

// From now on the tokens before this place lead to it.
void index_place(Store& store, const Document& document, int64_t offset) {
    int32_t newest[kDeepest];
    uint64_t hashes[kMostLevels];
    const int64_t place = document.start + offset;
    int64_t count = (int64_t)1 << store.levels;
    if (count > offset) count = offset;
    for (int64_t back = 0; back < count; ++back) newest[back] = store.tokens[(place - 1 - back) & store.mask];
    const int64_t levels = hashes_of(store, newest, count, document.salt, hashes);
    for (int64_t level = 0; level < levels; ++level) {
        const Found found = find(store, level, hashes[level], newest, document.salt);
        store.links[level * (store.mask + 1) + (place & store.mask)] = found.place < 0 ? 0 : (uint32_t)found.place;
        *found.entry = (uint32_t)place;
    }
}

void index_some(Store& store, int64_t places) {
    while (places > 0 && store.pending < store.num_documents) {
        const Document& document = store.documents[store.pending % store.most_documents];
        if (store.offset < document.first) store.offset = document.first;
        for (; places > 0 && store.offset < document.length; ++store.offset, --places)
            index_place(store, document, store.offset);
        if (store.offset >= document.length) {
            ++store.pending;
            store.offset = 0;
        }
    }
}

int64_t class_of(const Store& store, const Learnt& learnt, int64_t match) {
    return learnt.class_of[match < store.depth ? match : store.depth];
}

void judge(const Store& store, const Learnt& learnt, int32_t slot, const int32_t* came, int64_t count) {
    Row& row = store.rows[slot];
    const int32_t* guess = store.opened + slot * store.most;
    const float* shares = store.opened_shares + slot * store.most;
    if (count > row.opened) count = row.opened;
    for (int64_t index = 0; index < count; ++index) {
        const float right = guess[index] == came[index];
        float* mine = row.judged + 2 * class_of(store, learnt, row.match + index);
        float* all = learnt.all + 2 * class_of(store, learnt, row.match + index);
        mine[0] = mine[0] * learnt.keep + right;
        mine[1] = mine[1] * learnt.keep + shares[index];
        all[0] = all[0] * learnt.keep_all + right;
        all[1] = all[1] * learnt.keep_all + shares[index];
        if (!right) break;
    }
    row.opened = 0;
}

// How often guesses of this class are right, for each that was expected to be.
float rate(const Learnt& learnt, const Row& row, int64_t kind) {
    const float* mine = row.judged + 2 * kind;
    const float* all = learnt.all + 2 * kind;
    const float of_all = (all[0] + learnt.prior_weight * learnt.prior[kind]) / (all[1] + learnt.prior_weight);
    return (mine[0] + learnt.all_weight * of_all) / (mine[1] + learnt.all_weight);
}

int64_t limit(const Store& store, const Learnt& learnt, int64_t match) {
    const float wanted = learnt.factor * (float)match;
    if (wanted >= (float)store.most) return store.most;
    return wanted < 1 ? 1 : (int64_t)wanted;
}

// The newest places behind the longest match, at most kWidth of all that have its length in the tables.
int64_t search(const Store& store, const Text& text, const Salt& salt, int64_t* places, int64_t& match) {
    int32_t newest[kDeepest];
    uint64_t hashes[kMostLevels];
    const int64_t have = text.length < store.depth ? text.length : store.depth;
    for (int64_t back = 0; back < have; ++back) newest[back] = text.tokens[text.length - 1 - back];
    int64_t level = hashes_of(store, newest, have, salt, hashes), place = -1;
    while (place < 0 && level > 0) {
        --level;
        place = find(store, level, hashes[level], newest, salt).place;
    }
    int64_t count = 0;
    match = 0;
    for (int64_t seen = 0; place >= 0 && seen < kWidth; ++seen) {
        const int64_t length = equal_before(store, place, newest, have, salt);
        if (length > match) {
            match = length;
            count = 0;
        }
        if (length == match) places[count++] = place;
        const int64_t next = place_of(store, store.links[level * (store.mask + 1) + (place & store.mask)]);
        place = next < place ? next : -1;
    }
    return count;
}

// What most of these places say comes `ahead` tokens behind them, the newest of equal ones; returns how many say so.
int64_t vote(const Store& store, const int64_t* places, int64_t count, int64_t ahead, int32_t& token) {
    int32_t said[kWidth];
    bool says[kWidth];
    for (int64_t index = 0; index < count; ++index) {
        const Document& document = document_of(store, places[index]);
        says[index] = places[index] + ahead < document.start + document.length;
        said[index] = says[index] ? store.tokens[(places[index] + ahead) & store.mask] : 0;
    }
    int64_t best = 0;
    for (int64_t index = 0; index < count && count - index > best; ++index) {
        if (!says[index]) continue;
        int64_t votes = 1;
        for (int64_t other = index + 1; other < count; ++other) votes += says[other] && said[other] == said[index];
        if (votes > best) {
            best = votes;
            token = said[index];
        }
    }
    return best;
}

// Guesses what follows a text; in place of its own guess if it promises more.
void guess(const Store& store, const Learnt& learnt, const Text& text, int32_t slot, int32_t* drafts, float* chances,
           int32_t& count) {
    Row& row = store.rows[slot];
    int32_t* mine = store.opened + slot * store.most;
    float* shares = store.opened_shares + slot * store.most;
    int64_t places[kWidth];
    int64_t said = known(row.salt) ? search(store, text, row.salt, places, row.match) : 0;
    row.opened = 0;
    if (!said) return;
    const int64_t most = limit(store, learnt, row.match);
    float of_places = 1, together = 1, promised = 0, own = 0;
    float found[kDeepest];
    while (row.opened < most && said > 0) {
        int32_t token = 0;
        const int64_t votes = vote(store, places, said, row.opened, token);
        const float share = (float)votes / (float)said;
        of_places *= share;
        if (!votes || of_places < learnt.least) break;
        const float chance = share * rate(learnt, row, class_of(store, learnt, row.match + row.opened));
        together *= chance < 1 ? chance : 1;
        promised += together;
        found[row.opened] = together;
        mine[row.opened] = token;
        shares[row.opened] = share;
        int64_t left = 0;
        for (int64_t index = 0; index < said; ++index) {
            const Document& document = document_of(store, places[index]);
            const int64_t at = places[index] + row.opened;
            if (at < document.start + document.length && store.tokens[at & store.mask] == token)
                places[left++] = places[index];
        }
        said = left;
        ++row.opened;
    }
    for (int64_t index = 0; index < count; ++index) own += chances[index];
    if (promised <= own) return;
    count = (int32_t)row.opened;
    for (int64_t index = 0; index < store.most; ++index) {
        if (index < count) drafts[index] = mine[index];
        chances[index] = index < count ? found[index] : 0;
    }
}

// A guess of the request's own text is no longer than one of others' may be.
void limit_own(const Store& store, const Learnt& learnt, int64_t match, float* chances, int32_t& count) {
    const int64_t most = limit(store, learnt, match);
    if (count > most) count = (int32_t)most;
    while (count > 0 && chances[count - 1] < learnt.least) --count;
    for (int64_t index = count; index < store.most; ++index) chances[index] = 0;
}

}  // namespace

// Indexes so many places of documents that are not yet.
BATON_EXPORT(suffix_index)(void* store, int64_t places) { index_some(*(Store*)store, places); }

// After ngram.cpp, of the same rows: judges the guesses for these slots by what came, then guesses again (for the last
// row of each slot), and puts that in place of drafts [rows, most], chances [rows, most] and counts [rows] where it
// promises more.
BATON_EXPORT(suffix)(void* store_of, const void* learnt_of, const void* texts, const int32_t* slots,
                     const int32_t* runs, const int32_t* tokens, int64_t rows, int64_t places, int32_t* drafts,
                     float* chances, int32_t* counts) {
    Store& store = *(Store*)store_of;
    const Learnt& learnt = *(const Learnt*)learnt_of;
    index_some(store, places);
    for (int64_t row = 0; row < rows; ++row) {
        judge(store, learnt, slots[row], tokens, runs[row]);
        store.rows[slots[row]].newest = row;
        tokens += runs[row];
    }
    for (int64_t row = 0; row < rows; ++row) {
        if (store.rows[slots[row]].newest != row) continue;
        const Text& text = ((const Text*)texts)[slots[row]];
        float* of_row = chances + row * store.most;
        if (store.limited) limit_own(store, learnt, text.stands_on, of_row, counts[row]);
        guess(store, learnt, text, slots[row], drafts + row * store.most, of_row, counts[row]);
    }
}
