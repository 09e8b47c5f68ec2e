// The ways from the accumulators of the wgmma engine to memory, by epilogue.
#pragma once

#include "gemm/wgmma_block_store.cuh"
#include "gemm/wgmma_gradient.cuh"
#include "gemm/wgmma_store.cuh"

namespace fftune {

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_store_choice {
  using type = wgmma_store<T, Epilogue, tile>;
};
template <class T, class Activation, bool hidden, wgmma_tile tile>
struct wgmma_store_choice<T, gated_gradient<Activation, hidden>, tile> {
  using type = wgmma_gradient_store<T, gated_gradient<Activation, hidden>, tile>;
};
template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_store_choice<T, block_quantised<Epilogue>, tile> {
  using type = wgmma_block_store<Epilogue, tile>;
};
template <class T, class Epilogue, wgmma_tile tile>
using wgmma_store_of = typename wgmma_store_choice<T, Epilogue, tile>::type;

}  // namespace fftune
