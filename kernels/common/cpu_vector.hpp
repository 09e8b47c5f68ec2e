// Inner loops for the CPU, compiled once for each vector instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/common/activation.hpp"

namespace fftune {

/// The same loops in one instruction set. All are deterministic: the order of every sum is fixed
/// by the sizes alone.
struct VectorKernels {
  std::size_t tile_rows;     // weight rows of a tile: even
  std::size_t tile_columns;  // tokens of a tile, the width of a panel

  /// out[i] = act(gate[i]) * up[i]; out may be gate or up.
  void (*gated)(Activation activation, const float* gate, const float* up, float* out,
                std::size_t count);
  /// The largest value that is a number; -inf of none.
  float (*largest)(const float* values, std::size_t count);
  /// values[i] = exp(values[i] - shift), 0 below exp(-87.7); returns their sum.
  float (*exponentials)(float* values, float shift, std::size_t count);
  /// bf16 to float, and back with rounding to nearest even.
  void (*widen)(const std::uint16_t* in, float* out, std::size_t count);
  void (*narrow)(const float* in, std::uint16_t* out, std::size_t count);

  /// out [columns, rows] = inᵀ of in [rows, columns], with the distance between rows in elements.
  void (*transpose)(const float* in, std::size_t in_stride, float* out, std::size_t out_stride,
                    std::size_t rows, std::size_t columns);

  /// One register tile: out [tile_rows, tile_columns] (+)= w · panel, over `depth` >= 1.
  /// Rows 0 .. tile_rows/2 of w begin at `first`, the others at `second`, each row `stride`
  /// elements after the one before. panel is [depth, tile_columns].
  void (*tile)(const float* first, const float* second, std::size_t stride, const float* panel,
               std::size_t depth, bool accumulate, float* out);

  /// out[row * tokens + token] = the product of row `row` of w and row `token` of x, over `depth`:
  /// for few tokens, where each weight is read once. 1 to 4 rows and 1 to 4 tokens.
  void (*dot)(const float* w, std::size_t w_stride, const float* x, std::size_t x_stride,
              std::size_t depth, std::size_t rows, std::size_t tokens, float* out);
  void (*dot_bf16)(const std::uint16_t* w, std::size_t w_stride, const float* x,
                   std::size_t x_stride, std::size_t depth, std::size_t rows, std::size_t tokens,
                   float* out);
};

/// For a CPU's DeviceFacts::arch: "avx512", "avx2", or else for the compiler's own target.
const VectorKernels& vector_kernels(std::string_view isa);

/// The embedded sources whose change makes a choice among these loops stale.
constexpr const char* vector_kernel_source = "common/cpu_vector.inc";

}  // namespace fftune
