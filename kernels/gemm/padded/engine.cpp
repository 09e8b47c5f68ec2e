// The padded engines.
//
// A copy of a weight costs three times the bytes that few tokens would take. With more of them that
// is little beside kernels that load two bytes at a time.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/padded/padded.hpp"
#include "kernels/gemm/padded/row_copies.hpp"
#include "registry/part_family.hpp"

namespace fftune {
namespace {

/// A row-major tensor [matrices, rows, columns] of a problem, and what its rows and columns are in
/// memory that the inner engine sees.
struct Operand {
  std::string_view name;
  std::int64_t matrices, rows, columns;
  std::int64_t to_rows, to_columns;
  bool read, written;
  std::int64_t bytes = 2;  // of an element

  bool is_aligned() const { return rows == to_rows && columns == to_columns; }
  std::int64_t from_bytes() const { return matrices * rows * columns * bytes; }
  std::int64_t to_bytes() const { return matrices * to_rows * to_columns * bytes; }
};

std::int64_t aligned(std::int64_t extent, std::int64_t to = 8) {
  return ceil_div(extent, to) * to;
}

/// A problem with aligned rows, and the operands that are copied for it.
class Padded {
 public:
  /// `bounds_rows`: the inner engine loads B by tensor maps alone, which may end before its rows.
  Padded(const GemmProblem& gemm, bool bounds_rows) : problem(gemm) {
    const bool a_mn = gemm.a_major == Major::mn, b_mn = gemm.b_major == Major::mn;
    const bool side_by_side = gemm.b_packing == Packing::interleaved;
    if (a_mn) problem.m = aligned(gemm.m);
    problem.n = aligned(gemm.n);
    if (!a_mn || !b_mn) problem.k = aligned(gemm.k, side_by_side && !b_mn ? 64 : 8);
    add_a(gemm);
    add_b(gemm, bounds_rows);
    add_outputs(gemm);
    add_rows(gemm);
    for (const Operand& operand : operands) problem.follows = problem.follows || operand.read;
  }

  GemmProblem problem;
  std::vector<Operand> operands;
  std::int64_t b_rows = 0;  // of tensor maps of B, if they are fewer than the problem's; else 0

 private:
  /// Once, if C is its own source.
  void add(const Operand& operand) {
    if (operand.name.empty() || operand.is_aligned()) return;
    for (Operand& other : operands)
      if (other.name == operand.name) {
        other.read = other.read || operand.read;
        other.written = other.written || operand.written;
        return;
      }
    operands.push_back(operand);
  }

  void add_a(const GemmProblem& gemm) {
    const std::int64_t choices = gemm.a_sorted ? 1 : gemm.groups.choices;
    for (const TensorNames& names : gemm.a)
      if (gemm.a_major == Major::k) {
        const std::int64_t rows = gemm.m / (gemm.groups.by == Grouping::rows ? choices : 1);
        add({names.front(), 1, rows, gemm.k, rows, problem.k, true, false});
      } else {
        const bool groups = gemm.groups.by == Grouping::reduction;
        const std::int64_t rows = gemm.k / (groups ? choices : 1);
        add({names.front(), 1, rows, gemm.m, groups ? rows : problem.k, problem.m, true, false});
      }
  }

  void add_b(const GemmProblem& gemm, bool bounds_rows) {
    const bool grouped_rows = gemm.groups.by == Grouping::rows;
    const bool halves = gemm.b_packing == Packing::halves;
    const std::int64_t beside = gemm.b_packing == Packing::interleaved ? 2 : 1;
    for (std::size_t i = 0; i < gemm.b.size(); ++i)
      for (const std::string_view name : gemm.b[i]) {
        const bool stacked = grouped_rows && gemm.b[i].size() == 1;
        Operand b{name, (stacked ? gemm.groups.count : 1) * (halves ? 2 : 1), 0, 0, 0, 0, true,
                  false};
        if (gemm.b_major == Major::k) {
          const bool of_part = gemm.b.size() == 3;
          b.rows = (of_part ? gemm.epilogue.qkv.columns(i) : gemm.n) * beside;
          b.to_rows = of_part ? b.rows : problem.n * beside;
          b.columns = gemm.k, b.to_columns = problem.k;
        } else {
          const bool groups = gemm.groups.by == Grouping::reduction;
          b.rows = groups ? gemm.k / (gemm.b_sorted ? 1 : gemm.groups.choices) : gemm.k * beside;
          b.to_rows = groups ? b.rows : problem.k * beside;
          b.columns = gemm.n, b.to_columns = problem.n;
        }
        if (bounds_rows && b.columns == b.to_columns && b.rows != b.to_rows) {
          b_rows = b.rows / beside;
          continue;
        }
        problem.b_depends = true;
        add(b);
      }
  }

  void add_outputs(const GemmProblem& gemm) {
    const Epilogue& epilogue = gemm.epilogue;
    const bool reduces = gemm.groups.by == Grouping::reduction;
    // Rows of a routed C that belong to no group keep what they have.
    const bool keeps =
        gemm.groups.by == Grouping::rows && gemm.groups.mask.empty() && !gemm.c_sorted;
    const auto output = [&](std::string_view name, bool stacked, bool read, bool written) {
      add({name, stacked ? gemm.groups.count : 1, gemm.m, gemm.n, problem.m, problem.n,
           read || (written && keeps), written});
    };
    const auto each = [&](const std::vector<TensorNames>& matrices, bool written) {
      for (const TensorNames& names : matrices)
        for (const std::string_view name : names)
          output(name, reduces && names.size() == 1, !written, written);
    };
    if (gemm.epilogue.kind == EpilogueKind::qkv) return;
    each(gemm.c, true);
    each(epilogue.source, false);
    const bool gated = gemm.epilogue.kind == EpilogueKind::gated;
    output(epilogue.gate, false, !gated, gated);
    output(epilogue.up, false, !gated, gated);
    output(epilogue.d_up, false, false, true);
    output(epilogue.hidden, false, false, true);
  }

  void add_rows(const GemmProblem& gemm) {
    for (std::size_t i = 0; i < row_broadcasts; ++i) {
      Operand row{gemm.epilogue.rows[i], 1, 1, gemm.n, 1, problem.n, true, false};
      row.bytes = is_f32(row_broadcast(i)) ? 4 : 2;
      add(row);
    }
    for (const std::string_view bias : gemm.epilogue.group_bias) {
      Operand row{bias, 1, gemm.groups.count, gemm.n, gemm.groups.count, problem.n, true, false};
      if (gemm.b_packing == Packing::halves) row.rows *= 2, row.to_rows *= 2;
      if (gemm.b_packing == Packing::interleaved) row.columns *= 2, row.to_columns *= 2;
      add(row);
    }
  }
};

/// In elements of 16 bits.
row_copy copy_of(const Operand& operand, bool in) {
  const std::int64_t halves = operand.bytes / 2;
  row_copy copy{};
  copy.matrices = operand.matrices;
  copy.rows = in ? operand.rows : operand.to_rows;
  copy.to_rows = in ? operand.to_rows : operand.rows;
  const auto own = static_cast<int>(operand.columns * halves);
  const auto padded = static_cast<int>(operand.to_columns * halves);
  copy.columns = in ? own : padded;
  copy.to_columns = in ? padded : own;
  return copy;
}

template <const Engine& inner>
constexpr bool bounds_rows = &inner == &sm90_engine;

std::optional<std::string> refuse(const GemmProblem& gemm) {
  if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
    return fmt::format("rows of 16-bit elements are padded, not of {}", dtype_name(gemm.dtype));
  if (gemm.quantisation.any() || !gemm.packed.empty() || gemm.c_dtype != gemm.dtype ||
      gemm.wide_dtype != gemm.dtype)
    return "it pads matrices of one type, without scales";
  if (gemm.batch_invariant) return std::string(order_depends_on_rows);
  if (gemm.norm_of_a.any()) return "the norm of A divides by the number of its features";
  if (!misaligned_rows(gemm)) return "rows are aligned as they are";
  constexpr std::int64_t most_columns = std::int64_t{1} << 30;  // row_copy counts halves of them
  for (const std::int64_t extent : {gemm.m, gemm.n, gemm.k})
    if (extent > most_columns - 64)
      return fmt::format("extents are limited to 2^30, and this one is {}", extent);
  if (gemm.epilogue.kind == EpilogueKind::qkv && gemm.n % 8 != 0)
    return "heads of no multiple of 8 features";
  return std::nullopt;
}

template <const Engine& inner>
std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  if (auto reason = refuse(chain.front())) return reason;
  const Padded padded(chain.front(), bounds_rows<inner>);
  if (padded.operands.size() > most_row_copies) return "too many operands are unaligned";
  return inner.can_implement({padded.problem}, facts);
}

template <const Engine& inner>
Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return inner.search.space({Padded(chain.front(), bounds_rows<inner>).problem}, facts);
}

template <const Engine& inner>
Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  return inner.search.default_config({Padded(chain.front(), bounds_rows<inner>).problem}, facts);
}

template <const Engine& inner>
std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  const Padded padded(chain.front(), bounds_rows<inner>);
  auto seconds = inner.search.estimate({padded.problem}, facts, config);
  if (!seconds || facts.memory_bandwidth <= 0) return seconds;
  constexpr double launch = 2e-6, share_of_bandwidth = 0.8;
  double bytes = 0;
  bool in = false, out = false;
  for (const Operand& operand : padded.operands) {
    const int copies = (operand.read ? 1 : 0) + (operand.written ? 1 : 0);
    bytes += copies * static_cast<double>(operand.from_bytes() + operand.to_bytes());
    in = in || operand.read;
    out = out || operand.written;
  }
  return *seconds + (in ? launch : 0) + (out ? launch : 0) +
         bytes / (share_of_bandwidth * facts.memory_bandwidth);
}

/// Few tokens of many experts: copies of all weights take longer than the few that are needed.
template <const Engine& inner>
bool is_preferred(const GemmChain& chain, const DeviceFacts& facts) {
  const auto own = estimate<inner>(chain, facts, default_config<inner>(chain, facts));
  const auto other = simt_engine.search.estimate(chain, facts, Config());
  return !own || !other || *own < *other;
}

/// Ends the tensor maps of B with its rows: zeros are behind them.
void bound_rows(Program& program, const std::vector<TensorNames>& b, const TensorPlaces& places,
                std::int64_t rows) {
  const auto is_b = [&](const Pointer& pointer) {
    const auto* const own = std::get_if<TensorArgument>(&pointer);
    return own != nullptr && std::ranges::any_of(b, [&](const TensorNames& names) {
             return std::ranges::any_of(
                 names, [&](std::string_view name) { return places.at(name) == own->tensor; });
           });
  };
  for (Step& step : program.steps) {
    auto* const launch = std::get_if<KernelLaunch>(&step);
    if (launch == nullptr || !launch->parameters) continue;
    for (ParameterStruct::Field& field : launch->parameters->fields)
      if (auto* const map = std::get_if<TensorMapArgument>(&field.value);
          map != nullptr && is_b(map->matrix))
        map->rows = rows;
  }
}

template <const Engine& inner>
void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const Padded padded(chain.front(), bounds_rows<inner>);
  std::vector<Pointer> pointers;  // where the inner engine has each tensor
  for (std::size_t i = 0; i < places.count(); ++i) pointers.emplace_back(TensorArgument{i});
  std::vector<RowCopy> in, out;
  for (const Operand& operand : padded.operands) {
    const TensorArgument own = tensor_of(places, operand.name);
    const ScratchArgument copy{program.scratch.size()};
    program.scratch.push_back({static_cast<std::size_t>(operand.to_bytes())});
    pointers[own.tensor] = copy;
    if (operand.read) in.push_back({copy_of(operand, true), own, copy});
    if (operand.written) out.push_back({copy_of(operand, false), copy, own});
  }
  append_row_copies(program, in, facts);
  Program own;
  inner.append(own, {padded.problem}, places, facts, config);
  if (padded.b_rows > 0) bound_rows(own, chain.front().b, places, padded.b_rows);
  append_moved(program, std::move(own), pointers, places.count());
  append_row_copies(program, out, facts);
}

template <const Engine& inner>
constexpr Engine padded_engine(std::string_view name, const char* source) {
  return {.name = name,
          .can_implement = can_implement<inner>,
          .search = {space<inner>, default_config<inner>, estimate<inner>},
          .is_preferred = is_preferred<inner>,
          .append = append<inner>,
          .sources = {source, "gemm/sort_tokens.cu", "gemm/head_sines.cu", row_copy_source}};
}

}  // namespace

constinit const Engine padded_sm90_engine =
    padded_engine<sm90_engine>("sm90_padded", "gemm/sm90/gemm.cu");
constinit const Engine padded_sm80_engine =
    padded_engine<sm80_engine>("sm80_padded", "gemm/sm80/gemm.cu");

const Engine* unaligned_engine_of(const Engine& engine) {
  if (&engine == &sm90_engine) return &padded_sm90_engine;
  if (&engine == &sm80_engine) return &padded_sm80_engine;
  if (&engine == &decode_engine) return &unaligned_decode_engine;
  return nullptr;
}

}  // namespace fftune
