// Rows to e4m3 with a scale for each `length` elements: of a whole row, or of 128.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

constexpr int quantise_vector = 8;  // elements that a thread loads at a time
constexpr int quantise_held = 4;    // vectors in registers; a longer row's rest is read again

// Grid: ceil(rows * scales of a row / groups). Block: group * groups; `group` threads have the
// elements of a scale. `aligned`: rows begin at multiples of 16 bytes.
template <class T, int group, int groups, bool aligned>
__global__ void __launch_bounds__(group* groups)
    quantise_rows(const T* x, fp8* elements, float* scales, i64 rows, i64 k, i64 length) {
  using vector = aligned_vector<T, quantise_vector>;
  using largest_of_row = row_sum<1, group, groups, 1, larger_magnitude>;
  __shared__ typename largest_of_row::memory shared;
  const i64 of_row = ceil_div(k, length), all = rows * of_row;
  const i64 own = static_cast<i64>(blockIdx.x) * groups + threadIdx.x / group;
  const i64 place = own < all ? own : all - 1, first = place % of_row * length;
  const i64 count = length < k - first ? length : k - first;
  const i64 begin = place / of_row * k + first;
  const i64 at = threadIdx.x % group * quantise_vector;
  constexpr i64 step = group * quantise_vector;
  wait_and_launch_dependents();

  const auto load = [&](i64 from) {
    vector result = {};
    if constexpr (aligned) {
      result = load_through_l1<T, quantise_vector>(x + begin + from, from < count);
    } else {
#pragma unroll
      for (int i = 0; i < quantise_vector; ++i) {
        if (from + i < count) reinterpret_cast<T*>(result.word)[i] = x[begin + from + i];
      }
    }
    return result;
  };
  float largest[1] = {};
  const auto join = [&](const vector& from) {
    float value[quantise_vector];
    to_floats(from, value);
#pragma unroll
    for (int i = 0; i < quantise_vector; ++i) {
      largest[0] = larger_magnitude::join(largest[0], fabsf(value[i]));
    }
  };
  vector held[quantise_held];
#pragma unroll
  for (int i = 0; i < quantise_held; ++i) held[i] = load(at + i * step);
#pragma unroll
  for (int i = 0; i < quantise_held; ++i) join(held[i]);
#pragma unroll 1
  for (i64 from = at + quantise_held * step; from < count; from += step) join(load(from));
  largest_of_row::apply(largest, shared, 0);
  if (own >= all) return;

  const float scale = scale_of<fp8>(largest[0]), factor = 1.0f / scale;
  if (at == 0) scales[own] = scale;
  const auto put = [&](i64 to, const vector& from) {
    if (to >= count) return;
    float value[quantise_vector];
    to_floats(from, value);
#pragma unroll
    for (int i = 0; i < quantise_vector; ++i) value[i] *= factor;
    const auto result = quantise<fp8>(value);
    if constexpr (aligned) {
      *reinterpret_cast<uint2*>(elements + begin + to) = make_uint2(result.word[0], result.word[1]);
    } else {
#pragma unroll
      for (int i = 0; i < quantise_vector; ++i) {
        if (to + i < count)
          elements[begin + to + i].bits = static_cast<u8>(result.word[i / 4] >> i % 4 * 8);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < quantise_held; ++i) put(at + i * step, held[i]);
#pragma unroll 1
  for (i64 from = at + quantise_held * step; from < count; from += step) put(from, load(from));
}

}  // namespace fftune
