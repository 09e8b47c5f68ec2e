// Layers with two experts behind a mask: token i goes through the weights of the true expert where
// byte i of the mask is not zero, else through those of the false one.
//
// masked-linear: y_i = x_i·w_maskᵀ. masked-ffn: the gated feed-forward network (ffn.hpp) of the
// token's expert. What the mask holds is known on the device alone.
//
// The backward pass of masked-linear: dx_i = dy_i·w_mask, and of either expert dw = Σ dy_iᵀ·x_i
// over its own tokens, zero where it has none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/gemm/shape.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in masked_linear.cpp and masked_ffn.cpp; listed in kernels/catalog.cpp.
const Op& masked_linear_op();
const Op& masked_ffn_op();

namespace masked {

/// "linear" is all of masked-linear forward, "dx" and "dw" are its backward pass; masked-ffn is x
/// -> "gate_up" -> hidden -> "down" -> y. hidden is in the order of the mask (sorted_by_mark): the
/// rows of the true expert, then of the other.
enum class Stage { linear, dx, dw, gate_up, down };
std::string stage_name(Stage stage);

/// Why a family of the stage cannot serve the problem: it is of the other pass.
std::optional<std::string> refuse_pass(Stage stage, const Problem& problem);

/// The places of masked-linear's tensors in its backward pass.
namespace backward {
constexpr std::size_t dy = 0;        // [m, n]
constexpr std::size_t x = 1;         // [m, k]
constexpr std::size_t mask = 2;      // [m]
constexpr std::size_t w_true = 3;    // [n, k]
constexpr std::size_t w_false = 4;   // [n, k]
constexpr std::size_t dx = 5;        // [m, k]
constexpr std::size_t dw_true = 6;   // [n, k]
constexpr std::size_t dw_false = 7;  // [n, k]
}  // namespace backward

/// A stage as a product of grouped rows; dw, which sums over them, is none. Tensors by their places
/// among the op's.
struct StageProduct {
  GemmShape shape;  // of all tokens
  std::size_t a = 0;
  std::size_t mask = 0;
  std::array<std::vector<std::size_t>, 2> b;  // of the true expert, then of the false one
  std::size_t c = 0;
  bool sorted_a = false;  // in the order of the mask, not of the tokens
  bool sorted_c = false;
  bool transposed_b = false;  // [k, n], not [n, k]
};
StageProduct product_of(Stage stage, const Problem& problem);

/// The option that says what the masks look like.
OptionField mask_option();
/// The mask among an op's tensors.
TensorSpec mask_tensor(const Problem& problem);

/// The definition of a stage in float64.
void reference(Stage stage, const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

}  // namespace masked
}  // namespace fftune
