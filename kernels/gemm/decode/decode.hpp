// Definitions that the decode engine, the fused decode engine and the experts' kernels for few
// tokens share: the host side of gemm/decode/stream.cuh.
#pragma once

#include <optional>
#include <string>

#include "kernels/common/typed_space.hpp"
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
/// what a configuration needs.
template <class Point, class Needs>
void limit_stream(TypedSpace<Point>& space, const typename TypedSpace<Point>::Names& reads,
                  Needs needs) {
  space.constraint("the loads in flight are held in registers: 255 a thread, and 65,536 an SM",
                   reads, [needs](const Point& point) {
                     const StreamNeeds stream = needs(point);
                     return stream.registers <= most_registers(stream.threads);
                   });
  space.constraint(
      "a thread needs 2 to 16 loads in flight: one does not cover the latency of memory, and more "
      "than 16 only start later",
      reads, [needs](const Point& point) {
        const StreamNeeds stream = needs(point);
        return (stream.loads >= 2 || stream.is_short) && stream.loads <= 16;
      });
}

}  // namespace fftune
