// A stream of packed weights (gemm/packed/layout.cuh) through stages in shared memory
// (gemm/decode/shared_stream.cuh): 16 rows of weights as A, and up to 8 tokens as the columns of B.
#pragma once

#include "gemm/decode/packed_stage_shape.cuh"
#include "gemm/decode/packed_stream.cuh"
#include "gemm/decode/shared_stream.cuh"

namespace fftune {

// A packed weight whose rows have `k` elements.
struct packed_matrix {
  const u8 *codes, *scales, *zeros;
  int k;
};

// The producer: copies the elements [first, end) of k of 16 rows to a stage.
template <packed_stage_shape shape, class Pipeline>
__device__ __forceinline__ void load_packed_stage(Pipeline& pipeline, const packed_matrix& of,
                                                  i64 tile, int first, int end) {
  constexpr packed_form format = shape.format;
  pipeline.begin_load();
  if (is_elected()) {
    const int blocks = ceil_div(end - first, packed_k);
    const int groups = format.group == 0 ? 1 : ceil_div(end - first, shape.group());
    const int first_group = format.group == 0 ? 0 : first / shape.group();
    const i64 groups_of_row =
        format.group == 0 ? 1 : ceil_div(of.k, shape.group()) + format.first_group();
    const i64 group = tile * groups_of_row;
    const u32 codes = blocks * shape.block_bytes(), scales = groups * shape.group_bytes();
    const u32 zeros = format.zeros ? groups * packed_rows : 0;
    const u32 rows = format.scales_rows() ? packed_rows * 4 : 0;
    const u32 barrier = pipeline.full(), to = pipeline.buffer();
    barrier_arrive_expect(barrier, codes + scales + zeros + rows);
    const auto copy = [&](u32 at, const u8* from, u32 bytes) {
      bulk_load(to + at, from, bytes, barrier, l2_policy::evict_first);
    };
    const i64 block = tile * packed_k_blocks(of.k) + first / packed_k;
    copy(0, of.codes + packed_part_bytes + block * shape.block_bytes(), codes);
    copy(shape.scales_at(),
         of.scales + (group + format.first_group() + first_group) * shape.group_bytes(), scales);
    if constexpr (format.zeros)
      copy(shape.others_at(), of.zeros + (group + first_group) * packed_rows, zeros);
    if constexpr (format.scales_rows())
      copy(shape.others_at(), of.scales + group * shape.group_bytes(), rows);
  }
  pipeline.advance();
}

// A warp's MMAs of its blocks of a stage: every `warps`-th. The interface is stage_product's, but
// for tokens, which ldmatrix reads. There are no branches between the blocks of a warp, so that
// one's loads and MMAs overlap another's.
template <class T, packed_stage_shape shape, int warps>
struct packed_stage_product {
  static constexpr packed_form format = shape.format;
  static constexpr int stage_k = shape.k();
  static constexpr int steps = ceil_div(shape.blocks, warps);  // a warp's blocks
  static constexpr int scales_of_block = shape.group() < packed_k ? 2 : 1;
  using codes = packed_codes<T, format.code>;
  using stream = packed_stream<T, format, packed_config{}, 1>;
  using both_scales = typename stream::both_scales;
  struct accumulators {
    float value[4];
  };

  // This lane's codes of a stage, and their scales and zero points, of both rows.
  struct fragment {
    vector16 words[steps][format.parts()];
    both_scales scale[steps][scales_of_block];
    u16 zero[steps][scales_of_block];
    u64 of_rows;
  };

  static __device__ __forceinline__ void load(fragment& of, u32 stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane / 4;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int block = warp + i * warps;
      if (shape.blocks % warps != 0 && block >= shape.blocks) break;
#pragma unroll
      for (int part = 0; part < format.parts(); ++part)
        of.words[i][part] =
            read_shared(stage + (block * format.parts() + part) * packed_part_bytes + lane * 16);
#pragma unroll
      for (int half = 0; half < scales_of_block; ++half) {
        // The same as that of the block, where a warp's blocks are whole groups apart.
        constexpr int apart = warps * packed_k;
        const int group = apart % shape.group() == 0
                              ? warp * packed_k / shape.group() + half + i * (apart / shape.group())
                              : (block * packed_k + half * 32) / shape.group();
        of.scale[i][half] =
            read_value<both_scales>(stage + shape.scales_at() + group * shape.group_bytes() +
                                    pair * 2 * format.scale_bytes());
        if constexpr (format.zeros)
          of.zero[i][half] =
              read_value<u16>(stage + shape.others_at() + group * packed_rows + pair * 2);
      }
    }
    if constexpr (format.scales_rows())
      of.of_rows = read_value<u64>(stage + shape.others_at() + pair * 8);
  }

  // `tokens`: this lane's row of tokens for ldmatrix, at the stage's first element of k; `left`:
  // elements of k from there on.
  static __device__ __forceinline__ void run(accumulators& sum, const fragment& of, u32 tokens,
                                             int left) {
    const int warp = threadIdx.x / 32, there = smaller(ceil_div(left, packed_k), shape.blocks);
    run_own<steps>(sum, of, tokens, left, (there - warp + warps - 1) / warps);
  }

 private:
  // A warp that has `own` blocks, `count` of them at most. A loop for each number of blocks would
  // be too much code for many.
  template <int count>
  static __device__ __forceinline__ void run_own(accumulators& sum, const fragment& of, u32 tokens,
                                                 int left, int own) {
    if (own >= count)
      run_steps<count>(sum, of, tokens, left);
    else if constexpr (steps > 4)
      run_steps<0>(sum, of, tokens, left);
    else if constexpr (count > 1)
      run_own<count - 1>(sum, of, tokens, left, own);
  }

  // `count`: the warp's blocks; 0: those of them that there are.
  template <int count>
  static __device__ __forceinline__ void run_steps(accumulators& sum, const fragment& of,
                                                   u32 tokens, int left) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < (count > 0 ? count : steps); ++i) {
      const int block = warp + i * warps;
      if (count == 0 && block * packed_k >= left) continue;
      float part[1][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 b[1][4];
        load_matrices(b[0][0], b[0][1], b[0][2], b[0][3], tokens + block * 128 + half * 64);
        const int group = scales_of_block == 2 ? half : 0, first = half * 2 % (4 / format.parts());
        const u32* const words = of.words[i][half * format.parts() / 2].word;
        const auto scale = of.scale[i][group];
        stream::template multiply_half<false>(part, b, codes::step_codes::of(words, first),
                                              codes::step_codes::of(words, first + 1), scale,
                                              format.zeros ? of.zero[i][group] : 0);
        if (scales_of_block == 2 || half == 1) {
          float rows[2];
          if constexpr (format.scales_rows()) {
            rows[0] = __uint_as_float(static_cast<u32>(of.of_rows)) * codes::unit;
            rows[1] = __uint_as_float(static_cast<u32>(of.of_rows >> 32)) * codes::unit;
          } else {
            codes::values(scale, rows[0], rows[1]);
          }
#pragma unroll
          for (int value = 0; value < 4; ++value) {
            sum.value[value] += part[0][value] * rows[value / 2];
            part[0][value] = 0;
          }
        }
      }
    }
  }
};

}  // namespace fftune
