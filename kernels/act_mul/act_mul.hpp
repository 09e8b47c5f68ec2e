// The elementwise part of an unfused gated feed-forward network (Shazeer 2020, arXiv 2002.05202):
// out = act(gate) ⊙ up, with gate and up as two tensors or as the halves of one packed row.
//
// The backward pass: dgate = dout ⊙ up ⊙ act'(gate), dup = dout ⊙ act(gate), packed as the inputs
// are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/activation.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in act_mul.cpp; listed in kernels/catalog.cpp.
const Op& act_mul_op();

namespace act_mul {

constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";

/// The places of the tensors. Two tensors: gate, up, then out, or dout, dgate, dup. Packed:
/// gate_up, then out, or dout, dgate_up; `up` and `dup` are then places of no tensor of their own.
struct Places {
  std::size_t gate = 0;   // [m, h], or [m, 2 h] with gate in the first half of each row
  std::size_t up = 0;     // [m, h]
  std::size_t out = 0;    // [m, h]
  std::size_t dout = 0;   // [m, h]
  std::size_t dgate = 0;  // as gate
  std::size_t dup = 0;    // as up
  std::size_t count = 0;
};
Places places_of(const Problem& problem);

bool packed(const Problem& problem);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace act_mul
}  // namespace fftune
