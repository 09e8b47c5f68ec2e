// Processes heads that a product has written to memory, before attention reads them: norms, over a
// head or over all heads of q or of k, RoPE, and the rows of the caches. The epilogue qkv does the
// same if a block of the product has all features that a norm is over.
//
//   block          a token's heads of q, of k or of v (blockIdx.y); a warp has a head at a time, in
//                  shared memory as float32
//
//   barriers       __syncthreads between the warps' sums of squares and the norm of all heads
//   dependencies   nothing is read before the kernels before are complete
#include "common/async.cuh"
#include "gemm/head_row.cuh"

namespace fftune {

enum class head_norm {
  none,
  head,     // root mean square, weights [dim]
  rows,     // over all heads of q, or of k: weights [heads, dim]
  centred,  // layer normalisation, weights and biases [dim]
};

// Where the product has put q, k and v.
enum class raw_heads {
  apart,    // three tensors
  joined,   // one, a token's heads of q, of k and of v one after the other
  grouped,  // one, of each head of k its heads of q, k and v
  gated,    // three tensors, in q's a head's gate behind each head
};

struct heads_config {
  int dim = 0, rotary = 0;
  head_rotation rotation = head_rotation::none;
  head_norm norm = head_norm::none;
  bool norm_last = false;  // behind the rotation
  raw_heads raw = raw_heads::apart;
  bool caches = false, wide_slots = false;
  int warps = 8;
  bool e4m3 = false;  // of the caches
  bool scale_of_head = false;
  bool v_norm = false;  // of heads of v: root mean square, without weights

  constexpr int pairs() const { return rotation == head_rotation::none ? 0 : rotary / 2; }
};

template <class T>
struct heads_tensors {
  const T* from[3];
  T* to[3];
  const T* weights[2];
  const T* biases[2];
};

template <class T, heads_config config>
class heads_kernel {
  static constexpr int dim = config.dim, warps = config.warps, pairs = config.pairs();

 public:
  struct storage {
    float features[warps][dim];
    float2 turns[pairs + 1];
    float squares[warps];
  };

  // Processes token blockIdx.x and part blockIdx.y.
  static __device__ __forceinline__ void run(const heads_tensors<T>& tensors, const void* slots,
                                             const head_angles& angles, const float* frequencies,
                                             int heads, int kv_heads, int cache_rows,
                                             int cache_head, float epsilon, float offset,
                                             storage& shared, const float* k_scale = nullptr,
                                             const float* v_scale = nullptr) {
    const i64 token = blockIdx.x;
    const int part = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int count = part == 0 ? heads : kv_heads;
    i64 row = token;
    if constexpr (config.caches) {
      if (part > 0) {
        row = config.wide_slots ? static_cast<const i64*>(slots)[token]
                                : static_cast<const int*>(slots)[token];
        if (static_cast<u64>(row) >= static_cast<u64>(cache_rows)) return;
      }
    }
    const auto head_at = [&](int head) {
      if constexpr (config.raw == raw_heads::joined) {
        const int before = part == 0 ? 0 : heads + (part - 1) * kv_heads;
        return tensors.from[0] + (token * (heads + 2 * kv_heads) + before + head) * dim;
      } else if constexpr (config.raw == raw_heads::grouped) {
        const int of_group = heads / kv_heads;
        const int group = part == 0 ? head / of_group : head;
        const int within = part == 0 ? head % of_group : of_group + part - 1;
        return tensors.from[0] +
               (token * (heads + 2 * kv_heads) + group * (of_group + 2) + within) * dim;
      } else if constexpr (config.raw == raw_heads::gated) {
        return tensors.from[part] + (token * count + head) * (part == 0 ? 2 * dim : dim);
      } else {
        return tensors.from[part] + (token * count + head) * dim;
      }
    };
    float squares = 0;  // of all heads
    if (part < 2) {
      if constexpr (config.norm == head_norm::rows) {
        for (int head = warp; head < count; head += warps) {
          for (int i = lane; i < dim; i += 32) {
            const float value = to_float(head_at(head)[i]);
            squares += value * value;
          }
        }
        squares = warp_sum(squares);
        if (lane == 0) shared.squares[warp] = squares;
      }
      using real = typename choose_type<sizeof(T) == 4, double, float>::type;
      for (int pair = threadIdx.x; pair < pairs; pair += warps * 32) {
        shared.turns[pair] =
            turn_of<config.rotation, real>(angles, frequencies, token, pair, pairs);
      }
      __syncthreads();
      if constexpr (config.norm == head_norm::rows) {
        squares = 0;
        for (int other = 0; other < warps; ++other) squares += shared.squares[other];
      }
    }
    float* const features = shared.features[warp];
    for (int head = warp; head < count; head += warps) {
      const T* const from = head_at(head);
      for (int i = lane; i < dim; i += 32) features[i] = to_float(from[i]);
      __syncwarp();
      if (part < 2) {
        const T* const weights =
            config.norm == head_norm::none
                ? nullptr
                : tensors.weights[part] + (config.norm == head_norm::rows ? head * dim : 0);
        const T* const biases = tensors.biases[part];
        const float mean_square = squares / (static_cast<float>(count) * dim);
        if constexpr (!config.norm_last) {
          normalise(features, weights, biases, mean_square, epsilon, offset, lane);
        }
        rotate(features, shared.turns, lane);
        if constexpr (config.norm_last) {
          normalise(features, weights, biases, mean_square, epsilon, offset, lane);
        }
      } else if constexpr (config.v_norm) {
        const float factor = rsqrtf(warp_mean_square(features, 0, lane) + epsilon);
        for (int i = lane; i < dim; i += 32) features[i] *= factor;
        __syncwarp();
      }
      const int stride = config.caches && part > 0 ? cache_head : dim;
      if constexpr (config.e4m3) {
        if (part > 0) {
          const float scale = (part == 1 ? k_scale : v_scale)[config.scale_of_head ? head : 0];
          fp8* const to = reinterpret_cast<fp8*>(tensors.to[part]) + (row * count + head) * stride;
          for (int i = lane; i < dim; i += 32)
            to[i] = from_float<fp8>(__fdiv_rn(features[i], scale));
          __syncwarp();  // before the next head takes the place
          continue;
        }
      }
      T* const to = tensors.to[part] + (row * count + head) * stride;
      for (int i = lane; i < dim; i += 32) to[i] = from_float<T>(features[i]);
      __syncwarp();  // before the next head takes the place
    }
  }

  // Copies the gates of token blockIdx.x.
  static __device__ __forceinline__ void copy_gates(const T* from, T* to, int heads) {
    const i64 first = static_cast<i64>(blockIdx.x) * heads;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
      for (int i = threadIdx.x % 32; i < dim; i += 32) {
        to[(first + head) * dim + i] = from[((first + head) * 2 + 1) * dim + i];
      }
    }
  }

 private:
  static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
  }

  // The mean square of the distances of a head's features from `mean`.
  static __device__ __forceinline__ float warp_mean_square(const float* features, float mean,
                                                           int lane) {
    float squares = 0;
    for (int i = lane; i < dim; i += 32) {
      const float value = features[i] - mean;
      squares += value * value;
    }
    return warp_sum(squares) / dim;
  }

  // `mean_square`: of all heads, for head_norm::rows.
  static __device__ __forceinline__ void normalise(float* features, const T* weights,
                                                   const T* biases, float mean_square,
                                                   float epsilon, float offset, int lane) {
    if constexpr (config.norm == head_norm::none) return;
    float mean = 0;
    if constexpr (config.norm == head_norm::centred) {
      for (int i = lane; i < dim; i += 32) mean += features[i];
      mean = warp_sum(mean) / dim;
    }
    if constexpr (config.norm != head_norm::rows) {
      mean_square = warp_mean_square(features, mean, lane);
    }
    const float factor = rsqrtf(mean_square + epsilon);
    for (int i = lane; i < dim; i += 32) {
      float value = (features[i] - mean) * factor * (offset + to_float(weights[i]));
      if constexpr (config.norm == head_norm::centred) value += to_float(biases[i]);
      features[i] = value;
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void rotate(float* features, const float2* turns, int lane) {
    constexpr bool halves = config.rotation == head_rotation::halves;
    for (int pair = lane; pair < pairs; pair += 32) {
      float& first = features[halves ? pair : 2 * pair];
      float& second = features[halves ? pair + pairs : 2 * pair + 1];
      const float before = first;
      const float2 by = turns[pair];
      first = before * by.x - second * by.y;
      second = second * by.x + before * by.y;
    }
    __syncwarp();
  }
};

// Tensors [m, heads, dim]; unless they are apart, q has all, [m, (heads + 2 kv_heads) dim]. k_to
// and v_to are the caches, [cache_rows, kv_heads, cache_head], or [m, kv_heads, dim]; a slot of no
// row writes nothing. Positions, table, table_rows and scale are those of head_angles. Grid: (m,
// 3). Block: 32
// * config.warps.
template <class T, heads_config config>
__global__ void __launch_bounds__(32 * config.warps)
    finish_heads(const T* q, const T* k, const T* v, T* q_to, T* k_to, T* v_to, const T* q_norm,
                 const T* k_norm, const T* q_bias, const T* k_bias, const void* slots,
                 const int* positions, const float* table,
                 const __grid_constant__ pair_frequencies<config.pairs() + 1> frequencies,
                 int table_rows, float scale, int heads, int kv_heads, int cache_rows,
                 int cache_head, float epsilon, float norm_offset) {
  __shared__ typename heads_kernel<T, config>::storage shared;
  wait_and_launch_dependents();
  const heads_tensors<T> tensors{{q, k, v}, {q_to, k_to, v_to}, {q_norm, k_norm}, {q_bias, k_bias}};
  heads_kernel<T, config>::run(tensors, slots, {positions, table, table_rows, scale},
                               frequencies.of, heads, kv_heads, cache_rows, cache_head, epsilon,
                               norm_offset, shared);
}

// The same with caches of e4m3, k_scale and v_scale: [1], or [kv_heads] with config.scale_of_head.
template <class T, heads_config config>
__global__ void __launch_bounds__(32 * config.warps)
    finish_heads_e4m3(const T* q, const T* k, const T* v, T* q_to, void* k_to, void* v_to,
                      const T* q_norm, const T* k_norm, const T* q_bias, const T* k_bias,
                      const void* slots, const int* positions, const float* table,
                      const __grid_constant__ pair_frequencies<config.pairs() + 1> frequencies,
                      int table_rows, float scale, int heads, int kv_heads, int cache_rows,
                      int cache_head, float epsilon, float norm_offset, const float* k_scale,
                      const float* v_scale) {
  __shared__ typename heads_kernel<T, config>::storage shared;
  wait_and_launch_dependents();
  const heads_tensors<T> tensors{{q, k, v},
                                 {q_to, static_cast<T*>(k_to), static_cast<T*>(v_to)},
                                 {q_norm, k_norm},
                                 {q_bias, k_bias}};
  heads_kernel<T, config>::run(tensors, slots, {positions, table, table_rows, scale},
                               frequencies.of, heads, kv_heads, cache_rows, cache_head, epsilon,
                               norm_offset, shared, k_scale, v_scale);
}

// The same of heads that have gates, with caches of either kind. Grid: (m, 4), the last for gates.
template <class T, heads_config config>
__global__ void __launch_bounds__(32 * config.warps)
    finish_heads_gated(const T* q, const T* k, const T* v, T* q_to, void* k_to, void* v_to,
                       const T* q_norm, const T* k_norm, const T* q_bias, const T* k_bias,
                       const void* slots, const int* positions, const float* table,
                       const __grid_constant__ pair_frequencies<config.pairs() + 1> frequencies,
                       int table_rows, float scale, int heads, int kv_heads, int cache_rows,
                       int cache_head, float epsilon, float norm_offset, const float* k_scale,
                       const float* v_scale, T* gates) {
  __shared__ typename heads_kernel<T, config>::storage shared;
  wait_and_launch_dependents();
  if (blockIdx.y == 3) {
    heads_kernel<T, config>::copy_gates(q, gates, heads);
    return;
  }
  const heads_tensors<T> tensors{{q, k, v},
                                 {q_to, static_cast<T*>(k_to), static_cast<T*>(v_to)},
                                 {q_norm, k_norm},
                                 {q_bias, k_bias}};
  heads_kernel<T, config>::run(tensors, slots, {positions, table, table_rows, scale},
                               frequencies.of, heads, kv_heads, cache_rows, cache_head, epsilon,
                               norm_offset, shared, k_scale, v_scale);
}

}  // namespace fftune
