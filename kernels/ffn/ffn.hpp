// The gated feed-forward network of Llama (Shazeer 2020, arXiv 2002.05202):
// y = (act(x·w_gateᵀ) ⊙ (x·w_upᵀ))·w_downᵀ, what is added to it, a bias or a residual, and what x
// goes through before: a root mean square norm (norm.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "kernels/gemm/shape.hpp"
#include "kernels/ffn/stages.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in ffn.cpp; listed in kernels/catalog.cpp.
const Op& ffn_op();

namespace ffn {

/// The places of the forward pass's first tensors, which are also those that TensorArgument counts
/// by.
namespace tensor {
constexpr std::size_t x = 0;       // [m, d]
constexpr std::size_t w_gate = 1;  // [h, d]
constexpr std::size_t w_up = 2;    // [h, d]
constexpr std::size_t w_down = 3;  // [d, h]
}  // namespace tensor

/// In fp8, x, the weights and hidden are elements of fp8 with f32 scales: a number is its element
/// times the scale. What is neither a sum's operand nor a scale is bf16.
///
/// scales=tensor: one for each tensor. hidden's is given too, as static quantisation has it.
/// scales=block: one for each 128 elements of a row of x and of hidden, and for each block of 128
/// rows by 128 columns of a weight; the last of them may be less. The op finds hidden's: what
/// brings the largest of the 128 to 448, the largest number of e4m3 (DeepSeek-V3, arXiv
/// 2412.19437, 3.3.2).
bool is_quantised(const Problem& problem);
DType wide_dtype(const Problem& problem);
bool has_block_scales(const Problem& problem);

/// What a problem asks for beside the plain forward pass.
struct Form {
  bool saves = false;     // gate and up are stored too: save=preact, or in the pass bwd save=input
  bool bias = false;      // y has a bias: bias=down
  bool residual = false;  // y is added to a residual: residual=yes
  bool accumulates = false;  // bwd: the weights' gradients are added to others: accumulate=yes
  bool normalises = false;   // x is normalised first: norm=rms or add-rms
  bool adds_before = false;  // and a residual is added to it before that: norm=add-rms
  bool adds() const { return bias || residual; }
  /// Of the products, in front of which there may be a norm.
  bool plain() const { return !saves && !adds(); }
};
Form form_of(const Problem& problem);
/// Whether a backward pass computes gate and up again: save=input.
bool recomputes(const Problem& problem);

/// The places of all of them, of either pass.
struct Places {
  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t x = tensor::x;
  std::size_t w_gate = tensor::w_gate;
  std::size_t w_up = tensor::w_up;
  std::size_t w_down = tensor::w_down;
  std::size_t x_scale = none;       // [1], or [m, blocks of d]
  std::size_t w_gate_scale = none;  // [1], or [blocks of h, blocks of d], as w_up_scale
  std::size_t w_up_scale = none;
  std::size_t hidden_scale = none;    // [1], or [m, blocks of h] between the stages
  std::size_t w_down_scale = none;    // [1], or [blocks of d, blocks of h]
  std::size_t b_down = none;          // [d]
  std::size_t residual = none;        // [m, d]
  std::size_t x_residual = none;      // [m, d], of the norm
  std::size_t w_norm = none;          // [d]
  std::size_t y = 4;                  // [m, d]
  std::size_t gate = none;            // [m, h]: x·w_gateᵀ, in the training form
  std::size_t up = none;              // [m, h]: x·w_upᵀ
  std::size_t sum = none;             // [m, d]: x + x_residual
  std::size_t gate_up_x = tensor::x;  // what the weights are multiplied with: x, or x normalised
  std::size_t hidden = 5;             // [m, h], between the stages
  // Of the pass bwd; a gradient has the shape of what it belongs to.
  std::size_t dy = none;
  std::size_t dw_gate_before = none;  // where gradients accumulate; it may be dw_gate itself
  std::size_t dw_up_before = none;
  std::size_t dw_down_before = none;
  std::size_t dx = none;
  std::size_t dw_gate = none;
  std::size_t dw_up = none;
  std::size_t dw_down = none;
  std::size_t d_gate = none;  // between the stages, as d_up
  std::size_t d_up = none;
  std::size_t count = 6;
};
Places places_of(const Problem& problem);

/// The sizes of a problem: "m" tokens, "d" embedding, "h" intermediate.
struct Shape {
  std::int64_t m = 0;
  std::int64_t d = 0;
  std::int64_t h = 0;
};
Shape shape_of(const Problem& problem);

}  // namespace ffn
}  // namespace fftune
