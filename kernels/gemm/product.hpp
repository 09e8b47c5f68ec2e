// A stage of an op as matrix products in one launch, whatever engine computes them: what the
// families of linear and of the backward passes hand to an engine.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/gemm/shape.hpp"

namespace fftune {

/// What becomes of a product dc in the backward pass of act(gate) ⊙ up: d_gate = dc ⊙ up ⊙
/// act'(gate), d_up = dc ⊙ act(gate), and hidden = act(gate) ⊙ up where that is not at hand.
struct GatedGradient {
  std::string activation;
  Pointer gate;  // [m,n], as all of them
  Pointer up;
};

/// One sum: c = a · bᵀ (+ bias) (+ addend). Two terms: c = a₀ · b₀ᵀ + a₁ · b₁ᵀ (+ addend). Two
/// results: cᵢ = aᵢ · bᵀ (+ addendᵢ). A gradient: see there.
struct Product {
  GemmShape shape;
  DType dtype = DType::bf16;  // of every matrix
  std::vector<Pointer> a;     // one for each term or result
  std::vector<Pointer> b;     // one for each term
  std::vector<Pointer> c;     // one for each result; or d_gate, d_up, and hidden where it is wanted
  std::optional<Pointer> bias = std::nullopt;  // [n], added to every row
  std::vector<Pointer> addends = {};           // none, or one for each result; may be c itself
  std::optional<GatedGradient> gradient = std::nullopt;
  /// Another stage of the plan comes before: a launch may start before that is complete.
  bool follows = false;
  /// b is written by an earlier stage: a launch that starts early must wait with it too.
  bool b_is_written = false;

  bool keeps_hidden() const { return gradient && c.size() == 3; }
};

/// A stage of one pass of an op, and what it is of a problem.
struct ProductStage {
  std::string_view name;
  std::string_view pass;
  Product (*product)(const Problem&);
};

inline std::string stage_name(const ProductStage& stage) {
  return std::string(stage.name);
}

/// Why a problem of another pass cannot be served, or a device of another kind.
std::optional<std::string> refuse_stage(const ProductStage& stage, const Problem& problem,
                                        const DeviceFacts& facts, DeviceKind kind);

/// The pointers in the order of the kernels of product_fallback.cu and product_sm80.cu: a0, a1, b0,
/// b1, c0, c1, c2, bias, more0, more1; null for those that the product does without.
std::vector<Argument> pointer_arguments(const Product& product);

/// Why the rows of its matrices cannot be moved 16 bytes at a time.
std::optional<std::string> refuse_rows(const Product& product);

/// The device's policy for what becomes of the sums, in gemm/epilogue.cuh.
std::string epilogue_type(const Product& product);

/// The device's policy for where the operands are, in gemm/operands.cuh.
std::string operands_type(const Product& product);

}  // namespace fftune
