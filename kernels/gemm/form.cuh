// The compile-time form of a GEMM: the parts of a GemmProblem that kernels are specialised for.
// Kernels take it as one template argument, which the host prints (launch.hpp). Included by host
// and device code.
#pragma once

#include "gemm/qkv.cuh"
#include "gemm/row_broadcast.cuh"

namespace fftune {

enum class element { f32, bf16, fp16, fp8 };  // epilogue_ops.cuh has their types, in this order

// How many accumulators and operands a GEMM has.
enum class gemm_operands {
  single,          // C = A·Bᵀ
  dual_b,          // two B operands share A: the epilogue takes A·B0ᵀ and A·B1ᵀ
  k_concatenated,  // C = A0·B0ᵀ + A1·B1ᵀ in one accumulator; k is that of each pair
  two_outputs,     // two A operands share B: C0 = A0·Bᵀ, C1 = A1·Bᵀ
};

// The extent of an operand that is contiguous in memory, in CUTLASS' words: K-major operands are
// A [m,k] and B [n,k]; MN-major ones A [k,m] and B [k,n].
enum class major { k, mn };

enum class grouping {
  none,
  rows,       // every row of A and C belongs to a group, and takes that group's B
  reduction,  // every k belongs to a group: C of a group sums over its own k (weight gradients)
};
enum class group_source { mask, routed };  // routed: offsets and a permutation in memory

// How one stacked tensor has both B operands (or K-concatenated pairs) of each group.
enum class packing {
  separate,     // it does not: each has a tensor of its own
  halves,       // [groups, 2, rows, ...]: the rows of the first, then those of the second
  interleaved,  // [groups, rows, 2, ...]: a row of the first, then one of the second
};

// When a block may build the table of groups that are sorted by an earlier launch.
enum class groups_ready {
  awaited,  // when the launch before is complete: it may be the one that writes offsets
  settled,  // at once: the offsets were there when the launch before began
  counted,  // at once, by counting the ids that are being sorted; the permutation is awaited
};

enum class epilogue_kind {
  linear,               // C = act(accumulator (+ bias, or whatever row broadcasts there are)) (+
                        // source), where there is an activation
  gated,                // dual_b: C = act(A·B0ᵀ) ⊙ (A·B1ᵀ); gate and up may be stored too
  activation_gradient,  // from dC = A·Bᵀ: C = d_gate = dC ⊙ up ⊙ act'(gate), d_up = dC ⊙ act(gate),
                        // and hidden = act(gate) ⊙ up on request; reads gate and up
  qkv,  // C = heads of q, k and v (qkv.cuh): bias, norms, rotation, three outputs
};
enum class activation_kind : int;  // common/activation.cuh

// Norm of A's rows before the product: a root mean square norm in one of its conventions
// (common/rows.cuh), rounded to A's type.
enum class row_norm { none, llama, gemma, t5 };

// fp8 e4m3 operands: a number is its element times its scale (f32).
enum class scaling {
  none,
  tensor,   // One scale for each tensor.
  block,    // One for each 128 elements of a row of A, and for each 128 x 128 block of B.
  channel,  // One for each row of A, or 128 elements of it (a_scaled_by_block), and each row of B.
};

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
  groups_ready ready = groups_ready::awaited;  // of routed groups

  epilogue_kind epilogue = epilogue_kind::linear;
  activation_kind activation = {};       // of an epilogue that is not linear, or activates
  bool broadcasts[row_broadcasts] = {};  // linear: which of row_broadcast
  bool activates = false;                // linear: behind the row broadcasts
  bool adds_source = false;
  bool stores_preactivations = false;  // gated: gate and up, too
  bool stores_hidden = false;          // activation_gradient: hidden, too

  scaling scales = scaling::none;
  bool a_scaled_by_block = false;  // scaling::channel
  bool a_scales_sorted = false;    // grouped rows: scales of rows of A lie as sorted rows do
  bool c_quantised = false;

  packing b_packing = packing::separate;
  bool weighs_rows = false;  // grouped rows: accumulators times a factor of their row
  bool group_bias = false;   // grouped rows: accumulators plus a bias of their group

  bool b_depends = false;  // an earlier launch of the plan writes B
  row_norm norm_of_a = row_norm::none;
  qkv_form qkv = {};  // of the epilogue qkv

  constexpr int b_operands() const { return operands == gemm_operands::dual_b ? 2 : 1; }
  constexpr int k_pairs() const { return operands == gemm_operands::k_concatenated ? 2 : 1; }
  constexpr int outputs() const { return operands == gemm_operands::two_outputs ? 2 : 1; }
  /// Whether the kernel finds the scales of C, one for each 128 columns of a row.
  constexpr bool finds_scales() const {
    return c_quantised && (scales == scaling::block || scales == scaling::channel);
  }
  /// Whether rows of A have a scale for each K block.
  constexpr bool scales_k_blocks() const {
    return scales == scaling::block || (scales == scaling::channel && a_scaled_by_block);
  }
  constexpr bool broadcasts_any() const {
    for (const bool one : broadcasts)
      if (one) return true;
    return false;
  }
  /// Whether a linear epilogue changes the accumulators before the source is added.
  constexpr bool changes_columns() const { return broadcasts_any() || activates; }
  constexpr bool is_qkv() const { return epilogue == epilogue_kind::qkv; }
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
