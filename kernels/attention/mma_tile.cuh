// Common parts of attention's mma.sync engines: products of a warp's tile of queries with keys and
// with values in shared memory, and the online softmax of its accumulators.
//
// The accumulators of S = Q K^T, rounded to 16 bits, are the A fragments of O = P V: the
// probabilities never leave the registers.
#pragma once

#include "attention/row_layout.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"

namespace fftune {

// Chunks of 8 elements of a head's row in global memory, in accesses that its alignment allows.
// Elements of a chunk beyond the last of the row are zeros in shared memory.
template <class T, int dim>
struct row_chunks {
  static constexpr int access = attention_access_bytes(dim), parts = 16 / access;
  static constexpr int count = (dim + 7) / 8;  // with elements
  static_assert(dim % 2 == 0 && sizeof(T) == 2);

  // Starts to copy chunk `chunk`, or zeros.
  static __device__ __forceinline__ void copy(u32 to, const T* row, int chunk, bool exists) {
    if constexpr (access == 16) {
      copy_async(to, row + chunk * 8,
                 exists && (attention_padded_dim(dim) == dim || chunk * 8 < dim));
    } else {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const int column = chunk * 8 + part * (access / 2);
        copy_async_narrow<access>(to + part * access, row + column, exists && column < dim);
      }
    }
  }

  // A chunk that has elements.
  static __device__ __forceinline__ vector16 load(const T* row, int chunk) {
    if constexpr (access == 16) {
      return load_dependent(row + chunk * 8);
    } else {
      vector16 value = {};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int column = chunk * 8 + word * 2;
        if (column < dim) value.word[word] = load_dependent_word(row + column);
      }
      return value;
    }
  }
  static __device__ __forceinline__ void store(T* row, int chunk, float4 value) {
    if constexpr (access == 16) {
      *reinterpret_cast<float4*>(row + chunk * 8) = value;
    } else {
      const float words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int column = chunk * 8 + word * 2;
        if (column < dim) *reinterpret_cast<float*>(row + column) = words[word];
      }
    }
  }
};

// Probabilities of 16 keys, as A fragments.
template <class T, int m_tiles, int blocks>
__device__ __forceinline__ void pack_step(u32 (&a)[m_tiles][4],
                                          const float (&p)[m_tiles][blocks][4], int step) {
#pragma unroll
  for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&from)[4] = p[tile][2 * step + i / 2];
      a[tile][i] = pack<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
  }
}

// `m_tiles` times 16 rows of queries of one warp. In fragments a thread has the rows
// 16 tile + lane / 4 + 8 half.
template <class T, int dim, int m_tiles>
struct mma_tile {
  using layout = attention_row_layout<dim>;
  static constexpr int steps = layout::padded / 16;    // of k in S = Q K^T
  static constexpr int o_blocks = layout::padded / 8;  // of columns of O

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
      pack_step<T>(a, p, step);
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

// The online softmax of a thread's rows; sums are this thread's part.
template <int m_tiles>
struct mma_softmax {
  softmax_row row[m_tiles][2];

  // Replaces scores, minus infinity where a row does not see the key, by powers of two, and scales
  // the accumulators where references have changed.
  template <int blocks, int o_blocks>
  __device__ __forceinline__ void update(float (&s)[m_tiles][blocks][4],
                                         float (&o)[m_tiles][o_blocks][4], float factor) {
    float largest[m_tiles][2];
    bool exceeded = false;
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = minus_infinity();
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
          most = fmaxf(most, fmaxf(s[tile][block][half * 2], s[tile][block][half * 2 + 1]));
        }
        largest[tile][half] = most * factor;
        exceeded |= row[tile][half].exceeded_by(largest[tile][half]);
      }
    }
    // If no thread's own scores exceed the references, those of rows do not.
    if (__any_sync(~0u, exceeded)) {
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = largest[tile][half];
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
          const float rescale = row[tile][half].rescale_if_exceeded(most);
#pragma unroll
          for (int block = 0; block < o_blocks; ++block) {
            o[tile][block][half * 2] *= rescale;
            o[tile][block][half * 2 + 1] *= rescale;
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = row[tile][half].offset();
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            s[tile][block][i] = approximate_exp2(__fmaf_rn(s[tile][block][i], factor, -offset));
            row[tile][half].sum += s[tile][block][i];
          }
        }
      }
    }
  }

  // A row with the sum of all of its threads.
  __device__ __forceinline__ softmax_row whole(int tile, int half) const {
    softmax_row result = row[tile][half];
    result.sum += __shfl_xor_sync(~0u, result.sum, 1);
    result.sum += __shfl_xor_sync(~0u, result.sum, 2);
    return result;
  }
};

}  // namespace fftune
