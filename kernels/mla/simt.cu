// Latent attention for any rank, alignment and type: the fallback.
//
// A block has one row, a head of a query, at a time. Its warps take keys in turn: a lane has every
// 32nd feature of the key in registers, for its score and for the sum of values. The results of the
// warps are added up in shared memory, in their order.
//
// Grid: blocks that loop over the rows. Block: 128 threads.
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "mla/cache.cuh"

namespace fftune {

template <mla_form form>
__device__ __forceinline__ void attend_rows(const mla_params& p) {
  using T = element_type<form.type>;
  constexpr int warps = 4, width = form.width();
  constexpr int latents = ceil_div(form.rank, 32), ropes = ceil_div(form.rope, 32);
  __shared__ float q[width];
  __shared__ float values[warps][form.rank];
  __shared__ softmax_row softmax_of[warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_and_launch_dependents();

  const i64 rows = static_cast<i64>(p.batch) * p.queries * p.heads;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const int head = static_cast<int>(row % p.heads);
    const int query = static_cast<int>(row / p.heads % p.queries);
    const int sequence = static_cast<int>(row / p.heads / p.queries);
    for (int i = threadIdx.x; i < form.rank; i += 128) {
      q[i] = to_float(static_cast<const T*>(p.q_latent)[row * form.rank + i]);
    }
    if constexpr (form.rope > 0) {
      for (int i = threadIdx.x; i < form.rope; i += 128) {
        q[form.rank + i] = to_float(static_cast<const T*>(p.q_rope)[row * form.rope + i]);
      }
    }
    __syncthreads();

    const int visible = mla_visible(p, query, mla_length<form>(p, sequence));
    softmax_row softmax;
    float o[latents] = {};
    for (int key = warp; key < visible; key += warps) {
      const i64 place = mla_place<form>(p, sequence, key);
      if (place == mla_no_key) continue;
      const T* const from = static_cast<const T*>(p.cache) + place;
      float latent[latents], score = 0;
#pragma unroll
      for (int i = 0; i < latents; ++i) {
        const int at = i * 32 + lane;
        const bool exists = place >= 0 && at < form.rank;
        latent[i] = exists ? to_float(from[at]) : 0.0f;
        if (exists) score += q[at] * latent[i];
      }
#pragma unroll
      for (int i = 0; i < ropes; ++i) {
        const int at = form.rank + i * 32 + lane;
        if (place >= 0 && at < width) score += q[at] * to_float(from[at]);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        score += __shfl_xor_sync(~0u, score, distance);
      }
      score *= p.scale * log2_e;
      const float factor = softmax.rescale_if_exceeded(score);
      const float weight = approximate_exp2(score - softmax.offset());
      softmax.sum += weight;
#pragma unroll
      for (int i = 0; i < latents; ++i) o[i] = o[i] * factor + weight * latent[i];
    }
#pragma unroll
    for (int i = 0; i < latents; ++i) {
      if (i * 32 + lane < form.rank) values[warp][i * 32 + lane] = o[i];
    }
    if (lane == 0) softmax_of[warp] = softmax;
    __syncthreads();

    softmax_row all;
    for (int i = 0; i < warps; ++i) all.rescale(softmax_of[i].reference);
    float factor[warps];
    for (int i = 0; i < warps; ++i) {
      factor[i] = approximate_exp2(softmax_of[i].reference - all.offset());
      all.sum += softmax_of[i].sum * factor[i];
    }
    const softmax_result result = finish_softmax(all, minus_infinity());
    for (int i = threadIdx.x; i < form.rank; i += 128) {
      float sum = 0;
      for (int other = 0; other < warps; ++other) sum += values[other][i] * factor[other];
      static_cast<T*>(p.out)[row * form.rank + i] = from_float<T>(sum * result.factor);
    }
    if constexpr (form.lse) {
      if (threadIdx.x == 0) {
        p.lse[mla_lse_place<form>(p, sequence, query, head)] = result.lse * natural_log_of_2;
      }
    }
    __syncthreads();  // q and the warps' results are read
  }
}

template <mla_form form>
__global__ void __launch_bounds__(128) mla_simt(const __grid_constant__ mla_params p) {
  attend_rows<form>(p);
}

template <mla_form form>
__global__ void __launch_bounds__(128) mla_simt_lists(const __grid_constant__ mla_list_params p) {
  attend_rows<form>(p.mla);
}

}  // namespace fftune
