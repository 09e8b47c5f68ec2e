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
// No kernel sorts the choices before: up to most_choices of them every block reads all ids, marks
// the experts that are among them, and each warp finds the rows of an expert by ballots.
//
//   shared memory  ids [choices]; marks, a bit an expert; lists [warps][tokens], the rows that a
//                  warp computes; then
//                  chosen_gate_up: accumulators [warps][2][n_fragments][32 lanes][values]
//                  chosen_down:    rows [k_parts][choices][rows] in f32
//   barriers       __syncthreads before the ids are read, before the marks are, and before what the
//                  warps computed is added up
#include "common/activation.cuh"
#include "common/dependency.cuh"
#include "common/mma.cuh"
#include "common/vector.cuh"

namespace fftune {

// How the weights of gate and up lie: as `packing` of gemm/form.cuh.
enum class weights_of_both { separate, halves, interleaved };

// tokens: rows of an expert that a pass over its weights serves, 8 or 16.
struct chosen_config {
  int tokens, rows, warps, unroll, k_parts;
};

namespace {

constexpr int most_choices = 1024, most_experts = 1024;

// The choices and the experts among them, in shared memory.
struct chosen_experts {
  struct storage {
    int ids[most_choices];
    u32 marks[most_experts / 32];
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
    if (threadIdx.x < most_experts / 32) shared.marks[threadIdx.x] = 0;
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

// A warp's MMAs of up to 16 rows with `operands` times n_fragments · 8 rows of weights.
template <class T, chosen_config config, int operands>
struct chosen_mma {
  static constexpr int n_fragments = config.rows / 8, unroll = config.unroll;
  static constexpr int halves = config.tokens / 8, k_group = 32 * unroll;
  using accumulators = float[operands][n_fragments][4];

  const T* weights[operands][n_fragments];  // of rows past the last one those of the last
  const T* rows[halves];                    // null: there is no such row
  int k;                                    // elements of a row
  accumulators sum = {};

  // Adds the products over [begin, end) of k, `stride` apart. Weights are loaded before the first
  // call of ready(), rows after it.
  template <class Ready>
  __device__ __forceinline__ void run(int begin, int end, int stride, const Ready& ready) {
    const int lane_k = static_cast<int>(threadIdx.x) % 4 * 8;
    for (int at = begin; at < end; at += stride) {
      vector16 b[operands][n_fragments][unroll], a[unroll][halves];
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        const int from = at + step * 32 + lane_k;
#pragma unroll
        for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
          for (int fragment = 0; fragment < n_fragments; ++fragment) {
            b[operand][fragment][step] =
                from < k ? load_streaming(weights[operand][fragment] + from) : vector16{};
          }
        }
      }
      ready();
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        const int from = at + step * 32 + lane_k;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          a[step][half] =
              from < k && rows[half] != nullptr ? load_dependent(rows[half] + from) : vector16{};
        }
      }
      __syncwarp();  // keeps the MMAs behind all of the loads
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
#pragma unroll
        for (int part = 0; part < 4; part += 2) {
          const vector16 &low = a[step][0], &high = a[step][halves - 1];
          const u32 left[4] = {low.word[part], halves == 2 ? high.word[part] : 0u,
                               low.word[part + 1], halves == 2 ? high.word[part + 1] : 0u};
#pragma unroll
          for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
            for (int fragment = 0; fragment < n_fragments; ++fragment) {
              const vector16& weight = b[operand][fragment][step];
              const u32 right[2] = {weight.word[part], weight.word[part + 1]};
              mma_16x8x16<T>(sum[operand][fragment], left, right);
            }
          }
        }
      }
    }
  }
};

// The sorted order of the choices, as the stage route has it: a warp takes every `warps`-th expert.
template <int warps>
__device__ __forceinline__ void write_order(const chosen_experts& chosen, int experts,
                                            const float* weights, int* offsets, int* tokens,
                                            int* places, float* row_weights) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int expert = warp; expert <= experts; expert += warps) {
    int first = 0;
    for (int begin = 0; begin < chosen.choices; begin += 32) {
      const int choice = begin + lane;
      const int id = choice < chosen.choices ? chosen.shared.ids[choice] : -1;
      first += __popc(__ballot_sync(~0u, id >= 0 && id < expert));
    }
    if (lane == 0) offsets[expert] = first;
    // Rows that no expert has.
    if (expert == experts) {
      for (int row = first + lane; row < chosen.choices; row += 32) {
        tokens[row] = 0;
        if (row_weights != nullptr) row_weights[row] = 0;
      }
      for (int choice = lane; choice < chosen.choices; choice += 32) {
        if (chosen.shared.ids[choice] < 0) places[choice] = -1;
      }
      continue;
    }
    int place = first;
    for (int begin = 0; begin < chosen.choices; begin += 32) {
      const int choice = begin + lane;
      const bool own = choice < chosen.choices && chosen.shared.ids[choice] == expert;
      const u32 found = __ballot_sync(~0u, own);
      if (own) {
        const int row = place + __popc(found & ((1u << lane) - 1));
        places[choice] = row;
        tokens[row] = chosen.token(choice);
        if (row_weights != nullptr) {
          const int of_weight = chosen.place_of_weight(choice);
          row_weights[row] = of_weight < 0 ? 1.0f : weights[of_weight];
        }
      }
      place += __popc(found);
    }
  }
}

}  // namespace

// x [tokens, d], ids [tokens, top_k], w_gate and w_up [experts, h, d], or both the same tensor
// [experts, 2 h, d]; b_gate and b_up [experts, h] the same way, or null; weights and row_weights as
// in route.cu, where the rows of x are weighed, else null; offsets, tokens and places as the
// stage route has them, hidden [choices, h] in the sorted order. Grid: (ceil(h / rows), experts
// that may be chosen + 1). Block: 32 · warps.
template <class T, class activation, chosen_config config, weights_of_both packed>
__global__ void __launch_bounds__(config.warps * 32)
    chosen_gate_up(const T* x, const int* ids, const T* w_gate, const T* w_up, int* offsets,
                   int* tokens, int* places, T* hidden, const float* weights, float* row_weights,
                   const T* b_gate, const T* b_up, int choices, int top_k, int shared, int experts,
                   int d, int h) {
  constexpr int threads = config.warps * 32, n_fragments = config.rows / 8;
  constexpr int values = config.tokens / 4;
  static_assert(n_fragments <= config.warps && config.k_parts == 1);
  __shared__ chosen_experts::storage storage;
  __shared__ int lists[config.warps][config.tokens];
  __shared__ float partial[config.warps][2][n_fragments][32][values];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_and_launch_dependents();
  const auto chosen = chosen_experts::build<threads>(storage, ids, choices, top_k, shared, experts);
  if (blockIdx.y + 1 == gridDim.y) {
    if (blockIdx.x == 0) {
      write_order<config.warps>(chosen, experts + shared, weights, offsets, tokens, places,
                                row_weights);
    }
    return;
  }
  const int index = blockIdx.y;
  if (index >= chosen.count()) return;
  const int expert = chosen.expert(index), first_row = blockIdx.x * config.rows;

  // Of gate and of up, a row of an expert among all rows.
  struct row_of_both {
    i64 gate, up;
    __device__ __forceinline__ row_of_both(int expert, int row, int h) {
      constexpr bool halves = packed == weights_of_both::halves;
      gate = static_cast<i64>(expert) * h + row, up = gate;
      if constexpr (halves) gate += static_cast<i64>(expert) * h, up = gate + h;
      if constexpr (packed == weights_of_both::interleaved) gate *= 2, up = gate + 1;
    }
  };
  using mma = chosen_mma<T, config, 2>;
  for (int from = 0;; from += config.tokens) {
    const auto group = chosen.list(expert, from, config.tokens, lists[warp]);
    mma own;
    own.k = d;
#pragma unroll
    for (int fragment = 0; fragment < n_fragments; ++fragment) {
      const int row = smaller(first_row + fragment * 8 + lane / 4, h - 1);
      const row_of_both at(expert, row, h);
      own.weights[0][fragment] = w_gate + at.gate * d;
      own.weights[1][fragment] = w_up + at.up * d;
    }
#pragma unroll
    for (int half = 0; half < config.tokens / 8; ++half) {
      const int rank = half * 8 + lane / 4;
      own.rows[half] = from + rank < group.count
                           ? x + static_cast<i64>(chosen.token(lists[warp][rank])) * d
                           : nullptr;
    }
    own.run(warp * mma::k_group, d, config.warps * mma::k_group, [] {});
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
#pragma unroll
      for (int fragment = 0; fragment < n_fragments; ++fragment) {
#pragma unroll
        for (int value = 0; value < values; ++value) {
          partial[warp][operand][fragment][lane][value] = own.sum[operand][fragment][value];
        }
      }
    }
    __syncthreads();
    if (warp < n_fragments) {
      float total[2][values] = {};
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
#pragma unroll
        for (int other = 0; other < config.warps; ++other) {
#pragma unroll
          for (int value = 0; value < values; ++value) {
            total[operand][value] += partial[other][operand][warp][lane][value];
          }
        }
      }
      const int column = first_row + warp * 8 + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < config.tokens / 8; ++half) {
        const int rank = from + half * 8 + lane / 4;
        if (rank < group.count && column < h) {
          float product[2];
          float weight = 1;
          if (row_weights != nullptr) {
            const int of_weight = chosen.place_of_weight(lists[warp][rank - from]);
            weight = of_weight < 0 ? 1.0f : weights[of_weight];
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float gate = total[0][half * 2 + i] * weight, up = total[1][half * 2 + i] * weight;
            if (b_gate != nullptr) {
              const row_of_both at(expert, column + i, h);
              gate += to_float(b_gate[at.gate]);
              up += to_float(b_up[at.up]);
            }
            product[i] = gated_product<activation>(gate, up);
          }
          *reinterpret_cast<u32*>(hidden + static_cast<i64>(group.first + rank) * h + column) =
              pack<T>(product[0], product[1]);
        }
      }
    }
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
                const T* b_down, const T* residual, T* y, int tokens, int choices, int top_k,
                int shared, int experts, int d, int h) {
  constexpr int threads = config.warps * 32, n_fragments = config.rows / 8;
  __shared__ chosen_experts::storage storage;
  __shared__ int lists[config.warps][config.tokens];
  extern __shared__ float products[];  // [k_parts][choices][rows]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  const auto chosen = chosen_experts::build<threads>(storage, ids, choices, top_k, shared, experts);
  const int units = chosen.count() * config.k_parts, first_row = blockIdx.x * config.rows;
  bool waited = false;
  const auto ready = [&waited] {
    if (!waited) wait_for_dependencies();
    waited = true;
  };

  using mma = chosen_mma<T, config, 1>;
  const int groups = ceil_div(h, mma::k_group);
  for (int unit = warp; unit < units; unit += config.warps) {
    const int expert = chosen.expert(unit / config.k_parts), part = unit % config.k_parts;
    for (int from = 0;; from += config.tokens) {
      __syncwarp();  // the list of the rows before is read
      const auto group = chosen.list(expert, from, config.tokens, lists[warp]);
      mma own;
      own.k = h;
#pragma unroll
      for (int fragment = 0; fragment < n_fragments; ++fragment) {
        const int row = smaller(first_row + fragment * 8 + lane / 4, d - 1);
        own.weights[0][fragment] = w_down + (static_cast<i64>(expert) * d + row) * h;
      }
#pragma unroll
      for (int half = 0; half < config.tokens / 8; ++half) {
        const int rank = from + half * 8 + lane / 4;
        own.rows[half] =
            rank < group.count ? hidden + static_cast<i64>(group.first + rank) * h : nullptr;
      }
      own.run(groups * part / config.k_parts * mma::k_group,
              smaller(groups * (part + 1) / config.k_parts * mma::k_group, h), mma::k_group, ready);
#pragma unroll
      for (int half = 0; half < config.tokens / 8; ++half) {
        const int rank = half * 8 + lane / 4;
        if (from + rank < group.count) {
          float* const to = products +
                            (static_cast<i64>(part) * choices + lists[warp][rank]) * config.rows +
                            lane % 4 * 2;
#pragma unroll
          for (int fragment = 0; fragment < n_fragments; ++fragment) {
            to[fragment * 8] = own.sum[0][fragment][half * 2];
            to[fragment * 8 + 1] = own.sum[0][fragment][half * 2 + 1];
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
      unpack<T>(*reinterpret_cast<const u32*>(residual + static_cast<i64>(token) * d + first_row +
                                              column),
                low, high);
    }
    const int choices_of_token = top_k + shared;
    for (int choice = token * choices_of_token; choice < (token + 1) * choices_of_token; ++choice) {
      const int expert = storage.ids[choice];
      if (expert < 0) continue;
      float first = 0, second = 0;
      if (b_down != nullptr) {
        const T* const bias = b_down + static_cast<i64>(expert) * d + first_row + column;
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
        pack<T>(low, high);
  }
}

}  // namespace fftune
