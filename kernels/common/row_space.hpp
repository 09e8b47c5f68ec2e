// The space of kernels that keep rows in registers: threads of a block, or of a cluster of blocks,
// share a row and read it once, by vectors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/space.hpp"
#include "registry/family.hpp"

namespace fftune {

struct RowShape {
  std::int64_t rows = 0;
  std::int64_t elements = 0;  // of a row
  DType dtype = DType::f32;

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(dtype_bytes(dtype)); }
  std::int64_t bytes() const { return elements * element_bytes(); }
  std::int64_t vectors(std::int64_t vector_bytes) const { return bytes() / vector_bytes; }
};

/// What the kernels of a family are compiled for.
struct RowKernelLimits {
  std::vector<std::int64_t> group;   // threads of a block that share a row
  std::vector<std::int64_t> groups;  // rows of a block side by side
  bool clusters = false;             // blocks may share a row; and accesses have an L2 policy
};

/// Elements that one access moves.
std::int64_t elements_of_vector(const RowShape& shape, const Config& config);
/// Vectors of a row that each of its threads has.
std::int64_t vectors_of_thread(const RowShape& shape, const Config& config);
std::int64_t block_threads(const Config& config);

/// Adds vector, group and groups, and with clusters cluster and evict_first, with what constrains
/// them alone.
void add_row_parameters(Space& space, const RowShape& shape, const RowKernelLimits& limits,
                        const DeviceFacts& facts);

/// Why rows in registers cannot serve a pass, one line: no CUDA kernel can, or the default of
/// `family` is not in its space. `extent` is the size that a row's elements have in the problem.
std::optional<std::string> refuse_rows(const Family& family, const Problem& problem,
                                       std::string_view pass, const DeviceFacts& facts,
                                       std::string_view extent, std::int64_t elements);

}  // namespace fftune
