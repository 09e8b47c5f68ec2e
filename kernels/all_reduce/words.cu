// All-reduce in one shot: a rank sends its rows to every peer as words (words.cuh), and polls those
// that peers send it.
//
// A cluster of `cluster` blocks has a row. A thread has vectors of 16 bytes, vector i being number
// (i * cluster + rank) * threads + thread of the row. The last cluster has no row: it exchanges
// greetings (common/peers.cuh). Grid: (rows + 1) * cluster.
#include "all_reduce/normed_rows.cuh"
#include "all_reduce/words.cuh"

namespace fftune {

template <class T, class Convention, bool normalises, bool adds, norm_output output, int ranks,
          int threads, int vectors, int cluster>
__global__ void __launch_bounds__(threads)
    all_reduce_words(const __grid_constant__ all_reduce_params params) {
  constexpr int count = 16 / static_cast<int>(sizeof(T));
  using row_sums = row_sum<1, threads, 1, cluster>;
  __shared__ typename row_sums::memory shared;
  wait_for_dependencies();

  const i64 row = blockIdx.x / cluster;
  const int d = params.d;
  const u32 part = cluster > 1 ? cluster_rank() : 0;
  const int first_column =
      (static_cast<int>(part) * threads + static_cast<int>(threadIdx.x)) * count;
  constexpr int column_step = cluster * threads * count;
  const bool has_row = row < params.rows;
  const u64 policy = l2_eviction_policy<false>();
  const auto valid = [&](int i) { return has_row && first_column + i * column_step < d; };
  const auto place = [&](int i) { return row * d + first_column + i * column_step; };
  const auto number = [&](int i) { return place(i) / count; };

  aligned_vector<T, count> own[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i)
    own[i] = load_once<T, count>(static_cast<const T*>(params.x) + place(i), valid(i), policy);

  peer_group<ranks> group(params.table, params.loopback, params.tag);
  sent_words::require_room(group, params.rows * (d / count));
  sent_words::send_all(group, own, valid, number);
  // The next kernel loads its weights while this one waits, and not while it sends.
  launch_dependents();
  const bool greets = !has_row && part == 0;
  if (greets) group.send_greeting(static_cast<int>(threadIdx.x));
  // All of the block have read the epoch. The ticket's way to memory and back passes while data are
  // on theirs: it is looked at behind the results.
  __syncthreads();
  const u32 last_ticket = gridDim.x - 1;
  u32 ticket = 0;
  if (threadIdx.x == 0) ticket = atomicInc(&group.control()->ticket, last_ticket);

  aligned_vector<T, count> others[vectors], weights[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    if constexpr (adds)
      others[i] =
          load_once<T, count>(static_cast<const T*>(params.residual) + place(i), valid(i), policy);
    if constexpr (normalises)
      weights[i] = load_through_l1<T, count>(
          static_cast<const T*>(params.w) + first_column + i * column_step, valid(i));
  }
  if (greets) group.await_greeting(static_cast<int>(threadIdx.x));

  float total[vectors][count];
  sent_words::add_up(group, own, total, valid, number);

  float squares[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    if (!valid(i)) continue;
    if constexpr (adds) {
      float other[count];
      to_floats(others[i], other);
#pragma unroll
      for (int e = 0; e < count; ++e) total[i][e] += other[e];
    }
    own[i] = from_floats<T>(total[i]);
    if constexpr (normalises) {
      if constexpr (adds)
        if (!group.failed) store_once(static_cast<T*>(params.sum) + place(i), own[i], policy);
      to_floats(own[i], total[i]);
#pragma unroll
      for (int e = 0; e < count; ++e) squares[0] += total[i][e] * total[i][e];
    } else if (!group.failed) {
      store_once(static_cast<T*>(params.y) + place(i), own[i], policy);
    }
  }

  if constexpr (normalises) {
    row_sums::apply(squares, shared, 0);
    const normed_rows<T, Convention, output> rows(squares[0], params);
    float largest[1] = {};
    if constexpr (output == norm_output::fp8) {
#pragma unroll
      for (int i = 0; i < vectors; ++i)
        if (valid(i)) rows.join_largest(largest[0], own[i], weights[i]);
      using row_largest = row_sum<1, threads, 1, cluster, larger_magnitude>;
      __shared__ typename row_largest::memory shared_largest;
      row_largest::apply(largest, shared_largest, 0);
    }
    const float scale = rows.scale(largest[0]);
    if (output == norm_output::fp8 && has_row && first_column == 0 && !group.failed)
      params.scales[row] = scale;
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (valid(i) && !group.failed) rows.store(place(i), own[i], weights[i], scale, policy);
    row_sums::finish();
  }
  if (threadIdx.x == 0 && ticket == last_ticket) group.control()->epoch = group.epoch;
}

}  // namespace fftune
