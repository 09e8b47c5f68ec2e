// The host's twin of wgmma_tile.cuh: the same names and the same arithmetic.
#pragma once

#include <cstdint>
#include <string>

#include "core/config.hpp"
#include "kernels/gemm/shape.hpp"

namespace fftune {

struct WgmmaTile {
  enum class Schedule { cooperative, pingpong, swap_ab };

  int bm, bn;
  Schedule schedule;
  int consumers, cluster_m, cluster_n, split_k, stages, output_boxes, group_m;
  bool one_owner;

  explicit WgmmaTile(const Config& config, bool one = false)
      : bm(config.get("bm")),
        bn(config.get("bn")),
        schedule(schedule_of(config.word("schedule"))),
        consumers(config.get("mma_warpgroups")),
        cluster_m(config.get("cluster_m")),
        cluster_n(config.get("cluster_n")),
        split_k(config.get("split_k")),
        stages(config.get("stages")),
        output_boxes(config.get("epilogue_stages")),
        group_m(config.get("group_m")),
        one_owner(one) {}

  static Schedule schedule_of(const std::string& word) {
    if (word == "pingpong") return Schedule::pingpong;
    return word == "swap_ab" ? Schedule::swap_ab : Schedule::cooperative;
  }

  bool ping_pong() const { return schedule == Schedule::pingpong; }
  bool swapped() const { return schedule == Schedule::swap_ab; }
  int rows() const { return swapped() ? bn : bm; }
  int columns() const { return swapped() ? bm : bn; }
  /// Among how many warpgroups the rows are split.
  int row_consumers() const { return ping_pong() ? 1 : consumers; }
  int consumer_rows() const { return rows() / row_consumers(); }
  int parts() const { return consumer_rows() / 64; }
  int cluster_blocks() const { return cluster_m * cluster_n * split_k; }
  /// Accumulators a thread.
  int sums(int products) const { return products * parts() * columns() / 2; }

  /// The narrow side of one wgmma: both products' columns where they are side by side.
  int instruction_columns(int products) const {
    const int widest = consumers == 3 ? 192 : 256;
    return swapped() || products * bn > widest ? columns() : products * bn;
  }

  int owners() const {
    const int granule = swapped() ? 8 : 32;
    return !one_owner && columns() % (granule * split_k) == 0 ? split_k : 1;
  }
  int owned_columns() const { return columns() / owners(); }
  int box_features() const {
    if (swapped() || owned_columns() % 64 == 0) return 64;
    return owned_columns() % 32 == 0 ? 32 : 16;
  }
  int box_tokens() const { return swapped() ? owned_columns() : consumer_rows(); }
  int boxes() const { return swapped() ? parts() : owned_columns() / box_features(); }
  /// Of boxes that are read and then stored over: whether those of a tile come in while the tile
  /// before it is under way (wgmma_gradient.cuh).
  bool reads_ahead() const {
    return output_boxes * (ping_pong() ? consumers : 1) >= (ping_pong() ? boxes() : 2);
  }

  std::int64_t shared_bytes(int products, int box_buffers = 1) const {
    const std::int64_t ring = std::int64_t{stages} * (bm + products * bn) * 128;
    const std::int64_t exchange = split_k == 1 ? 0
                                               : std::int64_t{split_k - 1} * consumers * 128 *
                                                     products * parts() * owned_columns() * 2;
    const std::int64_t output =
        std::int64_t{consumers} * output_boxes * box_buffers * box_tokens() * box_features() * 2;
    return 1024 + ring + exchange + output + stages * 16 + consumers * output_boxes * 8 + 8;
  }

  std::int64_t clusters(const GemmShape& shape) const {
    return shape.row_tiles(std::int64_t{bm} * cluster_m) *
           ceil_div(shape.n, std::int64_t{bn} * cluster_n) * shape.results;
  }
  /// Runs of the tiles of one row, which a cluster takes in turn.
  std::int64_t column_runs(const GemmShape& shape) const {
    return ceil_div(ceil_div(shape.n, std::int64_t{bn} * cluster_n), shape.turns);
  }
  std::int64_t row_runs(const GemmShape& shape) const {
    return shape.row_tiles(std::int64_t{bm} * cluster_m) * column_runs(shape) * shape.results;
  }
  std::int64_t tiles(const GemmShape& shape) const {
    return shape.row_tiles(bm) * ceil_div(shape.n, bn) * shape.results;
  }
  /// k tiles of a block, of all terms.
  std::int64_t k_tiles(const GemmShape& shape) const {
    return ceil_div(ceil_div(shape.k, 64) * shape.terms, split_k);
  }
};

}  // namespace fftune
