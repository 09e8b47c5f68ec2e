// The configuration of decode.cu and the plan that follows from it: tiles, shared memory, the grid
// and the workspace. Included by the kernel and by the host: this is the only definition.
#pragma once

#include "attention/row_layout.cuh"
#include "mla/params.cuh"

namespace fftune {

struct mla_decode_config {
  int row_warps = 1;     // Warps along the rows of queries,
  int column_warps = 4;  // and along the latent features of the result.
  int m_tiles = 1;       // Tiles of 16 rows of a warp.
  int keys = 32;         // Keys of a stage.
  int stages = 2;        // Stages of keys in shared memory.
  int ctas_per_sm = 1;   // CTAs per SM that shared memory and registers must allow.
  int least_tiles = 1;   // Stages of keys of a CTA at least, before others share the work.

  constexpr int warps() const { return row_warps * column_warps; }
  constexpr int threads() const { return warps() * 32; }
  constexpr int rows() const { return row_warps * m_tiles * 16; }
  constexpr int keys_of_warp() const { return keys / column_warps; }
  /// Latent features of a warp, whole pairs of 8; the last warp's may be past the last one.
  constexpr int columns(const mla_form& form) const {
    return (form.rank + 16 * column_warps - 1) / (16 * column_warps) * 16;
  }
  /// Accumulators of a thread.
  constexpr int accumulators(const mla_form& form) const { return m_tiles * columns(form) / 2; }
};

struct mla_decode_plan {
  int width;        // elements of a row of the cache in shared memory, zeros behind its last
  int stage_bytes;  // of the keys of a stage

  // Shared memory: the stages; queries; the scores of a stage, f32 rows of score_row elements.
  int q_at, scores_at, score_row;
  int shared_bytes;
};

/// Elements of a row in shared memory: a step of the scores takes 32, and the result's columns lie
/// within a row.
constexpr int mla_padded_width(const mla_form& form, const mla_decode_config& config) {
  const int columns = config.columns(form) * config.column_warps;
  return ((columns > form.width() ? columns : form.width()) + 31) / 32 * 32;
}

constexpr mla_decode_plan mla_decode_plan_of(const mla_form& form,
                                             const mla_decode_config& config) {
  mla_decode_plan plan = {};
  plan.width = mla_padded_width(form, config);
  const int pitch = attention_row_pitch(plan.width);
  plan.stage_bytes = config.keys * pitch;
  plan.q_at = config.stages * plan.stage_bytes;
  plan.scores_at = plan.q_at + config.rows() * pitch;
  // Eight rows of one access, 8 bytes of four lanes each, are in different banks.
  plan.score_row = config.keys + 8;
  plan.shared_bytes = plan.scores_at + config.rows() * plan.score_row * 4;
  return plan;
}

/// Why a configuration cannot serve a form, or null.
constexpr const char* mla_decode_misfit(const mla_form& form, const mla_decode_config& config) {
  if (config.keys % 16 != 0 || config.keys % (8 * config.column_warps) != 0)
    return "each warp has whole blocks of 8 keys of a stage";
  if (config.keys > 32 * config.warps()) return "a lane finds one row of the cache of a stage";
  if (config.stages < 2) return "one stage is loaded while another is read";
  if (config.accumulators(form) > 128) return "accumulators must fit in registers";
  return nullptr;
}

/// The division of the keys: the groups divide the tiles of all sequences evenly.
struct mla_decode_grid {
  int row_blocks;  // CTAs of a group, all with the same keys
  int groups;      // grid: (row_blocks, groups)
  bool cuts;       // whether several groups may share a sequence, and wait for each other

  /// Floats of a part of a sequence: results [rows][rank], then the softmax [rows][2].
  static constexpr long long part_floats(const mla_form& form, const mla_decode_config& config) {
    return static_cast<long long>(config.rows()) * (form.rank + 2);
  }
  /// Workspace layout: [groups][2][row blocks] parts. A group shares its first and its last
  /// sequence at most.
  constexpr long long partial_bytes(const mla_form& form, const mla_decode_config& config) const {
    return cuts ? 8ll * groups * row_blocks * part_floats(form, config) : 0;
  }
  constexpr long long counter_bytes() const { return cuts ? 8ll * groups * row_blocks : 0; }
};

/// As many groups as the device has room for at once, if each has least_tiles tiles.
constexpr mla_decode_grid mla_decode_grid_of(const mla_decode_config& config, int multiprocessors,
                                             int batch, long long rows, int kv_len,
                                             bool same_lengths) {
  mla_decode_grid grid = {static_cast<int>((rows + config.rows() - 1) / config.rows()), 1, false};
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
  // Sequences of one length: a few groups less, if none is cut then.
  for (int groups = grid.groups; same_lengths && groups > 0 && groups * 20 >= grid.groups * 19;
       --groups) {
    if (batch % groups == 0) {
      grid.groups = groups;
      break;
    }
  }
  grid.cuts = grid.groups > 1 && !(same_lengths && batch % grid.groups == 0);
  return grid;
}

}  // namespace fftune
