// Layers with two experts behind a mask: token i goes through the weights of the true expert where
// byte i of the mask is not zero, else through those of the false one.
//
// masked-linear: y_i = x_i·w_maskᵀ. masked-ffn: the gated feed-forward network (ffn.hpp) of the
// token's expert. What the mask holds is known on the device alone.
//
// The backward pass of masked-linear: dx_i = dy_i·w_mask, and of either expert dw = Σ dy_iᵀ·x_i
// over its own tokens, zero where it has none, added to other gradients where that is asked for.
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

/// Of either expert, the true one first.
template <class T>
using EachExpert = std::array<T, 2>;

/// The places of masked-linear's tensors; of the pass fwd the first ones of this type and y.
struct LinearPlaces {
  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t dy = none;  // [m, n]
  std::size_t x = none;   // [m, k]
  std::size_t mask = none;
  EachExpert<std::size_t> w{none, none};          // [n, k]
  EachExpert<std::size_t> dw_before{none, none};  // [n, k]; each may be its dw itself
  std::size_t y = none;                           // [m, n]
  std::size_t dx = none;                          // [m, k]
  EachExpert<std::size_t> dw{none, none};         // [n, k]
};
LinearPlaces linear_places(const Problem& problem);

/// Whether the gradients of the weights are added to others: accumulate=yes.
bool accumulates(const Problem& problem);

/// A stage as a product of grouped rows. Tensors by their places among the op's.
struct StageProduct {
  GemmShape shape;  // of all tokens
  std::size_t a = 0;
  std::size_t mask = 0;
  EachExpert<std::vector<std::size_t>> b;  // one for each product
  std::size_t c = 0;
  bool sorted_a = false;  // in the order of the mask, not of the tokens
  bool sorted_c = false;
};
StageProduct product_of(Stage stage, const Problem& problem);

/// A stage as sums over the tokens of each expert: of its result i, c_i = a_iᵀ·b (+ addend_i).
struct StageSum {
  GemmShape shape;             // m x n of one c, k tokens in all; both operands are transposed
  std::vector<std::size_t> a;  // [k, m], one for each result
  std::size_t b = 0;           // [k, n]
  std::size_t mask = 0;
  EachExpert<std::vector<std::size_t>> c;        // one for each result
  EachExpert<std::vector<std::size_t>> addends;  // none, or one for each result; may be c itself
  bool sorted_a = false;
  bool sorted_b = false;
};
StageSum sum_of(Stage stage, const Problem& problem);

/// The option that says what the masks look like.
OptionField mask_option();
/// The option of the pass bwd behind accumulates().
OptionField accumulate_option();
/// The mask among an op's tensors.
TensorSpec mask_tensor(const Problem& problem);

/// The definition of a stage in float64.
void reference(Stage stage, const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

}  // namespace masked
}  // namespace fftune
