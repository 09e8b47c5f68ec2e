// The configuration of sm90.cu and the plan that follows from it. Included by the kernel and by the
// host: this is the only definition.
#pragma once

#include "common/types.cuh"
#include "mla/grid.cuh"
#include "mla/params.cuh"

namespace fftune {

struct mla_sm90_config {
  int keys = 64;        // Keys of a stage.
  int stages = 2;       // Stages of keys in shared memory.
  int tma = 0;          // Whether whole tiles of keys are loaded by TMA.
  int cluster = 1;      // CTAs of neighbouring row blocks that each load a part for all of them.
  int least_tiles = 1;  // Stages of keys of a CTA at least, before others share the work.

  constexpr int box_rows() const { return keys / cluster; }
  static constexpr int ctas_per_sm = 1;
  static constexpr int rows() { return 64; }
};

struct mla_sm90_params {
  tensor_map
      cache;  // with config.tma: pages or sequences, of boxes of 64 elements of box_rows() rows
  mla_params mla;
};

struct mla_sm90_plan {
  int slabs;        // of 64 elements of a row, 128 bytes under the 128-byte swizzle
  int stage_bytes;  // [slab][key] of the keys of a stage
  // Shared memory from a 1024-byte boundary on: Q [slab][64 rows], the stages, the probabilities
  // and two floats of each thread that the MMA warpgroups exchange, the two sequences that the
  // group may share with others, barriers.
  int stages_at, exchange_at, floats_at, cuts_at, barriers_at;
  int shared_bytes;  // with room to align to 1024

  // Barriers: full [stage][slab], empty [stage][piece], Q full, Q empty.
  static constexpr int pieces = 3;
  constexpr int stage_barriers() const { return slabs + pieces; }
};

constexpr mla_sm90_plan mla_sm90_plan_of(const mla_form& form, const mla_sm90_config& config) {
  mla_sm90_plan plan = {};
  plan.slabs = (form.width() + 63) / 64;
  plan.stage_bytes = plan.slabs * config.keys * 128;
  plan.stages_at = plan.slabs * 64 * 128;
  plan.exchange_at = plan.stages_at + config.stages * plan.stage_bytes;
  // The probabilities of a thread, two of 16 bits in a word.
  plan.floats_at = plan.exchange_at + 128 * config.keys;
  plan.cuts_at = plan.floats_at + 128 * 8;
  plan.barriers_at = plan.cuts_at + 2 * 16;
  plan.shared_bytes = 1024 + plan.barriers_at + 8 * (config.stages * plan.stage_barriers() + 2);
  return plan;
}

}  // namespace fftune
