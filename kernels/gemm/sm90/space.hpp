// The sm90 engine's parameters: their constraints for a GEMM on a device, which to use untuned, and
// the cost model that ranks them.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/config_reader.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "kernels/gemm/problem.hpp"
#include "kernels/gemm/sm90/config.cuh"

namespace fftune::sm90 {

/// Columns of tiles. Those between the usual ones are for waves that they fill better, and for
/// heads that no usual tile has whole.
inline constexpr std::array usual_columns{64, 96, 128, 192, 256};
inline constexpr std::array columns_between{80, 112, 160, 224};

/// Where the quarters of the draws of a random number that are below and above half of them have
/// their mean, about.
inline constexpr double usual_deviations = 1.5;

/// A configuration: the kernel's template argument, its run-time arguments, and whether a
/// kernel before it sorts the rows, or the tokens of a grouped reduction.
struct Tile : sm90_config {
  int group_m = 8;
  bool pre_permute = false;

  Tile() = default;
  explicit Tile(const Config& config);

 private:
  explicit Tile(ConfigReader config);
};

/// "fftune::sm90_config{.bm = 128, ...}"
std::string template_argument(const sm90_config& config);

/// Input of the space and the cost model. In fp8, k
/// counts pairs of elements: a K block has the same bytes and takes the same instructions as one of
/// 16-bit elements.
struct Workload {
  explicit Workload(const GemmProblem& gemm);
  /// The same as a configuration has it.
  Workload with(const Tile& tile) const;
  /// Makes this, a copy of `whole`, what whole.with(tile) is.
  void take(const Workload& whole, const Tile& tile);

  gemm_form form;
  std::int64_t m, n, k;  // k of one K-concatenated pair
  /// Rows that may share a tile: m, or those that few sorted groups exceed.
  std::int64_t rows;
  std::int64_t groups;
  /// Computed matrices: outputs; for a grouped reduction, those of every group.
  std::int64_t results;
  int tensors_per_stage;
  int a_reuse = 1;
  bool gathers_a = false, gathers_b = false;
  std::int64_t choices;  // rows of A that gather the same token
  /// Grouped rows by a mask: those that group 0 should have.
  std::int64_t first_group_rows = 0;
  double deviation = 0;  // of that number, where it is random
  /// Sorted groups: how many deviations there are more tiles than expected.
  double more_tiles = 0;

  int b_operands() const { return form.b_operands(); }
  int k_pairs() const { return form.k_pairs(); }
  bool a_mn_major() const { return form.a_major == major::mn; }
  bool b_mn_major() const { return form.b_major == major::mn; }
  bool grouped_rows() const { return form.groups == grouping::rows; }
  /// Grouped rows that an earlier launch has sorted.
  bool sorted_rows() const { return grouped_rows() && form.source == group_source::routed; }
  bool grouped_reduction() const { return form.groups == grouping::reduction; }
  bool promotes() const { return form.scales != scaling::none; }
  /// Sorted rows in fp8: experts.
  bool promotes_sorted_rows() const { return sorted_rows() && promotes(); }

  /// Tiles of this many rows that cover m; no tile has rows of two groups.
  std::int64_t row_tiles(std::int64_t height) const;
  /// The same for rows that are not sorted, `first_rows` of them of group 0.
  std::int64_t row_tiles(std::int64_t height, std::int64_t first_rows) const;
  /// The rows of group 0 in a draw so many deviations from the expected one.
  std::int64_t drawn_first_rows(double deviations) const;
  /// Sorted groups of many rows: whether some should have more than others, so that no number of
  /// tiles is sure.
  bool has_uneven_groups() const { return has_uneven_groups_; }
  /// Grouped rows: how many groups should have rows; else 1.
  std::int64_t groups_with_rows() const;
  /// Row tiles of the smaller of two groups by a mask.
  std::int64_t fewest_row_tiles(std::int64_t height) const;
  std::int64_t tiles(const Tile& tile) const;
  /// Runs of tiles of one row that a cluster has one after the other: one tile without A reuse.
  std::int64_t column_runs(const Tile& tile) const;
  std::int64_t runs(const Tile& tile) const;
  /// K blocks of a CTA.
  std::int64_t k_blocks(const Tile& tile) const;

 private:
  void expect_rows(const Groups& groups);

  std::int64_t groups_with_rows_ = 1;
  /// Sorted groups: the tiles that all should take, of 8 rows, of 16, and so on.
  std::vector<double> expected_tiles_ = {}, tile_deviations_ = {};
  bool has_uneven_groups_ = false;
};

/// Whether most tiles of grouped rows, or K blocks of a grouped reduction, are gathered.
bool gathers(const GemmProblem& gemm);

/// bm, bn, schedule, mma_warpgroups, cluster_m, cluster_n, split_k, stages, epilogue_stages,
/// group_m; a_reuse of gathered rows; pre_permute of those of sorted groups, and with gather_warps
/// of gathered reductions. `bn` counts columns of C: with two B operands a CTA computes 2 bn.
Space space(const GemmProblem& gemm, const DeviceFacts& facts);

/// The feasible configuration of least cycles(), where tiles of heights that were not timed count
/// as some percent slower; among equal ones that of the deeper pipeline.
Config default_config(const GemmProblem& gemm, const DeviceFacts& facts);

/// The cost model, of one GEMM.
class CostModel {
 public:
  CostModel(const GemmProblem& gemm, const DeviceFacts& facts);

  /// Clock cycles of a configuration with its plan, accurate enough to rank.
  double cycles(const Tile& tile, const sm90_plan& plan);
  /// About as many, never more, in a fraction of the time.
  double least_cycles(const Tile& tile, const sm90_plan& plan);

 private:
  double cycles(const Tile& tile, const sm90_plan& plan, bool fast);

  const GemmProblem& gemm_;
  const DeviceFacts& facts_;
  Workload whole_;  // whatever the tile
  Workload work_;   // as the tile has it
};

/// CostModel::cycles() of a single configuration.
double cycles(const GemmProblem& gemm, const DeviceFacts& facts, const Config& config);

}  // namespace fftune::sm90
