// Each token's rows brought together: y_t = the sum over its choices of weight times row, in fp32
// and in the order of the choices.
//
// A thread has 16 bytes of columns of a token and asks for eight of its rows at once; or, where
// rows are not 16-byte aligned, one element. Memory bound: a row is read once, y written once.
//
// Grid: (ceil(columns / (threads · elements)), min(tokens, 65535)). Block: threads.
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, int elements>
struct combined_columns {
  float sum[elements] = {};

  __device__ __forceinline__ void add(float weight, const vector16& row) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < elements; ++i) sum[i] += weight * __uint_as_float(row.word[i]);
    } else {
#pragma unroll
      for (int i = 0; i < elements; i += 2) {
        float first, second;
        unpack<T>(row.word[i / 2], first, second);
        sum[i] += weight * first;
        sum[i + 1] += weight * second;
      }
    }
  }
  __device__ __forceinline__ vector16 rounded() const {
    vector16 result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        result.word[i] = __float_as_uint(sum[i]);
      } else {
        result.word[i] = pack<T>(sum[i * 2], sum[i * 2 + 1]);
      }
    }
    return result;
  }
};

// rows [.., columns], places [tokens, choices], weights [tokens, weighted] or null, residual and y
// [tokens, columns], the former or null. Choices from `weighted` on have the weight 1. `aligned`:
// rows are whole vectors of 16 bytes.
template <class T, int choices, int weighted, bool aligned, int threads>
__global__ void __launch_bounds__(threads)
    combine_rows(const T* rows, const int* places, const float* weights, const T* residual, T* y,
                 int tokens, i64 columns) {
  constexpr int elements = aligned ? 16 / static_cast<int>(sizeof(T)) : 1;
  constexpr int together = choices < 8 ? choices : 8;
  launch_dependents();
  wait_for_dependencies();
  const i64 column = (static_cast<i64>(blockIdx.x) * threads + threadIdx.x) * elements;
  if (column >= columns) return;
  for (int token = blockIdx.y; token < tokens; token += gridDim.y) {
    const i64 first = static_cast<i64>(token) * choices;
    combined_columns<T, elements> total;
    if (residual != nullptr) {
      const T* const from = residual + token * columns + column;
      if constexpr (aligned) {
        total.add(1, load_dependent(from));
      } else {
        total.sum[0] = to_float(*from);
      }
    }
#pragma unroll
    for (int begin = 0; begin < choices; begin += together) {
      int place[together];
      float weight[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        place[i] = -1;
        weight[i] = 1;
        if (begin + i >= choices) continue;
        place[i] = places[first + begin + i];
        if (weights != nullptr && begin + i < weighted) {
          weight[i] = weights[static_cast<i64>(token) * weighted + begin + i];
        }
      }
      if constexpr (aligned) {
        vector16 row[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
          if (place[i] >= 0) row[i] = load_dependent(rows + place[i] * columns + column);
        }
#pragma unroll
        for (int i = 0; i < together; ++i) {
          if (place[i] >= 0) total.add(weight[i], row[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < together; ++i) {
          if (place[i] >= 0)
            total.sum[0] += weight[i] * to_float(rows[place[i] * columns + column]);
        }
      }
    }
    if constexpr (aligned) {
      store(y + token * columns + column, total.rounded());
    } else {
      y[token * columns + column] = from_float<T>(total.sum[0]);
    }
  }
}

}  // namespace fftune
