// The gated feed-forward network of Llama (Shazeer 2020, arXiv 2002.05202):
// y = (act(x·w_gateᵀ) ⊙ (x·w_upᵀ))·w_downᵀ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in ffn.cpp; listed in kernels/catalog.cpp.
const Op& ffn_op();

namespace ffn {

/// The places of the op's tensors, which are also those that TensorArgument counts by.
namespace tensor {
constexpr std::size_t x = 0;       // [m, d]
constexpr std::size_t w_gate = 1;  // [h, d]
constexpr std::size_t w_up = 2;    // [h, d]
constexpr std::size_t w_down = 3;  // [d, h]
constexpr std::size_t y = 4;       // [m, d]
constexpr std::size_t hidden = 5;  // [m, h], between the stages
constexpr std::size_t count = 6;
}  // namespace tensor

/// The stages: x, w_gate, w_up -> hidden, then hidden, w_down -> y.
constexpr const char* stage_gate_up = "gate_up";
constexpr const char* stage_down = "down";

/// The sizes of a problem: "m" tokens, "d" embedding, "h" intermediate.
struct Shape {
  std::int64_t m = 0;
  std::int64_t d = 0;
  std::int64_t h = 0;
};
Shape shape_of(const Problem& problem);

}  // namespace ffn
}  // namespace fftune
