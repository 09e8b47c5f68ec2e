// The tile configuration of the sm80 attention forward, and its shared memory. Included by the
// kernel and by the host, which checks configurations and launches the kernel: this is the only
// definition.
#pragma once

#include "attention/row_layout.cuh"

namespace fftune {

struct attention_sm80_config {
  int warps = 4;        // of a CTA
  int m_tiles = 1;      // 16-row tiles of queries of a warp
  int bn = 64;          // keys of a block
  int stages = 2;       // blocks of keys and values in shared memory
  int ctas_per_sm = 1;  // that registers must allow

  constexpr int threads() const { return warps * 32; }
  constexpr int bm() const { return warps * m_tiles * 16; }
};

struct attention_sm80_plan {
  bool q_in_registers;  // the fragments of all of Q, else they are loaded again for each block
  int block_bytes;      // of keys
  int stage_bytes;      // of keys and values
  // Shared memory: queries, whose place the output takes, then the stages.
  int stages_at;
  int shared_bytes;
};

/// Heads of v have v_dim features.
constexpr attention_sm80_plan attention_sm80_plan_of(const attention_form& form, int v_dim,
                                                     const attention_sm80_config& config) {
  attention_sm80_plan plan = {};
  const int pitch = attention_row_pitch(form.dim);
  const int padded = attention_padded_dim(form.dim);
  // 32-bit registers of a thread for accumulators of O and S, and for Q.
  const int accumulators = config.m_tiles * (attention_padded_dim(v_dim) / 2 + config.bn / 2);
  plan.q_in_registers = accumulators + config.m_tiles * padded / 4 <= 160;
  const int value_words = form.e4m3 ? v_dim / 2 : v_dim;
  plan.block_bytes = config.bn * attention_row_pitch(attention_kv_words(form));
  plan.stage_bytes = plan.block_bytes + config.bn * attention_row_pitch(value_words);
  plan.stages_at = config.bm() * pitch;
  plan.shared_bytes = plan.stages_at + config.stages * plan.stage_bytes;
  return plan;
}

/// Why a configuration cannot serve a form, or null.
constexpr const char* attention_sm80_refusal(const attention_form& form, int v_dim,
                                             const attention_sm80_config& config) {
  if (config.stages < 2) return "one block is loaded while another is used";
  if (config.bn % 16 != 0) return "the keys of a block are the k of m16n8k16";
  if (v_dim > form.dim) return "the output takes the place of the queries";
  if (config.m_tiles * (attention_padded_dim(v_dim) / 2 + config.bn / 2) > 200)
    return "accumulators must fit in registers";
  // Two tiles hold both halves of 32 features of Q, too.
  if (form.e4m3 && config.m_tiles > 1 && attention_padded_dim(v_dim) > 96)
    return "accumulators must fit in registers";
  if (form.mask == attention_mask::packed &&
      (config.bm() % attention_flag_tile != 0 || config.bn % attention_flag_tile != 0))
    return "a tile is whole tiles of the mask's flags";
  return nullptr;
}

}  // namespace fftune
