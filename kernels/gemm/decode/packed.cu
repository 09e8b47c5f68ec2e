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
// Rows of A in groups that are sorted before, such as those of experts: each group has its own rows
// of the stacked B. Blocks are then of the groups that have rows, in turn, and begin with the wait
// where the launch before may be the one that sorts (groups_ready). A group of more than `tokens`
// rows takes several passes over its weights.
//
// A header of another layout, or of another size, makes C NaN.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/packed_stream.cuh"
#include "gemm/decode/store_pair.cuh"
#include "gemm/packed/group_rows.cuh"
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
  using terms = column_terms<form>;
  static constexpr bool grouped = form.groups == grouping::rows;
  static constexpr bool counts = grouped && form.ready == groups_ready::counted;

  struct warp_place {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int k_warp = warp % k_warps;
    int first_tile;
    __device__ __forceinline__ explicit warp_place(int block)
        : first_tile((block * config.row_warps + warp / k_warps) * tiles) {}
  };

  // The group that is number `slot` of those that have rows; none: its count is 0. All lanes of a
  // warp.
  static __device__ __forceinline__ group_rows find_group(const gemm_params& p, int slot) {
    const int lane = threadIdx.x % 32;
    for (int begin = 0; begin < p.groups; begin += 32) {
      const int group = begin + lane;
      const int first = group < p.groups ? p.offsets[group] : 0;
      const int count = group < p.groups ? p.offsets[group + 1] - first : 0;
      u32 found = __ballot_sync(~0u, count > 0);
      const int here = __popc(found);
      if (slot >= here) {
        slot -= here;
        continue;
      }
      for (; slot > 0; --slot) found &= found - 1;
      const int from = __ffs(found) - 1;
      return {begin + from, __shfl_sync(~0u, first, from), __shfl_sync(~0u, count, from)};
    }
    return {0, 0, 0};
  }

  // Where this lane of the stream reads. Tiles past the last one are never stored: the last one is
  // read again.
  static __device__ __forceinline__ void place(stream& weights, const packed_params& p,
                                               const warp_place& own, int group) {
    const int last = static_cast<int>(packed_tiles(p.gemm.n)) - 1;
    const i64 of_group = static_cast<i64>(group) * (last + 1);
    const i64 k_blocks = packed_k_blocks(p.gemm.k), groups = p.groups;
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const i64 at = of_group + smaller(own.first_tile + tile, last);
        weights.blocks[operand][tile] = static_cast<const u8*>(p.gemm.b[0][operand]) +
                                        (1 + at * k_blocks * format.parts()) * packed_part_bytes +
                                        own.lane * 16;
        const i64 scale = (at * groups + format.first_group()) * packed_rows + own.lane / 4 * 2;
        weights.scales[operand][tile] =
            static_cast<const typename codes::scale*>(p.scales[operand]) + scale;
        weights.zeros[operand][tile] = p.zeros[operand] + scale;
      }
    }
  }

  // Copies the tokens of a stage whose first block of k is `first`; `places`: their rows of A, if
  // these are grouped.
  static __device__ __forceinline__ void copy_tokens(const gemm_params& p, u32 shared, int first,
                                                     int tokens, const int* places) {
    constexpr int chunks = config.stage_k_blocks() * 8;  // of a token
    const int count = tokens * chunks;
    for (int i = threadIdx.x; i < count; i += config.threads()) {
      const int token = i / chunks, chunk = i % chunks;
      const int k = first * packed_k + chunk * 8;
      const u32 to =
          shared + (chunk / 8 * config.tokens + token) * 128 + ((chunk % 8) ^ (token % 8)) * 16;
      const bool valid = k < p.k;
      const i64 row = grouped ? places[token] : token;
      copy_async(to, static_cast<const T*>(p.a[0]) + row * p.k + (valid ? k : 0), valid);
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
    if constexpr (grouped && form.ready == groups_ready::awaited) wait_for_dependencies();
    if constexpr (!counts) launch_dependents();
    if constexpr (grouped) {
      __shared__ int places[config.tokens];
      const int row_blocks = ceil_div(p.gemm.n, config.rows());
      const int block = static_cast<int>(blockIdx.x), slot = block / row_blocks;
      counted_rows all;
      if constexpr (counts) {
        all = find_counted_group(p.gemm, slot);
      } else {
        all.rows = find_group(p.gemm, slot);
      }
      const warp_place own(block % row_blocks);
      for (int from = 0; from < all.rows.count; from += config.tokens) {
        const group_rows rows{all.rows.index, all.rows.first + from,
                              smaller(all.rows.count - from, config.tokens)};
        __syncthreads();  // the pass before has read shared memory
        if constexpr (counts) {
          const int i = __popc(all.members & ((1u << own.lane) - 1)) - from;
          const bool is_member = all.members >> own.lane & 1;
          if (own.warp == 0 && is_member && i >= 0 && i < rows.count)
            places[i] = own.lane / p.choices;
        } else {
          for (int i = threadIdx.x; i < rows.count; i += config.threads()) {
            places[i] = form.a_sorted ? rows.first + i : p.gemm.permutation[rows.first + i];
          }
        }
        __syncthreads();
        run_pass(p, shared, own, rows, places);
      }
      wait_for_dependencies();  // without rows, too: a launch is complete after the one before
    } else {
      run_pass(p, shared, warp_place(static_cast<int>(blockIdx.x)), {.count = p.gemm.m}, nullptr);
    }
  }

 private:
  static __device__ __forceinline__ void run_pass(const packed_params& p, unsigned char* shared,
                                                  const warp_place& own, const group_rows& rows,
                                                  const int* places) {
    const u32 tokens = shared_address(shared);
    stream weights;
    place(weights, p, own, rows.index);

    // The share of k: stages [first, last).
    constexpr int stage_blocks = config.stage_k_blocks();
    const int k_blocks = static_cast<int>(packed_k_blocks(p.gemm.k));
    const int all = ceil_div(k_blocks, stage_blocks), split = static_cast<int>(blockIdx.y);
    const int first = all * split / p.gemm.split_k, last = all * (split + 1) / p.gemm.split_k;
    const auto run_of = [&](int stage) {
      return stage * stage_blocks + own.k_warp * config.unroll;
    };

    bool known = true;
    vector16 headers[operands];
#pragma unroll
    for (int operand = 0; operand < operands; ++operand)
      headers[operand] = load_cached(p.gemm.b[0][operand]);
    if (first < last) weights.load_run(run_of(first), p.gemm.k);
    weights.load_row_scales();
    if (own.lane < tiles)
      terms::prefetch(p.gemm, rows.index, (own.first_tile + own.lane) * packed_rows);
    clear_tokens(rows.count, tokens);
    if constexpr (!grouped || form.ready == groups_ready::settled) wait_for_dependencies();
    const auto copy = [&](int slot, int stage) {
      copy_tokens(p.gemm, tokens + slot * config.stage_bytes(), stage * stage_blocks, rows.count,
                  places);
    };
#pragma unroll
    for (int i = 0; i < stages - 1; ++i) {
      if (first + i < last) copy(i, first + i);
      copy_async_commit();
    }
    const i64 all_rows = static_cast<i64>(p.gemm.n) * (grouped ? p.gemm.groups : 1);
#pragma unroll
    for (int operand = 0; operand < operands; ++operand)
      known = known && is_packed(headers[operand], format.code, all_rows, p.gemm.k);
    int slot = 0;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      copy_async_wait<stages - 2>();
      __syncthreads();
      const int free = slot == 0 ? stages - 1 : slot - 1;
      if (stage + stages - 1 < last) copy(free, stage + stages - 1);
      copy_async_commit();
      weights.multiply(
          tokens + slot * config.stage_bytes() + own.k_warp * config.unroll * config.tokens * 128,
          run_of(stage + 1), stage + 1 < last ? p.gemm.k : 0);
      slot = slot == stages - 1 ? 0 : slot + 1;
      // The launch behind reads what the one before this one writes: the sorted order.
      if (counts && stage == first + 1) wait_and_launch_dependents();
    }
    if constexpr (counts) wait_for_dependencies();
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
      const terms of_columns(p.gemm, rows.index, column);
      store_token(p.gemm, rows, of_columns, token, column, value[0], value[2]);
      store_token(p.gemm, rows, of_columns, token + 1, column, value[1], value[3]);
    }
  }

  // Two neighbouring columns of a token of the pass, with what belongs to its row and group.
  static __device__ __forceinline__ void store_token(const gemm_params& p, const group_rows& rows,
                                                     const terms& of_columns, int token, int column,
                                                     float (&first)[operands],
                                                     float (&second)[operands]) {
    if constexpr (grouped) {
      if (token >= rows.count || column >= p.n) return;
      of_columns.apply(p, rows.first + token, first, second);
    }
    store_pair<form>(p, rows.first + token, column, first, second);
  }
};

// Grid: (ceil(n / rows) * groups that may have rows, split_k), with clusters of (1, split_k) where
// there are no split_counters. Block: config.threads(). Shared memory:
// config.shared_bytes(operands).
template <gemm_form form, packed_form format, packed_config config>
__global__ void __launch_bounds__(config.threads())
    packed_decode(const __grid_constant__ packed_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  packed_kernel<form, format, config>::run(p, shared_memory);
}

}  // namespace fftune
