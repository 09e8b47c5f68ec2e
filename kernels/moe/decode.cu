// A mixture of experts for few tokens, in two launches at the speed of reading the chosen experts'
// weights once: mma.sync with weights that go from memory straight into registers, as in the decode
// engine (gemm/decode).
//
//   chosen_gate_up    route and gate_up. Block (i, s) has `rows` hidden features of the s-th expert
//                     that any token chose; one more row of blocks writes the sorted order.
//   chosen_down       down and combine. A block has `rows` features of y of all tokens. Its warps
//                     take the chosen experts in turn, or parts of their k, and leave each choice's
//                     row in shared memory; then the block adds up each token's choices in order.
//
// Both are long: a stream of weights, its scales and what becomes of its sums share a dozen values
// of a warp. As functions they would take all of these, and the compiler would order them anew.
//
// No kernel sorts the choices first. There are most_choices of them at most, so every block reads
// all ids and marks the experts among them, and each warp finds the rows of an expert by ballots.
//
//   shared memory  ids [choices]; marks, a bit an expert; lists [warps][tokens], the rows that a
//                  warp computes; then
//                  chosen_gate_up: accumulators of the warps (warp_reduction)
//                  chosen_down:    rows [k_parts][choices][rows] in f32
//   barriers       __syncthreads before the ids are read, before the marks are read, and before the
//                  warps' results are added up
//
// Elements of fp8 become fp16 in registers, which represents all of their values. Where a scale is
// for 128 elements of k, the products of each 64 are scaled and added up in f32. A scale of hidden
// is for 128 of its columns: the blocks that compute them form a cluster and read each other's
// maxima.
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream.cuh"
#include "moe/decode_config.cuh"

namespace fftune {

namespace {

// The choices and the experts among them, in shared memory.
struct chosen_experts {
  struct storage {
    int ids[chosen_config::most_choices];
    u32 marks[chosen_config::most_experts / 32];
  };
  storage& shared;
  int choices, top_k, shared_experts;

  // The token of a choice, and the place of its weight, negative where it has the weight 1.
  __device__ __forceinline__ int token(int choice) const {
    return choice / (top_k + shared_experts);
  }
  __device__ __forceinline__ int place_of_weight(int choice) const {
    const int own = token(choice), rank = choice - own * (top_k + shared_experts);
    return rank < top_k ? own * top_k + rank : -1;
  }

  // All threads of the block. Every token has chosen the shared experts, after its ids.
  template <int threads>
  static __device__ __forceinline__ chosen_experts build(storage& shared, const int* ids,
                                                         int choices, int top_k, int shared_experts,
                                                         int experts) {
    const chosen_experts self{shared, choices, top_k, shared_experts};
    if (threadIdx.x < chosen_config::most_experts / 32) shared.marks[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += threads) {
      const int place = self.place_of_weight(i);
      const int rank = i - self.token(i) * (top_k + shared_experts);
      const int id = place >= 0 ? ids[place] : experts + rank - top_k;
      const bool is_here = id >= 0 && (place < 0 || id < experts);
      shared.ids[i] = is_here ? id : -1;
      if (is_here) atomicOr(&shared.marks[id / 32], 1u << id % 32);
    }
    __syncthreads();
    return self;
  }

  // How many experts there are. All lanes of a warp, as below.
  __device__ __forceinline__ int count() const {
    return static_cast<int>(__reduce_add_sync(~0u, __popc(shared.marks[threadIdx.x % 32])));
  }
  // The expert that is number `index` among them.
  __device__ __forceinline__ int expert(int index) const {
    const int lane = threadIdx.x % 32;
    u32 marks = shared.marks[lane];
    int inclusive = __popc(marks);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    int rank = index - (inclusive - __popc(marks));
    const bool has = rank >= 0 && rank < __popc(marks);
    for (; has && rank > 0; --rank) marks &= marks - 1;
    const u32 found = __ballot_sync(~0u, has);
    const int place = lane * 32 + __ffs(marks) - 1;
    return __shfl_sync(~0u, place, __ffs(found) - 1);
  }
  // Rows of an expert: how many, and the sorted place of the first.
  struct group {
    int count, first;
  };
  // Lists the choices of rows [from, from + most) of the expert.
  __device__ __forceinline__ group list(int expert, int from, int most, int* rows) const {
    const int lane = threadIdx.x % 32;
    group found{0, 0};
    for (int begin = 0; begin < choices; begin += 32) {
      const int choice = begin + lane;
      const int id = choice < choices ? shared.ids[choice] : -1;
      const u32 own = __ballot_sync(~0u, id == expert);
      found.first += __popc(__ballot_sync(~0u, id >= 0 && id < expert));
      const int rank = found.count + __popc(own & ((1u << lane) - 1)) - from;
      if (id == expert && rank >= 0 && rank < most) rows[rank] = choice;
      found.count += __popc(own);
    }
    __syncwarp();
    return found;
  }
};

__device__ __forceinline__ int scale_blocks(int extent) {
  return ceil_div(extent, columns_of_scale);
}

// The type of what is no operand of a product.
template <class T>
using wide_of = typename choose_type<is_same<T, fp8>, bf16, T>::type;

// Loads of 16-bit weights stay in order. Expanding fp8 takes the registers that this costs.
template <class T, chosen_config config, int operands, bool by_block>
using chosen_stream =
    weight_stream<T, T, config.shape(operands),
                  is_same<T, fp8> ? load_path::read_only : load_path::in_order,
                  stream_bounds::every_load, by_block ? stream_scales::block : stream_scales::none>;

// The sorted order of the choices, as the stage route has it. A thread of a row of blocks takes an
// expert and a choice, and counts the rows before them: a warp that took one expert after the other
// was behind the weights of ten of 512 experts.
template <int threads>
__device__ __forceinline__ void write_order(const chosen_experts& chosen, int experts,
                                            const float* weights, int* offsets, int* tokens,
                                            int* places, float* row_weights) {
  const int thread = blockIdx.x * threads + threadIdx.x, all_threads = gridDim.x * threads;
  const int* const ids = chosen.shared.ids;
  // Rows of the experts below this one, and its own of the choices below `end`.
  const auto rows_before = [&](int expert, int end) {
    int rows = 0;
#pragma unroll 4
    for (int i = 0; i < chosen.choices; ++i) {
      rows += ids[i] >= 0 && (ids[i] < expert || (ids[i] == expert && i < end));
    }
    return rows;
  };
  for (int expert = thread; expert <= experts; expert += all_threads) {
    offsets[expert] = rows_before(expert, 0);
  }
  for (int choice = thread; choice < chosen.choices; choice += all_threads) {
    const bool is_here = ids[choice] >= 0;
    int row = rows_before(is_here ? ids[choice] : experts, choice);
    if (!is_here) {  // rows of no expert are the last
      for (int i = 0; i < choice; ++i) row += ids[i] < 0;
    }
    places[choice] = is_here ? row : -1;
    tokens[row] = is_here ? chosen.token(choice) : 0;
    if (row_weights != nullptr) {
      const int of_weight = chosen.place_of_weight(choice);
      row_weights[row] = !is_here ? 0.0f : of_weight < 0 ? 1.0f : weights[of_weight];
    }
  }
}

}  // namespace

// x [tokens, d], ids [tokens, top_k], w_gate and w_up [experts, h, d], or both the same tensor
// [experts, 2 h, d]. b_gate and b_up [experts, h] follow the same rule, or are null. Weights and
// row_weights are as in route.cu if the rows of x are weighed, else null. Offsets, tokens and
// places are as in the stage route. hidden [choices, h] is in the sorted order. Scales are those of
// moe.hpp, of w_gate and w_up apart or in one tensor as they are. Grid: (ceil(h / rows), experts
// that may be chosen + 1); if it computes scales of hidden, clusters of 128 / rows along x. Block:
// 32 · warps.
template <class T, class activation, chosen_config config>
__global__ void __launch_bounds__(config.warps * 32)
    chosen_gate_up(const T* x, const int* ids, const T* w_gate, const T* w_up, int* offsets,
                   int* tokens, int* places, T* hidden, const float* weights, float* row_weights,
                   const wide_of<T>* b_gate, const wide_of<T>* b_up, const float* x_scale,
                   const float* w_gate_scale, const float* w_up_scale, float* hidden_scale,
                   int choices, int top_k, int shared, int experts, int d, int h) {
  constexpr int threads = config.warps * 32, n_fragments = config.rows / 8;
  constexpr int halves = config.tokens / 8;
  constexpr chosen_scales scaled = config.scaled;
  constexpr bool quantises = scaled != chosen_scales::none;
  constexpr bool finds_scales = scaled == chosen_scales::token || scaled == chosen_scales::block;
  constexpr bool by_block = scaled == chosen_scales::block;
  using reduction = warp_reduction<config.shape(2), config.warps>;
  static_assert(config.k_parts == 1);
  __shared__ chosen_experts::storage storage;
  __shared__ int lists[config.warps][config.tokens];
  __shared__ float partial[config.shape(2).reduction_bytes(config.warps) / 4];
  __shared__ float largest[finds_scales ? config.tokens : 1][n_fragments];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_and_launch_dependents();
  const auto chosen = chosen_experts::build<threads>(storage, ids, choices, top_k, shared, experts);
  if (blockIdx.y + 1 == gridDim.y) {
    write_order<threads>(chosen, experts + shared, weights, offsets, tokens, places, row_weights);
    return;
  }
  const int index = blockIdx.y;
  if (index >= chosen.count()) return;
  const int expert = chosen.expert(index), first_row = blockIdx.x * config.rows;

  // Position of a row of an expert's gate and up among all rows; each expert has `extent` rows of a
  // matrix.
  struct row_of_both {
    i64 gate, up;
    __device__ __forceinline__ row_of_both(int expert, int row, int extent) {
      constexpr bool halves = config.packed == weights_of_both::halves;
      gate = static_cast<i64>(expert) * extent + row, up = gate;
      if constexpr (halves) gate += static_cast<i64>(expert) * extent, up = gate + extent;
      if constexpr (config.packed == weights_of_both::interleaved) gate *= 2, up = gate + 1;
    }
  };
  using stream = chosen_stream<T, config, 2, by_block>;
  for (int from = 0;; from += config.tokens) {
    const auto group = chosen.list(expert, from, config.tokens, lists[warp]);
    stream own;
    own.k = d;
#pragma unroll
    for (int fragment = 0; fragment < n_fragments; ++fragment) {
      const int row = smaller(first_row + fragment * 8 + lane / 4, h - 1);
      const row_of_both at(expert, row, h);
      own.weights[0][fragment] = w_gate + at.gate * d;
      own.weights[1][fragment] = w_up + at.up * d;
    }
    if constexpr (by_block) {
      const int block = smaller(first_row, h - 1) / columns_of_scale;
      const row_of_both at(expert, block, scale_blocks(h));
      own.weight_scales[0] = w_gate_scale + at.gate * scale_blocks(d);
      own.weight_scales[1] = w_up_scale + at.up * scale_blocks(d);
    }
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int rank = half * 8 + lane / 4;
      const bool exists = from + rank < group.count;
      const i64 token = exists ? chosen.token(lists[warp][rank]) : 0;
      own.exists[half] = exists;
      own.rows[half] = x + token * d;
      if constexpr (by_block) own.row_scales[half] = x_scale + token * scale_blocks(d);
    }
    own.run(warp * stream::k_group, d, config.warps * stream::k_group, [] {});
    reduction::store(partial, own.sum, warp, lane);
    __syncthreads();
    float product[halves][2] = {};
    const int column = first_row + warp * 8 + lane % 4 * 2;
    if (warp < n_fragments) {
      float total[2][4] = {};
      reduction::add(total, partial, warp, lane);
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        const int rank = from + half * 8 + lane / 4;
        if (rank < group.count && column < h) {
          const int choice = lists[warp][rank - from];
          float weight = 1;
          if (row_weights != nullptr) {
            const int of_weight = chosen.place_of_weight(choice);
            weight = of_weight < 0 ? 1.0f : weights[of_weight];
          }
          if constexpr (scaled == chosen_scales::tensor) weight *= *x_scale;
          if constexpr (scaled == chosen_scales::token) weight *= x_scale[chosen.token(choice)];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float gate = total[0][half * 2 + i] * weight, up = total[1][half * 2 + i] * weight;
            if constexpr (scaled == chosen_scales::tensor) {
              const row_of_both at(expert, 0, 1);
              gate *= w_gate_scale[at.gate], up *= w_up_scale[at.up];
            }
            const row_of_both at(expert, column + i, h);
            if constexpr (scaled == chosen_scales::token) {
              gate *= w_gate_scale[at.gate], up *= w_up_scale[at.up];
            }
            if (b_gate != nullptr) {
              gate += to_float(b_gate[at.gate]);
              up += to_float(b_up[at.up]);
            }
            product[half][i] = gated_product<activation>(gate, up);
          }
        }
      }
    }
    float scale[halves] = {};
    if constexpr (finds_scales) {
      if (warp < n_fragments) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          float own_largest =
              larger_magnitude::join(fabsf(product[half][0]), fabsf(product[half][1]));
#pragma unroll
          for (int distance = 1; distance < 4; distance *= 2) {
            own_largest =
                larger_magnitude::join(own_largest, __shfl_xor_sync(~0u, own_largest, distance));
          }
          if (lane % 4 == 0) largest[half * 8 + lane / 4][warp] = own_largest;
        }
      }
      cluster_barrier();
      constexpr u32 ctas = columns_of_scale / config.rows;
      if (warp < n_fragments) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          float of_all = 0;
          const u32 own_place = shared_address(largest[half * 8 + lane / 4]);
#pragma unroll
          for (u32 cta = 0; cta < ctas; ++cta) {
#pragma unroll
            for (u32 fragment = 0; fragment < n_fragments; ++fragment) {
              of_all = larger_magnitude::join(
                  of_all, __uint_as_float(
                              load_cluster_word(cluster_address(own_place + fragment * 4, cta))));
            }
          }
          scale[half] = scale_of<fp8>(of_all);
        }
      }
    } else if constexpr (quantises) {
#pragma unroll
      for (int half = 0; half < halves; ++half) scale[half] = *hidden_scale;
    }
    if (warp < n_fragments) {
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        const int rank = from + half * 8 + lane / 4;
        if (rank < group.count && column < h) {
          const i64 row = group.first + rank;
          if constexpr (quantises) {
            *reinterpret_cast<u16*>(hidden + row * h + column) =
                static_cast<u16>(quantised_pair<fp8>(product[half][0] / scale[half],
                                                     product[half][1] / scale[half]));
            if (finds_scales && column % columns_of_scale == 0) {
              hidden_scale[row * scale_blocks(h) + column / columns_of_scale] = scale[half];
            }
          } else {
            *reinterpret_cast<u32*>(hidden + row * h + column) =
                pack<T>(product[half][0], product[half][1]);
          }
        }
      }
    }
    // A block may neither leave nor write again while others read its numbers.
    if constexpr (finds_scales) cluster_barrier();
    if (from + config.tokens >= group.count) return;
    __syncthreads();
  }
}

// hidden [choices, h] in the sorted order, w_down [experts, d, h], b_down [experts, d] or null,
// weights [tokens, top_k] or null, residual and y [tokens, d], the former or null. Grid: ceil(d /
// rows). Block: 32 · warps. Dynamic shared memory: rows in f32.
template <class T, chosen_config config>
__global__ void __launch_bounds__(config.warps * 32)
    chosen_down(const T* hidden, const int* ids, const float* weights, const T* w_down,
                const wide_of<T>* b_down, const wide_of<T>* residual, wide_of<T>* y,
                const float* hidden_scale, const float* w_down_scale, int tokens, int choices,
                int top_k, int shared, int experts, int d, int h) {
  constexpr int threads = config.warps * 32, n_fragments = config.rows / 8;
  using W = wide_of<T>;
  constexpr chosen_scales scaled = config.scaled;
  constexpr bool by_block = scaled == chosen_scales::token || scaled == chosen_scales::block;
  __shared__ chosen_experts::storage storage;
  __shared__ int lists[config.warps][config.tokens];
  extern __shared__ float products[];  // [k_parts][choices][rows]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  const auto chosen = chosen_experts::build<threads>(storage, ids, choices, top_k, shared, experts);
  const int units = chosen.count() * config.k_parts, first_row = blockIdx.x * config.rows;
  if constexpr (config.l2_prefetch != 0) {
    // The launch before may leave the memory idle: prefetch every weight of this block.
    const int own_rows = smaller(config.rows, d - first_row);
    for (int index = warp; index < chosen.count(); index += config.warps) {
      const i64 row = static_cast<i64>(chosen.expert(index)) * d + first_row;
      if (lane == 0) prefetch_l2(w_down + row * h, own_rows * h * static_cast<int>(sizeof(T)));
    }
  }
  bool waited = false;
  const auto ready = [&waited] {
    if (!waited) wait_for_dependencies();
    waited = true;
  };

  using stream = chosen_stream<T, config, 1, by_block>;
  const int groups = ceil_div(h, stream::k_group);
  for (int unit = warp; unit < units; unit += config.warps) {
    const int expert = chosen.expert(unit / config.k_parts), part = unit % config.k_parts;
    for (int from = 0;; from += config.tokens) {
      __syncwarp();  // the list of the rows before is read
      const auto group = chosen.list(expert, from, config.tokens, lists[warp]);
      stream own;
      own.k = h;
#pragma unroll
      for (int fragment = 0; fragment < n_fragments; ++fragment) {
        const int row = smaller(first_row + fragment * 8 + lane / 4, d - 1);
        own.weights[0][fragment] = w_down + (static_cast<i64>(expert) * d + row) * h;
      }
      if constexpr (by_block) {
        const i64 block = static_cast<i64>(expert) * scale_blocks(d) + first_row / columns_of_scale;
        own.weight_scales[0] =
            scaled == chosen_scales::block ? w_down_scale + block * scale_blocks(h) : nullptr;
      }
#pragma unroll
      for (int half = 0; half < config.tokens / 8; ++half) {
        const int rank = from + half * 8 + lane / 4;
        const i64 row = group.first + rank;
        own.exists[half] = rank < group.count;
        own.rows[half] = hidden + row * h;
        if constexpr (by_block) own.row_scales[half] = hidden_scale + row * scale_blocks(h);
      }
      own.run(groups * part / config.k_parts * stream::k_group,
              smaller(groups * (part + 1) / config.k_parts * stream::k_group, h), stream::k_group,
              ready);
#pragma unroll
      for (int half = 0; half < config.tokens / 8; ++half) {
        const int rank = half * 8 + lane / 4;
        if (from + rank < group.count) {
          float* const to = products +
                            (static_cast<i64>(part) * choices + lists[warp][rank]) * config.rows +
                            lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < 2 * n_fragments; ++i) {
            const int own_column = i / 2 * 8 + i % 2;
            float factor = 1;
            if constexpr (scaled == chosen_scales::tensor) {
              factor = *hidden_scale * w_down_scale[expert];
            } else if constexpr (scaled == chosen_scales::token) {
              const int row = smaller(first_row + lane % 4 * 2 + own_column, d - 1);
              factor = w_down_scale[static_cast<i64>(expert) * d + row];
            }
            to[own_column] = own.sum[0][i / 2][half * 2 + i % 2] * factor;
          }
        }
      }
      if (from + config.tokens >= group.count) break;
    }
  }
  ready();  // also a warp without a unit stores only when the launches before are complete
  __syncthreads();

  constexpr int pairs = config.rows / 2;  // of columns
  for (int i = threadIdx.x; i < tokens * pairs; i += threads) {
    const int token = i / pairs, column = i % pairs * 2;
    if (first_row + column >= d) continue;
    float low = 0, high = 0;
    if (residual != nullptr) {
      unpack<W>(*reinterpret_cast<const u32*>(residual + static_cast<i64>(token) * d + first_row +
                                              column),
                low, high);
    }
    const int choices_of_token = top_k + shared;
    for (int choice = token * choices_of_token; choice < (token + 1) * choices_of_token; ++choice) {
      const int expert = storage.ids[choice];
      if (expert < 0) continue;
      float first = 0, second = 0;
      if (b_down != nullptr) {
        const W* const bias = b_down + static_cast<i64>(expert) * d + first_row + column;
        first = to_float(bias[0]), second = to_float(bias[1]);
      }
#pragma unroll
      for (int part = 0; part < config.k_parts; ++part) {
        const float* const from =
            products + (static_cast<i64>(part) * choices + choice) * config.rows + column;
        first += from[0];
        second += from[1];
      }
      const int of_weight = weights == nullptr ? -1 : chosen.place_of_weight(choice);
      const float weight = of_weight < 0 ? 1.0f : weights[of_weight];
      low += weight * first;
      high += weight * second;
    }
    *reinterpret_cast<u32*>(y + static_cast<i64>(token) * d + first_row + column) =
        pack<W>(low, high);
  }
}

}  // namespace fftune
