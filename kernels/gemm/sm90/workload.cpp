// The tiles that a launch of sm90 computes, by the rows that groups are expected to have.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/sm90/space.hpp"

namespace fftune::sm90 {

Workload::Workload(const GemmProblem& gemm)
    : form(form_of(gemm)),
      m(gemm.m),
      n(gemm.n),
      k(form.scales == scaling::none ? gemm.k : ceil_div(gemm.k, 2)),
      rows(gemm.m),
      groups(gemm.groups.count),
      results(gemm.outputs()),
      tensors_per_stage(gemm.tensors_per_stage()),
      choices(gemm.groups.choices) {
  if (grouped_reduction()) results *= groups;
  if (grouped_rows() && form.source == group_source::mask) {
    const double tokens = static_cast<double>(m), share = gemm.groups.expected_share;
    first_group_rows = std::llround(tokens * share);
    if (gemm.groups.random) deviation = std::sqrt(tokens * share * (1 - share));
  }
  if (sorted_rows()) expect_rows(gemm.groups);
  gathers_a = gemm.groups.any() && gemm.groups.scattered && !gemm.a_sorted;
  gathers_b = grouped_reduction() && gemm.groups.scattered && !gemm.b_sorted;
}

// The number of a group's rows is close to Poisson distributed. For x rows, tiles of height t take
// ceil(x / t): one for each i with x > i t.
void Workload::expect_rows(const Groups& all) {
  constexpr int heights = 64;
  auto expected = all.expected_rows;
  if (expected.empty())
    expected = {
        {static_cast<double>(groups), static_cast<double>(m) / static_cast<double>(groups)}};
  constexpr std::int64_t few_rows = 128;  // of a group: its B decides, whatever the waves
  has_uneven_groups_ = expected.size() > 1 && m >= few_rows * groups;
  expected_tiles_.assign(heights, 0);
  tile_deviations_.assign(heights, 0);
  double of_rows = 0, of_squares = 0;
  for (const ExpectedRows& alike : expected) {
    of_rows += alike.groups * alike.rows;
    of_squares += alike.groups * alike.rows * alike.rows;
    const double spread = std::sqrt(alike.rows);
    for (int i = 0; i < heights; ++i) {
      const double height = 8 * (i + 1);
      double tiles = 1 - std::exp(-alike.rows), variance = tiles * (1 - tiles);
      if (alike.rows > 4 * height) {
        tiles = alike.rows / height + 0.5;
        variance = 1.0 / 12 + alike.rows / (height * height);
      } else {
        for (double full = height; full < alike.rows + 4 * spread; full += height) {
          const double more = std::erfc((full + 0.5 - alike.rows) / (spread * std::sqrt(2.0))) / 2;
          tiles += more;
          variance += more * (1 - more);
        }
      }
      expected_tiles_[static_cast<std::size_t>(i)] += alike.groups * tiles;
      tile_deviations_[static_cast<std::size_t>(i)] += alike.groups * variance;
    }
  }
  for (double& of_height : tile_deviations_) of_height = std::sqrt(of_height);
  const double usual = of_rows > 0 ? of_squares / of_rows : 0;
  rows = std::clamp<std::int64_t>(std::llround(usual + 3 * std::sqrt(usual)), 1, m);
  groups_with_rows_ = std::max<std::int64_t>(1, std::llround(all.with_rows()));
}

Workload Workload::with(const Tile& tile) const {
  Workload own = *this;
  own.take(*this, tile);
  return own;
}

void Workload::take(const Workload& whole, const Tile& tile) {
  a_reuse = tile.a_reuse;
  gathers_a = whole.gathers_a && !tile.pre_permute;
  gathers_b = whole.gathers_b && !tile.pre_permute;
  // A cluster that shares the k of a grouped reduction has a tile of every group.
  results = grouped_reduction() && tile.split_k > 1 ? whole.results / groups : whole.results;
}

std::int64_t Workload::row_tiles(std::int64_t height) const {
  if (!expected_tiles_.empty()) {
    const auto at =
        std::min<std::size_t>(static_cast<std::size_t>(height / 8), expected_tiles_.size());
    return std::max<std::int64_t>(
        1, std::llround(expected_tiles_[at - 1] + more_tiles * tile_deviations_[at - 1]));
  }
  return row_tiles(height, first_group_rows);
}
std::int64_t Workload::row_tiles(std::int64_t height, std::int64_t first_rows) const {
  return ceil_div(m - first_rows, height) + ceil_div(first_rows, height);
}
std::int64_t Workload::drawn_first_rows(double deviations) const {
  const double drawn = static_cast<double>(first_group_rows) + deviations * deviation;
  return std::clamp<std::int64_t>(std::llround(drawn), 0, m);
}
std::int64_t Workload::groups_with_rows() const {
  if (!grouped_rows()) return 1;
  if (form.source == group_source::routed) return groups_with_rows_;
  return (first_group_rows > 0) + (first_group_rows < m);
}
std::int64_t Workload::fewest_row_tiles(std::int64_t height) const {
  return ceil_div(std::min(first_group_rows, m - first_group_rows), height);
}
std::int64_t Workload::tiles(const Tile& tile) const {
  return row_tiles(tile.bm) * ceil_div(n, tile.bn) * results;
}
std::int64_t Workload::column_runs(const Tile& tile) const {
  return ceil_div(ceil_div(n, std::int64_t{tile.bn} * tile.cluster_n), a_reuse);
}
std::int64_t Workload::runs(const Tile& tile) const {
  return row_tiles(std::int64_t{tile.bm} * tile.cluster_m) * column_runs(tile) * results;
}
std::int64_t Workload::k_blocks(const Tile& tile) const {
  return ceil_div(ceil_div(k, 64) * k_pairs(), tile.split_k);
}

}  // namespace fftune::sm90
