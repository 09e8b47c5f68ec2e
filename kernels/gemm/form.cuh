// The inputs of a GEMM kernel. Its form: the parts of a GemmProblem that kernels are specialised
// for, one template argument, which the host prints (launch.hpp). Its parameters: one struct,
// passed by value, whose fields the host writes by their offsets. Included by host and device code.
#pragma once

#include "common/types.cuh"

namespace fftune {

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
  qkv,  // C = heads of q, k and v (qkv_form): bias, norms, rotation, three outputs
};
enum class activation_kind : int;  // common/activation.cuh

// The row broadcasts of a linear epilogue: vectors [n] whose elements are applied to every row of
// C, such as a bias. This is the only definition: every engine applies those of a gemm_form in this
// order, and the host names their tensors (Epilogue::row). To add one, add an enumerator and its
// arithmetic here.
enum class row_broadcast { bias, scale };  // in the order in which they are applied
constexpr int row_broadcasts = 2;

/// Whether its elements are f32 whatever C is, rather than those of the source.
constexpr bool is_f32(row_broadcast row) {
  return row == row_broadcast::scale;
}

/// An element of C with the vector's element of its column.
constexpr float apply(row_broadcast row, float value, float element) {
  return row == row_broadcast::scale ? value * element : value + element;
}

// The epilogue of a QKV product: the columns of C are the heads of q, then of k, then of v, `dim`
// features each, and each of the three parts is a matrix of its own. Steps for a head's features,
// in this order:
//   bias      + bias[n]
//   norm      q and k: x * w / sqrt(mean of x^2 + eps), over the features of a head
//   rotation  q and k: rotary position embedding of the first `rotary` features
// and then the one rounding.
enum class head_rotation {
  none,
  halves,       // pairs are features rotary / 2 apart
  interleaved,  // pairs are neighbours
};

struct qkv_form {
  int dim = 0;     // features of a head
  int rotary = 0;  // The first `rotary` features are rotated.
  head_rotation rotation = head_rotation::none;
  bool separate = false;  // B, and the bias, are a tensor for each part
  bool bias = false;
  bool normalises = false;  // q and k
  bool caches = false;  // row i of k and v goes to row slots[i], nowhere if there is no such row
  bool wide_slots = false;  // of 64 bits

  constexpr bool rotates() const { return rotation != head_rotation::none; }
};

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

// --- Parameters ---

// The host leaves fields that a problem does not use.
struct gemm_params {
  // Matrices, row-major. The second a belongs to the second K-concatenated pair, or output.
  const void* a[2];
  // [group][operand]; one stacked tensor of all groups: b[0]; qkv: those of the parts
  const void* b[2][2];
  void* c[2][2];             // [group][output]; groups only in a grouped reduction; qkv: as b.
  const void* source[2][2];  // Added to C; indexed as c.
  const void* broadcasts[row_broadcasts];  // [n] each.
  const float* row_weights;                // [m], by sorted rows.
  const void* group_bias[2];  // [groups, n] for each B operand; packed as B is: the first alone.
  void* gate;                 // [m, n], written (gated) or read (activation_gradient), as up.
  void* up;
  void* d_up;
  void* hidden;
  const float* a_scale;
  const float* b_scale[2];
  float* c_scale;  // read with Scaling::tensor, written with Scaling::block

  const unsigned char* mask;  // u8 [tokens]
  const int* offsets;         // [groups + 1]
  const int* permutation;     // [tokens]
  const int* ids;             // [id_count]: the groups of the choices that are sorted
  int groups, id_count;
  int whole_groups;  // the last ones, with a row of each token

  int m, n, k;  // k of one K-concatenated pair; of a grouped reduction all tokens
  int group_m;  // tile rows in a band of the raster order
  int split_k;
  unsigned*
      split_counters;     // split-K through a workspace: [tiles], zero before and after; else null
  float* split_partials;  // [tiles, split_k, elements of a tile]

  const void* norm_of_a;  // [k]: weights of the row norm
  float norm_epsilon;
};

// The angles of rotated heads: those of a row's position.
struct head_angles {
  const int* positions;  // [m]
  const float* table;    // [table_rows, 2 pairs]: kernels read the first of each pair, and the last
                         // row for a position past the end. Null: position times the pair's
                         // frequency.
  int table_rows;
  float scale;  // of sines and cosines
};
template <int count>
struct pair_frequencies {
  float of[count];
};

// Kernel parameters besides gemm_params, whose b and c hold the parts in their order, as arrays of
// pointers one after the other.
struct qkv_params {
  const void* bias[3];   // of each part; the first alone if they are one tensor
  const void* norms[2];  // [dim], of q and of k
  const float* sines;    // [m, rotary / 2, 2]: cosine and sine of each pair
  const void* slots;     // [m]
  int cache_rows;        // of the caches
  int cache_head;        // elements from a head of theirs to the next
  int q_columns;         // of part 0
  int kv_columns;        // of each other part
  float epsilon;
  float
      norm_offset;  // added to the norms' elements: 1 where they are kept as their distance from 1

  constexpr int part_of(int column) const {
    return column < q_columns ? 0 : column < q_columns + kv_columns ? 1 : 2;
  }
  constexpr int first_column(int part) const {
    return part == 0 ? 0 : q_columns + (part - 1) * kv_columns;
  }
  constexpr int columns(int part) const { return part == 0 ? q_columns : kv_columns; }
};

// Parameters of engines that need no tensor maps.
struct plain_params {
  gemm_params gemm;
  qkv_params qkv;  // epilogue qkv
};

// Parameters of engines that compute the sines of rotated heads themselves.
struct angle_params : plain_params {
  head_angles angles;
};
template <int pairs>
struct rotating_params : angle_params {
  pair_frequencies<pairs> frequencies;
};

}  // namespace fftune
