// The configuration of decode.cu and the plan that follows from it: tiles and shared memory.
// Included by the kernel and by the host: this is the only definition.
#pragma once

#include "attention/row_layout.cuh"
#include "mla/grid.cuh"
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

  // Shared memory: the stages; queries; the scores of a stage, f32 rows of score_row elements; with
  // lists, a word for each key of each stage, not 0 if the key exists.
  int q_at, scores_at, score_row, exists_at;
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
  plan.exists_at = plan.scores_at + config.rows() * plan.score_row * 4;
  plan.shared_bytes = plan.exists_at + (form.chosen ? config.stages * config.keys * 4 : 0);
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

}  // namespace fftune
