// Work on rows of activations, each by itself, shared out among the threads.
#pragma once
#include "ranges.h"

namespace {

// Below some microseconds of work other threads cost more than they do, and below a fraction of one so does taking the
// next rows: so many elements at least for all threads, and so many at a time.
constexpr int64_t kElementsTogether = 32768;
constexpr int64_t kElementsAtATime = 4096;

// body(row) for all rows; `n` elements of a row, or what takes as long.  A thread has the same rows every time, as far
// as all come in time, so that the residual stream stays in the cache of its core.
template <class Body>
void for_rows(int64_t rows, int64_t n, const Body& body) {
    if (rows * n < kElementsTogether) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    int64_t group = kElementsAtATime / n, share = rows / (8 * baton_num_threads());
    if (group > share) group = share;
    if (group < 1) group = 1;
    parallel_ranges((rows + group - 1) / group, [&](int64_t index, bool) {
        const int64_t stop = (index + 1) * group < rows ? (index + 1) * group : rows;
        for (int64_t row = index * group; row < stop; ++row) body(row);
    });
}

}  // namespace
