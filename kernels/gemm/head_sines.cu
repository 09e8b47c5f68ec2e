// The cosines and sines by which the epilogue qkv rotates heads: of every row and pair, in float32.
#include "common/dependency.cuh"
#include "common/sine.cuh"
#include "common/types.cuh"

namespace fftune {

template <int count>
struct pair_frequencies {
  float of[count];
};

// `angles`, where `has_table`: [table_rows, 2 pairs], of which a position past the end reads the
// last row, and of each pair the first angle counts. Grid: rows * pairs / 256 blocks.
template <int pairs, bool has_table, bool interleaved, class Real>
__global__ void __launch_bounds__(256)
    head_sines(const int* positions, const float* angles, float2* sines,
               const __grid_constant__ pair_frequencies<pairs> frequencies, i64 rows,
               int table_rows, float scale) {
  launch_dependents();
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= rows * pairs) return;
  const i64 row = at / pairs;
  const int pair = static_cast<int>(at % pairs);
  wait_for_dependencies();
  const int position = positions[row];
  float angle;
  if constexpr (has_table) {
    const int last = table_rows - 1;
    const int line = position < 0 ? 0 : position > last ? last : position;
    angle = angles[static_cast<i64>(line) * (2 * pairs) + (interleaved ? 2 * pair : pair)];
  } else {
    angle = static_cast<float>(position) * frequencies.of[pair];
  }
  Real sine, cosine;
  sine_and_cosine(angle, sine, cosine);
  sines[at] = {static_cast<float>(cosine * scale), static_cast<float>(sine * scale)};
}

}  // namespace fftune
