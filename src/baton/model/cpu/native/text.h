// The text of a slot that drafts are guessed from, as drafting/ngram.py fills it: ngram.cpp writes, suffix.cpp reads it.
#pragma once

#include <cstdint>

struct Text {
    int32_t* tokens;
    int32_t* links;  // by place
    int32_t* table;  // place << 2 | n, or 0
    float* judged;   // [levels, 2]: guesses that were right, guesses
    int64_t length;
    int64_t mask;      // entries of the table less 1
    int64_t source;    // where the longest match is: tokens[source] is to come next
    int64_t match;     // tokens before it that are those at the end; 0: there is none
    int64_t along;     // the guess behind a token that differed: tokens[along] is to come next; 0: there is none
    int64_t since;     // tokens before it that are those at the end, since that one
    int64_t differed;  // where that one was expected
    int64_t before;    // tokens that had been right before it
    int64_t stands_on;  // tokens that were right before the guess that the last call gave
};
