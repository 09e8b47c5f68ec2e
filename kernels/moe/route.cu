// The sorted order of a mixture's choices: a stable counting sort by expert, in one launch.
//
//   ids [tokens, top_k] -> offsets [experts + shared + 1], tokens [..], places [tokens, top_k +
//   shared], and the weights of the rows where row_weights is not null
//
// A warp has a run of consecutive choices, 32 at a time. It counts those of each expert, the counts
// become first places, and a second pass gives each choice its place: that of its expert's first
// choice in the warp, plus the choices of that expert which came before it there.
//
//   shared memory  counts [experts][warps + 1], then totals [experts + 1] and first [experts]
//   a cluster      of `ctas` blocks shares the choices; each reads the totals of the others
//
// Shared experts come last, each with all tokens. A choice whose id names no expert has no place.
// Rows beyond the last offset are not used: their tokens and weights are 0.
//
// Grid: ctas. Block: threads.
#include "common/async.cuh"
#include "common/types.cuh"

namespace fftune {

struct route_config {
  int threads, ctas;
};

// All tokens of each shared expert, and the rows that are not used, from row `before` on.
template <route_config config>
__device__ __forceinline__ void fill_rest(u32 rank, u32 before, int* offsets, int* tokens,
                                          int* places, float* row_weights, int tokens_in_all,
                                          int top_k, int experts, int shared) {
  const i64 all = static_cast<i64>(tokens_in_all) * (top_k + shared);
  const i64 of_shared = static_cast<i64>(tokens_in_all) * shared;
  const int first_thread = static_cast<int>(rank * config.threads + threadIdx.x);
  for (int expert = first_thread; expert < shared; expert += config.ctas * config.threads) {
    offsets[experts + expert + 1] = static_cast<int>(before) + (expert + 1) * tokens_in_all;
  }
  for (i64 at = first_thread; before + at < all; at += config.ctas * config.threads) {
    const u32 expert = static_cast<u32>(at) / tokens_in_all;
    const u32 token = static_cast<u32>(at) - expert * tokens_in_all;
    const bool is_shared = at < of_shared;
    tokens[before + at] = is_shared ? static_cast<int>(token) : 0;
    if (row_weights != nullptr) row_weights[before + at] = is_shared ? 1.0f : 0.0f;
    if (is_shared) {
      places[static_cast<i64>(token) * (top_k + shared) + top_k + expert] =
          static_cast<int>(before + at);
    }
  }
}

// An expert's choices of all blocks, and of those before this one.
template <route_config config>
__device__ __forceinline__ void read_totals(u32& total, u32& of_earlier, u32* of_block, u32 rank) {
#pragma unroll
  for (u32 cta = 0; cta < config.ctas; ++cta) {
    u32 own = *of_block;
    if constexpr (config.ctas > 1) {
      own = load_cluster_word(cluster_address(shared_address(of_block), cta));
    }
    if (static_cast<int>(cta) < static_cast<int>(rank)) of_earlier += own;
    total += own;
  }
}

// Calls visit(choice, whether it is an expert here, which one) for each choice of a warp in order.
template <class Visit>
__device__ __forceinline__ void visit_choices(const int* ids, int begin, int end, int experts,
                                              const Visit& visit) {
  const int lane = threadIdx.x % 32;
  constexpr int together = 8;  // loads in flight
  for (int group = begin; group < end; group += 32 * together) {
    int own[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int choice = group + i * 32 + lane;
      own[i] = choice < end ? ids[choice] : -1;
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (group + i * 32 >= end) break;
      const bool is_here = own[i] >= 0 && own[i] < experts;
      visit(group + i * 32 + lane, is_here, own[i]);
    }
  }
}

template <route_config config>
__global__ void __launch_bounds__(config.threads)
    route_choices(const int* ids, int* offsets, int* tokens, int* places, const float* weights,
                  float* row_weights, int tokens_in_all, int top_k, int experts, int shared) {
  const int choices = tokens_in_all * top_k;  // but for those of the shared experts
  constexpr int warps = config.threads / 32, stride = warps + 1;
  extern __shared__ u32 counts[];
  u32* const totals = counts + experts * stride;  // of this block's choices; [experts]: none
  u32* const first = totals + experts + 1;        // where this block's choices of an expert begin
  u32* const sums = first + experts;              // [warps]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 rank = config.ctas == 1 ? 0 : cluster_rank();

  wait_and_launch_dependents();
  for (int i = threadIdx.x; i < experts * stride; i += config.threads) counts[i] = 0;
  __syncthreads();

  // Whole groups of 32 choices, as evenly as possible.
  const i64 groups = ceil_div(static_cast<i64>(choices), i64{32});
  const i64 part = static_cast<i64>(rank) * warps + warp;
  const int begin = static_cast<int>(groups * part / (config.ctas * warps)) * 32;
  const int end =
      smaller(static_cast<int>(groups * (part + 1) / (config.ctas * warps)) * 32, choices);
  const auto for_each = [&](const auto& visit) { visit_choices(ids, begin, end, experts, visit); };
  for_each([&](int, bool is_here, int id) {
    if (is_here) atomicAdd(&counts[id * stride + warp], 1);
  });
  __syncthreads();

  // Each expert's counts become the choices of the warps before; its total is that of the block.
  for (int expert = threadIdx.x; expert < experts; expert += config.threads) {
    u32 own[warps], before = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) own[i] = counts[expert * stride + i];
#pragma unroll
    for (int i = 0; i < warps; ++i) {
      counts[expert * stride + i] = before;
      before += own[i];
    }
    totals[expert] = before;
  }
  if constexpr (config.ctas > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }

  // Where each expert begins, and in it this block.
  u32 before = 0;
  for (int round = 0; round < experts; round += config.threads) {
    const int expert = round + static_cast<int>(threadIdx.x);
    u32 total = 0, of_earlier = 0;
    if (expert < experts) read_totals<config>(total, of_earlier, totals + expert, rank);
    u32 inclusive = total;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    const u32 of_warp = lane < warps ? sums[lane] : 0;
    const u32 warps_before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    const u32 all = __reduce_add_sync(~0u, of_warp);
    if (expert < experts) {
      const u32 begin_of_expert = before + warps_before + inclusive - total;
      first[expert] = begin_of_expert + of_earlier;
      if (rank == 0) offsets[expert] = static_cast<int>(begin_of_expert);
    }
    before += all;
    __syncthreads();
  }
  if (rank == 0 && threadIdx.x == 0) offsets[experts] = static_cast<int>(before);

  for_each([&](int choice, bool is_here, int id) {
    const u32 peers = __match_any_sync(~0u, is_here ? id : experts);
    if (is_here) {
      const u32 place = first[id] + counts[id * stride + warp] + __popc(peers & ((1u << lane) - 1));
      const u32 token = static_cast<u32>(choice) / top_k;
      places[choice + token * shared] = static_cast<int>(place);
      tokens[place] = static_cast<int>(token);
      if (row_weights != nullptr) row_weights[place] = weights[choice];
    } else if (choice < end) {
      places[choice + static_cast<u32>(choice) / top_k * shared] = -1;
    }
    __syncwarp();
    if (is_here && lane == __ffs(peers) - 1) counts[id * stride + warp] += __popc(peers);
    __syncwarp();
  });
  fill_rest<config>(rank, before, offsets, tokens, places, row_weights, tokens_in_all, top_k,
                    experts, shared);
  // A block may not leave while others read its totals.
  if constexpr (config.ctas > 1) cluster_barrier();
}

}  // namespace fftune
