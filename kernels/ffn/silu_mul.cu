// out = act(gate) * up, as a pipeline of library products needs it between its GEMMs: what `bench`
// compares with.
//
// gate and up are [rows, columns] with a row stride in elements of their own: two tensors (stride =
// columns), or the halves of one packed [rows, 2 columns] product (stride = 2 columns, up = gate +
// columns). out is [rows, columns]. Eight elements a thread; columns and strides are multiples of 8
// and the pointers 16-byte aligned. Grid: (ceil(columns / 8 / 256), min(rows, 65535)). Block: 256
// threads.
#include "common/activation.cuh"
#include "common/vector.cuh"

namespace fftune {

template <class T, class Activation>
__global__ void __launch_bounds__(256) silu_mul(const T* gate, const T* up, T* out, i64 rows,
                                                i64 columns, i64 gate_stride, i64 up_stride) {
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * 8;
  if (column >= columns) {
    return;
  }
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    const vector16 gates = load_cached(gate + row * gate_stride + column);
    const vector16 ups = load_cached(up + row * up_stride + column);
    vector16 result;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float gate_pair[2], up_pair[2];
      unpack<T>(gates.word[word], gate_pair[0], gate_pair[1]);
      unpack<T>(ups.word[word], up_pair[0], up_pair[1]);
      result.word[word] = pack<T>(Activation::apply(gate_pair[0]) * up_pair[0],
                                  Activation::apply(gate_pair[1]) * up_pair[1]);
    }
    store(out + row * columns + column, result);
  }
}

}  // namespace fftune
