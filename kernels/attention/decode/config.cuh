// The configuration of the decode engine of attention, and the plan that follows from it: rows of
// queries, shared memory, the grid and the workspace. Included by the kernel and by the host, which
// checks configurations and launches the kernel: this is the only definition.
#pragma once

#include "attention/row_layout.cuh"

namespace fftune {

struct attention_decode_config {
  int warps = 4;        // Warps of a CTA; each takes a slice of the keys.
  int slice = 16;       // Keys of a warp in a stage: 16 or 32, of e4m3 32 or 64.
  int stages = 3;       // Slices of K and V of each warp in shared memory.
  int m_tiles = 1;      // Tiles of 16 rows of queries of a CTA.
  int ctas_per_sm = 2;  // CTAs per SM that shared memory and registers must allow.
  // KiB of keys and values that a CTA prefetches to L2 during the preceding kernel, if the host
  // knows their addresses (contiguous, and all sequences of one length).
  int prefetch = 64;

  constexpr int threads() const { return warps * 32; }
  constexpr int rows() const { return m_tiles * 16; }
  /// Keys of a CTA in a stage: the unit in which work is divided.
  constexpr int tile() const { return warps * slice; }
  /// Words of 16 bytes of a row's partial results: two columns each, then the softmax.
  constexpr int partial_words(int dim) const { return (dim + 3) / 4 * 2 + 1; }
};

struct attention_decode_plan {
  bool q_in_registers;  // the fragments of all of Q, else they are loaded again for each slice
  int slice_bytes;      // K, or V, of a stage of one warp
  int ring_bytes;       // of one warp

  // Shared memory: the rings, which the warps' accumulators reuse at the end of a sequence; then
  // queries; then the softmax statistics of the warps.
  int q_at, statistics_at;
  int shared_bytes;
};

constexpr attention_decode_plan attention_decode_plan_of(const attention_form& form,
                                                         const attention_decode_config& config) {
  attention_decode_plan plan = {};
  const int pitch = attention_row_pitch(form.dim);
  // Beside the accumulators, m_tiles * dim / 2, a thread needs about 70 registers.
  plan.q_in_registers = config.m_tiles * attention_padded_dim(form.dim) <= 128;
  plan.slice_bytes = config.slice * attention_row_pitch(attention_kv_words(form));
  plan.ring_bytes = config.stages * 2 * plan.slice_bytes;
  plan.q_at = config.warps * plan.ring_bytes;
  plan.statistics_at = plan.q_at + config.rows() * pitch;
  plan.shared_bytes = plan.statistics_at + config.warps * config.rows() * 8;
  return plan;
}

/// Why a configuration cannot serve a form, or null.
constexpr const char* attention_decode_refusal(const attention_form& form,
                                               const attention_decode_config& config) {
  const int rows_of_kv = form.e4m3 ? config.slice / 2 : config.slice;  // of 16 bits
  if (rows_of_kv != 16 && rows_of_kv != 32) return "a slice is one or two pages' least size";
  if (config.stages < 2) return "one slice is loaded while another is read";
  if (config.rows() > rows_of_kv)
    return "a warp's accumulators take the place of one stage of its keys";
  // Two tiles of e4m3 have twice the scores, too: 16 of each key.
  const int most_columns = form.e4m3 && config.m_tiles > 1 ? 128 : 256;
  if (config.m_tiles * attention_padded_dim(form.dim) > most_columns)
    return "accumulators must fit in registers";
  return nullptr;
}

/// The division of the keys. CTAs of a group do the same keys of all kv heads, at the same time:
/// they read whole rows of the cache together. The groups divide the tiles of all sequences evenly.
struct attention_decode_grid {
  int heads;   // CTAs of a group: kv heads times blocks of query rows
  int groups;  // grid: (heads, groups)

  /// Workspace layout: partial results [groups][2][heads][rows][partial_words].
  constexpr long long partial_bytes(const attention_form& form,
                                    const attention_decode_config& config) const {
    return 32ll * groups * heads * config.rows() * config.partial_words(form.dim);
  }
};

constexpr int attention_decode_row_blocks(const attention_decode_config& config, int group,
                                          int q_len) {
  return (group * q_len + config.rows() - 1) / config.rows();
}

/// As many groups as the device has room for. With sequences of one length a few less, if that cuts
/// no sequence, or all of them into equal parts: fewer partial results to combine.
constexpr attention_decode_grid attention_decode_grid_of(const attention_decode_config& config,
                                                         int multiprocessors, int batch,
                                                         int kv_heads, int row_blocks, int kv_len,
                                                         bool same_lengths) {
  attention_decode_grid grid = {kv_heads * row_blocks, 1};
  const int room = multiprocessors * config.ctas_per_sm;
  const int tiles = (kv_len + config.tile() - 1) / config.tile();  // of a sequence
  // More heads than room: several groups, so that the last wave is short.
  int most = grid.heads <= room ? room / grid.heads : 4;
  const long long all = static_cast<long long>(tiles > 0 ? tiles : 1) * batch;
  if (most > all) most = static_cast<int>(all);
  // The kernel divides in 32 bits.
  constexpr long long largest = (1ll << 32) - 1;
  if ((all + 1) * most > largest) most = static_cast<int>(largest / (all + 1));
  grid.groups = most;
  if (!same_lengths) return grid;
  for (int groups = most; groups > 0 && groups * 20 >= most * 19; --groups) {
    const bool whole = batch % groups == 0;
    const bool equal_parts = groups % batch == 0 && tiles % (groups / batch) == 0;
    if (whole || equal_parts) {
      grid.groups = groups;
      break;
    }
  }
  return grid;
}

}  // namespace fftune
