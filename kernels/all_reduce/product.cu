// The product of few tokens whose result is a summand of a group's: y = residual + the sum over the
// ranks of A B^T, in one launch. K-major 16-bit matrices, 16-byte aligned rows and pointers.
//
// A block streams `rows` rows of B as decode_gemm does (gemm/decode/gemm.cu), for up to 16 rows of
// A. As soon as its columns are done they go to the peers as packets, in float32, and the block
// polls the peers' packets of the same columns. So the link is at work while other blocks still
// read weights, and the sum is of float32 summands: nothing is rounded before the residual.
//
// Grid: (ceil(n / rows) + 1, split_k), clusters of (1, split_k). The last column of blocks
// exchanges greetings (common/peers.cuh). Block: config.threads(). Shared memory:
// config.shared_bytes().
#include "all_reduce/product.cuh"
#include "common/async.cuh"
#include "common/peers.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream.cuh"
#include "gemm/split_k.cuh"

namespace fftune {

// Two neighbouring columns of the rows lane / 4 and, with 16 tokens, lane / 4 + 8.
template <class T, bool adds, int ranks, int halves>
__device__ __forceinline__ void store_sums(const summed_product_params& p, peer_group<ranks>& group,
                                           int row, int column, const float4& own) {
  const float first[2] = {own.x, own.z}, next[2] = {own.y, own.w};
  const auto exists = [&](int half) { return row + half * 8 < p.m && column < p.n; };
  const auto place = [&](int half) { return static_cast<i64>(row + half * 8) * p.n + column; };
  // Eight columns of all rows are together, so that a store of a warp fills whole lines.
  const auto packets = [&](int half) {
    return (static_cast<i64>(column / 8) * p.m + row + half * 8) * 64 + column % 8 * 8;
  };
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    if (group.failed || !exists(half)) continue;
#pragma unroll
    for (int peer = 0; peer < ranks; ++peer)
      if (group.is_peer(peer))
        store_packets(group.packets_for(peer) + packets(half), __float_as_uint(first[half]),
                      __float_as_uint(next[half]), group.epoch);
  }
  float total[halves][2];
#pragma unroll
  for (int peer = 0; peer < ranks; ++peer) {
    u32 words[halves][2];
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      words[half][0] = __float_as_uint(first[half]);
      words[half][1] = __float_as_uint(next[half]);
    }
    if (group.is_peer(peer)) {
      const char* const from = group.packets_of(peer);
      group.wait(peer, [&] {  // the loads of both rows are in flight together
        bool there = true;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          if (!exists(half)) continue;
          const bool own =
              load_packets(from + packets(half), group.epoch, words[half][0], words[half][1]);
          there = there && own;
        }
        return there;
      });
    }
#pragma unroll
    for (int half = 0; half < halves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float summand = __uint_as_float(words[half][i]);
        total[half][i] = peer == 0 ? summand : total[half][i] + summand;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < halves; ++half) {
    if (!exists(half) || group.failed) continue;
    if constexpr (adds)
      add_pair<T>(total[half][0], total[half][1],
                  *reinterpret_cast<const u32*>(static_cast<const T*>(p.residual) + place(half)));
    *reinterpret_cast<u32*>(static_cast<T*>(p.y) + place(half)) =
        pack<T>(total[half][0], total[half][1]);
  }
}

template <class T, bool adds, int ranks, summed_product_config config>
__global__ void __launch_bounds__(config.threads())
    summed_product(const __grid_constant__ summed_product_params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr stream_shape shape = config.shape();
  constexpr int n_fragments = shape.n_fragments(), warps = config.warps;
  using stream = weight_stream<T, T, shape, load_path::read_only, stream_bounds::last_group>;
  using reduction = warp_reduction<shape, warps>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();

  if (blockIdx.x == gridDim.x - 1) {
    if (blockIdx.y != 0) return;
    wait_for_dependencies();
    peer_group<ranks> group(p.table, p.loopback, p.tag);
    if (threadIdx.x < 32) group.greet(static_cast<int>(threadIdx.x));
    __syncthreads();
    if (threadIdx.x == 0) group.finish();
    return;
  }

  const int first_row = static_cast<int>(blockIdx.x) * config.rows;
  const int lane_k = lane % 4 * stream::weight::elements;
  stream weights;
#pragma unroll
  for (int j = 0; j < n_fragments; ++j) {
    const int row = smaller(first_row + j * 8 + lane / 4, p.n - 1);
    weights.weights[0][j] = static_cast<const T*>(p.b) + static_cast<i64>(row) * p.k + lane_k;
  }
#pragma unroll
  for (int half = 0; half < shape.halves(); ++half) {
    const int token = lane / 4 + half * 8;
    weights.exists[half] = token < p.m;
    weights.rows[half] = static_cast<const T*>(p.a) + static_cast<i64>(token) * p.k + lane_k;
  }
  weights.left = larger(p.k - lane_k, 0);

  const u32 groups = ceil_div(static_cast<u32>(p.k), static_cast<u32>(stream::k_group));
  const u32 split = blockIdx.y, split_k = p.split_k;
  // Weights are complete before the launch; the kernel before may still write the tokens.
  weights.run_groups(
      groups * split / split_k + warp, groups * (split + 1) / split_k, warps,
      static_cast<u32>(p.k) / stream::k_group, [] { wait_for_dependencies(); },
      [](typename stream::token_group&, u32, bool) {});
  wait_for_dependencies();  // a warp without a group too
  peer_group<ranks> group(p.table, p.loopback, p.tag);
  group.require_room(static_cast<u64>(p.m) * ((p.n + 7) / 8) * 64, group.packet_bytes);

  float4 total[1] = {};
  reduction::store(reinterpret_cast<float*>(shared), weights.sum, warp, lane);
  __syncthreads();
  if (warp < n_fragments) {
    float sum[1][4] = {};
    reduction::add(sum, reinterpret_cast<float*>(shared), warp, lane);
    total[0] = {sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
  }
  if (p.split_k > 1) {
    __syncthreads();  // the warps' accumulators are read
    if (!reduce_through_cluster<n_fragments * 32>(total, warp < n_fragments, p.split_k, shared))
      return;
  }
  if (warp < n_fragments)
    store_sums<T, adds, ranks, shape.halves()>(p, group, lane / 4,
                                               first_row + warp * 8 + lane % 4 * 2, total[0]);
  __syncthreads();
  if (threadIdx.x == 0) group.finish();
}

}  // namespace fftune
