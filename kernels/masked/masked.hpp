// Layers with two experts behind a mask: token i goes through the weights of the true expert where
// byte i of the mask is not zero, else through those of the false one.
//
// masked-linear: y_i = x_i·w_maskᵀ. masked-ffn: the gated feed-forward network (ffn.hpp) of the
// token's expert. What the mask holds is known on the device alone.
//
// The backward pass of masked-linear: dx_i = dy_i·w_mask, and of either expert dw = Σ dy_iᵀ·x_i
// over its own tokens, zero where it has none, added to other gradients where that is asked for.
// That of masked-ffn is the one of ffn (ffn/backward.hpp) with the weights of the token's expert,
// and each weight's gradient sums over the tokens of its expert.
//
// gate, up, their gradients and hidden are in the order of the mask (sorted_by_mark): the rows of
// the true expert, then of the other. gate and up are so where the forward pass saves them, too:
// what reads them reads rows that are neighbours.
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

/// "linear" is all of masked-linear forward, "dx" and "dw" are its backward pass. masked-ffn is x
/// -> "gate_up" -> hidden -> "down" -> y; its backward pass begins with gate_up where gate and up
/// are computed again, and goes on with "d_hidden" to "d_down", as that of ffn.
enum class Stage { linear, dx, dw, gate_up, down, d_hidden, d_x, d_gate_up, d_down };
std::string stage_name(Stage stage);
/// The stages of a problem, in order.
std::vector<Stage> stages_of(const Problem& problem);

/// Why a family of the stage cannot serve the problem, which has no such stage.
std::optional<std::string> refuse_stage(Stage stage, const Problem& problem);

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

/// The same of masked-ffn. A gradient has the shape of what it belongs to.
struct FfnPlaces {
  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t dy = none;  // [m, d]
  std::size_t x = none;   // [m, d]
  std::size_t mask = none;
  std::size_t gate = none;                          // [m, h], sorted, as the next
  std::size_t up = none;                            // [m, h]
  EachExpert<std::size_t> w_gate{none, none};       // [h, d]
  EachExpert<std::size_t> w_up{none, none};         // [h, d]
  EachExpert<std::size_t> w_down{none, none};       // [d, h]
  EachExpert<std::size_t> gate_before{none, none};  // where gradients accumulate; each may be its
  EachExpert<std::size_t> up_before{none, none};    // gradient itself
  EachExpert<std::size_t> down_before{none, none};
  std::size_t y = none;   // [m, d]
  std::size_t dx = none;  // [m, d]
  EachExpert<std::size_t> dw_gate{none, none};
  EachExpert<std::size_t> dw_up{none, none};
  EachExpert<std::size_t> dw_down{none, none};
  std::size_t hidden = none;  // [m, h], sorted, as the next
  std::size_t d_gate = none;
  std::size_t d_up = none;
  std::size_t count = 0;
};
FfnPlaces ffn_places(const Problem& problem);
std::vector<TensorSpec> ffn_tensors(const Problem& problem);

/// Whether the gradients of the weights are added to others: accumulate=yes.
bool accumulates(const Problem& problem);
/// Whether masked-ffn's gate and up are stored beside hidden: for a backward pass (save=preact), or
/// in the pass that computes them again (save=input).
bool stores_gates(const Problem& problem);
/// Whether a backward pass computes gate and up again.
bool recomputes(const Problem& problem);

/// A stage as products of grouped rows, in one launch. Tensors by their places among the op's.
struct StageProduct {
  GemmShape shape;             // of all tokens
  std::vector<std::size_t> a;  // one for each term
  std::size_t mask = 0;
  EachExpert<std::vector<std::size_t>> b;  // one for each product or term
  /// The output; of gate_up hidden, and gate and up where they are stored; of gradients d_gate,
  /// d_up and hidden where it is wanted.
  std::vector<std::size_t> c;
  struct Gates {
    std::size_t gate = 0;
    std::size_t up = 0;
  };
  std::optional<Gates> gradient;  // of the product, by gate and up: see gemm/product.hpp
  bool sorted_a = false;          // in the order of the mask, not of the tokens
  bool sorted_c = false;
};
StageProduct product_of(Stage stage, const Problem& problem);
StageProduct linear_product(Stage stage, const Problem& problem);
StageProduct ffn_product(Stage stage, const Problem& problem);

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
StageSum linear_sum(const Problem& problem);
StageSum ffn_sum(Stage stage, const Problem& problem);

/// Whether a stage is such a sum; the others are products of grouped rows.
bool sums_over_tokens(Stage stage);
/// The option that says what the masks look like.
OptionField mask_option();
/// The mask among an op's tensors.
TensorSpec mask_tensor(const Problem& problem);

/// The definition of a stage in float64.
void reference(Stage stage, const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

}  // namespace masked
}  // namespace fftune
