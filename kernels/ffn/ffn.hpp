// The gated feed-forward network of Llama (Shazeer 2020, arXiv 2002.05202):
// y = (act(x·w_gateᵀ) ⊙ (x·w_upᵀ))·w_downᵀ, and what is added to it: a bias, a residual.
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
}  // namespace tensor

/// What a problem asks for beside the plain forward pass.
struct Form {
  bool saves = false;     // gate and up are outputs too: save=preact
  bool bias = false;      // y has a bias: bias=down
  bool residual = false;  // y is added to a residual: residual=yes
  bool adds() const { return bias || residual; }
  bool plain() const { return !saves && !adds(); }
};
Form form_of(const Problem& problem);

/// The places of those that the form moves.
struct Places {
  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t b_down = none;    // [d]
  std::size_t residual = none;  // [m, d]
  std::size_t y = 4;            // [m, d]
  std::size_t gate = none;      // [m, h]: x·w_gateᵀ, in the training form
  std::size_t up = none;        // [m, h]: x·w_upᵀ
  std::size_t hidden = 5;       // [m, h], between the stages
  std::size_t count = 6;
};
Places places_of(const Problem& problem);

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
