// Products of matrices for any sizes, alignment and element type: one sum, two terms, two results
// that share B, or the gradients of a gate.
//
// Grid: results * ceil(m / 64) * ceil(n / 64), in one dimension because only that one may pass
// 65,535. Block: 256 threads.
#include "gemm/fallback.cuh"

namespace fftune {

// c0, and c1 of a second result, add `bias` and their own `more`; null where they do not. Of
// gradients `more` is gate and up, and c is d_gate, d_up and hidden. k is that of one term.
template <class T, class Epilogue, class Operands>
__global__ void __launch_bounds__(256)
    product_fallback(const T* a0, const T* a1, const T* b0, const T* b1, T* c0, T* c1, T* c2,
                     const T* bias, const T* more0, const T* more1, int m, int n, int k) {
  using gemm = fallback_gemm<T, Epilogue>;
  __shared__ typename gemm::storage shared;
  constexpr u32 tile = 64;
  const u32 tiles_n = ceil_div(static_cast<u32>(n), tile);
  u32 tile_m = blockIdx.x / tiles_n;
  bool second = false;
  if constexpr (Operands::results == 2) {
    const u32 tiles_m = ceil_div(static_cast<u32>(m), tile);
    second = tile_m >= tiles_m;
    if (second) tile_m -= tiles_m;
  }
  const i64 first_m = static_cast<i64>(tile_m) * tile;
  const i64 first_n = static_cast<i64>(blockIdx.x % tiles_n) * tile;
  typename gemm::tile_sums sum = {};
  gemm::template multiply<Operands>(sum, second ? a1 : a0, {b0}, first_m, first_n, m, n, k, shared);
  if constexpr (Operands::terms == 2) {
    __syncthreads();  // the last tiles of the first term are read
    gemm::template multiply<Operands>(sum, a1, {b1}, first_m, first_n, m, n, k, shared);
  }
  gemm::for_each_element(sum, first_m, first_n, m, n, [&](i64 row, i64 column, float(&own)[1]) {
    const i64 at = row * n + column;
    if constexpr (is_gradient<Epilogue>) {
      float result[Epilogue::outputs];
      Epilogue::apply(own[0], to_float(more0[at]), to_float(more1[at]), result);
      c0[at] = from_float<T>(result[0]);
      c1[at] = from_float<T>(result[1]);
      if constexpr (Epilogue::outputs == 3) c2[at] = from_float<T>(result[2]);
    } else {
      const addends<T> more{bias, second ? more1 : more0};
      (second ? c1 : c0)[at] = from_float<T>(more.template add<Epilogue>(own[0], row, column, n));
    }
  });
}

}  // namespace fftune
