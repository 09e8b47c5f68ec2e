// A block of a Product on the CPU: its operands in place, and what becomes of its sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/gemm/product.hpp"

namespace fftune {

/// Rows [row, row + rows) and columns [column, column + columns) of c.
struct ProductBlock {
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t column = 0;
  std::int64_t columns = 0;
};

/// The address of an element of a tensor.
std::byte* element_at(const HostCall& call, const Pointer& matrix, DType dtype,
                      std::int64_t element);

/// Finishes a block of sums [rows, columns] of result `result`, which is overwritten: adds what the
/// product adds, or makes the gradients of it, rounds, and stores. `loops` are those of f32.
void finish_block(const Product& product, const HostCall& call, const ProductBlock& block,
                  int result, const RowKernels& loops, float* sums);

/// How many tensors the product's host functions look at.
std::size_t tensors_of(const Product& product);

}  // namespace fftune
