// The step between the two products of the backward pass, for each choice: the gradients of gate
// and up, hidden, each times the weight of the choice, and the gradient of that weight.
//
//   d_gate = d_hidden ⊙ up ⊙ act'(gate), d_up = d_hidden ⊙ act(gate), hidden = act(gate) ⊙ up
//   d_weight = Σ d_hidden ⊙ hidden + Σ dy ⊙ b_down
//
// Each block has one choice. Its threads loop over the row's columns, 16 bytes at a time or, where
// rows are not 16-byte aligned, one element. Their sums are added in a fixed order: within a warp
// by shuffles, then across the warps.
//
// Grid: min(choices, 2^31 - 1). Block: threads. Where weights were applied before the first
// product, their gradient needs the last one: combine_before.
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "gemm/form.cuh"

namespace fftune {

struct weigh_config {
  packing gate_up;  // how one tensor has the gradients of gate and up
  bool before;      // weights were applied before: gradients and hidden are asked for without them
  bool aligned;
  int threads;
};

namespace {

// Consecutive elements of a row that a thread has.
template <class T, bool aligned>
struct columns_of_row {
  static constexpr int count = aligned ? 16 / static_cast<int>(sizeof(T)) : 1;
  float value[count];

  static __device__ __forceinline__ columns_of_row load(const T* from) {
    columns_of_row result;
    if constexpr (!aligned) {
      result.value[0] = to_float(*from);
    } else {
      const vector16 words = load_dependent(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          result.value[i] = __uint_as_float(words.word[i]);
        } else {
          unpack<T>(words.word[i], result.value[i * 2], result.value[i * 2 + 1]);
        }
      }
    }
    return result;
  }
  __device__ __forceinline__ void store_times(float factor, T* to) const {
    if constexpr (!aligned) {
      *to = from_float<T>(factor * value[0]);
    } else {
      vector16 words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          words.word[i] = __float_as_uint(factor * value[i]);
        } else {
          words.word[i] = pack<T>(factor * value[i * 2], factor * value[i * 2 + 1]);
        }
      }
      store(to, words);
    }
  }
  // Elements of one and of the other in turn: the first or the second half of them.
  static __device__ __forceinline__ columns_of_row in_turn(const columns_of_row& one,
                                                           const columns_of_row& other, int half) {
    columns_of_row result;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int from = (half * count + i) / 2;
      result.value[i] = i % 2 == 0 ? one.value[from] : other.value[from];
    }
    return result;
  }
};

// The factor of the activated gate, and the gradient by up of d times that factor.
template <class activation>
__device__ __forceinline__ void factor_and_gradient(float up, float d, float& factor,
                                                    float& gradient) {
  factor = up, gradient = d;
  if constexpr (is_same<activation, swiglu_oai>) {
    factor = swiglu_oai::up_factor(up);
    gradient = swiglu_oai::up_gradient(up, d);
  }
}

// Row `row` of the gradients of gate and up: two tensors [rows, h], or one [rows, 2 h].
template <packing packed, class T, class Columns>
__device__ __forceinline__ void store_gradients(T* gates, T* ups, i64 row, i64 column, i64 h,
                                                float factor, const Columns& d_gate,
                                                const Columns& d_up) {
  if constexpr (packed == packing::separate) {
    d_gate.store_times(factor, gates + row * h + column);
    d_up.store_times(factor, ups + row * h + column);
  } else if constexpr (packed == packing::halves) {
    d_gate.store_times(factor, gates + row * 2 * h + column);
    d_up.store_times(factor, gates + row * 2 * h + h + column);
  } else {
    T* const to = gates + row * 2 * h + 2 * column;
    if constexpr (Columns::count == 1) {
      d_gate.store_times(factor, to);
      d_up.store_times(factor, to + 1);
    } else {
      Columns::in_turn(d_gate, d_up, 0).store_times(factor, to);
      Columns::in_turn(d_gate, d_up, 1).store_times(factor, to + Columns::count);
    }
  }
}

}  // namespace

// d_hidden, gate and up [rows, h], weights and ids [tokens, top_k], places [tokens, top_k +
// shared]; dy [tokens, d] and b_down [experts, d], or null where there is no such bias. Choices
// from top_k on have the weight 1. With packed weights `*_gate` have the gradients of both, and
// `*_up` are null. d_gate and d_up are null unless config.before; then d_weights is null, and
// hidden has no weight. Weighted gradients may be null with config.before; hidden may always be.
template <class T, class activation, weigh_config config>
__global__ void __launch_bounds__(config.threads)
    weigh_rows(const T* d_hidden, const T* gate, const T* up, const float* weights,
               const int* places, const int* ids, const T* dy, const T* b_down, T* weighted_d_gate,
               T* weighted_d_up, T* d_gate, T* d_up, T* hidden, float* d_weights, i64 choices,
               int top_k, int shared, i64 h, i64 d) {
  using columns = columns_of_row<T, config.aligned>;
  constexpr int threads = config.threads, stride = threads * columns::count;
  __shared__ float sums[threads / 32];
  launch_dependents();
  wait_for_dependencies();
  for (i64 choice = blockIdx.x; choice < choices; choice += gridDim.x) {
    const int place = places[choice];
    const i64 token = choice / (top_k + shared);
    const int own = static_cast<int>(choice - token * (top_k + shared));
    const float weight = own < top_k ? weights[token * top_k + own] : 1.0f;
    float sum = 0;
    for (i64 column = threadIdx.x * columns::count; column < h && place >= 0; column += stride) {
      const i64 at = place * h + column;
      const columns dc = columns::load(d_hidden + at), gates = columns::load(gate + at),
                    ups = columns::load(up + at);
      columns of_gate, of_up, product;
#pragma unroll
      for (int i = 0; i < columns::count; ++i) {
        float value, slope, factor;
        activation::value_and_slope(gates.value[i], value, slope);
        factor_and_gradient<activation>(ups.value[i], dc.value[i] * value, factor, of_up.value[i]);
        of_gate.value[i] =
            activation_gradient<activation>(gates.value[i], dc.value[i] * factor, slope);
        product.value[i] = value * factor;
        sum += dc.value[i] * product.value[i];
      }
      if (!config.before || weighted_d_gate != nullptr) {
        store_gradients<config.gate_up>(weighted_d_gate, weighted_d_up, place, column, h, weight,
                                        of_gate, of_up);
      }
      if constexpr (config.before) {
        store_gradients<config.gate_up>(d_gate, d_up, place, column, h, 1.0f, of_gate, of_up);
      }
      if (hidden != nullptr) {
        product.store_times(config.before ? 1.0f : weight, hidden + at);
      }
    }
    if constexpr (config.before) continue;
    if (own >= top_k) continue;
    if (b_down != nullptr && place >= 0) {
      const T* const bias = b_down + static_cast<i64>(ids[token * top_k + own]) * d;
      for (i64 column = threadIdx.x * columns::count; column < d; column += stride) {
        const columns one = columns::load(dy + token * d + column),
                      other = columns::load(bias + column);
#pragma unroll
        for (int i = 0; i < columns::count; ++i) sum += one.value[i] * other.value[i];
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0;
#pragma unroll
      for (int warp = 0; warp < threads / 32; ++warp) total += sums[warp];
      d_weights[token * top_k + own] = total;
    }
    __syncthreads();
  }
}

// The last stage where weights were applied before: u = rows is the gradient by a token's weighted
// row, so dx = the sum of weight times u, and the gradient of a weight is x·u.
//
// A block has a token. Its threads take the columns in turn, and reduce the products of each
// choice: within a warp by shuffles, then over the warps. Shapes: rows [.., columns], places
// [tokens, choices], weights and d_weights [tokens, weighted], x and dx [tokens, columns]. Grid:
// min(tokens, 65535). Block: threads.
template <class T, int choices, int weighted, bool aligned, int threads>
__global__ void __launch_bounds__(threads)
    combine_before(const T* rows, const int* places, const float* weights, const T* x, T* dx,
                   float* d_weights, int tokens, i64 width) {
  using columns = columns_of_row<T, aligned>;
  constexpr int together = choices < 4 ? choices : 4;  // rows in flight
  __shared__ float sums[weighted][threads / 32];
  launch_dependents();
  wait_for_dependencies();
  for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
    const int* const own_places = places + static_cast<i64>(token) * choices;
    const float* const own_weights = weights + static_cast<i64>(token) * weighted;
    float products[weighted] = {};
    for (i64 column = threadIdx.x * columns::count; column < width;
         column += threads * columns::count) {
      const i64 at = token * width + column;
      const columns own = columns::load(x + at);
      columns total = {};
#pragma unroll
      for (int begin = 0; begin < choices; begin += together) {
        columns row[together];
        int place[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
          place[i] = begin + i < choices ? own_places[begin + i] : -1;
          if (place[i] >= 0) row[i] = columns::load(rows + place[i] * width + column);
        }
#pragma unroll
        for (int i = 0; i < together; ++i) {
          const int choice = begin + i;
          if (choice >= choices || place[i] < 0) continue;  // no weight or x that is NaN counts
          const float weight = choice < weighted ? own_weights[choice] : 1.0f;
#pragma unroll
          for (int element = 0; element < columns::count; ++element) {
            total.value[element] += weight * row[i].value[element];
            if (choice < weighted) {
              products[choice] += own.value[element] * row[i].value[element];
            }
          }
        }
      }
      total.store_times(1.0f, dx + at);
    }
#pragma unroll
    for (int choice = 0; choice < weighted; ++choice) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        products[choice] += __shfl_xor_sync(~0u, products[choice], distance);
      }
      if (threadIdx.x % 32 == 0) sums[choice][threadIdx.x / 32] = products[choice];
    }
    __syncthreads();
    if (threadIdx.x < weighted) {
      float total = 0;
#pragma unroll
      for (int warp = 0; warp < threads / 32; ++warp) total += sums[threadIdx.x][warp];
      d_weights[static_cast<i64>(token) * weighted + threadIdx.x] = total;
    }
    __syncthreads();
  }
}

}  // namespace fftune
