// The steps of rope as kernels of their own, as a user's pipeline has them: what `bench` compares
// with. x, y [tokens, heads, dim], rows of x `row` elements apart; turned [tokens, heads, rotary];
// cosine, sine [positions, rotary]. Block: 256. Grid: any, but for baseline_angles.
#include "common/numerics.cuh"

namespace fftune {

template <int pairs>
struct baseline_frequencies {
  float value[pairs];
};

// Grid: ceil(positions * rotary / 256).
template <bool table, bool interleaved, int rotary>
__global__ void __launch_bounds__(256)
    baseline_angles(const float* angles, baseline_frequencies<rotary / 2> frequencies,
                    float* cosine, float* sine, i64 positions, float scale) {
  const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= positions * rotary) return;
  const int column = static_cast<int>(i % rotary);
  const int pair = interleaved ? column / 2 : column % (rotary / 2);
  const float angle =
      table ? angles[i] : __fmul_rn(static_cast<float>(i / rotary), frequencies.value[pair]);
  float s, c;
  sine_and_cosine(angle, s, c);
  sine[i] = s * scale;
  cosine[i] = c * scale;
}

// Calls body(token, head, column) for each of this thread's elements of [tokens, heads, columns].
template <int columns, class Body>
__device__ __forceinline__ void for_elements(i64 tokens, int heads, const Body& body) {
  const i64 step = static_cast<i64>(gridDim.x) * 256;
  for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < tokens * heads * columns;
       i += step) {
    const i64 of_head = i / columns;
    body(of_head / heads, of_head % heads, static_cast<int>(i % columns));
  }
}

// r of the forward pass, or that of the backward pass, whose sine is the partner's. The position
// of a token is token / divisor % modulus.
template <class T, bool transposed, bool interleaved, int dim, int rotary>
__global__ void __launch_bounds__(256)
    baseline_turn(const T* x, const float* sine, T* turned, i64 tokens, int heads, i64 row,
                  i64 divisor, i64 modulus) {
  for_elements<rotary>(tokens, heads, [&](i64 token, i64 head, int column) {
    const bool first = interleaved ? column % 2 == 0 : column < rotary / 2;
    const int distance = interleaved ? 1 : rotary / 2;
    const int partner = first ? column + distance : column - distance;
    float value = to_float(x[token * row + head * dim + partner]);
    if (transposed) value *= sine[token / divisor % modulus * rotary + partner];
    turned[(token * heads + head) * rotary + column] =
        from_float<T>(first == transposed ? value : -value);
  });
}

template <class T, bool transposed, int dim, int rotary>
__global__ void __launch_bounds__(256)
    baseline_sum(const T* x, const T* turned, const float* cosine, const float* sine, T* y,
                 i64 tokens, int heads, i64 row, i64 divisor, i64 modulus) {
  for_elements<dim>(tokens, heads, [&](i64 token, i64 head, int column) {
    float value = to_float(x[token * row + head * dim + column]);
    if (column < rotary) {
      const i64 angle = token / divisor % modulus * rotary + column;
      const float other = to_float(turned[(token * heads + head) * rotary + column]);
      value = value * cosine[angle] + (transposed ? other : other * sine[angle]);
    }
    y[(token * heads + head) * dim + column] = from_float<T>(value);
  });
}

}  // namespace fftune
