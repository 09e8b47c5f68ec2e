// Families of kernels that keep rows in registers: threads of a block, or of a cluster of blocks,
// share a row and read it once, by vectors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/space.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune {

struct RowShape {
  std::int64_t rows = 0;
  std::int64_t elements = 0;  // of a row
  DType dtype = DType::f32;

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(dtype_bytes(dtype)); }
  std::int64_t bytes() const { return elements * element_bytes(); }
  std::int64_t vectors(std::int64_t vector_bytes) const { return bytes() / vector_bytes; }
};

/// Compile-time parameters of the family's kernels.
struct RowKernelLimits {
  std::vector<std::int64_t> group;   // threads of a block that share a row
  std::vector<std::int64_t> groups;  // rows of a block side by side
  bool clusters = false;             // blocks may share a row; and accesses have an L2 policy
  bool wide_alone = false;           // a row of more than 256 threads has a block to itself
};

/// Elements that one access moves.
std::int64_t elements_of_vector(const RowShape& shape, const Config& config);
/// Vectors of a row that each of its threads has.
std::int64_t vectors_of_thread(const RowShape& shape, const Config& config);
std::int64_t block_threads(const Config& config);

/// Adds vector, group and groups, and with clusters cluster and evict_first, with the constraints
/// on them alone.
void add_row_parameters(Space& space, const RowShape& shape, const RowKernelLimits& limits,
                        const DeviceFacts& facts);

/// Keeps `waves`, the blocks of an SM, to those that are resident: others only add partial sums.
void limit_waves(Space& space);

/// Inputs of the choice of a default configuration.
struct RowDefaults {
  std::int64_t vectors = 1;  // of a thread, about
  std::int64_t least_group = 8;
  std::int64_t most_group = 512;
  std::int64_t cluster = 1;  // blocks that share a row
};

/// vector, group and groups: the widest accesses to which rows are aligned, and 256 threads a block
/// or what a row takes.
Config default_rows(const RowShape& shape, const RowDefaults& defaults);

/// Adds a launch of the kernel `expression` of `file` on a grid of `sets` blocks, or clusters of
/// them where the configuration has clusters. On compute capability 9.0 it is programmatic.
void append_row_kernel(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& expression, std::int64_t sets, const Config& config,
                       std::vector<Argument> arguments);

/// A family of such kernels. It refuses rows for which its default configuration is not feasible.
class RowFamily final : public StageFamily {
 public:
  RowFamily(StageFamilyFacts facts, RowShape (*shape)(const Problem&))
      : StageFamily(std::move(facts)), shape_(shape) {}
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override;

 private:
  RowShape (*shape_)(const Problem&);
};

}  // namespace fftune
