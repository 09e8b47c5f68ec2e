// A product for each head (head_linear.hpp), for a few tokens: the weight is read once for those of
// a block.
//
//   block          some tokens and some features of y of one head; x in shared memory as float32
//   layout=kn      threads have neighbouring features of y and divide k; the parts of a sum meet in
//                  shared memory
//   layout=nk      a warp has a feature of y at a time, and its lanes divide k
//
//   dependencies   nothing is read before the kernels before are complete
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

struct head_linear_config {
  int n = 0, k = 0;
  bool inputs_as_rows = false;
  int tokens = 8, columns = 64;
};

// x [m, heads, x_head], w [heads, w_head elements] with w_h from element w_first on, y [m, heads,
// n]. Grid: (heads * blocks of columns, blocks that loop over the tokens). Block: 128 threads.
template <class T, head_linear_config config>
__global__ void __launch_bounds__(128) head_linear(const T* x, const T* w, T* y, i64 m, int heads,
                                                   i64 x_head, i64 w_head, i64 w_first) {
  constexpr int threads = 128, n = config.n, k = config.k, tokens = config.tokens;
  constexpr int columns = config.columns, blocks = ceil_div(n, columns);
  __shared__ float features[tokens][k];
  wait_and_launch_dependents();

  const int head = blockIdx.x / blocks, first = blockIdx.x % blocks * columns;
  const T* const weight = w + head * w_head + w_first;
  const i64 to_row = static_cast<i64>(heads) * n;
  for (i64 token = static_cast<i64>(blockIdx.y) * tokens; token < m;
       token += static_cast<i64>(gridDim.y) * tokens) {
    const int count = static_cast<int>(m - token < tokens ? m - token : tokens);
    for (int i = threadIdx.x; i < tokens * k; i += threads) {
      const int row = i / k, at = i % k;
      features[row][at] =
          row < count ? to_float(x[((token + row) * heads + head) * x_head + at]) : 0.0f;
    }
    __syncthreads();
    T* const to = y + (token * heads + head) * n;

    if constexpr (config.inputs_as_rows) {
      constexpr int parts = threads / columns;  // of k
      __shared__ float partial[parts][columns];
      const int column = threadIdx.x % columns, part = threadIdx.x / columns;
      float sums[tokens] = {};
      if (first + column < n) {
        for (int i = part; i < k; i += parts) {
          const float value = to_float(weight[static_cast<i64>(i) * n + first + column]);
#pragma unroll
          for (int row = 0; row < tokens; ++row) sums[row] += features[row][i] * value;
        }
      }
#pragma unroll
      for (int row = 0; row < tokens; ++row) {
        partial[part][column] = sums[row];
        __syncthreads();
        if (part == 0 && row < count && first + column < n) {
          float sum = 0;
#pragma unroll
          for (int other = 0; other < parts; ++other) sum += partial[other][column];
          to[row * to_row + first + column] = from_float<T>(sum);
        }
        __syncthreads();  // before the next token's sums come
      }
    } else {
      const int lane = threadIdx.x % 32;
      const int end = first + columns < n ? first + columns : n;
      for (int column = first + threadIdx.x / 32; column < end; column += threads / 32) {
        float sums[tokens] = {};
        for (int i = lane; i < k; i += 32) {
          const float value = to_float(weight[static_cast<i64>(column) * k + i]);
#pragma unroll
          for (int row = 0; row < tokens; ++row) sums[row] += features[row][i] * value;
        }
#pragma unroll
        for (int row = 0; row < tokens; ++row) {
#pragma unroll
          for (int other = 1; other < 32; other *= 2) {
            sums[row] += __shfl_xor_sync(~0u, sums[row], other);
          }
          if (lane == 0 && row < count) to[row * to_row + column] = from_float<T>(sums[row]);
        }
      }
    }
    __syncthreads();  // the features are read
  }
}

}  // namespace fftune
