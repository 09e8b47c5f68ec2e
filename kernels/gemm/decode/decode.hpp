// Definitions that the decode engine, the fused decode engine and the experts' kernels for few
// tokens share: the host side of gemm/decode/stream.cuh.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/space.hpp"
#include "kernels/gemm/decode/stream_shape.cuh"
#include "kernels/gemm/problem.hpp"

namespace fftune {

/// The rows of A in the tensor core's operand: 8 or 16.
int decode_tokens(const GemmProblem& gemm);

/// Why neither of them can implement a GEMM, its epilogue and its alignment aside.
std::optional<std::string> no_decode(const GemmProblem& gemm);

/// A configuration's 16-byte loads of weights in flight and registers, of a thread, and its block's
/// threads. `is_short`: k has no more than one load for a thread.
struct StreamNeeds {
  int loads, registers, threads;
  bool is_short = false;
};

/// Adds the constraints of weights that go through registers. `reads`: the parameters that decide
/// what a configuration needs, where the space shall know.
void limit_stream(Space& space, const std::function<StreamNeeds(const Config&)>& needs,
                  const std::vector<std::string>& reads = {});

}  // namespace fftune
