// Copies of keys and values for shares of the heads of queries that read them, and the sums of the
// copies' gradients. 16-bit elements, heads of a multiple of 8 features, aligned to 16 bytes.
//
// Head j of a copy is head j / copies of the tensor: copies of a head lie side by side.
#include "common/async.cuh"
#include "common/vectors.cuh"

namespace fftune {

constexpr int copies_threads = 256;

// to [tokens, kv_heads * copies, vectors] of 16 bytes. Rows and heads are as far apart as these
// say, in such vectors. Grid: any number of blocks, (k, v). Block: 256.
template <int copies>
__global__ void __launch_bounds__(copies_threads)
    attention_backward_copy_heads(const uint4* k, const uint4* v, uint4* k_to, uint4* v_to,
                                  i64 tokens, int kv_heads, int vectors, int k_row, int v_row,
                                  int head) {
  wait_and_launch_dependents();
  const uint4* const from = blockIdx.y == 0 ? k : v;
  uint4* const to = blockIdx.y == 0 ? k_to : v_to;
  const int row = blockIdx.y == 0 ? k_row : v_row;
  const i64 count = tokens * kv_heads * vectors;
  for (i64 i = static_cast<i64>(blockIdx.x) * copies_threads + threadIdx.x; i < count;
       i += static_cast<i64>(gridDim.x) * copies_threads) {
    const int column = static_cast<int>(i % vectors);
    const i64 head_of_token = i / vectors;
    const i64 token = head_of_token / kv_heads, own = head_of_token % kv_heads;
    const uint4 value = from[token * row + own * head + column];
#pragma unroll
    for (int copy = 0; copy < copies; ++copy) {
      to[(head_of_token * copies + copy) * vectors + column] = value;
    }
  }
}

// dk and dv [tokens, kv_heads, dim] from those of the copies, in f32 and in the copies' order.
// Grid: any number of blocks, (dk, dv). Block: 256.
template <class T, int copies>
__global__ void __launch_bounds__(copies_threads)
    attention_backward_sum_copies(const T* dk_from, const T* dv_from, T* dk, T* dv, i64 heads,
                                  int dim) {
  wait_and_launch_dependents();
  const T* const from = blockIdx.y == 0 ? dk_from : dv_from;
  T* const to = blockIdx.y == 0 ? dk : dv;
  const int vectors = dim / 8;
  for (i64 i = static_cast<i64>(blockIdx.x) * copies_threads + threadIdx.x; i < heads * vectors;
       i += static_cast<i64>(gridDim.x) * copies_threads) {
    const i64 head = i / vectors;
    const int column = static_cast<int>(i % vectors) * 8;
    float sum[8] = {};
#pragma unroll
    for (int copy = 0; copy < copies; ++copy) {
      float value[8];
      to_floats(*reinterpret_cast<const aligned_vector<T, 8>*>(from + (head * copies + copy) * dim +
                                                               column),
                value);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += value[e];
    }
    *reinterpret_cast<aligned_vector<T, 8>*>(to + head * dim + column) = from_floats<T>(sum);
  }
}

}  // namespace fftune
