#include "kernels/gemm/library_product.hpp"

namespace fftune {

void append_library_product(Program& program, const Product& product) {
  const GemmShape& shape = product.shape;
  for (int result = 0; result < shape.results; ++result)
    for (int term = 0; term < shape.terms; ++term) {
      const auto place = static_cast<std::size_t>(result);
      // What a gradient is added to is the same buffer, as a framework has it.
      const bool accumulates = term > 0 || !product.addends.empty();
      program.steps.emplace_back(
          LibraryGemm{.dtype = product.dtype,
                      .m = shape.m,
                      .n = shape.n,
                      .k = shape.k,
                      .a = product.a[static_cast<std::size_t>(result + term)],
                      .b = product.b[static_cast<std::size_t>(term)],
                      .c = product.c[place],
                      .a_transposed = shape.a_transposed,
                      .b_transposed = shape.b_transposed,
                      .accumulates = accumulates});
    }
}

void append_library_product(Program& program, const Product& product, const Pointer& sum) {
  Product plain = product;
  plain.c = {sum};
  append_library_product(program, plain);
}

}  // namespace fftune
