// The state of sequences that generate tokens (decode/decode.hpp), and how a step changes it.
#pragma once

#include "common/types.cuh"

namespace fftune {

// Whether a sequence's step counts: it has not ended, and the cache has room for its last id.
__device__ __forceinline__ bool goes_on(int ended, int length, int cache) {
  return ended == 0 && length < cache;
}

struct sequence_state {
  const int *limits, *stop;
  int *ids, *lengths, *steps, *ended, *out;
  int cache, stops, room, pad;
};

// Takes the id that was chosen for the sequence `row`.
__device__ __forceinline__ void advance_sequence(const sequence_state& of, int row, int chosen) {
  const int length = of.lengths[row];
  if (!goes_on(of.ended[row], length, of.cache)) {
    of.ids[row] = of.pad;
    if (of.ended[row] == 0) of.ended[row] = 2;
    return;
  }
  const int step = of.steps[row], count = larger(length, 0) + 1;
  of.ids[row] = chosen;
  of.lengths[row] = count;
  of.steps[row] = step + 1;
  if (step >= 0 && step < of.room) of.out[static_cast<i64>(row) * of.room + step] = chosen;
  int end = count >= of.cache || count + 1 >= of.limits[row] ? 2 : 0;
  for (int i = 0; i < of.stops; ++i)
    if (of.stop[i] == chosen) end = 1;
  of.ended[row] = end;
}

}  // namespace fftune
