// The compile-time form of a GEMM: the parts of a GemmProblem that kernels are specialised for.
// Kernels take it as one template argument, which the host prints (form.hpp). Included by host and
// device code.
#pragma once

#include "gemm/row_broadcast.cuh"

namespace fftune {

enum class element { f32, bf16, fp16, fp8 };
enum class gemm_operands { single, dual_b, k_concatenated, two_outputs };  // GemmForm
enum class major { k, mn };
enum class grouping { none, rows, reduction };
enum class group_source { mask, routed };  // routed: offsets and a permutation in memory
enum class epilogue_kind { linear, gated, activation_gradient };
enum class activation_kind : int;  // common/activation.cuh
enum class scaling { none, tensor, block };

struct gemm_form {
  element ab = element::bf16;    // of A and B
  element c = element::bf16;     // of C
  element wide = element::bf16;  // of bias, source, gate and up
  gemm_operands operands = gemm_operands::single;
  major a_major = major::k, b_major = major::k;

  grouping groups = grouping::none;
  group_source source = group_source::mask;
  /// One tensor stacks all groups' B (grouped rows) or C and source (grouped reduction).
  bool stacked = false;
  bool a_sorted = false, b_sorted = false, c_sorted = false;

  epilogue_kind epilogue = epilogue_kind::linear;
  activation_kind activation = {};       // of an epilogue that is not linear
  bool broadcasts[row_broadcasts] = {};  // linear: which of row_broadcast
  bool adds_source = false;
  bool stores_preactivations = false;  // gated: gate and up, too
  bool stores_hidden = false;          // activation_gradient: hidden, too

  scaling scales = scaling::none;
  bool c_quantised = false;

  bool b_depends = false;  // an earlier launch of the plan writes B

  constexpr int b_operands() const { return operands == gemm_operands::dual_b ? 2 : 1; }
  constexpr int k_pairs() const { return operands == gemm_operands::k_concatenated ? 2 : 1; }
  constexpr int outputs() const { return operands == gemm_operands::two_outputs ? 2 : 1; }
  constexpr bool broadcasts_any() const {
    for (const bool one : broadcasts)
      if (one) return true;
    return false;
  }
  constexpr bool is_gradient() const { return epilogue == epilogue_kind::activation_gradient; }
  /// Values that are stored of one element of an output: C; gated: C, then gate and up;
  /// activation_gradient: d_gate, d_up, then hidden.
  constexpr int stored_values() const {
    if (epilogue == epilogue_kind::gated) return stores_preactivations ? 3 : 1;
    if (epilogue == epilogue_kind::activation_gradient) return stores_hidden ? 3 : 2;
    return 1;
  }
};

}  // namespace fftune
