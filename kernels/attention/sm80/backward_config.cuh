// The tile configuration of the sm80 attention backward, and its shared memory. Included
// by the kernels and by the host, which checks configurations and launches the kernels: this is the
// only definition.
#pragma once

#include "attention/row_layout.cuh"

namespace fftune {

struct attention_sm80_backward_config {
  int warps = 4;   // of a CTA; each has 16 rows: queries for dq, keys for dk and dv
  int block = 32;  // keys of a step, or queries
  int stages = 2;  // blocks in shared memory
  int ctas_per_sm = 1;

  constexpr int threads() const { return warps * 32; }
  constexpr int rows() const { return warps * 16; }
};

struct attention_sm80_backward_plan {
  /// The accumulators of dk and dv together do not fit in registers: other CTAs make dv.
  bool splits_dkv;
  int tile_bytes;   // of the CTA's rows of one tensor
  int block_bytes;  // of a block of one tensor
  // Shared memory: the CTA's rows of two tensors, whose place the results take; the stages, of
  // blocks of two tensors; then [stage][2][block] statistics of queries, in f32.
  int stages_at, statistics_at;
  int shared_bytes;
};

constexpr attention_sm80_backward_plan attention_sm80_backward_plan_of(
    const attention_form& form, const attention_sm80_backward_config& config) {
  attention_sm80_backward_plan plan = {};
  const int pitch = attention_row_pitch(form.dim);
  plan.splits_dkv = form.dim > 128;
  plan.tile_bytes = config.rows() * pitch;
  plan.block_bytes = config.block * pitch;
  plan.stages_at = 2 * plan.tile_bytes;
  plan.statistics_at = plan.stages_at + config.stages * 2 * plan.block_bytes;
  plan.shared_bytes = plan.statistics_at + config.stages * 2 * config.block * 4;
  return plan;
}

/// Why a configuration cannot serve a form, or null.
constexpr const char* attention_sm80_backward_refusal(
    const attention_form& form, const attention_sm80_backward_config& config) {
  if (config.stages < 2) return "one block is loaded while another is used";
  if (config.block % 16 != 0) return "the rows of a block are the k of m16n8k16";
  const int gradients = attention_padded_dim(form.dim) / 2 * (form.dim > 128 ? 1 : 2);
  if (gradients + config.block > 200) return "accumulators must fit in registers";
  if (form.mask == attention_mask::packed &&
      (config.rows() != attention_flag_tile || attention_flag_tile % config.block != 0))
    return "a CTA's rows, and whole blocks, are those of the mask's flags";
  return nullptr;
}

}  // namespace fftune
