// The toy op's stages as executables whose output a test may spoil.
#pragma once

#include <functional>
#include <memory>

#include "support/host_backend.hpp"
#include "support/toy_op.hpp"
#include "verify/verifier.hpp"

namespace fftune::test {

using Spoil = std::function<void(void* const* tensors, void* workspace)>;

inline constexpr std::size_t toy_x = 0, toy_a = 1, toy_b = 2, toy_y = 3, toy_hidden = 4;

/// Runs stage 0 or 1 as it should be, then `spoil`.
inline std::shared_ptr<const Executable> toy_stage(const Problem& problem, int stage,
                                                   const Spoil& spoil = {},
                                                   std::size_t workspace_bytes = 0) {
  const auto m = problem.size("m");
  const auto d = problem.size("d");
  const auto h = problem.size("h");
  return std::make_shared<HostExecutable>(
      [=, dtype = problem.dtype](void* const* t, void* workspace) {
        if (stage == 0)
          toy_product(dtype, m, h, d, t[toy_x], t[toy_a], t[toy_hidden]);
        else
          toy_product(dtype, m, d, h, t[toy_hidden], t[toy_b], t[toy_y]);
        if (spoil) spoil(t, workspace);
      },
      workspace_bytes);
}

}  // namespace fftune::test
