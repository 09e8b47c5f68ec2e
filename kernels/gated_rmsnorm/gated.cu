// RMSNorm with a gate behind it or before it (gated_rmsnorm.hpp has the formulas), and its
// gradient. Rows that fit in registers are read once; the fallbacks serve any width and alignment.
//
// x, dy, y, dx, dz [tokens, groups, d], z [tokens, z_row], w [groups, d], or with `one_w` [d]: a
// row is one norm of a token. Without a norm (`normed`) a row is x times its gate; with `row_gate`
// z has one element for each row, [tokens, groups]. `share` threads of a block have a row, `side`
// rows lie side by side in a block; vector i of a thread is vector i * share + lane of the row.
#include "common/activation.cuh"
#include "common/columns.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

struct sigmoid_gate {
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    value = silu::sigmoid(x);
    slope = value * (1.0f - value);
  }
  static __device__ __forceinline__ float value(float x) { return silu::sigmoid(x); }
};

// Where a row's gate and weights are.
struct gated_row {
  i64 z, w;

  __device__ __forceinline__ gated_row(i64 row, int groups, int d, i64 z_row, bool row_gate = false,
                                       bool one_w = false) {
    const i64 token = groups == 1 ? row : row / groups;
    const i64 group = row - token * groups;
    z = token * z_row + (row_gate ? group : group * d);
    w = one_w ? 0 : group * d;
  }
};

// x̂ ⊙ w, with its gate where that comes behind it.
template <class T, class W, class gate, class Convention, bool before>
__device__ __forceinline__ float gated_result(float normalised, float weight, float z) {
  float value = Convention::template normalised<T>(normalised) * weight;
  if constexpr (before) return value;
  // transformers' product of two tensors of one type is rounded to it.
  if constexpr (is_same<T, W>) value = Convention::template normalised<T>(value);
  return value * gate::value(z);
}

// Grid: ceil(rows / side). Block: share * side.
template <class T, class W, class gate, class Convention, bool before, bool normed, bool row_gate,
          int vector, int vectors, int share, int side, bool one_w = false>
__global__ void __launch_bounds__(share* side)
    gated_rmsnorm_rows(const T* x, const T* z, const W* w, T* y, i64 rows, int groups, int d,
                       i64 z_row, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using sums = row_sum<1, share, side, 1>;
  __shared__ typename sums::memory shared;
  wait_and_launch_dependents();
  const u64 policy = l2_eviction_policy<false>();
  const i64 row = static_cast<i64>(blockIdx.x) * side + threadIdx.x / share;
  const gated_row at(row, groups, d, z_row, row_gate, one_w);
  const int first_column = static_cast<int>(threadIdx.x) % share * count;
  constexpr int column_step = share * count;
  aligned_vector<T, count> values[vectors], gates[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    const bool valid = row < rows && column < d;
    values[i] = load_once<T, count>(x + row * d + column, valid, policy);
    if constexpr (!row_gate) gates[i] = load_once<T, count>(z + at.z + column, valid, policy);
  }
  const auto load_gate = [&](int i, float(&own)[count]) {
    if constexpr (row_gate) {
      const float one = row < rows ? to_float(z[at.z]) : 0.0f;
#pragma unroll
      for (int e = 0; e < count; ++e) own[e] = one;
    } else {
      to_floats(gates[i], own);
    }
  };
  if constexpr (!normed) {
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (column >= d) continue;
      float value[count], own[count];
      to_floats(values[i], value);
      load_gate(i, own);
#pragma unroll
      for (int e = 0; e < count; ++e) value[e] *= gate::value(own[e]);
      store_once(y + row * d + column, from_floats<T>(value), policy);
    }
    return;
  }
  // Few weights are loaded beside the row, and few products with the gate are kept in floats.
  constexpr bool has_weights = vectors * count * sizeof(W) <= 64;
  constexpr bool keeps = before && vectors * count <= 16;
  aligned_vector<W, count> weights[has_weights ? vectors : 1];
  const auto load_weights = [&](int i) {
    const int column = first_column + i * column_step;
    return load_through_l1<W, count>(w + at.w + column, row < rows && column < d);
  };
  if constexpr (has_weights) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) weights[i] = load_weights(i);
  }
  float squares[1] = {}, products[keeps ? vectors : 1][count];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    float value[count], own[count];
    to_floats(values[i], value);
    if constexpr (before) load_gate(i, own);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if constexpr (before) value[e] *= gate::value(own[e]);
      if constexpr (keeps) products[i][e] = value[e];
      squares[0] += value[e] * value[e];
    }
  }
  sums::apply(squares, shared, 0);
  if (row >= rows) return;
  const float r = reciprocal_deviation(squares[0], d, eps);
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    if (column >= d) continue;
    float value[count], own[count], weight[count];
    to_floats(values[i], value);
    if constexpr (!keeps) load_gate(i, own);
    to_floats(has_weights ? weights[has_weights ? i : 0] : load_weights(i), weight);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if constexpr (keeps) {
        value[e] = products[i][e];
        own[e] = 0.0f;
      } else if constexpr (before) {
        value[e] *= gate::value(own[e]);
      }
      value[e] = gated_result<T, W, gate, Convention, before>(value[e] * r, weight[e], own[e]);
    }
    store_once(y + row * d + column, from_floats<T>(value), policy);
  }
}

// A thread has the same columns of one part of w in every row, so it accumulates their dw in
// registers. partial [gridDim.x * side, d] for each part of w: blocks of a part are neighbours.
// Grid: groups * blocks of a part. Block: share * side.
template <class T, class W, class gate, bool before, bool frozen, int vector, int vectors,
          int share, int side>
__global__ void __launch_bounds__(share* side)
    gated_rmsnorm_backward(const T* dy, const T* x, const T* z, const W* w, T* dx, T* dz,
                           float* partial, i64 tokens, int groups, int d, i64 z_row, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using sums = row_sum<2, share, side, 1>;
  __shared__ typename sums::memory shared;
  wait_and_launch_dependents();
  const u64 policy = l2_eviction_policy<false>();
  const int group = static_cast<int>(blockIdx.x % static_cast<u32>(groups));
  const i64 block = blockIdx.x / static_cast<u32>(groups), blocks = gridDim.x / groups;
  const int first_column = static_cast<int>(threadIdx.x) % share * count;
  constexpr int column_step = share * count;
  const float inverse_width = 1.0f / static_cast<float>(d);
  float d_weight[frozen ? 1 : vectors][count] = {};
  int buffer = 0;
  for (i64 base = block * side; base < tokens; base += blocks * side, buffer ^= 1) {
    const i64 token = base + threadIdx.x / share;
    const i64 row = token * groups + group;
    const i64 gate_at = token * z_row + static_cast<i64>(group) * d;
    aligned_vector<T, count> values[vectors], gates[vectors], slopes[vectors];
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      const bool valid = token < tokens && column < d;
      values[i] = load_once<T, count>(x + row * d + column, valid, policy);
      gates[i] = load_once<T, count>(z + gate_at + column, valid, policy);
      slopes[i] = load_once<T, count>(dy + row * d + column, valid, policy);
    }
    const auto weights_of = [&](int column, float(&weight)[count]) {
      to_floats(load_through_l1<W, count>(w + static_cast<i64>(group) * d + column, column < d),
                weight);
    };
    float of_row[2] = {};  // sums of g times the norm's input, and of that input squared
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float value[count], own[count], slope[count], weight[count];
      to_floats(values[i], value);
      to_floats(gates[i], own);
      to_floats(slopes[i], slope);
      weights_of(first_column + i * column_step, weight);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        const float a = gate::value(own[e]);
        if constexpr (before) {
          value[e] *= a;
        } else {
          slope[e] *= a;
        }
        of_row[0] += slope[e] * weight[e] * value[e];
        of_row[1] += value[e] * value[e];
      }
    }
    sums::apply(of_row, shared, buffer);
    const float r = rsqrtf(of_row[1] * inverse_width + eps);
    const float mean = of_row[0] * r * inverse_width;  // of g times the normalised value
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (token >= tokens || column >= d) continue;
      float value[count], own[count], slope[count], weight[count], d_gate[count];
      to_floats(values[i], value);
      to_floats(gates[i], own);
      to_floats(slopes[i], slope);
      weights_of(column, weight);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        float a, a_slope;
        gate::value_and_slope(own[e], a, a_slope);
        const float normalised = (before ? value[e] * a : value[e]) * r;
        const float of_norm = before ? slope[e] : slope[e] * a;
        if constexpr (!frozen) d_weight[i][e] += of_norm * normalised;
        float gradient = r * (of_norm * weight[e] - normalised * mean);
        if constexpr (count == 1) {  // d == 1 implies count == 1
          if (d == 1) gradient = lone_gradient(of_norm * weight[e], r, eps);
        }
        d_gate[e] = (before ? gradient * value[e] : slope[e] * normalised * weight[e]) * a_slope;
        value[e] = before ? gradient * a : gradient;
      }
      store_once(dx + row * d + column, from_floats<T>(value), policy);
      store_once(dz + row * d + column, from_floats<T>(d_gate), policy);
    }
  }
  if constexpr (!frozen) {
    const i64 part = block * side + threadIdx.x / share;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (column < d) store_floats(partial + (part * groups + group) * d + column, d_weight[i]);
    }
  }
}

template <class W>
__global__ void __launch_bounds__(512)
    gated_rmsnorm_sum(const float* partial, W* dw, int rows, i64 columns) {
  column_sum(partial, dw, rows, columns);
}

// --- Any width and alignment: a block of 256 threads for each row, which is read again from L2 ---

template <class T, class W, class gate, class Convention, bool before, bool normed, bool row_gate,
          bool one_w = false>
__global__ void __launch_bounds__(256)
    gated_rmsnorm_fallback(const T* x, const T* z, const W* w, T* y, i64 rows, int groups, int d,
                           i64 z_row, float eps) {
  using sums = row_sum<1, 256, 1, 1>;
  __shared__ typename sums::memory shared;
  int buffer = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
    const gated_row at(row, groups, d, z_row, row_gate, one_w);
    const auto gate_at = [&](int column) { return to_float(z[at.z + (row_gate ? 0 : column)]); };
    const auto input = [&](int column) {
      const float value = to_float(x[row * d + column]);
      return before ? value * gate::value(gate_at(column)) : value;
    };
    if constexpr (!normed) {
      for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
        y[row * d + column] =
            from_float<T>(to_float(x[row * d + column]) * gate::value(gate_at(column)));
      }
      continue;
    }
    float squares[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = input(column);
      squares[0] += value * value;
    }
    sums::apply(squares, shared, buffer);
    const float r = reciprocal_deviation(squares[0], d, eps);
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      y[row * d + column] = from_float<T>(gated_result<T, W, gate, Convention, before>(
          input(column) * r, to_float(w[at.w + column]), gate_at(column)));
    }
  }
}

// r_of [rows]: 1 / deviation of each row.
template <class T, class W, class gate, bool before>
__global__ void __launch_bounds__(256)
    gated_rmsnorm_backward_fallback(const T* dy, const T* x, const T* z, const W* w, T* dx, T* dz,
                                    float* r_of, i64 rows, int groups, int d, i64 z_row,
                                    float eps) {
  using sums = row_sum<2, 256, 1, 1>;
  __shared__ typename sums::memory shared;
  int buffer = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
    const gated_row at(row, groups, d, z_row);
    float of_row[2] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float a = gate::value(to_float(z[at.z + column]));
      const float own = to_float(x[row * d + column]), value = before ? own * a : own;
      const float given = to_float(dy[row * d + column]), slope = before ? given : given * a;
      of_row[0] += slope * to_float(w[at.w + column]) * value;
      of_row[1] += value * value;
    }
    sums::apply(of_row, shared, buffer);
    const float r = reciprocal_deviation(of_row[1], d, eps);
    const float mean = of_row[0] * r / static_cast<float>(d);
    if (threadIdx.x == 0) r_of[row] = r;
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      float a, a_slope;
      gate::value_and_slope(to_float(z[at.z + column]), a, a_slope);
      const float own = to_float(x[row * d + column]), weight = to_float(w[at.w + column]);
      const float normalised = (before ? own * a : own) * r;
      const float given = to_float(dy[row * d + column]), slope = before ? given : given * a;
      const float gradient =
          d == 1 ? lone_gradient(slope * weight, r, eps) : r * (slope * weight - normalised * mean);
      dx[row * d + column] = from_float<T>(before ? gradient * a : gradient);
      dz[row * d + column] =
          from_float<T>((before ? gradient * own : given * normalised * weight) * a_slope);
    }
  }
}

// partial [chunks, groups * d]: a thread adds up `chunk` tokens of one column.
// Grid: (ceil(groups * d / 256), chunks). Block: 256.
template <class T, class gate>
__global__ void __launch_bounds__(256)
    gated_rmsnorm_backward_columns(const T* dy, const T* x, const T* z, const float* r_of,
                                   float* partial, i64 tokens, int groups, int d, i64 z_row,
                                   i64 chunk) {
  const i64 width = static_cast<i64>(groups) * d;
  const i64 column = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (column >= width) return;
  const i64 begin = blockIdx.y * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
  float sum = 0.0f;
  for (i64 token = begin; token < end; ++token) {
    // x̂ and dy, one of which has the gate as a factor.
    const float a = gate::value(to_float(z[token * z_row + column]));
    sum += to_float(dy[token * width + column]) * to_float(x[token * width + column]) * a *
           r_of[token * groups + column / d];
  }
  partial[static_cast<i64>(blockIdx.y) * width + column] = sum;
}

}  // namespace fftune
