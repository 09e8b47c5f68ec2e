// One GEMM launch as every engine is given it: extents, operands by the names of the op's tensors,
// grouping, epilogue fusion and quantisation. Stages of ops are made of these; engines (engine.hpp)
// compute them.
//
//   C [m,n] = epilogue(A [m,k] · B [n,k]ᵀ)            row-major, fp32 accumulation
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/gemm/form.cuh"
#include "kernels/gemm/packed/weight.hpp"

namespace fftune {

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Compile-time parameters of the kernels; their one definition is in form.cuh.
using GemmForm = gemm_operands;
using Major = major;
using Grouping = grouping;
using EpilogueKind = epilogue_kind;
using Scaling = scaling;
using Packing = packing;

/// One matrix by the name of the op's tensor. With groups: one tensor for each group ("w_true",
/// "w_false"), or a single tensor [groups, ...] that stacks those of all groups. Where rows are
/// grouped, only B has one for each group; where the reduction is grouped, C and its source have.
using TensorNames = std::vector<std::string_view>;

/// The number of groups, and about how many rows each of them should have.
struct ExpectedRows {
  double groups = 0;
  double rows = 0;
};

/// The groups, and which tokens (rows, or elements of k) belong to which. The sorted order has the
/// tokens of group 0 first, then those of group 1 and so on, each in ascending order.
struct Groups {
  Grouping by = Grouping::none;
  std::int64_t count = 1;
  /// Two groups by a tensor u8 [tokens]: group 0 where the byte is not zero. Each kernel
  /// finds the sorted order itself.
  std::string_view mask = {};
  /// Or any number of groups, sorted before: i32 [count + 1], the first sorted row of each group
  /// and the end of the last; and i32 [tokens], the token of each sorted row. Sorted rows that
  /// `offsets` leaves out belong to no group: their rows of C are not written.
  std::string_view offsets = {};
  std::string_view permutation = {};
  /// Sorted groups: when a kernel may build its table of them. `counted`: it counts `ids`, i32
  /// [id_count], the group of each choice (choices of another number are in none); the last
  /// `whole_groups` groups have a row of each token besides.
  groups_ready ready = groups_ready::awaited;
  std::string_view ids = {};
  std::int64_t id_count = 0, whole_groups = 0;
  /// Sorted groups: rows (or elements of k) that a token has, each in a group of its own. An
  /// operand that is not sorted then has only the tokens' rows, 1/choices as many as the GEMM, and
  /// `permutation` says whose each sorted row is. C, if rows are grouped, is sorted.
  std::int64_t choices = 1;
  /// For the cost model: the expected share of the tokens in group 0 of a mask; whether that is a
  /// probability rather than an exact number; and whether the tokens of a group are scattered
  /// rather than in long runs.
  double expected_share = 0.5;
  bool random = false;
  bool scattered = false;
  /// For sorted groups: their expected rows; empty: all groups have equally many.
  std::vector<ExpectedRows> expected_rows = {};

  bool any() const { return by != Grouping::none; }
  /// How many sorted groups should have rows.
  double with_rows() const;
  /// The tiles of `height` rows that `rows` rows take at most, however the groups share them: a
  /// group's last tile may have a single row, and no more groups than rows have any.
  std::int64_t most_tiles(std::int64_t rows, std::int64_t height) const;
};

/// The heads of a QKV product. GemmProblem::b has one packed weight or three, `c` the outputs q, k
/// and v, or q and the caches [slots, kv_heads, cache_head].
struct QkvHeads {
  qkv_form form = {};
  std::int64_t heads = 0, kv_heads = 0;
  std::vector<std::string_view> bias = {};   // as b
  std::vector<std::string_view> norms = {};  // [dim]: of q and k
  std::string_view slots = {};               // [m], of caches
  std::int64_t cache_rows = 0;               // of caches
  std::int64_t cache_head = 0;               // elements from a head of caches to the next
  double epsilon = 0;
  double norm_offset = 0;  // added to the norms' weights
  /// Rotation: the row's position, i32 [m], and either a table of angles, f32 [positions, rotary],
  /// or the frequency of each pair. Kernels read the table's first angle of each pair.
  std::string_view positions = {};
  std::string_view angles = {};
  std::int64_t table_rows = 0;
  std::vector<float> frequencies = {};
  float scale = 1;  // of all sines and cosines

  /// Columns of part 0 (q), 1 (k) or 2 (v).
  std::int64_t columns(std::size_t part) const { return (part == 0 ? heads : kv_heads) * form.dim; }
  /// Elements from a head of a part to the next in its tensor.
  std::int64_t head_stride(std::size_t part) const {
    return part > 0 && form.caches ? cache_head : form.dim;
  }
  std::int64_t first_column(std::size_t part) const {
    return part == 0 ? 0 : columns(0) + (part == 1 ? 0 : columns(1));
  }
  /// Whether tiles of `bn` columns have whole heads, each of one part.
  bool fits_heads(std::int64_t bn) const {
    return bn % form.dim == 0 && columns(0) % bn == 0 && columns(1) % bn == 0;
  }
  std::size_t part_of(std::int64_t column) const {
    return column < columns(0) ? 0 : column < columns(0) + columns(1) ? 1 : 2;
  }
};

/// A root mean square norm of the rows of A, within the GEMM: A's rows are multiplied as that norm
/// would have written them.
struct NormOfA {
  row_norm kind = row_norm::none;
  std::string_view weights = {};  // [k]
  double epsilon = 0;

  bool any() const { return kind != row_norm::none; }
};

/// Operations on the accumulators before their one rounding.
struct Epilogue {
  EpilogueKind kind = EpilogueKind::linear;
  Activation activation = Activation::none;                // Linear: after the row broadcasts.
  std::array<std::string_view, row_broadcasts> rows = {};  // Linear: [n] per row broadcast.
  std::vector<TensorNames> source = {};  // Linear: added to each output; may be C itself.
  std::string_view gate = {};            // [m,n]: stored by gated, read by activation_gradient.
  std::string_view up = {};              // [m,n], as gate.
  std::string_view d_up = {};            // [m,n], of activation_gradient.
  std::string_view hidden = {};          // [m,n], of activation_gradient; not stored if empty.
  QkvHeads qkv = {};                     // The epilogue qkv.
  /// Grouped rows in a sorted C, before all of the above: f32 [m], a factor of each sorted row; and
  /// a bias [groups, n] of each B operand, packed as B is.
  std::string_view row_weights = {};
  std::vector<std::string_view> group_bias = {};

  bool stores_preactivations() const { return kind == EpilogueKind::gated && !gate.empty(); }
  std::string_view& row(row_broadcast which) { return rows[static_cast<std::size_t>(which)]; }
  bool broadcasts() const {
    return std::any_of(rows.begin(), rows.end(), [](const auto& row) { return !row.empty(); });
  }
  /// Whether accumulators change before the epilogue.
  bool has_group_terms() const { return !row_weights.empty() || !group_bias.empty(); }
  bool adds() const { return broadcasts() || !source.empty(); }
};

/// Elements of k, and rows of B, that share a scale with Scaling::block.
constexpr std::int64_t scale_block = 128;

struct Quantisation {
  Scaling scaling = Scaling::none;
  std::string_view a_scale = {};  // [1], or [m, blocks of k], or [m]
  /// One for each B operand: [1], or [blocks of n, blocks of k], or [n]. Grouped rows: [groups,
  /// ...], those of all groups in one tensor.
  std::vector<std::string_view> b_scale = {};
  /// C is fp8 too. Scaling::tensor: its scale [1] is given. Else the kernel finds the
  /// scales [m, blocks of n] and writes them.
  std::string_view c_scale = {};

  bool a_scaled_by_block = false;  // Scaling::channel: a_scale is [m, blocks of k]

  bool any() const { return scaling != Scaling::none; }
  /// Whether the kernel finds the scales of C.
  bool finds_scales() const { return !c_scale.empty() && scaling != Scaling::tensor; }
};

struct GemmProblem {
  std::int64_t m = 1, n = 1, k = 1;
  DType dtype = DType::bf16;       // of A and B
  DType c_dtype = DType::bf16;     // of C
  DType wide_dtype = DType::bf16;  // of bias, source, gate and up
  GemmForm form = GemmForm::single;
  Major a_major = Major::k, b_major = Major::k;
  std::vector<TensorNames> a = {};  // one; two if k_concatenated or two_outputs
  std::vector<TensorNames> b = {};  // one; two if dual_b or k_concatenated; qkv: one or three
  std::vector<TensorNames> c = {};  // one; two if two_outputs; qkv: three. gradient: d_gate
  /// Other than separate: both of b name the same tensor.
  Packing b_packing = Packing::separate;
  /// With groups: whether the rows (with a grouped reduction the tokens) of A, of B and of C with
  /// whatever else the epilogue reads and writes lie in the sorted order, rather than the tokens'.
  bool a_sorted = false, b_sorted = false, c_sorted = false;
  Groups groups = {};
  NormOfA norm_of_a = {};
  Epilogue epilogue = {};
  Quantisation quantisation = {};
  /// Not empty: each of b is the codes of one of these packed weights, instead of a matrix.
  std::vector<PackedWeight> packed = {};
  /// Another launch of the plan comes before this one: programmatic dependent launch applies.
  bool follows = false;
  /// A row of C has the same bits whatever m is.
  bool batch_invariant = false;
  /// B is an output of an earlier launch of the plan: loads of B wait for that, too.
  bool b_depends = false;

  DType dtype_of(row_broadcast row) const { return is_f32(row) ? DType::f32 : wide_dtype; }
  int b_operands() const { return form == GemmForm::dual_b ? 2 : 1; }  // that share A
  int k_pairs() const { return form == GemmForm::k_concatenated ? 2 : 1; }
  int outputs() const { return form == GemmForm::two_outputs ? 2 : 1; }  // that share B
  /// Matrices of C's size that are stored, or read and then stored over, together.
  int tensors_per_stage() const {
    if (epilogue.kind != EpilogueKind::activation_gradient) return 1;
    return epilogue.hidden.empty() ? 2 : 3;
  }
  /// The extent that counts tokens: that of a weight gradient's reduction, else the rows.
  std::int64_t tokens() const { return a_major == Major::mn ? k : m; }
  /// Floating-point operations.
  double flops() const;
};

/// The sizes of a product, as its space and its cost model see them; k is that of one
/// K-concatenated pair.
struct GemmSize {
  std::int64_t m, n, k;
  explicit GemmSize(const GemmProblem& gemm) : m(gemm.m), n(gemm.n), k(gemm.k) {}
};

/// Why rows of A, B and C cannot be loaded and stored 16 bytes at a time; nothing if they can.
std::optional<std::string> misaligned_rows(const GemmProblem& gemm);

}  // namespace fftune
