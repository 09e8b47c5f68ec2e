// The decode engine for packed weights: C = epilogue(A B^T) for up to 64 rows of A and a B of
// packed codes with scales (gemm/packed/layout.cuh), sm_80 and newer, at the speed of reading B
// once.
//
// A block has row_warps * tiles * 16 rows of each B; its k_warps share k, and so do the blocks of
// split_k (blockIdx.y). Weights go from memory straight into registers, where each word becomes one
// MMA's operand A (decode/packed_stream.cuh). Tokens are the operand B, which all warps read from
// shared memory:
//
//        k ->        |      stage 0       |      stage 1       | ...    64 * unroll of k each:
//   rows of B        | k warp 0 | k warp 1| k warp 0 | k warp 1|        a run
//
//   registers        a warp's next run of codes and scales, in flight while this one is multiplied
//   shared memory    tokens [stages][blocks of k][tokens][128 bytes], chunks of 16 bytes swizzled;
//                    then the accumulators of the k warps, and those of split-K
//   barriers         one __syncthreads a stage: the tokens of it are there, and those of the stage
//                    before are read; then as in decode/gemm.cu
//   dependencies     the first run of weights is loaded before griddepcontrol.wait, tokens after it
//
// A header of another layout, or of another size, makes C NaN.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/packed_stream.cuh"
#include "gemm/decode/store_pair.cuh"
#include "gemm/packed/params.cuh"
#include "gemm/split_k.cuh"

namespace fftune {

template <gemm_form form, packed_form format, packed_config config>
class packed_kernel {
  using T = element_type<form.ab>;
  static constexpr int operands = form.b_operands(), tiles = config.tiles;
  static constexpr int n_fragments = config.n_fragments(), k_warps = config.k_warps;
  static constexpr int own_vectors = config.own_vectors(), stages = config.stages;
  using codes = packed_codes<T, format.code>;
  using stream = packed_stream<T, format, config, operands>;

  struct warp_place {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int k_warp = warp % k_warps;
    int first_tile = (static_cast<int>(blockIdx.x) * config.row_warps + warp / k_warps) * tiles;
  };

  // Where this lane of the stream reads. Tiles past the last one are never stored: the last one is
  // read again.
  static __device__ __forceinline__ void place(stream& weights, const packed_params& p,
                                               const warp_place& own) {
    const int last = static_cast<int>(packed_tiles(p.gemm.n)) - 1;
    const i64 k_blocks = packed_k_blocks(p.gemm.k), groups = p.groups;
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const i64 at = smaller(own.first_tile + tile, last);
        weights.blocks[operand][tile] = static_cast<const u8*>(p.gemm.b[0][operand]) +
                                        (1 + at * k_blocks * format.parts()) * packed_part_bytes +
                                        own.lane * 16;
        const i64 scale = at * groups * packed_rows + own.lane / 4 * 2;
        weights.scales[operand][tile] =
            static_cast<const typename codes::scale*>(p.scales[operand]) + scale;
        weights.zeros[operand][tile] = p.zeros[operand] + scale;
      }
    }
  }

  // Copies the tokens of a stage whose first block of k is `first`.
  static __device__ __forceinline__ void copy_tokens(const gemm_params& p, u32 shared, int first) {
    constexpr int chunks = config.stage_k_blocks() * 8;  // of a token
    const int count = p.m * chunks;
    for (int i = threadIdx.x; i < count; i += config.threads()) {
      const int token = i / chunks, chunk = i % chunks;
      const int k = first * packed_k + chunk * 8;
      const u32 to =
          shared + (chunk / 8 * config.tokens + token) * 128 + ((chunk % 8) ^ (token % 8)) * 16;
      const bool valid = k < p.k;
      copy_async(to,
                 static_cast<const T*>(p.a[0]) + static_cast<i64>(token) * p.k + (valid ? k : 0),
                 valid);
    }
  }
  // Tokens that there are not: zeros, in all stages.
  static __device__ __forceinline__ void clear_tokens(int m, u32 shared) {
    constexpr int rows = stages * config.stage_k_blocks() * config.tokens;
    for (int i = threadIdx.x; i < rows * 8; i += config.threads()) {
      if (i / 8 % config.tokens >= m) store_shared(shared + i * 16, float4{});
    }
  }

  // Adds up the accumulators of the k warps, in order; each has its share of the vectors.
  static __device__ __forceinline__ void reduce_k_warps(const stream& weights,
                                                        float4 (&total)[operands * own_vectors],
                                                        float* shared, const warp_place& own) {
    constexpr int vectors = config.vectors();
    if constexpr (k_warps == 1) {
#pragma unroll
      for (int i = 0; i < operands * vectors; ++i) {
        const float(&sum)[4] = weights.sum[i / vectors][i % vectors / n_fragments][i % n_fragments];
        total[i] = {sum[0], sum[1], sum[2], sum[3]};
      }
    } else {
      const auto place = [&](int warp, int operand, int vector) {
        return reinterpret_cast<float4*>(shared) +
               ((warp * operands + operand) * vectors + vector) * 32 + own.lane;
      };
#pragma unroll
      for (int i = 0; i < operands * vectors; ++i) {
        const float(&sum)[4] = weights.sum[i / vectors][i % vectors / n_fragments][i % n_fragments];
        *place(own.warp, i / vectors, i % vectors) = {sum[0], sum[1], sum[2], sum[3]};
      }
      __syncthreads();
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int i = 0; i < own_vectors; ++i) {
          const int vector = own.k_warp + i * k_warps;
          if (vector >= vectors) continue;
#pragma unroll
          for (int other = 0; other < k_warps; ++other) {
            add(total[operand * own_vectors + i],
                *place(own.warp - own.k_warp + other, operand, vector));
          }
        }
      }
    }
  }

 public:
  static __device__ __forceinline__ void run(const packed_params& p, unsigned char* shared) {
    const warp_place own;
    const u32 tokens = shared_address(shared);
    stream weights;
    place(weights, p, own);

    // The share of k: stages [first, last).
    constexpr int stage_blocks = config.stage_k_blocks();
    const int k_blocks = static_cast<int>(packed_k_blocks(p.gemm.k));
    const int all = ceil_div(k_blocks, stage_blocks), split = static_cast<int>(blockIdx.y);
    const int first = all * split / p.gemm.split_k, last = all * (split + 1) / p.gemm.split_k;
    const auto run_of = [&](int stage) {
      return stage * stage_blocks + own.k_warp * config.unroll;
    };

    launch_dependents();
    bool known = true;
    vector16 headers[operands];
#pragma unroll
    for (int operand = 0; operand < operands; ++operand)
      headers[operand] = load_cached(p.gemm.b[0][operand]);
    if (first < last) weights.load_run(run_of(first), p.gemm.k);
    weights.load_row_scales();
    clear_tokens(p.gemm.m, tokens);
#pragma unroll
    for (int operand = 0; operand < operands; ++operand)
      known = known && is_packed(headers[operand], format.code, p.gemm.n, p.gemm.k);
    wait_for_dependencies();
#pragma unroll
    for (int i = 0; i < stages - 1; ++i) {
      if (first + i < last)
        copy_tokens(p.gemm, tokens + i * config.stage_bytes(), (first + i) * stage_blocks);
      copy_async_commit();
    }
    int slot = 0;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      copy_async_wait<stages - 2>();
      __syncthreads();
      const int free = slot == 0 ? stages - 1 : slot - 1;
      if (stage + stages - 1 < last)
        copy_tokens(p.gemm, tokens + free * config.stage_bytes(),
                    (stage + stages - 1) * stage_blocks);
      copy_async_commit();
      weights.multiply(
          tokens + slot * config.stage_bytes() + own.k_warp * config.unroll * config.tokens * 128,
          run_of(stage + 1), stage + 1 < last ? p.gemm.k : 0);
      slot = slot == stages - 1 ? 0 : slot + 1;
    }
    weights.scale_rows();

    float4 total[operands * own_vectors] = {};
    __syncthreads();  // the last stage is read
    reduce_k_warps(weights, total, reinterpret_cast<float*>(shared), own);
    if (p.gemm.split_k > 1) {
      __syncthreads();  // the warps' accumulators are read
      if (!reduce_splits<config.threads()>(total, true, p.gemm.split_k,
                                           {p.gemm.split_counters, p.gemm.split_partials}, shared))
        return;
    }
#pragma unroll
    for (int i = 0; i < own_vectors; ++i) {
      const int vector = own.k_warp + i * k_warps;
      if (vector >= config.vectors()) continue;
      const int column = (own.first_tile + vector / n_fragments) * packed_rows + own.lane / 4 * 2;
      const int token = vector % n_fragments * 8 + own.lane % 4 * 2;
      float value[4][operands];
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
        const float4& sum = total[operand * own_vectors + i];
        const float nan = __uint_as_float(0x7fffffff);
        value[0][operand] = known ? sum.x : nan;
        value[1][operand] = known ? sum.y : nan;
        value[2][operand] = known ? sum.z : nan;
        value[3][operand] = known ? sum.w : nan;
      }
      store_pair<form>(p.gemm, token, column, value[0], value[2]);
      store_pair<form>(p.gemm, token + 1, column, value[1], value[3]);
    }
  }
};

// Grid: (ceil(n / rows), split_k), with clusters of (1, split_k) where there are no split_counters.
// Block: config.threads(). Shared memory: config.shared_bytes(operands).
template <gemm_form form, packed_form format, packed_config config>
__global__ void __launch_bounds__(config.threads())
    packed_decode(const __grid_constant__ packed_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  packed_kernel<form, format, config>::run(p, shared_memory);
}

}  // namespace fftune
