// The grid of the kernels of latent attention, and the workspace of sequences that are cut.
// Included by the kernels and by the host: this is the only definition.
#pragma once

#include "mla/params.cuh"

namespace fftune {

/// Floats of a part of a sequence: results [rows][rank], then the softmax [rows][2].
constexpr long long mla_part_floats(const mla_form& form, int rows) {
  return static_cast<long long>(rows) * (form.rank + 2);
}

/// The division of the keys: the groups divide the tiles of all sequences evenly.
struct mla_grid {
  int row_blocks;  // CTAs of a group, all with the same keys
  int groups;      // grid: (row_blocks, groups)
  bool cuts;       // whether several groups may share a sequence, and wait for each other

  /// Workspace layout: [groups][2][row blocks] parts. A group shares its first and its last
  /// sequence at most.
  constexpr long long partial_bytes(const mla_form& form, int rows_of_cta) const {
    return cuts ? 8ll * groups * row_blocks * mla_part_floats(form, rows_of_cta) : 0;
  }
  constexpr long long counter_bytes() const { return cuts ? 8ll * groups * row_blocks : 0; }
};

/// As many groups as the device has room for at once, if each has least_tiles tiles.
template <class Config>
constexpr mla_grid mla_grid_of(const Config& config, int multiprocessors, int batch, long long rows,
                               int kv_len, bool same_lengths) {
  mla_grid grid = {static_cast<int>((rows + config.rows() - 1) / config.rows()), 1, false};
  const int room = multiprocessors * config.ctas_per_sm;
  const long long tiles = (kv_len + config.keys - 1) / config.keys;  // of a sequence
  const long long all = tiles * batch;
  long long most = room / grid.row_blocks;
  const long long useful = all / config.least_tiles;
  if (most > useful) most = useful;
  // More rows than room: each group has whole sequences, and none waits.
  if (most < 1) {
    grid.groups = 1;
    return grid;
  }
  // The kernel divides in 32 bits.
  constexpr long long largest = (1ll << 32) - 1;
  if ((all + 1) * most > largest) most = largest / (all + 1);
  grid.groups = static_cast<int>(most > 1 ? most : 1);
  // Sequences of one length: fewer groups, if they have fewer parts of sequences then. A part takes
  // as long as some 256 keys: its queries are loaded, its results stored and added up.
  if (same_lengths) {
    const long long of_part = 256 / config.keys;
    long long least = 0;
    for (long long groups = most > 1 ? most : 1; groups > 0; --groups) {
      const long long share = (all + groups - 1) / groups;
      const long long parts = groups % batch == 0   ? 1
                              : batch % groups == 0 ? batch / groups
                                                    : (share + tiles - 1) / tiles + 1;
      const long long cost = share + of_part * parts;
      if (least == 0 || cost < least) {
        least = cost;
        grid.groups = static_cast<int>(groups);
      }
    }
  }
  grid.cuts = grid.groups > 1 && !(same_lengths && batch % grid.groups == 0);
  return grid;
}

}  // namespace fftune
