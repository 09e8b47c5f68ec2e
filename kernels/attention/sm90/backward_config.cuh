// The tile configuration of the sm_90a attention backward, the plan that follows from it, and its
// parameters. Included by the kernels and by the host, which checks configurations and launches the
// kernels: this is the only definition.
#pragma once

#include "attention/form.cuh"
#include "attention/params.cuh"
#include "attention/row_layout.cuh"
#include "common/types.cuh"

namespace fftune {

// How a tile's share of dq gets from the accumulators to memory, where all key blocks add to it.
enum class dq_path {
  bulk,    // through shared memory; a warp of the producers has TMA add it
  direct,  // red.global.add from the registers: no shared memory
};

struct sm90_backward_config {
  int bm = 64, bn = 128;  // queries and keys of a tile
  int mma_warpgroups = 2;
  int q_stages = 2, do_stages = 2;  // query blocks in shared memory: of q, and of d_out
  int ds_stages = 2;                // of dS in shared memory: with two, one barrier less
  dq_path dq = dq_path::bulk;
  /// The scores of the next query block are computed under the end of this one. Costs a thread the
  /// registers of both.
  bool ahead = true;
  /// Idle warps of the main kernel prepare heads that are scheduled next, and convert dq of those
  /// before, in place of most of the launches around it.
  bool beside = false;
};

struct sm90_backward_plan {
  int dim;         // of a head
  int slabs;       // of 64 columns of a head, 128 bytes, the widest swizzle; the last may be unfull
  int head_pitch;  // elements from a head to the next
  // Whether boxes are of one head, and of columns behind it zeros: the MMAs' last step takes some.
  // Else a box is of a row's columns; those behind the head lead to columns of results that nobody
  // stores.
  bool head_boxes;
  int score_k_steps;  // of 16 features of a product of rows
  /// Wide heads: a key block of 64, whose dk and dv the MMA warpgroups split by columns. P and dS
  /// go through shared memory. Else each warpgroup has 64 keys of its own, and P and dS stay in its
  /// registers as the A operands of dv and dk.
  bool splits_dim;
  int score_columns;     // queries of a warpgroup's tile of scores, which has 64 keys
  int gradient_columns;  // columns of a warpgroup's share of dk and of dv, which has 64 keys; the
                         // last ones may be behind the head
  int dq_tiles;          // of 64 columns of dq that a warpgroup computes, transposed
  int dq_columns;        // queries of such a tile
  bool splits_dq_rows;   // narrow heads: the warpgroups split the queries of dq, not its columns
  int last_dq_threads;   // of a warpgroup, that have columns of a head in its last slab
  int dq_words;          // f32 of a query block's dq; its padding included
  int dq_share;          // of those of a warpgroup; the last one's may be fewer
  int busy_warps;        // of the producers; the others have time for what `beside` gives them

  int threads, producer_registers, mma_registers;

  int kv_slab_bytes, kv_bytes;  // of one of k and v
  int q_slab_bytes, q_bytes;    // of a stage of one of q and d_out
  int score_bytes;              // of a stage of P or dS in shared memory
  int dq_bytes;                 // staged, of a warpgroup

  // Shared memory from a 1024-byte boundary on.
  int k_at, v_at, q_at, do_at, p_at, ds_at, dq_at, lse_at, delta_at, visits_at;
  int dq_visits_at, dq_visit_bytes;  // of each MMA warpgroup a visit, then two barriers
  int barriers_at;
  int shared_bytes;  // with room to align to 1024
};

constexpr sm90_backward_plan sm90_backward_plan_of(const attention_form& form,
                                                   const sm90_backward_config& config) {
  sm90_backward_plan plan = {};
  const int warpgroups = config.mma_warpgroups;
  plan.dim = form.dim;
  plan.slabs = (form.dim + 63) / 64;
  const int padded = attention_padded_dim(form.dim);
  plan.head_pitch = attention_copies_heads(form.dim) ? padded : form.dim;
  plan.head_boxes = !attention_copies_heads(form.dim) && padded != form.dim;
  plan.score_k_steps = padded / 16;
  plan.splits_dim = config.bn == 64 && warpgroups > 1;
  plan.score_columns = plan.splits_dim ? config.bm / warpgroups : config.bm;
  plan.gradient_columns = plan.splits_dim ? plan.slabs * 64 / warpgroups : padded;
  plan.splits_dq_rows = plan.slabs < warpgroups;
  plan.dq_tiles = plan.splits_dq_rows ? plan.slabs : plan.slabs / warpgroups;
  plan.dq_columns = plan.splits_dq_rows ? config.bm / warpgroups : config.bm;
  plan.last_dq_threads = (padded - (plan.slabs - 1) * 64) * 2;
  plan.dq_words = config.bm * padded;
  plan.dq_share =
      plan.splits_dq_rows ? plan.dq_words / warpgroups : plan.dq_tiles * 64 * plan.dq_columns;

  plan.busy_warps = config.dq == dq_path::bulk ? 2 : 1;
  plan.threads = (warpgroups + 1) * 128;
  // A thread's share of 65,536. Warps beside the others take some 40.
  plan.mma_registers = (warpgroups == 3 ? 160 : 240) - (config.beside ? 8 : 0);
  plan.producer_registers = (warpgroups == 3 ? 512 : 504) - warpgroups * plan.mma_registers;

  plan.kv_slab_bytes = config.bn * 128;
  plan.kv_bytes = plan.slabs * plan.kv_slab_bytes;
  plan.q_slab_bytes = config.bm * 128;
  plan.q_bytes = plan.slabs * plan.q_slab_bytes;
  plan.score_bytes =
      plan.splits_dim ? (config.bm + 63) / 64 * 64 * 128 : config.bn / 64 * config.bm * 128;
  plan.dq_bytes = config.dq == dq_path::bulk ? plan.dq_share * 4 : 0;

  plan.k_at = 0;
  plan.v_at = plan.k_at + plan.kv_bytes;
  plan.q_at = plan.v_at + plan.kv_bytes;
  plan.do_at = plan.q_at + config.q_stages * plan.q_bytes;
  plan.p_at = plan.do_at + config.do_stages * plan.q_bytes;
  plan.ds_at = plan.p_at + (plan.splits_dim ? config.ds_stages * plan.score_bytes : 0);
  plan.dq_at = plan.ds_at + config.ds_stages * plan.score_bytes;
  plan.lse_at = plan.dq_at + warpgroups * plan.dq_bytes;
  plan.delta_at = plan.lse_at + config.q_stages * config.bm * 4;
  plan.visits_at = plan.delta_at + config.do_stages * config.bm * 4;
  plan.dq_visits_at = plan.visits_at + config.q_stages * 16;
  plan.dq_visit_bytes = 8 + 2 * 8;
  plan.barriers_at = plan.dq_visits_at + warpgroups * plan.dq_visit_bytes;
  plan.shared_bytes =
      1024 + plan.barriers_at + (2 + 2 * config.q_stages + 2 * config.do_stages) * 8;
  return plan;
}

/// Why a configuration cannot serve a form, or nullptr.
constexpr const char* sm90_backward_misfit(const attention_form& form,
                                           const sm90_backward_config& config) {
  const sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  if (form.type != element::bf16 && form.type != element::fp16) return "bf16 or fp16";
  if (form.dim > 256) return "heads of up to 256 features";
  if (form.paged) return "pages have no backward";
  if (config.bm % 16 != 0 || config.bm > 128) return "stmatrix stores 16 queries at a time";
  if (config.bn != 64 && config.bn != config.mma_warpgroups * 64)
    return "a tile of scores has 64 keys";
  if (config.mma_warpgroups < 2 || config.mma_warpgroups > 3) return "2 or 3 MMA warpgroups";
  if (plan.score_columns * (plan.splits_dim ? config.mma_warpgroups : 1) != config.bm ||
      plan.score_columns % 16 != 0)
    return "stmatrix stores 16 queries at a time";
  if (plan.splits_dim && (form.dim < 128 || plan.slabs % config.mma_warpgroups != 0))
    return "warpgroups split dk and dv of wide heads between slabs of 64 columns";
  if (plan.splits_dq_rows ? config.bm % (config.mma_warpgroups * 8) != 0
                          : plan.slabs % config.mma_warpgroups != 0)
    return "the warpgroups split dq evenly";
  // Limits by the layout of the operand that crosses slabs.
  if (plan.splits_dq_rows && plan.dq_columns % 8 != 0) return "wgmma has n in steps of 8";
  // dk, dv, scores, d_p and what the MMAs in flight hold, of a thread; the rest, addresses and the
  // like, is 12 at least, and 16 with scores ahead, whose MMAs are serialised if they lack one.
  const int scores = plan.score_columns / 2, dq = plan.dq_tiles * plan.dq_columns / 2;
  const int gradients = plan.gradient_columns;
  const int fragments = plan.splits_dim ? 0 : scores / 2;
  const int late = config.ahead ? scores + dq + fragments : dq + fragments;
  const int early = 2 * scores + fragments;
  const int rest = config.ahead ? 16 : 12;
  if (gradients + (late > early ? late : early) + rest > plan.mma_registers) return "registers";
  if (config.ahead && config.q_stages < 2) return "the next query block needs a stage of its own";
  if (config.beside && form.packed_sequences()) return "a head has its queries in one place";
  if (config.beside && form.dim % 16 != 0) return "idle warps store 16 columns";
  if (plan.shared_bytes > 227 * 1024) return "shared memory";
  return nullptr;
}

/// Rows of a head in the backward's statistics of each query: each sequence begins at a query
/// block. In thd, sequence i begins at block offsets[i] / bm + i.
constexpr long long sm90_backward_padded_rows(const attention_form& form, int batch, int q_len,
                                              int bm) {
  return form.packed_sequences() ? (static_cast<long long>(q_len / bm) + batch) * bm
                                 : static_cast<long long>(batch) * ((q_len + bm - 1) / bm) * bm;
}

/// Key blocks of one head, of one sequence (bshd), or of all (thd): there sequence i begins at
/// block kv_offsets[i] / bn + i.
constexpr int sm90_backward_key_blocks(const attention_form& form, int batch, int kv_len, int bn) {
  return form.packed_sequences() ? kv_len / bn + batch : (kv_len + bn - 1) / bn;
}

struct sm90_backward_params {
  // Boxes of 64 columns of one sequence: bm rows of q and d_out, bn rows of k and v. Dimensions:
  // columns (heads x dim), rows, sequences (1 in thd); of boxes of heads: columns of a head, heads,
  // tokens of all sequences.
  tensor_map q, d_out, k, v;
  attention_params attention;
  // Elements between tokens, and between sequences (bshd), of what attention_params has none for.
  long long d_out_batch, dq_batch, dk_batch, dv_batch;
  int d_out_row, dq_row, dk_row, dv_row;

  // Between the kernels; attention_params has delta [heads, padded rows] and dq_partials, of
  // dq_words for each [head, query block].
  float* lse_log2;  // f32 [heads, padded rows]: base 2; +inf where no key is allowed
  int* turns;       // [heads, query blocks, MMA warpgroups], deterministic: key blocks that added
  int padded_rows;

  // With `beside`. CTAs that have prepared their share of a head's queries, and those that have
  // added to its dq: [sequences, kv heads] each. The launch that converts begins at a head.
  int* prepared;
  int* finished;
  int first_converted;
};

}  // namespace fftune
