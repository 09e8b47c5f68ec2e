// The steps of ngram-block as kernels of their own, as a user's pipeline has them: what `bench`
// compares with. blocked [rows, vocab], one byte a token. Block: 256. Grid: (ceil(columns / 256),
// rows).
#include "common/numerics.cuh"

namespace fftune {

// Columns are places of a row.
template <class Id>
__global__ void __launch_bounds__(256)
    baseline_mark(const Id* ids, u8* blocked, int* invalid, i64 rows, int len, int vocab, int n,
                  i64 padding_id) {
  const Id padding = static_cast<Id>(padding_id);
  const int place = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    const Id* const row_ids = ids + row * len;
    if (place >= len) continue;
    const Id own = row_ids[place];
    if (own != padding && (own < 0 || own >= vocab)) atomicAdd(&invalid[row], 1);
    if (place > len - n) continue;
    bool same = true;
    for (int k = 0; k < n - 1 && same; ++k) {
      same = row_ids[place + k] == row_ids[len - n + 1 + k] && row_ids[place + k] != padding;
    }
    const Id follower = row_ids[place + n - 1];
    if (same && follower != padding && follower >= 0 && follower < vocab) {
      blocked[row * vocab + follower] = 1;
    }
  }
}

// texts [rows, prefix_len + len]: each row's ids after its group's prefix, as a pipeline has them
// that knows of whole rows alone. Columns are places of a text.
template <class Id>
__global__ void __launch_bounds__(256) baseline_join(const Id* prefixes, const Id* ids, Id* texts,
                                                     i64 rows, int beams, int prefix_len, int len) {
  const int place = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (place >= prefix_len + len) return;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    texts[row * (prefix_len + len) + place] = place < prefix_len
                                                  ? prefixes[row / beams * prefix_len + place]
                                                  : ids[row * len + place - prefix_len];
  }
}

// Columns are tokens.
template <class T>
__global__ void __launch_bounds__(256)
    baseline_fill(const u8* blocked, T* logits, i64 rows, int vocab) {
  const int token = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (token >= vocab) return;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    const i64 i = row * vocab + token;
    if (blocked[i]) logits[i] = from_float<T>(__uint_as_float(0xff800000u));
  }
}

// Columns are rows of the problem: 256 of them a block.
__global__ void __launch_bounds__(256) baseline_copy_counts(const int* from, int* to, i64 rows) {
  const i64 row = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (row < rows) to[row] = from[row];
}

}  // namespace fftune
