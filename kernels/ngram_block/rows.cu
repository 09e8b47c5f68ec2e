// Blocks the tokens that would repeat an n-gram of their row: definitions and layouts in
// kernels/ngram_block/ngram_block.hpp.
//
// A row belongs to one block, or to the blocks of a cluster. Each thread looks at every so many-th
// place of it: is the id there a token, and do the n - 1 ids from there on equal the row's last?
// The comparison begins at the end, where a text differs most often. `staged`: the row is brought
// to shared memory first, which makes one trip to global memory of two. Several threads may block
// one token: all of them write the same. Grid: any number of clusters of (cluster, 1, 1). Block:
// `threads`. Dynamic shared memory: len ids if staged.
#include "common/dependency.cuh"
#include "common/float16.cuh"
#include "common/row_sum.cuh"

namespace fftune {

template <class T>
__device__ __forceinline__ T negative_infinity() {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(0xff800000u);
  } else if constexpr (is_same<T, bf16>) {
    return T{0xff80};
  } else {
    return T{0xfc00};
  }
}

template <class T, class Id, bool own_lengths, bool own_n, int threads, int cluster, bool staged>
__global__ void __launch_bounds__(threads)
    block_rows(const Id* ids, T* logits, const int* lengths, const int* ns, int* invalid, i64 rows,
               int len, int vocab, int usual_n, i64 padding_id) {
  take_turn();
  using row_sums = row_sum<1, threads, 1, cluster>;
  __shared__ typename row_sums::memory shared;
  extern __shared__ u64 staging[];
  Id* const staged_ids = reinterpret_cast<Id*>(staging);
  const Id padding = static_cast<Id>(padding_id);
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = rank * threads + static_cast<int>(threadIdx.x);
  constexpr int step = threads * cluster;

  int turn = 0;
  for (i64 row = blockIdx.x / cluster; row < rows; row += gridDim.x / cluster, turn ^= 1) {
    const Id* const row_ids = ids + row * len;
    const auto id_at = [&](int place) { return staged ? staged_ids[place] : row_ids[place]; };
    const auto is_token = [&](Id id) { return id >= 0 && id < vocab; };
    int length = len;
    if constexpr (own_lengths) {
      length = lengths[row];
      length = length < 0 ? 0 : length < len ? length : len;
    }
    const int n = own_n ? ns[row] : usual_n;

    float flaws[1] = {0.0f};  // a count, exact up to 2^24
#pragma unroll 4
    for (int place = first; place < length; place += step) {
      const Id id = row_ids[place];
      if constexpr (staged) staged_ids[place] = id;
      if (id != padding && !is_token(id)) flaws[0] += 1.0f;
    }
    if constexpr (staged) __syncthreads();

    const int starts = n < 1 || n > length ? 0 : length - n + 1;  // places where an n-gram begins
    for (int place = first; place < starts; place += step) {
      bool same = true;
      for (int k = n - 2; k >= 0 && same; --k) {
        const Id id = id_at(place + k);
        same = id == id_at(starts + k) && id != padding;
      }
      if (!same) continue;
      const Id follower = id_at(place + n - 1);
      if (follower != padding && is_token(follower)) {
        logits[row * vocab + follower] = negative_infinity<T>();
      }
    }
    // A barrier too: the next row's ids may then take the place of these.
    row_sums::apply(flaws, shared, turn);
    if (threadIdx.x == 0 && rank == 0) invalid[row] = static_cast<int>(flaws[0]);
  }
  row_sums::finish();
}

}  // namespace fftune
