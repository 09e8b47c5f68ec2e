// The sm80 engine's parameters: their constraints for a GEMM on a device, which to use untuned, and
// the cost model that ranks them.
#pragma once

#include <string>

#include "core/space.hpp"
#include "device/facts.hpp"
#include "kernels/gemm/problem.hpp"
#include "kernels/gemm/sm80/config.cuh"

namespace fftune::sm80 {

/// A configuration: the kernel's template argument, and its run-time arguments.
struct Tile : sm80_config {
  int split_k = 1, group_m = 1;

  Tile() = default;
  Tile(const sm80_config& shape, int split, int band)
      : sm80_config(shape), split_k(split), group_m(band) {}
  explicit Tile(const Config& config);
  Config config() const;
  std::int64_t tiles_m(std::int64_t m) const { return ceil_div(m, bm); }
};

/// "fftune::sm80_config{128, 128, ...}"
std::string template_argument(const sm80_config& config);

/// bm, bn, bk, warps_m, warps_n, stages, split_k, group_m.
Space space(const GemmProblem& gemm, const DeviceFacts& facts);
bool has_tiles(const GemmProblem& gemm, const DeviceFacts& facts);

/// The feasible configuration of least cycles().
Config default_config(const GemmProblem& gemm, const DeviceFacts& facts);

/// The cost model: clock cycles of a configuration, accurate enough to rank.
double cycles(const GemmProblem& gemm, const DeviceFacts& facts, const Config& config);

}  // namespace fftune::sm80
