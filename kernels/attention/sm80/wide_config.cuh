// The tile configuration of the attention forward of mma.sync at wide heads, and the plan that
// follows from it. Included by the kernel and by the host: this is the only definition.
#pragma once

#include "attention/form.cuh"
#include "attention/row_layout.cuh"

namespace fftune {

struct attention_wide_sm80_config {
  int row_groups = 2;  // each of 32 queries and of four warps, which divide the features of a head
  int bn = 32;         // keys of a block

  constexpr int threads() const { return row_groups * 128; }
  constexpr int bm() const { return row_groups * 32; }
};

struct attention_wide_sm80_plan {
  int columns;        // of a head in shared memory: four warps have whole steps of 16
  int own_columns;    // of a warp
  int slices;         // of 8 keys of a block, each of whose scores are one warp's
  int partial_bytes;  // sums of scores of a row group; later its probabilities
  int probability_pitch;
  // Shared memory: queries, whose place the output takes, then the rest.
  int k_at, v_at, partials_at, largest_at;
  int shared_bytes;
};

constexpr attention_wide_sm80_plan attention_wide_sm80_plan_of(
    const attention_form& form, const attention_wide_sm80_config& config) {
  attention_wide_sm80_plan plan = {};
  plan.columns = (form.dim + 63) / 64 * 64;
  plan.own_columns = plan.columns / 4;
  plan.slices = config.bn / 8;
  plan.partial_bytes = 4 * 32 * config.bn * 4;
  plan.probability_pitch = config.bn * 2 + 16;
  const int row = plan.columns * 2;
  plan.k_at = config.bm() * row;
  plan.v_at = plan.k_at + config.bn * row;
  plan.partials_at = plan.v_at + config.bn * row;
  plan.largest_at = plan.partials_at + config.row_groups * plan.partial_bytes;
  plan.shared_bytes = plan.largest_at + config.bm() * 4 * 4;
  return plan;
}

}  // namespace fftune
