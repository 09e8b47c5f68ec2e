// Blocks the tokens that would repeat an n-gram of their row, where rows share prefixes.
// kernels/ngram_block/ngram_block.hpp has the definition and the layouts.
//
// A block, or the blocks of a cluster, have `tile` rows of a group. Each id of the prefix is read
// once, `vector` bytes at a time. If it equals the last id of a row, the ids before it are compared
// with the ids at the row's end. The rows' own ids, read `own_vector` bytes at a time, are divided
// among the cluster's blocks by rows. Several threads may block the same token: all write the same
// value. Grid: any number of clusters of
// (cluster, 1, 1). Block: `threads`. The kernel is long because its loops over ids share what they
// call where an id matches, which sees all of a tile's state.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

// The state of a row before its ids are compared.
template <class Id>
struct tile_row {
  int length;  // of prefix and own ids together
  int n;
  int flaws;  // own ids that are not valid tokens
  Id last;    // padding where nothing may match it
};

__device__ __forceinline__ int clamped(int length, int most) {
  return length < 0 ? 0 : length < most ? length : most;
}

// Calls look_at(row, place) where an id of a batch equals the last one of a row. Counts
// those that are no tokens.
template <int tile, int step, class Id, int count, int unroll, class IsToken, class LookAt>
__device__ __forceinline__ void find_matches(int& flaws, const id_run<Id, count> (&batch)[unroll],
                                             const Id (&last)[tile], u32 of_every_id, int place,
                                             int length, Id padding, const IsToken& is_token,
                                             const LookAt& look_at) {
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    u64 matches = 0;
#pragma unroll
    for (int e = 0; e < count; ++e) {
      const Id id = batch[u].value[e];
      if (place + u * step + e >= length || id == padding) continue;
      if (!is_token(id)) ++flaws;
      u32 same = of_every_id;
#pragma unroll
      for (int k = 0; k < tile; ++k) same |= id == last[k] ? 1u << k : 0u;
      matches |= static_cast<u64>(same) << (e * tile);
    }
    while (matches != 0) {
      const int bit = __ffsll(static_cast<long long>(matches)) - 1;
      matches &= matches - 1;
      look_at(bit % tile, place + u * step + bit / tile);
    }
  }
}

// A row before its ids are compared.
template <bool own_lengths, bool own_n, class Id>
__device__ __forceinline__ tile_row<Id> row_of(const Id* ids, const int* lengths, const int* ns,
                                               i64 row, int len, int usual_n, const Id* prefix,
                                               int shared_length, Id padding) {
  const int own = own_lengths ? clamped(lengths[row], len) : len;
  const int n = own_n ? ns[row] : usual_n;
  Id last = padding;
  if (n > 1 && own > 0) last = ids[row * len + own - 1];
  if (n > 1 && own == 0 && shared_length > 0) last = prefix[shared_length - 1];
  return {shared_length + own, n, 0, last};
}

template <class T, class Id, bool own_lengths, bool own_n, int threads, int cluster, int tile,
          int vector, int own_vector>
__global__ void __launch_bounds__(threads)
    block_groups(const Id* ids, const Id* prefixes, T* logits, const int* lengths,
                 const int* prefix_lengths, const int* ns, int* invalid, i64 rows, int beams,
                 int len, int prefix_len, int vocab, int usual_n, i64 padding_id) {
  wait_and_launch_dependents();
  using row_sums = row_sum<1, threads, 1, cluster>;
  __shared__ typename row_sums::memory shared;
  __shared__ tile_row<Id> known[tile];
  constexpr int count = vector / static_cast<int>(sizeof(Id));
  constexpr int own_count = own_vector / static_cast<int>(sizeof(Id));
  constexpr int unroll = 4;  // runs of a prefix that a thread has in flight
  static_assert(count * tile <= 64, "a bit for each id of a run and each row");
  using run = id_run<Id, count>;
  const Id padding = static_cast<Id>(padding_id);
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = (rank * threads + thread) * count;
  constexpr int step = threads * cluster * count;
  const auto is_token = [&](Id id) { return id >= 0 && id < vocab; };

  const int tiles = (beams - 1) / tile + 1;  // of a group
  const i64 units = ((rows - 1) / beams + 1) * tiles;
  int buffer = 0;
  for (i64 unit = blockIdx.x / cluster; unit < units; unit += gridDim.x / cluster, buffer ^= 1) {
    const i64 group = unit / tiles;
    const i64 begin = (unit - group * tiles) * tile;  // the first row's place in its group
    const i64 first_row = group * beams + begin;
    const i64 left = beams - begin < rows - first_row ? beams - begin : rows - first_row;
    const int tile_rows = left < tile ? static_cast<int>(left) : tile;
    if (tile_rows <= 0) break;  // the last group may be smaller
    const Id* const prefix = prefixes + group * prefix_len;
    const Id* const tile_ids = ids + first_row * len;

    // The first loads of the prefix are in flight while the rows' ends are looked up, before the
    // prefix's length is known.
    run batch[unroll];
    const auto load_batch = [&](int place, int length) {
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        batch[u] = {};
        if (place + u * step < length) {
          batch[u] = *reinterpret_cast<const run*>(prefix + place + u * step);
        }
      }
    };
    load_batch(first, prefix_len);
    const int shared_length = own_lengths ? clamped(prefix_lengths[group], prefix_len) : prefix_len;
    if (thread < tile_rows) {
      known[thread] = row_of<own_lengths, own_n>(ids, lengths, ns, first_row + thread, len, usual_n,
                                                 prefix, shared_length, padding);
    } else if (thread < tile) {
      known[thread] = {0, 0, 0, padding};
    }
    __syncthreads();
    Id last[tile];
    u32 of_every_id = 0;  // bit k: row k has n = 1 and blocks all its ids
#pragma unroll
    for (int k = 0; k < tile; ++k) {
      last[k] = known[k].last;
      if (known[k].n == 1) of_every_id |= 1u << k;
    }

    const auto id_at = [&](int k, int place) {
      return place < shared_length ? prefix[place]
                                   : tile_ids[static_cast<i64>(k) * len + place - shared_length];
    };
    const auto block = [&](int k, Id id) {
      if (id != padding && is_token(id)) {
        logits[(first_row + k) * vocab + id] = negative_infinity<T>();
      }
    };
    // Called where row k has its last id at `place` (with n = 1, at every id): blocks the next id
    // if the n - 2 ids before it match too.
    const auto look_at = [&](int k, int place) {
      const int n = known[k].n, end = known[k].length - 1;
      if (n == 1) return block(k, id_at(k, place));
      if (place == end || place < n - 2) return;
      for (int back = 1; back < n - 1; ++back) {
        const Id before = id_at(k, place - back);
        if (before != id_at(k, end - back) || before == padding) return;
      }
      block(k, id_at(k, place + 1));
    };

    // Sums of places are below 2^31: there are at most 2^18, and `step` is at most 2^15.
    int flaws = 0;
    for (int place = first; place < shared_length;) {
      find_matches<tile, step>(flaws, batch, last, of_every_id, place, shared_length, padding,
                               is_token, look_at);
      place += unroll * step;
      load_batch(place, shared_length);
    }

    const int runs = (len - 1) / own_count + 1;  // of a row
    const int mine = (tile_rows - rank + cluster - 1) / cluster;
    for (int i = thread; i < mine * runs; i += threads) {
      const int k = i / runs * cluster + rank;
      const int place = i % runs * own_count;
      using own_run = id_run<Id, own_count>;
      const auto own =
          *reinterpret_cast<const own_run*>(tile_ids + static_cast<i64>(k) * len + place);
#pragma unroll
      for (int e = 0; e < own_count; ++e) {
        const Id id = own.value[e];
        if (shared_length + place + e >= known[k].length || id == padding) continue;
        if (!is_token(id)) atomicAdd(&known[k].flaws, 1);
        if (known[k].n == 1 || id == known[k].last) look_at(k, shared_length + place + e);
      }
    }

    float prefix_flaws[1] = {static_cast<float>(flaws)};  // exact up to 2^24
    row_sums::apply(prefix_flaws, shared, buffer);
    if (thread < tile_rows && thread % cluster == rank) {
      invalid[first_row + thread] = static_cast<int>(prefix_flaws[0]) + known[thread].flaws;
    }
  }
  row_sums::finish();
}

}  // namespace fftune
