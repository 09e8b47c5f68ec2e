// The configuration of sm90.cu and the plan that follows from it. Included by the kernel and by the
// host: this is the only definition.
#pragma once

#include "mla/grid.cuh"
#include "mla/params.cuh"

namespace fftune {

struct mla_sm90_config {
  int keys = 64;        // Keys of a stage.
  int stages = 2;       // Stages of keys in shared memory.
  int least_tiles = 1;  // Stages of keys of a CTA at least, before others share the work.

  static constexpr int ctas_per_sm = 1;
  static constexpr int rows() { return 64; }
};

struct mla_sm90_plan {
  int slabs;        // of 64 elements of a row, 128 bytes under the 128-byte swizzle
  int stage_bytes;  // [slab][key] of the keys of a stage
  // Shared memory from a 1024-byte boundary on: Q [slab][64 rows], the stages, what the first MMA
  // warpgroup gives to the second, barriers.
  int stages_at, given_at, factors_at, barriers_at;
  int shared_bytes;  // with room to align to 1024
};

constexpr mla_sm90_plan mla_sm90_plan_of(const mla_form& form, const mla_sm90_config& config) {
  mla_sm90_plan plan = {};
  plan.slabs = (form.width() + 63) / 64;
  plan.stage_bytes = plan.slabs * config.keys * 128;
  plan.stages_at = plan.slabs * 64 * 128;
  plan.given_at = plan.stages_at + config.stages * plan.stage_bytes;
  // The probabilities of a thread, two of 16 bits in a word; then two floats.
  plan.factors_at = plan.given_at + 128 * config.keys;
  plan.barriers_at = plan.factors_at + 128 * 8;
  plan.shared_bytes = 1024 + plan.barriers_at + 2 * 8 * config.stages;
  return plan;
}

}  // namespace fftune
