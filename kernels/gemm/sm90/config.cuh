// The tile configuration of the sm_90a GEMM, the plan that follows from it (MMA shapes, epilogue
// subtiles, registers, and where everything lies in shared memory), and the kernel's parameters.
// Included by the kernel and by the host, which checks configurations and launches the kernel: this
// is the only definition.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

enum class sm90_schedule {
  cooperative,  // the MMA warpgroups split every tile
  pingpong,     // two MMA warpgroups alternate tiles: one's MMAs overlap the other's epilogue
  swap_ab,      // cooperative, with B as the 64-row operand of wgmma: for few rows of A
};

struct sm90_config {
  int bm = 128, bn = 128;  // tile of C; n of each B operand
  sm90_schedule schedule = sm90_schedule::cooperative;
  int mma_warpgroups = 2;
  int cluster_m = 1, cluster_n = 1;  // CTAs that share B, and A, by multicast.
  int split_k = 1;                   // CTAs of a cluster that share the k of one tile.
  int stages = 4;                    // K blocks in shared memory.
  int epilogue_stages = 1;           // Subtile buffers of each warpgroup, registers to memory.
  int a_reuse = 1;       // Grouped rows: tiles along n that use the A rows gathered for the first.
  int gather_warps = 2;  // Grouped reduction: producer warps that gather; 4 add a warpgroup.

  constexpr bool pingpong() const { return schedule == sm90_schedule::pingpong; }
  constexpr bool swap_ab() const { return schedule == sm90_schedule::swap_ab; }
  constexpr int cluster_ctas() const { return cluster_m * cluster_n * split_k; }
};

/// Words of shared memory that the groups need, as defined in groups.cuh.
constexpr int sm90_mask_words = 1024 + 4 + 32;
constexpr int sm90_offsets_words = (1024 + 1 + 3) / 4 * 4;
/// The last K blocks of a row of tiles, whose stores for A reuse the main loop does not wait for.
constexpr int sm90_late_k_blocks = 3;
/// Tokens of a K block of a grouped reduction, and K blocks whose tokens are looked up together:
/// one warp that looks up a K block at a time would be too slow.
constexpr int sm90_reduction_tokens = 64;
constexpr int sm90_reduction_lookahead = 4;

constexpr int sm90_element_bytes(element type) {
  return type == element::f32 ? 4 : type == element::fp8 ? 1 : 2;
}

struct sm90_plan {
  // Tiles. wgmma's 64-row side is m, or n with swap-AB; its columns are the other.
  int rows, columns;
  int bk;                // Elements of a K block: rows of 128 bytes, the widest swizzle.
  int warpgroup_rows;    // Rows of an MMA warpgroup.
  int m64_tiles;         // Row tiles of wgmma per warpgroup.
  int accumulators;      // Accumulators of a thread, for each m64 tile and B operand.
  bool fused_b;          // Both B operands in one wgmma: they are neighbours in shared memory.
  int wgmma_columns;     // The n of one wgmma.
  int a_bytes, b_bytes;  // Bytes of a stage; b of each operand.
  int stage_bytes;
  int b_scale_blocks;  // With block scales, the blocks of B that contain a tile's columns.
  int scale_bytes;     // Bytes next to a stage: scales of A's rows, then those of each B's blocks.
  int promotions;      // Fp8: accumulators of a K block that a warpgroup has at once.
  int cluster_ctas;

  // DSMEM split-K reduction: each CTA finishes a share of the columns if these are whole subtiles,
  // else one does all; of grouped reductions and of heads, whose features stay together, always
  // one.
  int reducers;
  int reduced_columns;
  int reduction_bytes;

  // Epilogue subtiles, as the tensor map must have them: subtile_m x subtile_n of C.
  int subtile_m, subtile_n;
  int subtile_bytes;
  int subtiles;           // of a warpgroup
  int tensors_per_stage;  // stored together, or loaded and then overwritten
  int epilogue_stage_bytes;
  int warpgroup_epilogue_bytes;
  int epilogue_barriers;  // one for each stage: the source has arrived

  // Threads and registers.
  int threads;
  int producer_warpgroups;
  int ctas_per_sm;
  bool reallocates_registers;  // setmaxnreg; not with two CTAs per SM
  int producer_registers, mma_registers;

  // Shared memory from a 1024-byte boundary on: stages, reduction, epilogue, scales, barriers,
  // groups.
  int reduction_at, epilogue_at, scales_at;
  int full_barriers_at, empty_barriers_at, epilogue_barriers_at, reduction_barrier_at;
  int groups_at, group_tiles_at, row_indices_at, reuse_barriers_at;
  int shared_bytes;  // with room to align to 1024

  constexpr int total_accumulators(const gemm_form& form) const {
    return form.b_operands() * m64_tiles * accumulators;
  }
};

/// Whether the tiles of a routed group have nearly equal rows, and the MMAs of a tile are only as
/// wide as its rows need. This requires swap-AB, where the rows are the side of wgmma that comes in
/// steps of 8. Lower tiles are for so few rows that loads of B are all that counts.
constexpr bool sm90_levels_tiles(const gemm_form& form, const sm90_config& config) {
  return form.groups == grouping::rows && form.source == group_source::routed &&
         form.scales == scaling::none && config.swap_ab() && config.bm > 64;
}

/// Bytes of shared memory for groups and gathered row indices, `rows` of them in a table.
constexpr int sm90_group_bytes(const gemm_form& form, int rows) {
  if (form.groups == grouping::none) return 0;
  const bool routed = form.source == group_source::routed;
  int words = routed ? sm90_offsets_words : sm90_mask_words;
  if (routed && form.groups == grouping::rows) words += sm90_offsets_words;
  return 4 * words + 2 * 4 * (rows + 4) + 4 * 8 + (form.groups == grouping::rows ? 16 : 0);
}

/// Small accumulators allow two CTAs per SM, so that the next kernel's first CTAs start while this
/// kernel's last ones run. Beside `accumulators` a thread needs about 64 registers.
constexpr int sm90_ctas_per_sm(int accumulators, int threads) {
  return accumulators + 64 <= 65536 / 2 / threads ? 2 : 1;
}

/// Registers move from the producer warps, which need few, to the MMA warpgroups, whose
/// accumulators need many. Gathering rows takes more of them than issuing TMA loads.
constexpr void sm90_assign_registers(sm90_plan& plan, const gemm_form& form,
                                     const sm90_config& config) {
  const int warpgroups = config.mma_warpgroups;
  const int accumulators = plan.total_accumulators(form);
  if (form.groups == grouping::none) {
    plan.producer_registers = warpgroups == 3 ? 32 : 40;
    plan.mma_registers = warpgroups == 3 ? 160 : 232;
  } else if (form.groups == grouping::rows) {
    plan.producer_registers = warpgroups == 1 ? 80 : warpgroups == 2 && form.a_sorted ? 40 : 56;
    plan.mma_registers = warpgroups == 3 ? 152 : warpgroups == 1 || form.a_sorted ? 232 : 224;
  } else if (plan.producer_warpgroups == 2) {
    plan.producer_registers = accumulators > 64 ? 56 : 96;
    plan.mma_registers = accumulators > 64 ? 200 : 160;
  } else {
    plan.producer_registers = warpgroups == 1                          ? 80
                              : warpgroups == 2 && accumulators >= 192 ? 40
                                                                       : 56;
    plan.mma_registers = warpgroups == 3 ? 152 : accumulators < 192 ? 224 : 232;
  }
}

constexpr sm90_plan sm90_plan_of(const gemm_form& form, const sm90_config& config) {
  sm90_plan plan = {};
  const int b_operands = form.b_operands();
  const bool swap = config.swap_ab();
  plan.rows = swap ? config.bn : config.bm;
  plan.columns = swap ? config.bm : config.bn;
  plan.bk = 128 / sm90_element_bytes(form.ab);
  plan.warpgroup_rows = config.pingpong() ? plan.rows : plan.rows / config.mma_warpgroups;
  plan.m64_tiles = plan.warpgroup_rows / 64;
  plan.accumulators = plan.columns / 2;
  // Three MMA warpgroups leave ptxas the registers for 192 columns.
  const int widest = config.mma_warpgroups == 3 ? 192 : 256;
  plan.fused_b = !swap && b_operands * config.bn <= widest;
  plan.wgmma_columns = plan.fused_b ? b_operands * config.bn : plan.columns;
  plan.a_bytes = config.bm * 128;
  plan.b_bytes = config.bn * 128;
  plan.stage_bytes = plan.a_bytes + b_operands * plan.b_bytes;
  plan.cluster_ctas = config.cluster_ctas();

  const int granule = swap ? 8 : 32;
  const bool single_cta_reduction = form.groups == grouping::reduction || form.is_qkv();
  plan.reducers =
      !single_cta_reduction && plan.columns % (granule * config.split_k) == 0 ? config.split_k : 1;
  plan.reduced_columns = plan.columns / plan.reducers;
  plan.reduction_bytes = (config.split_k - 1) * config.mma_warpgroups * 128 * b_operands *
                         plan.m64_tiles * plan.reduced_columns / 2 * 4;

  // TMA takes as long for a row of 32 columns as for one of 64.
  plan.subtile_n = swap || plan.reduced_columns % 64 == 0 ? 64
                   : plan.reduced_columns % 32 == 0       ? 32
                                                          : 16;
  plan.subtile_m = swap ? plan.reduced_columns : plan.warpgroup_rows;
  plan.subtile_bytes = plan.subtile_m * plan.subtile_n * 2;
  plan.subtiles = swap ? plan.m64_tiles : plan.reduced_columns / plan.subtile_n;
  plan.tensors_per_stage = form.is_gradient() ? form.stored_values() : 1;
  plan.epilogue_stage_bytes = plan.tensors_per_stage * plan.subtile_bytes;
  plan.warpgroup_epilogue_bytes = config.epilogue_stages * plan.epilogue_stage_bytes;
  plan.epilogue_barriers = config.mma_warpgroups * config.epilogue_stages;

  plan.producer_warpgroups = form.groups == grouping::reduction && config.gather_warps == 4 ? 2 : 1;
  plan.threads = (config.mma_warpgroups + plan.producer_warpgroups) * 128;
  // fp8 adds the accumulators of the current K block: one m64 tile and operand, and if registers
  // allow the next one too, whose MMAs run during the promotion.
  const int one_operand = plan.m64_tiles * plan.accumulators;
  const bool promotes = form.scales != scaling::none;
  const bool overlaps =
      b_operands * plan.m64_tiles > 1 &&
      b_operands * one_operand + 2 * plan.accumulators <= (config.mma_warpgroups == 3 ? 80 : 160);
  plan.promotions = overlaps ? 2 : 1;
  const int promoted = promotes ? one_operand > plan.promotions * plan.accumulators
                                      ? one_operand
                                      : plan.promotions * plan.accumulators
                                : 0;
  const bool four_gather = plan.producer_warpgroups == 2;
  plan.ctas_per_sm =
      four_gather ? 1 : sm90_ctas_per_sm(b_operands * one_operand + promoted, plan.threads);
  plan.reallocates_registers =
      four_gather || sm90_ctas_per_sm(b_operands * one_operand, plan.threads) == 1;
  sm90_assign_registers(plan, form, config);

  plan.reduction_at = config.stages * plan.stage_bytes;
  plan.epilogue_at = plan.reduction_at + plan.reduction_bytes;
  plan.b_scale_blocks = form.scales != scaling::block ? 0 : config.bn > 128 ? 2 : 1;
  plan.scale_bytes =
      form.scales_k_blocks() ? (config.bm + b_operands * plan.b_scale_blocks + 3) / 4 * 16 : 0;
  plan.scales_at = plan.epilogue_at + config.mma_warpgroups * plan.warpgroup_epilogue_bytes;
  plan.full_barriers_at = plan.scales_at + config.stages * plan.scale_bytes;
  plan.empty_barriers_at = plan.full_barriers_at + config.stages * 8;
  plan.epilogue_barriers_at = plan.empty_barriers_at + config.stages * 8;
  plan.reduction_barrier_at = plan.epilogue_barriers_at + plan.epilogue_barriers * 8;
  int end = plan.reduction_barrier_at + 8;
  if (form.groups != grouping::none) {
    const bool routed = form.source == group_source::routed;
    plan.groups_at = (end + 15) / 16 * 16;
    plan.group_tiles_at = plan.groups_at + 4 * (routed ? sm90_offsets_words : sm90_mask_words);
    const int index_rows = form.groups == grouping::rows
                               ? config.bm
                               : sm90_reduction_tokens * sm90_reduction_lookahead;
    end = plan.groups_at + sm90_group_bytes(form, index_rows);
    plan.reuse_barriers_at = end - 16;  // of grouped rows
    plan.row_indices_at = plan.group_tiles_at +
                          (routed && form.groups == grouping::rows ? 4 * sm90_offsets_words : 0);
  }
  plan.shared_bytes = 1024 + end;
  return plan;
}

/// CTAs of a persistent grid on an SM. An expert's small fp8 tile spends most of its time before
/// and after its MMAs; the MMAs of another CTA's tile hide that.
constexpr int sm90_resident_ctas(const gemm_form& form, const sm90_plan& plan) {
  constexpr int half_of_sm = 233472 / 2 - 1024;  // bytes of shared memory
  const bool expert_rows = form.groups == grouping::rows && form.source == group_source::routed &&
                           form.scales_k_blocks();
  return expert_rows && plan.cluster_ctas == 1 && plan.ctas_per_sm == 2 &&
                 plan.shared_bytes <= half_of_sm
             ? 2
             : 1;
}

/// Whether setmaxnreg can move registers in this way: a CTA has the registers that it was launched
/// with, the same number a thread in multiples of 8, and a request for more would never return.
constexpr bool sm90_registers_fit(const sm90_plan& plan, const sm90_config& config) {
  const int at_start = 65536 / plan.threads / 8 * 8;
  return config.mma_warpgroups * plan.mma_registers +
             plan.producer_warpgroups * plan.producer_registers <=
         plan.threads / 128 * at_start;
}

// The kernel's parameters: one struct, passed by value. The host encodes the tensor maps in use and
// leaves the others untouched.
struct sm90_params {
  gemm_params gemm;
  tensor_map a[2];       // as gemm_params::a
  tensor_map b[2][2];    // [group][operand or K-concatenated pair]; stacked: b[0], 3-D
  tensor_map out[4];     // sm90_out_index()
  tensor_map source[4];  // linear: as out, the addends; activation_gradient: gate, up
  tensor_map reuse;      // A rows gathered by an earlier tile, for A reuse
  qkv_params qkv;        // epilogue qkv, whose parts' maps b and out have in their order
};

/// The index in `out` of stored value `value` (C, gate, up; d_gate, d_up, hidden) of output
/// `output`, and of group `group` in a grouped reduction of two groups, each with its own C.
constexpr int sm90_out_index(const gemm_form& form, int value, int output, int group) {
  const bool own = form.groups == grouping::reduction && !form.stacked;
  return value + output + (own ? 2 * group : 0);
}

}  // namespace fftune
