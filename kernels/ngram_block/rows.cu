// Blocks the tokens that would repeat an n-gram of their row. kernels/ngram_block/ngram_block.hpp
// has the definition and the layouts.
//
// A block, or the blocks of a cluster, have a row. Each id is read once, `vector` bytes at a time.
// If it equals the row's last id, the ids before it are compared with the ids at the row's end,
// backwards, because texts differ there most often. Several threads may block the same token: all
// write the same value. `l2_prefetch`: a block prefetches its first row to L2 before
// griddepcontrol.wait. Grid: any number of clusters of (cluster, 1, 1). Block: `threads`.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, class Id, bool own_lengths, bool own_n, int threads, int cluster, int vector,
          bool l2_prefetch>
__global__ void __launch_bounds__(threads)
    block_rows(const Id* ids, T* logits, const int* lengths, const int* ns, int* invalid, i64 rows,
               int len, int vocab, int usual_n, i64 padding_id) {
  if constexpr (l2_prefetch) {
    if (threadIdx.x == 0 && blockIdx.x % cluster == 0) {
      prefetch_l2(ids + static_cast<i64>(blockIdx.x / cluster) * len,
                  static_cast<u32>(len) * static_cast<u32>(sizeof(Id)));
    }
  }
  wait_and_launch_dependents();
  using row_sums = row_sum<1, threads, 1, cluster>;
  __shared__ typename row_sums::memory shared;
  constexpr int count = vector / static_cast<int>(sizeof(Id));
  constexpr int unroll = 4;  // runs of ids that a thread has in flight
  using run = id_run<Id, count>;
  const Id padding = static_cast<Id>(padding_id);
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = (rank * threads + static_cast<int>(threadIdx.x)) * count;
  constexpr int step = threads * cluster * count;

  int buffer = 0;
  for (i64 row = blockIdx.x / cluster; row < rows; row += gridDim.x / cluster, buffer ^= 1) {
    const Id* const row_ids = ids + row * len;
    int length = len;
    if constexpr (own_lengths) {
      length = lengths[row];
      length = length < 0 ? 0 : length < len ? length : len;
    }
    const int n = own_n ? ns[row] : usual_n;
    const int end = length - 1;
    const Id last = n > 1 && end >= 0 ? row_ids[end] : padding;
    const auto is_token = [&](Id id) { return id >= 0 && id < vocab; };
    const auto block = [&](Id id) {
      if (id != padding && is_token(id)) logits[row * vocab + id] = negative_infinity<T>();
    };

    float flaws[1] = {0.0f};  // a count, exact up to 2^24
    const auto look_at = [&](int place, Id id) {
      if (place >= length || id == padding) return;
      if (!is_token(id)) flaws[0] += 1.0f;
      if (n == 1) block(id);
      if (id != last || place == end || place < n - 2) return;
      for (int back = 1; back < n - 1; ++back) {
        const Id before = row_ids[place - back];
        if (before != row_ids[end - back] || before == padding) return;
      }
      block(row_ids[place + 1]);
    };
    // Sums of places are below 2^31: a row has at most 2^17 ids, and `step` is at most 2^15.
    for (int place = first; place < length; place += unroll * step) {
      run batch[unroll] = {};
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        if (place + u * step < length) {
          batch[u] = *reinterpret_cast<const run*>(row_ids + place + u * step);
        }
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
#pragma unroll
        for (int k = 0; k < count; ++k) look_at(place + u * step + k, batch[u].value[k]);
      }
    }
    row_sums::apply(flaws, shared, buffer);
    if (threadIdx.x == 0 && rank == 0) invalid[row] = static_cast<int>(flaws[0]);
  }
  row_sums::finish();
}

}  // namespace fftune
