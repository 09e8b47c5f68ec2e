// A GemmProblem on the host: its tensors by their places, its groups in their sorted order, blocks
// of its operands as f32, and its epilogue.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "cpu/blas.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/cpu/work.hpp"
#include "kernels/gemm/problem.hpp"

namespace fftune::gemm_cpu {

/// Conversions between f32 and other types, in the processor's vectors for bf16.
struct Converter {
  const VectorKernels* vector = nullptr;

  void load(DType dtype, const void* from, float* to, std::int64_t count) const;
  void store(DType dtype, const float* from, void* to, std::int64_t count) const;
};

/// A tensor, or one for each group.
struct Matrix {
  std::vector<std::size_t> places = {};  // empty: there is no such matrix
  DType dtype = DType::f32;
  std::int64_t stacked = 0;  // elements from one group to the next of a tensor that stacks them
  std::int64_t offset = 0;   // elements before the first, of what is packed with another

  bool exists() const { return !places.empty(); }
  /// The address of an element of a group's matrix.
  std::byte* at(const HostCall& call, std::int64_t group, std::int64_t element) const {
    const std::size_t place = places.size() == 1 ? 0 : static_cast<std::size_t>(group);
    return static_cast<std::byte*>(call.tensors[places[place]]) +
           static_cast<std::size_t>(group * stacked + offset + element) * dtype_bytes(dtype);
  }
};

/// `count` rows, or elements of k: neighbours from `first` on, or those at these places of `order`.
struct Selection {
  std::int64_t first = 0;
  std::int64_t count = 0;
  const std::int32_t* order = nullptr;

  std::int64_t operator[](std::int64_t i) const { return order ? order[first + i] : first + i; }
  Selection part(std::int64_t from, std::int64_t size) const { return {first + from, size, order}; }
};

/// The sorted order of the tokens, and where each group begins in it. Without groups all rows are
/// those of group 0.
struct SortedGroups {
  std::int64_t count = 1;
  const std::int32_t* order = nullptr;    // the token of each sorted row
  const std::int32_t* offsets = nullptr;  // [count + 1]; null: one group of all `rows`
  std::int64_t rows = 0;

  Range range(std::int64_t group) const {
    return offsets ? Range{offsets[group], offsets[group + 1]} : Range{0, rows};
  }
  /// Sorted places [at.first, at.last), in a matrix that has the sorted order itself or the
  /// tokens'.
  Selection select(Range at, bool is_sorted) const {
    return {at.first, at.size(), is_sorted ? nullptr : order};
  }
};

class HostGemm {
 public:
  HostGemm(const GemmProblem& problem, const TensorPlaces& places, const DeviceFacts& facts);

  GemmProblem gemm;  // for its sizes and forms: its names may be gone
  std::vector<Matrix> a, b, c, source;
  std::array<Matrix, row_broadcasts> broadcasts;
  Matrix gate, up, d_up, hidden;
  Matrix row_weights;
  std::vector<Matrix> group_bias;  // of each B operand
  Matrix a_scale, c_scale;
  std::vector<Matrix> b_scale;
  std::vector<Matrix> bias_of_parts, norms;  // qkv
  Converter converter;
  const VectorKernels* vector = nullptr;
  const RowKernels* rows = nullptr;  // of f32

  /// Bytes of scratch that sort() takes.
  std::size_t order_bytes() const;
  /// Sorts the tokens; those of a mask into `scratch`.
  SortedGroups sort(const HostCall& call, std::byte* scratch) const;

  /// Whether blocks of the operands are copied: widened, or gathered.
  bool copies() const;
  /// Rows and columns of k of an operand for sgemm: in place if it is f32 and lies so, else copied
  /// to `room` [rows.count * k.count].
  MatrixView a_view(const HostCall& call, int index, Selection of_rows, Selection of_k,
                    float* room) const;
  /// The heads of a QKV product: columns of all parts. One view has the columns of one part.
  MatrixView b_view(const HostCall& call, int index, std::int64_t group, Selection of_columns,
                    Selection of_k, float* room) const;
  /// Elements of k of one row of A: out [k.count].
  void load_a(const HostCall& call, int index, std::int64_t row, Selection of_k, float* out) const;

  /// Finishes `count` neighbouring accumulators, from (row, column) of output `output` on, and
  /// stores the results: `second` are the accumulators of a second B operand. Both are overwritten.
  /// If this op computes block scales, `column` is a multiple of scale_block, and `count` too
  /// unless the row ends. For a QKV product they are whole heads.
  void finish(const HostCall& call, std::int64_t group, int output, std::int64_t row,
              std::int64_t column, float* first, float* second, std::int64_t count) const;
  /// Stores the pre-activations of a gated epilogue where they are asked for.
  void store_preactivations(const HostCall& call, std::int64_t row, std::int64_t column,
                            const float* gates, const float* ups, std::int64_t count) const;
  /// Applies the row broadcasts to accumulators, and adds the source.
  void add(const HostCall& call, std::int64_t group, int output, std::int64_t row,
           std::int64_t column, float* sums, std::int64_t count) const;

 private:
  MatrixView view(const HostCall& call, const Matrix& matrix, std::int64_t group,
                  std::int64_t stride, bool transposed, Selection outer, Selection inner,
                  float* room) const;
  void finish_heads(const HostCall& call, std::int64_t row, std::int64_t column, float* sums,
                    std::int64_t count) const;
  void apply_terms(const HostCall& call, std::int64_t group, int operand, std::int64_t row,
                   std::int64_t column, float* sums, std::int64_t count) const;
  void finish_gradient(const HostCall& call, std::int64_t at, float* sums,
                       std::int64_t count) const;
  void store_c(const HostCall& call, std::int64_t group, int output, std::int64_t row,
               std::int64_t column, float* values, std::int64_t count) const;
  std::int64_t tokens() const;  // that are grouped

  std::size_t mask_ = absent, offsets_ = absent, permutation_ = absent;
  std::size_t positions_ = absent, angles_ = absent, slots_ = absent;  // qkv
};

/// A gated layer as a chain of two plain GEMMs: hidden [m,h] = act(x·gateᵀ) ⊙ (x·upᵀ), y [m,d] =
/// hidden·downᵀ.
struct GatedChain {
  std::int64_t m = 0, d = 0, h = 0;
  DType dtype = DType::f32;
  Activation activation = Activation::silu;
  std::size_t x = 0, w_gate = 0, w_up = 0, w_down = 0, y = 0;  // places
};
/// Why the chain is not that of a gated layer in f32 or bf16, one line.
std::optional<std::string> refuse_gated_chain(const GemmChain& chain);
GatedChain gated_chain(const GemmChain& chain, const TensorPlaces& places);

/// The embedded sources that every engine over a HostGemm depends on, and its own.
std::vector<std::string> sources_with(std::vector<std::string> own);

}  // namespace fftune::gemm_cpu
