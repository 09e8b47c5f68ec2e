// The tile configuration of the sm_90a attention forward, and the plan that follows from it: tiles,
// registers, and where everything lies in shared memory. Included by the kernel and by the host,
// which checks configurations and launches the kernel: this is the only definition.
#pragma once

#include "attention/form.cuh"
#include "attention/row_layout.cuh"

namespace fftune {

struct attention_sm90_config {
  int mma_warpgroups = 2;  // each has 64 queries
  int bn = 128;            // keys of a block
  int stages = 2;          // blocks of keys, and as many of values, in shared memory
  /// MMA warpgroups issue their MMAs in turn, so that one's softmax overlaps the others' MMAs.
  bool ordered = true;
  /// Two where one MMA warpgroup and its shared memory leave room.
  int ctas_per_sm = 1;
  /// CTAs take their tiles from a counter in memory, the longest first, rather than in fixed turns.
  bool dynamic = false;
  /// Two MMA warpgroups have the same 64 queries and take blocks of keys in turn; what they have is
  /// added up at the end of a tile. For tiles that are too few, or too long, for the SMs.
  bool split_keys = false;
  /// Under a causal mask two MMA warpgroups have queries as far from the first as from the last, so
  /// that all tiles are equally long. For problems with one tile per SM.
  bool paired = false;
  /// Heads of q that share a head of keys and are rows of one tile: 64 / packed_heads queries of
  /// each are an MMA warpgroup's. A sequence with few queries then reads its keys once.
  int packed_heads = 1;
  /// Batch invariance: keys of a chunk (chunks.cuh), a multiple of bn. 0: a row has one sum.
  int chunk = 0;
  /// Each chunk of a tile is a work item of its own, whose sums attention_chunk_sums_sm90 adds up.
  /// For sequences that have too few tiles for the SMs.
  bool divided = false;
};

struct attention_sm90_plan {
  int q_parts;       // parts of 64 rows of a work tile
  int part_queries;  // queries of a part: of packed heads each has a row for every head
  int bm;            // queries of a work tile
  int slab_columns;  // columns of a row of q, k or v in shared memory: 128 bytes, or 64 with
                     // 64-byte swizzle
  int row_bytes;     // bytes of a slab's row
  int slabs;         // slabs of a head; the last one may have columns behind the head's
  int head_pitch;    // elements from a head to the next
  // Whether boxes are of one head, and of columns behind it zeros: the MMAs' last step takes some.
  // Else a box is of a row's columns, and the MMAs take none of those behind the head.
  bool head_boxes;
  int score_steps;                                       // of 16 features
  int out_columns;                                       // of the product with values
  int value_slab_columns, value_row_bytes, value_slabs;  // as those of keys
  int q_bytes;                                           // bytes of a part
  int q_box_bytes;      // of those that are copied: 64 rows, or the most that whole queries have
  int kv_bytes;         // bytes of a stage of keys
  int value_bytes;      // bytes of a stage of values
  int column_parts;     // parts of the output's columns, each an MMA warpgroup's
  int stage_slabs;      // slabs of a head that a stage has
  bool shares_queries;  // the MMA warpgroups have the same queries
  int score_registers, out_registers;  // accumulators of a thread
  // Warps that copy keys and values. A page is a copy of its own, and each takes the warp that
  // issues it more than 100 cycles: one warp is slower than the MMAs.
  int producer_warps;
  int threads;
  bool reallocates_registers;
  int producer_registers, mma_registers;
  // Shared memory from a 1024-byte boundary on.
  int k_at, v_at;  // q is at 0
  // split_keys: of what an MMA warpgroup gives to the other; then a full and an empty barrier of
  // each.
  int exchange_at, exchange_bytes;
  // Chunks: the sums of an MMA warpgroup over those so far, a word for each thread and register.
  int sums_at, sums_bytes;
  int q_barriers_at, k_barriers_at, v_barriers_at;  // full ones, then as many empty ones
  int tile_at, tile_bytes;                          // the next work tile, then its barriers
  int shared_bytes;                                 // with room to align to 1024
};

/// Heads of v have v_dim features. Where these are not as many as those of k, both are multiples
/// of 16: there are no boxes of heads, and no copies.
constexpr attention_sm90_plan attention_sm90_plan_of(const attention_form& form, int v_dim,
                                                     const attention_sm90_config& config) {
  attention_sm90_plan plan = {};
  plan.q_parts = config.split_keys ? 1 : config.mma_warpgroups;
  plan.part_queries = 64 / config.packed_heads;
  plan.bm = plan.part_queries * plan.q_parts;
  const int padded = attention_padded_dim(form.dim), padded_values = attention_padded_dim(v_dim);
  plan.head_pitch = attention_copies_heads(form.dim) ? padded : form.dim;
  plan.head_boxes = !attention_copies_heads(form.dim) && padded != form.dim;
  // TMA copies 64 bytes that begin within a sector hardly faster than 128. Two MMA warpgroups wait
  // for such rows, and heads of more than 192 features leave no registers for three.
  const int unit = plan.head_boxes && form.dim > 192 ? 64 : 32;
  const int columns = (form.dim + unit - 1) / unit * unit;
  const int value_columns = (v_dim + unit - 1) / unit * unit;
  plan.slab_columns = columns % 64 == 0 ? 64 : 32;
  plan.row_bytes = plan.slab_columns * 2;
  plan.slabs = columns / plan.slab_columns;
  plan.value_slab_columns = value_columns % 64 == 0 ? 64 : 32;
  plan.value_row_bytes = plan.value_slab_columns * 2;
  plan.value_slabs = value_columns / plan.value_slab_columns;
  plan.score_steps = padded / 16;
  plan.out_columns = (v_dim + 7) / 8 * 8;
  plan.q_bytes = 64 * columns * 2;
  plan.q_box_bytes = plan.part_queries * config.packed_heads * columns * 2;
  plan.kv_bytes = config.bn * columns * 2;
  plan.value_bytes = config.bn * value_columns * 2;
  plan.column_parts = 1;
  plan.stage_slabs = plan.slabs;
  plan.shares_queries = config.split_keys;
  plan.score_registers = config.bn / 2;
  plan.out_registers = plan.out_columns / 2;
  plan.producer_warps = form.paged ? 4 : 1;
  plan.threads = (config.mma_warpgroups + 1) * 128;
  // Registers move from the producer warp, which needs few, to the MMA warpgroups. With one of
  // these alone on an SM every thread has enough at the start.
  plan.reallocates_registers = config.mma_warpgroups > 1 || config.ctas_per_sm > 1;
  // Pages, and flags of a packed mask.
  const bool looks_up = form.paged || form.mask == attention_mask::packed;
  if (config.mma_warpgroups == 3) {
    plan.producer_registers = looks_up ? 56 : 32;
    plan.mma_registers = looks_up ? 152 : 160;
  } else if (config.mma_warpgroups == 2) {
    plan.producer_registers = looks_up ? 56 : 40;
    plan.mma_registers = looks_up ? 224 : 232;
  } else {
    plan.producer_registers = 40;
    plan.mma_registers = 216;
  }
  plan.k_at = plan.q_parts * plan.q_bytes;
  plan.v_at = plan.k_at + config.stages * plan.kv_bytes;
  plan.exchange_at = plan.v_at + config.stages * plan.value_bytes;
  // Each thread exchanges half of a row, and its reference and sum.
  plan.exchange_bytes = config.split_keys ? 128 * (padded_values + 8) : 0;
  plan.sums_at = plan.exchange_at + 2 * (plan.exchange_bytes + (config.split_keys ? 16 : 0));
  plan.sums_bytes = config.chunk > 0 && !config.divided ? 128 * padded_values * 2 : 0;
  plan.q_barriers_at = plan.sums_at + config.mma_warpgroups * plan.sums_bytes;
  plan.k_barriers_at = plan.q_barriers_at + 2 * 8 * plan.q_parts;
  plan.v_barriers_at = plan.k_barriers_at + 2 * 8 * config.stages;
  plan.tile_at = plan.v_barriers_at + 2 * 8 * config.stages;
  plan.tile_bytes = form.packed_sequences() || form.lengths ? 32 : 16;
  plan.shared_bytes = 1024 + plan.tile_at + plan.tile_bytes + 2 * 8;
  return plan;
}

/// Heads of more than 256 features: two MMA warpgroups have the same 64 queries, and each half of
/// the output's columns. A stage is a part of a block: 64 keys, or values, of 128 columns.
/// Configurations differ in stages, order, packed heads and chunks alone.
constexpr int attention_wide_columns = 128;  // of a stage

constexpr attention_sm90_plan attention_wide_plan_of(const attention_form& form,
                                                     const attention_sm90_config& config) {
  attention_sm90_plan plan = {};
  const int parts = (form.dim + attention_wide_columns - 1) / attention_wide_columns;
  const int columns = parts * attention_wide_columns, padded = attention_padded_dim(form.dim);
  const bool copies = attention_copies_heads(form.dim);
  plan.q_parts = 1;
  plan.shares_queries = true;
  plan.column_parts = 2;
  plan.part_queries = plan.bm = 64 / config.packed_heads;
  plan.slab_columns = 64;
  plan.row_bytes = 128;
  plan.slabs = columns / plan.slab_columns;
  plan.head_pitch = copies ? padded : form.dim;
  plan.head_boxes = !copies && padded != form.dim;
  plan.score_steps = padded / 16;
  plan.out_columns = (parts + 1) / 2 * attention_wide_columns;
  plan.q_bytes = 64 * columns * 2;
  plan.q_box_bytes = plan.part_queries * config.packed_heads * columns * 2;
  plan.kv_bytes = config.bn * attention_wide_columns * 2;
  plan.stage_slabs = attention_wide_columns / plan.slab_columns;
  plan.value_slab_columns = plan.slab_columns;
  plan.value_row_bytes = plan.row_bytes;
  plan.value_slabs = plan.slabs;
  plan.value_bytes = plan.kv_bytes;
  plan.score_registers = config.bn / 2;
  plan.out_registers = plan.out_columns / 2;
  plan.producer_warps = form.paged ? 4 : 1;
  plan.threads = 3 * 128;
  plan.reallocates_registers = true;
  const bool looks_up = form.paged || form.mask == attention_mask::packed;
  plan.producer_registers = looks_up ? 40 : 24;
  plan.mma_registers = looks_up ? 232 : 240;
  plan.k_at = plan.q_bytes;
  plan.v_at = plan.k_at;
  plan.q_barriers_at = plan.k_at + config.stages * plan.kv_bytes;
  plan.k_barriers_at = plan.q_barriers_at + 2 * 8;
  plan.v_barriers_at = plan.k_barriers_at;
  plan.tile_at = plan.k_barriers_at + 2 * 8 * config.stages;
  plan.tile_bytes = 16;
  plan.shared_bytes = 1024 + plan.tile_at;
  return plan;
}

/// Where kernels of a divided configuration leave sums: of each chunk, in float, a row for each row
/// of the result, which has the features, and for each of four threads a sum of probabilities and
/// their reference.
constexpr int attention_chunk_row(const attention_form& form) {
  return (form.dim + 7) / 8 * 8 + 8;
}

}  // namespace fftune
