// A Product as the vendor's BLAS computes it: what baselines are made of.
#pragma once

#include "kernels/gemm/product.hpp"

namespace fftune {

/// Appends one LibraryGemm for each term and result. What they add to is their c, as a framework
/// accumulates gradients. Of a gated gradient it is the product alone, into `sum`.
void append_library_product(Program& program, const Product& product);
void append_library_product(Program& program, const Product& product, const Pointer& sum);

}  // namespace fftune
