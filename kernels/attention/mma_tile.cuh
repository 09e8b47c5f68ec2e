// What the mma.sync engines of attention share: products of a warp's tile of queries with keys and
// with values in shared memory, and the online softmax of its accumulators.
//
// The accumulators of S = Q K^T, rounded to 16 bits, are the A fragments of O = P V: the
// probabilities never leave the registers.
#pragma once

#include "attention/mask.cuh"
#include "attention/row_layout.cuh"
#include "common/async_copy.cuh"
#include "common/mma.cuh"

namespace fftune {

template <element type>
using mma_element = typename choose_type<type == element::bf16, bf16, fp16>::type;

constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);
constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh by exp2: tanh.approx has 11 bits, too few for scores of tens.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * log2_e * x));
}

// What the softmax takes: scores in a unit such that exp2(scores * factor) are the exponentials.
// Without a soft cap and a bias the products themselves will do.
template <attention_form form>
struct score_scale {
  static constexpr bool scores_change = form.softcap || form.bias;
  float scale, softcap;

  __device__ __forceinline__ explicit score_scale(const attention_params& params)
      : scale(params.scale), softcap(params.softcap) {}

  __device__ __forceinline__ float factor() const {
    return scores_change ? log2_e : scale * log2_e;
  }
  __device__ __forceinline__ float score(float product) const {
    if constexpr (form.softcap) {
      return softcap * tanh_by_exp2(product * __fdividef(scale, softcap));
    } else {
      return scores_change ? product * scale : product;
    }
  }
};

// `m_tiles` times 16 rows of queries of one warp. In fragments a thread has the rows
// 16 tile + lane / 4 + 8 half.
template <class T, int dim, int m_tiles>
struct mma_tile {
  using layout = attention_row_layout<dim>;
  static constexpr int steps = layout::padded / 16;     // of k in S = Q K^T
  static constexpr int o_blocks = layout::padded / 8;   // of columns of O

  using fragments = u32[m_tiles][steps][4];
  using output = float[m_tiles][o_blocks][4];

  static __device__ __forceinline__ void load_q(u32 (&a)[m_tiles][4], u32 q, int step) {
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
      load_matrices(a[tile][0], a[tile][1], a[tile][2], a[tile][3],
                    layout::next_rows(layout::advance(q, step), tile * 16));
    }
  }

  static __device__ __forceinline__ void load_q(fragments& to, u32 q) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      u32 a[m_tiles][4];
      load_q(a, q, step);
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[tile][step][i] = a[tile][i];
      }
    }
  }

  // s = Q K^T of `keys` keys. `q` is the shared address of this lane's fragment of Q, from which
  // they are loaded unless they are `held` in registers, and `k` that of K.
  template <int keys, bool held>
  static __device__ __forceinline__ void multiply_keys(float (&s)[m_tiles][keys / 8][4],
                                                       const fragments& in_registers, u32 q,
                                                       u32 k) {
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int block = 0; block < keys / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[tile][block][i] = 0;
      }
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      u32 a[m_tiles][4];
      if constexpr (held) {
#pragma unroll
        for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[tile][i] = in_registers[tile][step][i];
        }
      } else {
        load_q(a, q, step);
      }
#pragma unroll
      for (int pair = 0; pair < keys / 16; ++pair) {
        u32 b[2][2];
        load_matrices(b[0][0], b[0][1], b[1][0], b[1][1],
                      layout::next_rows(layout::advance(k, step), pair * 16));
#pragma unroll
        for (int tile = 0; tile < m_tiles; ++tile) {
          mma_16x8x16<T>(s[tile][2 * pair], a[tile], b[0]);
          mma_16x8x16<T>(s[tile][2 * pair + 1], a[tile], b[1]);
        }
      }
    }
  }

  // o += P V of `keys` keys; `v` is the shared address of this lane's fragment of V.
  template <int keys>
  static __device__ __forceinline__ void multiply_values(output& o,
                                                         const float (&p)[m_tiles][keys / 8][4],
                                                         u32 v) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      u32 a[m_tiles][4];
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = p[tile][2 * step + i / 2];
          a[tile][i] = pack<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < o_blocks / 2; ++pair) {
        u32 b[2][2];
        load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                 layout::next_rows(layout::advance(v, pair), step * 16));
#pragma unroll
        for (int tile = 0; tile < m_tiles; ++tile) {
          mma_16x8x16<T>(o[tile][2 * pair], a[tile], b[0]);
          mma_16x8x16<T>(o[tile][2 * pair + 1], a[tile], b[1]);
        }
      }
    }
  }
};

// The online softmax of a thread's rows: the base 2 logarithm of the highest exponential so far, and
// this thread's part of the sum of exponentials.
template <int m_tiles>
struct online_softmax {
  float highest[m_tiles][2], sum[m_tiles][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        highest[tile][half] = minus_infinity;
        sum[tile][half] = 0;
      }
    }
  }

  // Replaces scores, -infinity where a row does not see the key, by exp2(score * factor -
  // highest), and scales the accumulators down where the highest score has changed.
  template <int blocks, int o_blocks>
  __device__ __forceinline__ void update(float (&s)[m_tiles][blocks][4],
                                         float (&o)[m_tiles][o_blocks][4], float factor) {
    bool changes = false;
    float rescale[m_tiles][2];
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = minus_infinity;
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
          top = fmaxf(top, fmaxf(s[tile][block][half * 2], s[tile][block][half * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float before = highest[tile][half];
        top = fmaxf(before, top * factor);
        // No key yet: any finite number, so that exponentials of -infinity are 0 and not NaN.
        const float base = top == minus_infinity ? 0.0f : top;
        rescale[tile][half] = exp2_fast(before - base);
        changes |= top != before;
        highest[tile][half] = top;
        float part = 0;
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            s[tile][block][i] = exp2_fast(s[tile][block][i] * factor - base);
            part += s[tile][block][i];
          }
        }
        sum[tile][half] = sum[tile][half] * rescale[tile][half] + part;
      }
    }
    if (__any_sync(~0u, changes)) {
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int block = 0; block < o_blocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[tile][block][i] *= rescale[tile][i / 2];
        }
      }
    }
  }

  // The sum of a whole row.
  __device__ __forceinline__ float row_sum(int tile, int half) const {
    float whole = sum[tile][half];
    whole += __shfl_xor_sync(~0u, whole, 1);
    whole += __shfl_xor_sync(~0u, whole, 2);
    return whole;
  }
};

}  // namespace fftune
