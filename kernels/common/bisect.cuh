// Search in an ascending sequence, for example the offsets of sequences of tokens.
#pragma once

namespace fftune {

// The last i of [0, count) for which is_before(i): it holds up to some i, and is not asked of 0.
template <class IsBefore>
__device__ __forceinline__ int last_before(const int& count, const IsBefore& is_before) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (is_before(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace fftune
