// The tile configuration of the sm_90a kernel for packed weights, its shared memory, and its
// parameters. Included by host and device code.
#pragma once

#include "gemm/form.cuh"
#include "gemm/packed/layout.cuh"
#include "gemm/packed/params.cuh"

namespace fftune {

struct sm90_packed_config {
  int tokens = 64;     // Rows of A of a CTA: columns of the MMAs, a multiple of 8 up to 256.
  int tiles = 1;       // Tiles of 64 rows of each B that an MMA warpgroup takes.
  int row_groups = 2;  // MMA warpgroups that take other rows,
  int k_groups = 1;    // and MMA warpgroups that take turns at the stages of these rows.
  int k_blocks = 2;    // Blocks of 64 of k of a stage.
  int ctas = 1;        // CTAs that share an SM: their registers and shared memory.
  int split_k = 1;     // CTAs of a cluster that share the k of a tile.

  static constexpr int most_stages = 12;
  static constexpr int most_accumulators = 128;  // of a thread, with those of a group of k

  constexpr int mma_warpgroups() const { return row_groups * k_groups; }
  constexpr int mma_threads() const { return mma_warpgroups() * 128; }
  constexpr int threads() const { return mma_threads() + 128; }  // with the producers
  /// Threads that have the accumulators in the end.
  constexpr int row_threads() const { return row_groups * 128; }
  constexpr int rows() const { return row_groups * tiles * 64; }  // of each B of a CTA
  constexpr int row_tiles() const { return rows() / packed_rows; }
  /// Tiles of 64 rows of an MMA warpgroup, of all B.
  constexpr int units(int operands) const { return operands * tiles; }
  /// Accumulators of a thread, in vectors of 4.
  constexpr int vectors(int operands) const { return units(operands) * tokens / 8; }

  /// Whether scales multiply the operands, rather than the accumulators of a group of k, which wait
  /// for their MMAs at its end. From some 64 tokens on there are fewer operands, and no registers
  /// for two sets of accumulators; f32 scales, which are two numbers, wait for more. Powers of two
  /// round no operand, and groups of 32 would wait for their MMAs every two k16 steps.
  constexpr bool scales_operands(int operands, packed_form form) const {
    return form.group != 0 &&
           (form.code == packed_code::mxfp4 || form.scales_rows() ||
            tokens > (form.scale_bytes() == 2 ? 32 : 64) ||
            2 * vectors(operands) * 4 > most_accumulators || form.group < tokens);
  }
  /// Scales of a stage, of each row; none where a whole row has one.
  constexpr int groups(packed_form form) const {
    if (form.group == 0) return 0;
    return k_blocks * packed_k > form.group ? k_blocks * packed_k / form.group : 1;
  }
  constexpr int token_bytes() const { return k_blocks * tokens * packed_k * 2; }
  /// Parts of 512 bytes of a stage, of each row of tiles, and those of a box of codes: a tensor
  /// map's box has at most 256 words a row.
  constexpr int stage_parts(packed_form form) const { return k_blocks * form.parts(); }
  constexpr int box_parts(packed_form form) const { return stage_parts(form) < 2 ? 1 : 2; }
  constexpr int code_bytes(int operands, packed_form form) const {
    return operands * row_tiles() * stage_parts(form) * packed_part_bytes;
  }
  constexpr int scale_bytes(int operands, packed_form form) const {
    return operands * row_tiles() * groups(form) * packed_rows * form.scale_bytes();
  }
  constexpr int zero_bytes(int operands, packed_form form) const {
    return form.zeros ? operands * row_tiles() * groups(form) * packed_rows : 0;
  }
  /// From the zero points of one B to those of the next: TMA writes to multiples of 128 bytes.
  constexpr int zero_stride(packed_form form) const {
    return (zero_bytes(1, form) + 127) / 128 * 128;
  }
  /// Bytes that are copied into a stage, and its size: swizzle atoms are 1024 bytes.
  constexpr int copied_bytes(int operands, packed_form form) const {
    return token_bytes() + code_bytes(operands, form) + scale_bytes(operands, form) +
           zero_bytes(operands, form);
  }
  constexpr int stage_bytes(int operands, packed_form form) const {
    const int padding = operands * zero_stride(form) - zero_bytes(operands, form);
    return (copied_bytes(operands, form) + padding + 1023) / 1024 * 1024;
  }
  /// Shared memory of a CTA: compute capability 9.0 has 228 KiB in an SM, 227 in a CTA, and each
  /// CTA takes one more.
  constexpr int most_shared() const { return (228 / ctas - 1) * 1024; }
  constexpr int stages(int operands, packed_form form) const {
    const int fit = (most_shared() - 1024 - most_stages * 16 - 16 - share_bytes(operands)) /
                    stage_bytes(operands, form);
    return fit < most_stages ? fit : most_stages;
  }
  /// Accumulators of the other k groups, where the stages are read.
  constexpr int exchange_bytes(int operands) const {
    return (k_groups - 1) * row_threads() * vectors(operands) * 16;
  }
  /// Vectors of a thread, of each B, that a CTA of a split finishes at the most; and accumulators
  /// that the other CTAs send it, most often while it still multiplies.
  constexpr int own_vectors() const { return (tiles * tokens / 8 + split_k - 1) / split_k; }
  constexpr int share_bytes(int operands) const {
    return (split_k - 1) * own_vectors() * operands * row_threads() * 16;
  }
  /// Behind these are the barriers: two of each stage, and that of the shares.
  constexpr int shares_at(int operands, packed_form form) const {
    const int all_stages = stages(operands, form) * stage_bytes(operands, form);
    return all_stages > exchange_bytes(operands) ? all_stages : exchange_bytes(operands);
  }
  constexpr int barriers_at(int operands, packed_form form) const {
    return shares_at(operands, form) + share_bytes(operands);
  }
  constexpr int shared_bytes(int operands, packed_form form) const {
    return 1024 + barriers_at(operands, form) + stages(operands, form) * 16 + 16;
  }
  /// Registers of a thread: accumulators, two batches of operands, a stage's codes.
  constexpr int registers(int operands, packed_form form) const {
    const int sets = form.group == 0 || scales_operands(operands, form) ? 1 : 2;
    const int of_terms = (form.scale_bytes() == 4 ? 6 : 4) + (form.scales_rows() ? 2 : 0);
    return 4 * sets * vectors(operands) +
           units(operands) * (16 + 4 * stage_parts(form) + of_terms) + 36;
  }
  /// Registers of a thread at launch, and what an MMA thread has once the producers gave theirs.
  constexpr int launch_registers() const {
    const int fit = 65536 / ctas / threads() / 8 * 8;
    return fit < 248 ? fit : 248;
  }
  static constexpr int producer_registers = 40;
  constexpr int mma_registers() const {
    const int fit = (launch_registers() * threads() - producer_registers * 128) / mma_threads();
    return fit < 240 ? fit / 8 * 8 : 240;
  }
  /// Whether a CTA takes one tile after the other, and the next one's loads begin before the end of
  /// its last: where shared memory has no accumulators in the end. It takes some registers. Few
  /// tokens have several tiles where they are in groups.
  constexpr bool persistent(int operands, packed_form form, bool grouped) const {
    return k_groups == 1 && split_k == 1 && (grouped || tokens > 64) &&
           registers(operands, form) + 16 <= mma_registers();
  }
  /// Columns of the MMAs of a tile that has no more rows of its group than that: half, or all. The
  /// accumulators of a group of k would have columns that no MMA writes.
  constexpr int few_columns(int operands, packed_form form, bool grouped) const {
    const bool one_set = form.group == 0 || scales_operands(operands, form);
    return grouped && tokens >= 64 && one_set ? half_columns(tokens) : tokens;
  }
  static constexpr int half_columns(int tokens) { return (tokens / 2 + 7) / 8 * 8; }
};

struct sm90_packed_params {
  packed_params packed;
  tensor_map tokens;     // A in boxes of [tokens, 64]
  tensor_map codes[2];   // [tiles of 16 rows, parts of 512 bytes] in words, without the header
  tensor_map scales[2];  // [tiles of 16 rows, groups * 16], with groups alone; zeros, too
  tensor_map zeros[2];
};

}  // namespace fftune
