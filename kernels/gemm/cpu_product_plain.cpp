// The CPU's fallback for products: plain loops over any sizes, types and layouts.
#include <algorithm>

#include "kernels/gemm/cpu_product_block.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune {
namespace {

constexpr std::int64_t columns = 256;  // of a block: a row of sums on the stack

float element(const HostCall& call, const Pointer& matrix, DType dtype, std::int64_t at) {
  float value = 0;
  decode(dtype, element_at(call, matrix, dtype, at), {&value, 1});
  return value;
}

/// sums [columns of the block] += row `row` of a · the block's columns of b.
void add_products(const Product& product, const HostCall& call, const Pointer& a, const Pointer& b,
                  std::int64_t row, const ProductBlock& block, float* sums) {
  const GemmShape& shape = product.shape;
  float values[columns];
  for (std::int64_t k = 0; k < shape.k; ++k) {
    const float factor =
        element(call, a, product.dtype, shape.a_transposed ? k * shape.m + row : row * shape.k + k);
    if (shape.b_transposed)
      decode(product.dtype, element_at(call, b, product.dtype, k * shape.n + block.column),
             {values, static_cast<std::size_t>(block.columns)});
    else
      for (std::int64_t j = 0; j < block.columns; ++j)
        values[j] = element(call, b, product.dtype, (block.column + j) * shape.k + k);
    for (std::int64_t j = 0; j < block.columns; ++j) sums[j] += factor * values[j];
  }
}

}  // namespace

std::optional<std::string> CpuPlainProduct::refusal(const Problem& problem,
                                                    const DeviceFacts& facts) const {
  return refuse_stage(stage(), problem, facts, DeviceKind::cpu);
}

Program CpuPlainProduct::program(const Problem& problem, const DeviceFacts& facts,
                                 const Config&) const {
  Program program;
  const Product work = product(problem);
  const RowKernels* const loops = &row_kernels(facts.arch, DType::f32);
  program.host_tensors = tensors_of(work);
  program.steps.emplace_back(HostFunction([work, loops](const HostCall& call) {
    const GemmShape& shape = work.shape;
    call.parallel.run(static_cast<int>(shape.m), call.parallel.max_threads(), [&](int task) {
      for (std::int64_t column = 0; column < shape.n; column += columns) {
        const ProductBlock block{task, 1, column, std::min(columns, shape.n - column)};
        for (int result = 0; result < shape.results; ++result) {
          float sums[columns] = {};
          for (int term = 0; term < shape.terms; ++term)
            add_products(work, call, work.a[static_cast<std::size_t>(term + result)],
                         work.b[static_cast<std::size_t>(term)], task, block, sums);
          finish_block(work, call, block, result, *loops, sums);
        }
      }
    });
  }));
  return program;
}

std::vector<std::string> CpuPlainProduct::sources() const {
  return {"gemm/cpu_product_plain.cpp", "gemm/cpu_product_block.cpp", activation_source,
          row_kernel_sources[0], row_kernel_sources[1]};
}

}  // namespace fftune
