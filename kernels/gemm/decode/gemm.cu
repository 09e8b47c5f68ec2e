// The decode engine: C = epilogue(A B^T) for up to 16 rows of A, sm_80 and newer, at the speed of
// reading B once. K-major 16-bit matrices, 16-byte aligned rows and pointers.
//
// The weights B are most of the bytes, and each is needed once: decode/stream.cuh, with a block's
// rows of B and groups of k for its warps.
//
//   block          `rows` rows of each B; blockIdx.y: which share of k (split_k)
//
//        k ->   |  k group 0   |  k group 1   | ... |  k group `warps`  | ...
//     rows of B |  warp 0      |  warp 1      |     |  warp 0           |
//
//                  a warp has b_operands * rows / 8 * unroll loads of 16 bytes a thread in flight
//   shared memory  the warps' accumulators, [warp][operand][fragment][lane]; then the split-K
//                  reduction of a cluster
//   barriers       one __syncthreads before the warps' accumulators are added up, in order: warp i
//                  finishes fragment i
//   dependencies   B is complete before the launch and is loaded first; the launch before may
//                  still write A, so the first load of A waits (griddepcontrol)
//
// A norm of A's rows (norm_of_a): every block computes the deviations of all rows, which are few
// and in L2, and normalises the elements that it loads. Its warps share the rows; where there are
// more warps than rows, several warps share a row.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/config.cuh"
#include "gemm/decode/store_pair.cuh"
#include "gemm/decode/stream.cuh"
#include "gemm/head_row.cuh"
#include "gemm/split_k.cuh"

namespace fftune {

// The type of common/rows.cuh.
template <row_norm kind>
struct row_norm_of {
  using type = t5_norm;
};
template <>
struct row_norm_of<row_norm::llama> {
  using type = llama_norm;
};
template <>
struct row_norm_of<row_norm::gemma> {
  using type = gemma_norm;
};
template <row_norm kind>
using row_norm_type = typename row_norm_of<kind>::type;

template <gemm_form form, decode_config config>
class decode_kernel {
  using T = element_type<form.ab>;
  static constexpr int b_operands = form.b_operands();
  static constexpr int tokens = config.tokens, rows = config.rows, warps = config.warps;
  static constexpr int unroll = config.unroll, n_fragments = config.n_fragments();
  static constexpr int head_blocks = config.blocks_of_head(form);
  static constexpr bool widens = form.c != form.ab;  // C is float32
  static_assert(form.wide == form.ab && (!widens || (form.c == element::f32 && !form.is_qkv())));
  static_assert(tokens == 8 || tokens == 16);
  static_assert(rows % 8 == 0 && n_fragments <= warps, "one fragment a warp in the reduction");

  static constexpr stream_shape shape = config.shape(form.b_operands());
  using stream = weight_stream<T, T, shape, load_path::read_only, stream_bounds::last_group>;
  using reduction = warp_reduction<shape, warps>;
  static constexpr int k_group = stream::k_group;

 public:
  using params = typename choose_type<form.qkv.rotates(), rotating_params<form.qkv.rotary / 2>,
                                      plain_params>::type;

 private:
  static constexpr bool normalises = form.norm_of_a != row_norm::none;
  using a_norm = row_norm_type<form.norm_of_a>;

  // 1 / the root mean square of each of this lane's tokens.
  using lane_deviations = float[tokens / 8];

  static __device__ __forceinline__ void find_deviations(const gemm_params& p,
                                                         lane_deviations& deviations) {
    __shared__ float sums[tokens][warps];  // of squares: of a token and a share of its row
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int shares = 1;  // warps that have a row together
    while (2 * shares * p.m <= warps) shares *= 2;
    const int share = warp % shares;
    for (int token = warp / shares; token < p.m; token += warps / shares) {
      const T* const row = static_cast<const T*>(p.a[0]) + static_cast<i64>(token) * p.k;
      float squares = 0;
      const auto add = [&](const vector16& values) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float first, next;
          unpack<T>(values.word[word], first, next);
          squares += first * first;
          squares += next * next;
        }
      };
      // Loads in flight, beside those of weights: more than 2 spill on sm_80 where these are 16.
      constexpr int together = tokens == 16 ? 4 : 2;
      const int stride = shares * 256;
      int at = (share * 32 + lane) * 8;
      for (; at + (together - 1) * stride < p.k; at += together * stride) {
        vector16 values[together];
#pragma unroll
        for (int i = 0; i < together; ++i) values[i] = load_dependent(row + at + i * stride);
#pragma unroll
        for (int i = 0; i < together; ++i) add(values[i]);
      }
      for (; at < p.k; at += stride) add(load_dependent(row + at));
#pragma unroll
      for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(~0u, squares, other);
      if (lane == 0) sums[token][share] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < tokens / 8; ++half) {
      const int token = lane / 4 + half * 8;
      float squares = 0;
      if (token < p.m) {
        for (int i = 0; i < shares; ++i) squares += sums[token][i];
      }
      deviations[half] = reciprocal_deviation(squares, p.k, p.norm_epsilon);
    }
  }
  // Eight elements of a token as the norm would have written them.
  static __device__ __forceinline__ void normalise(vector16& values, const vector16& weights,
                                                   float deviation) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float first, next, weight, next_weight;
      unpack<T>(values.word[word], first, next);
      unpack<T>(weights.word[word], weight, next_weight);
      first = a_norm::template normalised<T>(first * deviation) * a_norm::factor(weight);
      next = a_norm::template normalised<T>(next * deviation) * a_norm::factor(next_weight);
      values.word[word] = pack<T>(first, next);
    }
  }

  // Which rows of B the block has; in a product of heads those of one head, or of a part of one.
  struct block_rows {
    int first;       // row of B; of the head if there is one
    int matrix = 0;  // of B, where q, k and v have weights of their own
    int part = 0;    // q, k or v
    int column = 0;  // of the part: the head's first
    int part_of_head = 0;

    static __device__ __forceinline__ block_rows own(const params& all) {
      const int block = static_cast<int>(blockIdx.x);
      if constexpr (!form.is_qkv()) {
        return {block * rows};
      } else {
        constexpr int dim = form.qkv.dim;
        const int first = block / head_blocks * dim, part = all.qkv.part_of(first);
        const int column = first - all.qkv.first_column(part);
        if (form.qkv.separate) return {column, part, part, column, block % head_blocks};
        return {first, 0, part, column, block % head_blocks};
      }
    }
    // Row `i` of the block's, as one of B.
    __device__ __forceinline__ int row(int i) const {
      return first + (form.is_qkv() ? config.feature_of(form, part_of_head, i) : i);
    }
  };

  // Where this lane of the stream reads.
  static __device__ __forceinline__ void place(stream& weights, const gemm_params& p,
                                               const block_rows& own, int lane) {
    const int lane_k = lane % 4 * stream::weight::elements;
#pragma unroll
    for (int j = 0; j < n_fragments; ++j) {
      const int row = own.row(j * 8 + lane / 4);
      const i64 at = static_cast<i64>(smaller(row, p.n - 1)) * p.k + lane_k;
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        const void* const b = form.is_qkv() ? p.b[own.matrix / 2][own.matrix % 2] : p.b[0][operand];
        weights.weights[operand][j] = static_cast<const T*>(b) + at;
      }
    }
#pragma unroll
    for (int half = 0; half < tokens / 8; ++half) {
      const int token = lane / 4 + half * 8;
      weights.exists[half] = token < p.m;
      weights.rows[half] = static_cast<const T*>(p.a[0]) + static_cast<i64>(token) * p.k + lane_k;
    }
    weights.left = larger(p.k - lane_k, 0);
  }

  // A thread asks L2 for a part of a row of weights: elements from `begin`, behind the first loads
  // of all warps, to `end`.
  static __device__ __forceinline__ void prefetch_weights(const gemm_params& p,
                                                          const block_rows& own, u32 begin,
                                                          u32 end) {
    if constexpr (config.l2_prefetch > 0) {
      end = smaller(end, static_cast<u32>(p.k));
      const int operand = threadIdx.x / rows, row = own.row(threadIdx.x % rows);
      if (operand >= b_operands || row >= p.n || begin >= end) return;
      const u32 bytes = (end - begin) * sizeof(T) / 100 * config.l2_prefetch / 16 * 16;
      if (bytes == 0) return;
      const void* const b = form.is_qkv() ? p.b[own.matrix / 2][own.matrix % 2] : p.b[0][operand];
      prefetch_l2(static_cast<const T*>(b) + static_cast<i64>(row) * p.k + begin, bytes);
    }
  }

  static __device__ __forceinline__ float2* turns_of(float* shared) {
    return reinterpret_cast<float2*>(shared + config.reduction_bytes(form) / 4);
  }
  // The cosines and sines of the block's pairs, of every token.
  static __device__ __forceinline__ void find_turns(const params& all, float* shared,
                                                    const block_rows& own) {
    if constexpr (form.qkv.rotates()) {
      constexpr int pairs = form.qkv.rotary / 2;
      if (own.part == 2) return;
      for (int at = threadIdx.x; at < all.gemm.m * (rows / 2); at += config.threads()) {
        const int pair = config.pair_of(form, own.part_of_head, at % (rows / 2));
        if (pair >= pairs) continue;
        turns_of(shared)[at] = turn_of<form.qkv.rotation, float>(all.angles, all.frequencies.of,
                                                                 at / (rows / 2), pair, pairs);
      }
    }
  }

  // The features of a head that this block has: through shared memory, a token a warp. Where a head
  // is normalised and has several blocks, they are a cluster, and add up their squares in its
  // order.
  static __device__ __forceinline__ void store_head(const params& all, const float4& total,
                                                    float* shared, const block_rows& own) {
    constexpr bool halves = form.qkv.rotation == head_rotation::halves;
    constexpr int distance = !halves ? 1 : head_blocks > 1 ? rows / 2 : form.qkv.rotary / 2;
    constexpr bool in_cluster = form.qkv.normalises && head_blocks > 1;
    static_assert((tokens * rows + tokens) * 4 <= config.reduction_bytes(form));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* const squares = shared + tokens * rows;  // of each token
    __syncthreads();                                // what shared memory holds is read
    if (warp < n_fragments) {
      float* const to = shared + lane / 4 * rows + warp * 8 + lane % 4 * 2;
      to[0] = total.x, to[1] = total.y;
      if constexpr (tokens == 16) to[8 * rows] = total.z, to[8 * rows + 1] = total.w;
    }
    __syncthreads();
    using row = head_row<form, rows, distance>;
    const auto feature_of = [&](int i) { return config.feature_of(form, own.part_of_head, i); };
    if constexpr (form.qkv.bias || form.qkv.normalises) {
      const void* const bias = all.qkv.bias[form.qkv.separate ? own.part : 0];
      for (int token = warp; token < all.gemm.m; token += warps) {
        const float sum = row{shared + token * rows}.add_bias(
            static_cast<const T*>(bias) + own.first, feature_of);
        if (lane == 0) squares[token] = sum;
      }
      if constexpr (in_cluster) {
        cluster_barrier();
      } else {
        __syncwarp();
      }
    }
    for (int token = warp; token < all.gemm.m; token += warps) {
      const row head{shared + token * rows};
      if (form.qkv.normalises && own.part < 2) {
        float sum = squares[token];
        if constexpr (in_cluster) {
          sum = 0;
#pragma unroll
          for (int block = 0; block < head_blocks; ++block) {
            sum += __uint_as_float(
                load_cluster_word(cluster_address(shared_address(squares + token), block)));
          }
        }
        head.normalise(static_cast<const T*>(all.qkv.norms[own.part]), sum, all.qkv.epsilon,
                       all.qkv.norm_offset, feature_of);
      }
      const i64 to_row = row_of_part<form>(all.qkv, own.part, token);
      if (to_row < 0) continue;
      T* const to = static_cast<T*>(all.gemm.c[own.part / 2][own.part % 2]) +
                    place_in_part<form>(all.qkv, own.part, to_row, own.column);
      const float2* const turns = turns_of(shared) + token * (rows / 2);
      head.store(to, own.part == 2, feature_of,
                 [&](int i) { return turns[config.own_pair(form, i)]; });
    }
    if constexpr (in_cluster) cluster_barrier();  // shared memory must outlive the reads
  }

 public:
  static __device__ __forceinline__ void run(const params& all, unsigned char* shared) {
    const gemm_params& p = all.gemm;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const block_rows own = block_rows::own(all);
    stream weights;
    place(weights, p, own, lane);
    const T* const norm = static_cast<const T*>(p.norm_of_a) + lane % 4 * stream::weight::elements;

    // In 32 bits: k < 2^31, k_group >= 32 and fewer than 32 splits.
    const u32 groups = ceil_div(static_cast<u32>(p.k), static_cast<u32>(k_group));
    const u32 split = blockIdx.y, split_k = p.split_k;
    const u32 first_group = groups * split / split_k, last_group = groups * (split + 1) / split_k;
    const u32 whole_groups = static_cast<u32>(p.k) / k_group;

    launch_dependents();
    // Weights are complete before the launch; the kernel before may still write the tokens. Every
    // warp comes here once, and while they find the norm's deviations their weights are on the way.
    bool waited = false;
    lane_deviations deviations = {};
    const auto tokens_ready = [&] {
      if (waited) return;
      prefetch_weights(p, own, (first_group + warps) * k_group, last_group * k_group);
      wait_for_dependencies();
      if constexpr (normalises) find_deviations(p, deviations);
      waited = true;
    };
    const auto normalise_tokens = [&](typename stream::token_group& tokens, u32 k, bool valid) {
      if constexpr (normalises) {
#pragma unroll
        for (int i = 0; i < stream::token_vectors; ++i) {
          const vector16 of_norm =
              valid ? load_cached(norm + k + i * stream::token::elements) : vector16{};
#pragma unroll
          for (int half = 0; half < shape.halves(); ++half) {
            normalise(tokens[half][i], of_norm, deviations[half]);
          }
        }
      }
    };
    weights.run_groups(first_group + warp, last_group, warps, whole_groups, tokens_ready,
                       normalise_tokens);
    tokens_ready();  // a warp without a group must not store before the kernels before are done

    if constexpr (form.is_qkv()) find_turns(all, reinterpret_cast<float*>(shared), own);
    float4 total[b_operands] = {};
    reduction::store(reinterpret_cast<float*>(shared), weights.sum, warp, lane);
    __syncthreads();
    if (warp < n_fragments) {
      float sum[b_operands][4] = {};
      reduction::add(sum, reinterpret_cast<float*>(shared), warp, lane);
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        total[operand] = {sum[operand][0], sum[operand][1], sum[operand][2], sum[operand][3]};
      }
    }
    if (p.split_k > 1) {
      __syncthreads();  // the warps' accumulators are read
      if (!reduce_splits<n_fragments * 32>(total, warp < n_fragments, p.split_k,
                                           {p.split_counters, p.split_partials}, shared)) {
        return;
      }
    }
    if constexpr (form.is_qkv()) {
      store_head(all, total[0], reinterpret_cast<float*>(shared), own);
      return;
    }
    if (warp < n_fragments) {
      const int column = own.first + warp * 8 + lane % 4 * 2;
      float value[4][b_operands];
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        value[0][operand] = total[operand].x;
        value[1][operand] = total[operand].y;
        value[2][operand] = total[operand].z;
        value[3][operand] = total[operand].w;
      }
      store_pair<form>(p, lane / 4, column, value[0], value[1]);
      if constexpr (tokens == 16) {
        store_pair<form>(p, lane / 4 + 8, column, value[2], value[3]);
      }
    }
  }
};

// Grid: (ceil(n / rows), split_k), with clusters of (1, split_k) where there are no split_counters,
// or of (blocks_of_head, 1) where these normalise a head.
// Block: config.threads(). Shared memory: config.shared_bytes(form).
template <gemm_form form, decode_config config>
__global__ void __launch_bounds__(config.threads())
    decode_gemm(const __grid_constant__ typename decode_kernel<form, config>::params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  decode_kernel<form, config>::run(p, shared_memory);
}

}  // namespace fftune
