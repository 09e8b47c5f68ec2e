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
  int tile_bytes;   // of the CTA's rows of q or k, before those of d_out or v
  int block_bytes;  // of a block of k or q, before that of v or d_out
  int stage_bytes;  // of both
  // Shared memory: the CTA's rows of two tensors, whose place the results take; the stages, of
  // blocks of two tensors; then [stage][2][block] statistics of queries, in f32.
  int stages_at, statistics_at;
  int shared_bytes;
};

constexpr bool attention_splits_dkv(const attention_form& form, int v_dim) {
  return attention_padded_dim(form.dim) + attention_padded_dim(v_dim) > 256;
}
/// Columns of gradients in a thread's quad.
constexpr int attention_gradient_columns(const attention_form& form, int v_dim) {
  const int of_keys = attention_padded_dim(form.dim);
  const int of_values = attention_padded_dim(v_dim);
  if (!attention_splits_dkv(form, v_dim)) return of_keys + of_values;
  return of_keys > of_values ? of_keys : of_values;
}

constexpr attention_sm80_backward_plan attention_sm80_backward_plan_of(
    const attention_form& form, int v_dim, const attention_sm80_backward_config& config) {
  attention_sm80_backward_plan plan = {};
  const int pitch = attention_row_pitch(form.dim);
  const int value_pitch = attention_row_pitch(v_dim);
  plan.splits_dkv = attention_splits_dkv(form, v_dim);
  plan.tile_bytes = config.rows() * pitch;
  plan.block_bytes = config.block * pitch;
  plan.stage_bytes = plan.block_bytes + config.block * value_pitch;
  plan.stages_at = plan.tile_bytes + config.rows() * value_pitch;
  plan.statistics_at = plan.stages_at + config.stages * plan.stage_bytes;
  plan.shared_bytes = plan.statistics_at + config.stages * 2 * config.block * 4;
  return plan;
}

/// Why a configuration cannot serve a form, or null.
constexpr const char* attention_sm80_backward_refusal(
    const attention_form& form, int v_dim, const attention_sm80_backward_config& config) {
  if (config.stages < 2) return "one block is loaded while another is used";
  if (config.block % 16 != 0) return "the rows of a block are the k of m16n8k16";
  if (v_dim > form.dim) return "dv passes through rows of keys";
  if (attention_gradient_columns(form, v_dim) / 2 + config.block > 200)
    return "accumulators must fit in registers";
  if (form.mask == attention_mask::packed &&
      (config.rows() != attention_flag_tile || attention_flag_tile % config.block != 0))
    return "a CTA's rows, and whole blocks, are those of the mask's flags";
  return nullptr;
}

}  // namespace fftune
