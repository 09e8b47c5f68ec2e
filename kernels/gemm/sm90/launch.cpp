// The sm90 engine: can_implement, and how its kernel is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/sm90/config.cuh"
#include "kernels/gemm/sm90/space.hpp"

namespace fftune {
namespace {

using sm90::Tile;
using sm90::Workload;

/// Every CTA scans the mask: up to this number of tokens that pays.
constexpr std::int64_t most_masked_tokens = std::int64_t{1} << 19;
constexpr std::int64_t most_groups = 1024;  // that a CTA's tables in shared memory hold

std::optional<std::string> refuse_elements(const GemmProblem& gemm) {
  const Quantisation& quantisation = gemm.quantisation;
  if (!quantisation.any()) {
    if (gemm.dtype != DType::bf16 && gemm.dtype != DType::fp16)
      return fmt::format("wgmma multiplies bf16, fp16 and fp8 with scales, not {}",
                         dtype_name(gemm.dtype));
    if (gemm.c_dtype != gemm.dtype || gemm.wide_dtype != gemm.dtype)
      return fmt::format("products of {} are stored in that type", dtype_name(gemm.dtype));
    return std::nullopt;
  }
  if (gemm.dtype != DType::fp8)
    return fmt::format("scales are for fp8, not {}", dtype_name(gemm.dtype));
  if (gemm.a_major == Major::mn || gemm.b_major == Major::mn)
    return "wgmma takes K-major operands of fp8";
  const bool sorted_rows =
      gemm.groups.by == Grouping::rows && gemm.groups.mask.empty() && gemm.c_sorted;
  if (gemm.c_dtype == DType::f32 || gemm.wide_dtype == DType::f32)
    return "it stores products of fp8 in 16 bits or less, not in f32";
  if ((gemm.groups.any() && !sorted_rows) || gemm.k_pairs() == 2 || gemm.outputs() == 2 ||
      gemm.epilogue.kind == EpilogueKind::activation_gradient)
    return "fp8 needs a forward pass with one A, dense or in sorted groups";
  if (!quantisation.c_scale.empty() && gemm.epilogue.adds())
    return "a source needs a C of 16 bits, not fp8";
  return std::nullopt;
}

std::optional<std::string> refuse_epilogue(const GemmProblem& gemm) {
  const bool gated = gemm.epilogue.kind == EpilogueKind::gated;
  if (gated != (gemm.form == GemmForm::dual_b))
    return "two B operands and a gated epilogue come together";
  if (gemm.epilogue.kind == EpilogueKind::activation_gradient && gemm.form != GemmForm::single)
    return "an activation gradient is that of one product";
  return std::nullopt;
}

std::optional<std::string> refuse_heads(const GemmProblem& gemm) {
  if (gemm.epilogue.kind != EpilogueKind::qkv) return std::nullopt;
  const QkvHeads& qkv = gemm.epilogue.qkv;
  if (qkv.form.dim % 16 != 0)
    return fmt::format("heads of {} features: a tile takes heads of multiples of 16", qkv.form.dim);
  const int step = qkv.form.rotation == head_rotation::halves ? 16 : 8;
  if (qkv.form.rotates() && qkv.form.rotary % step != 0)
    return fmt::format(
        "{} rotated features: a thread has both of each pair only if they are a multiple of {}",
        qkv.form.rotary, step);
  const auto fits = [&](int bn) { return qkv.fits_heads(bn); };
  if (std::ranges::any_of(sm90::usual_columns, fits) ||
      std::ranges::any_of(sm90::columns_between, fits))
    return std::nullopt;
  return fmt::format("no tile has whole heads of {} features, {} of q or {} of k at a time",
                     qkv.form.dim, qkv.heads, qkv.kv_heads);
}

std::optional<std::string> refuse_groups(const GemmProblem& gemm) {
  const Groups& groups = gemm.groups;
  if (!groups.any()) return std::nullopt;
  const std::int64_t tokens = groups.by == Grouping::rows ? gemm.m : gemm.k;
  if (!groups.mask.empty() && tokens > most_masked_tokens)
    return fmt::format("{} tokens: every CTA scans the mask, which pays for up to {}", tokens,
                       most_masked_tokens);
  if (groups.count > most_groups)
    return fmt::format("{} groups: a CTA's tables hold {}", groups.count, most_groups);
  const auto& of_groups = groups.by == Grouping::rows ? gemm.b : gemm.c;
  if (of_groups.front().size() != 1 && groups.count != 2)
    return "more than two groups take one tensor that stacks their matrices";
  if (groups.choices > 1 && groups.by == Grouping::rows && !gemm.c_sorted)
    return "C must be sorted if a token has several groups, and so several rows of C";
  if (gemm.epilogue.kind == EpilogueKind::linear && gemm.epilogue.broadcasts())
    return "grouped GEMMs add no bias, nor any other vector";
  if (gemm.b_packing == Packing::interleaved && gemm.b_major == Major::k && gemm.k % 64 != 0)
    return fmt::format(
        "k={} is not a multiple of 64: a K block would reach into the other operand's interleaved "
        "row",
        gemm.k);
  if (groups.by == Grouping::rows) {
    if (gemm.a_major != Major::k || gemm.outputs() == 2)
      return "gathered rows of A need a contiguous k and one C";
    if (!gemm.a_sorted && gemm.k_pairs() == 2)
      return "K-concatenated operands need sorted rows: two A would have to be gathered";
    if (!gemm.epilogue.source.empty()) return "scattered rows of C cannot take a source";
    if (gemm.epilogue.kind == EpilogueKind::activation_gradient && !gemm.c_sorted)
      return "gate and up are loaded by TMA: their rows must be sorted";
    return std::nullopt;
  }
  if (gemm.a_major != Major::mn || gemm.b_major != Major::mn)
    return "gathered tokens need MN-major operands, whose other extent is contiguous";
  if (gemm.form != GemmForm::single && gemm.form != GemmForm::two_outputs)
    return "a grouped reduction has one A for each C";
  if (gemm.epilogue.kind != EpilogueKind::linear)
    return "a grouped reduction has a linear epilogue";
  if (gemm.outputs() == 2 && !gemm.a_sorted)
    return "two outputs need sorted tokens of A: two operands would have to be gathered";
  return std::nullopt;
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  const GemmProblem& gemm = chain.front();
  if (auto reason = refuse_elements(gemm)) return reason;
  if (auto reason = misaligned_rows(gemm)) return reason;
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (auto reason = refuse_epilogue(gemm)) return reason;
  if (auto reason = refuse_heads(gemm)) return reason;
  return refuse_groups(gemm);
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return sm90::space(chain.front(), facts);
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  return sm90::default_config(chain.front(), facts);
}

std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts,
                               const Config& config) {
  if (facts.clock_hz <= 0) return std::nullopt;
  return sm90::cycles(chain.front(), facts, config) / facts.clock_hz;
}

/// One launch of the engine, while its parameters are filled in.
class Launch {
 public:
  Launch(const GemmProblem& gemm, const TensorPlaces& places, const Tile& tile)
      : gemm_(gemm),
        places_(places),
        tile_(tile),
        form_(form_of(gemm)),
        parameters_{sizeof(sm90_params), {}} {
    set_gemm(fields().inside(&Params::gemm), gemm, places);
    if (tile.pre_permute) {
      form_.a_sorted = true;
      if (form_.source == group_source::routed) form_.ready = groups_ready::settled;
      form_.b_sorted = form_.groups == grouping::reduction;
    }
    // A grouped reduction waits with all of its operands.
    if (form_.groups == grouping::reduction) form_.b_depends = false;
    plan_ = sm90_plan_of(form_, tile);
    a_ = tensor_of(places, gemm.a.front().front());
    b_ = tensor_of(places, gemm.b.front().front());
  }

  void append(Program& program, const DeviceFacts& facts) {
    if (tile_.pre_permute) append_permute(program, facts);
    sines_ = append_sines(program, gemm_, places_);
    if (tile_.a_reuse > 1) add_reuse(program);
    add_operands();
    add_outputs();
    if (form_.is_qkv()) set_heads(fields().inside(&Params::qkv), gemm_, places_, sines_);
    fields().inside(&Params::gemm).set(&gemm_params::group_m, tile_.group_m);
    KernelLaunch& launch = append_gemm(
        program, "gemm/sm90/gemm.cu",
        fmt::format("gemm_sm90<{}, {}>", template_argument(form_), template_argument(tile_)),
        clusters(facts) * tile_.cluster_ctas(), plan_.threads, std::move(parameters_));
    launch.cluster.x = static_cast<std::uint32_t>(tile_.cluster_ctas());
    launch.shared_bytes = static_cast<std::uint32_t>(plan_.shared_bytes);
    launch.programmatic = gemm_.follows || tile_.pre_permute || sines_;
    if (!tile_.pre_permute && form_.ready == groups_ready::settled)
      launch.read_early = {tensor_of(places_, gemm_.groups.offsets)};
    if (form_.ready == groups_ready::counted)
      launch.read_early = {tensor_of(places_, gemm_.groups.ids)};
  }

 private:
  using Params = sm90_params;

  ParameterFields<Params> fields() { return ParameterFields<Params>(parameters_); }
  Pointer tensor(std::string_view name) const { return tensor_of(places_, name); }

  /// Rows of the tiles of grouped rows, at most: each group's last one may be a part, and fills its
  /// cluster.
  std::int64_t most_row_tiles() const {
    return gemm_.groups.most_tiles(gemm_.m, std::int64_t{tile_.bm} * tile_.cluster_m) *
           tile_.cluster_m;
  }

  /// Persistent CTAs, as many as are resident; with split-K a cluster for each tile.
  std::int64_t clusters(const DeviceFacts& facts) const {
    const Workload work = Workload(gemm_).with(tile_);
    const std::int64_t all = work.grouped_rows()
                                 ? most_row_tiles() / tile_.cluster_m * work.column_runs(tile_)
                                 : work.runs(tile_);
    const std::int64_t resident = std::max(facts.multiprocessors / tile_.cluster_ctas(), 1) *
                                  sm90_resident_ctas(form_, plan_);
    return tile_.split_k > 1 ? all : std::min(all, resident);
  }

  /// An operand of `rows` x `k` in boxes of one K block, `share` of its rows; MN-major in slabs of
  /// 64 of them.
  TensorMapArgument operand(const Pointer& matrix, Major major, std::int64_t rows, std::int64_t k,
                            int share, std::int64_t matrices = 0) const {
    const auto bk = static_cast<std::uint32_t>(plan_.bk);
    if (major == Major::mn) return {matrix, gemm_.dtype, k, rows, bk, 64, matrices};
    return {matrix, gemm_.dtype, rows, k, static_cast<std::uint32_t>(share), bk, matrices};
  }
  /// Rows of an operand: `sorted` if it is sorted, else the number of tokens.
  std::int64_t extent(std::int64_t sorted, bool is_sorted) const {
    return is_sorted ? sorted : sorted / gemm_.groups.choices;
  }
  TensorMapArgument a_map(const Pointer& matrix) const {
    const bool rows = form_.groups == grouping::rows, sorted = form_.a_sorted;
    return operand(matrix, gemm_.a_major, rows ? extent(gemm_.m, sorted) : gemm_.m,
                   rows ? gemm_.k : extent(gemm_.k, sorted), tile_.bm / tile_.cluster_n);
  }
  /// C, or any matrix in its subtiles.
  TensorMapArgument c_map(const Pointer& matrix, DType dtype, std::int64_t columns) const {
    const bool stacked = form_.groups == grouping::reduction && form_.stacked;
    return {matrix,
            dtype,
            gemm_.m,
            columns,
            static_cast<std::uint32_t>(plan_.subtile_m),
            static_cast<std::uint32_t>(plan_.subtile_n),
            stacked ? gemm_.groups.count : 0};
  }

  /// Columns of C number i, which is a part for a QKV product.
  std::int64_t part_columns(std::size_t i) const {
    return form_.is_qkv() ? gemm_.epilogue.qkv.columns(i) : gemm_.n;
  }

  void add_operands() {
    fields().set_at(&Params::a, 0, a_map(a_));
    if (gemm_.a.size() == 2) fields().set_at(&Params::a, 1, a_map(tensor(gemm_.a[1].front())));
    const bool stacked = form_.groups == grouping::rows && form_.stacked;
    if (form_.b_packing != packing::separate) {
      // Twice as many matrices, or each of their rows beside the other operand's.
      const bool side_by_side = form_.b_packing == packing::interleaved;
      const bool k_major = gemm_.b_major == Major::k;
      fields().set_at(
          &Params::b, 0,
          operand(b_, gemm_.b_major, gemm_.n * (side_by_side && !k_major ? 2 : 1),
                  gemm_.k * (side_by_side && k_major ? 2 : 1), tile_.bn / tile_.cluster_m,
                  gemm_.groups.count * (side_by_side ? 1 : 2)));
      return;
    }
    for (std::size_t i = 0; i < gemm_.b.size(); ++i)
      for (std::size_t group = 0; group < gemm_.b[i].size(); ++group)
        fields().set_at(
            &Params::b, group * 2 + i,
            operand(i == 0 && group == 0 ? b_ : tensor(gemm_.b[i][group]), gemm_.b_major,
                    gemm_.b.size() == 3 ? part_columns(i) : gemm_.n,
                    form_.groups == grouping::reduction ? extent(gemm_.k, form_.b_sorted) : gemm_.k,
                    tile_.bn / tile_.cluster_m, stacked ? gemm_.groups.count : 0));
  }

  void add_outputs() {
    const auto out = [&](int value, std::string_view name, DType dtype) {
      if (!name.empty())
        fields().set_at(&Params::out, static_cast<std::size_t>(sm90_out_index(form_, value, 0, 0)),
                        c_map(tensor(name), dtype, gemm_.n));
    };
    const auto each = [&](auto array, const std::vector<TensorNames>& matrices, DType dtype) {
      for (std::size_t i = 0; i < matrices.size(); ++i)
        for (std::size_t group = 0; group < matrices[i].size(); ++group)
          fields().set_at(array,
                          static_cast<std::size_t>(sm90_out_index(form_, 0, static_cast<int>(i),
                                                                  static_cast<int>(group))),
                          c_map(tensor(matrices[i][group]), dtype, part_columns(i)));
    };
    const Epilogue& epilogue = gemm_.epilogue;
    each(&Params::out, gemm_.c, gemm_.c_dtype);
    each(&Params::source, epilogue.source, gemm_.wide_dtype);
    if (epilogue.kind == EpilogueKind::gated) {
      out(1, epilogue.gate, gemm_.wide_dtype);
      out(2, epilogue.up, gemm_.wide_dtype);
    }
    if (epilogue.kind == EpilogueKind::activation_gradient) {
      out(1, epilogue.d_up, gemm_.c_dtype);
      out(2, epilogue.hidden, gemm_.c_dtype);
      fields().set_at(&Params::source, 0, c_map(tensor(epilogue.gate), gemm_.wide_dtype, gemm_.n));
      fields().set_at(&Params::source, 1, c_map(tensor(epilogue.up), gemm_.wide_dtype, gemm_.n));
    }
  }

  std::size_t scratch(Program& program, std::int64_t elements) const {
    program.scratch.push_back(
        {static_cast<std::size_t>(elements) * dtype_bytes(gemm_.dtype), false});
    return program.scratch.size() - 1;
  }

  /// Where the first of several tiles of the same rows stores the rows of A that it gathers.
  void add_reuse(Program& program) {
    const std::int64_t rows = most_row_tiles() * tile_.bm;
    TensorMapArgument stored = a_map(ScratchArgument{scratch(program, rows * gemm_.k)});
    stored.rows = rows;
    fields().set(&Params::reuse, stored);
  }

  /// The launch that sorts the rows of A, or the tokens of A and B, that are not.
  void append_permute(Program& program, const DeviceFacts& facts) {
    const bool by_rows = gemm_.groups.by == Grouping::rows;
    const std::int64_t rows = by_rows ? gemm_.m : gemm_.k;
    KernelLaunch& launch = append_permute_rows(program, gemm_, places_, facts, rows);
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(gemm_.dtype));
    int copied = 0;
    const auto copy = [&](Pointer& matrix, std::int64_t columns) {
      const ScratchArgument sorted{scratch(program, rows * columns)};
      launch.arguments.insert(
          launch.arguments.end(),
          {argument_of(matrix), sorted, static_cast<std::int32_t>(columns * bytes / 16)});
      matrix = sorted;
      ++copied;
    };
    if (!gemm_.a_sorted) copy(a_, by_rows ? gemm_.k : gemm_.m);
    if (!by_rows && !gemm_.b_sorted) copy(b_, gemm_.n);
    for (; copied < 2; ++copied)
      launch.arguments.insert(launch.arguments.end(),
                              {std::int64_t{0}, std::int64_t{0}, std::int32_t{0}});
    launch.arguments.emplace_back(static_cast<std::int32_t>(rows));
  }

  const GemmProblem& gemm_;
  const TensorPlaces& places_;
  const Tile& tile_;
  gemm_form form_;
  sm90_plan plan_ = {};
  ParameterStruct parameters_;
  std::optional<Pointer> sines_;  // of rotated heads
  Pointer a_, b_;                 // the first ones, or their sorted copies
};

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const Tile tile(config);
  Launch(chain.front(), places, tile).append(program, facts);
}

}  // namespace

constinit const Engine sm90_engine{
    .name = "sm90",
    .can_implement = can_implement,
    .search = {space, default_config, estimate},
    .append = append,
    .batch_invariant = true,
    .sources = {"gemm/sm90/gemm.cu", "gemm/sort_tokens.cu", "gemm/head_sines.cu"}};

}  // namespace fftune
