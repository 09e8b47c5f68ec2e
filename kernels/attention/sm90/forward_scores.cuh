// Scores of a block of keys, from the MMA to probabilities in registers.
#pragma once

#include "attention/sm90/forward_cta.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/wgmma_widths.cuh"

namespace fftune {

template <class Traits>
struct attention_scores {
  using cta_type = attention_cta<Traits>;
  static constexpr attention_form form = Traits::form;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int bn = config.bn;
  static constexpr bool packed = cta_type::packed;
  using T = typename cta_type::T;
  using score_accumulators = typename cta_type::score_accumulators;
  using probabilities = typename cta_type::probabilities;
  using mask_words = typename cta_type::mask_words;
  using tile_rows = typename cta_type::tile_rows;

  cta_type cta;

  __device__ __forceinline__ void issue_scores(score_accumulators& scores, u32 k) const {
    const u64 q_rows =
        wgmma_swizzled_descriptor<plan.row_bytes>(cta.base + cta.own_part() * plan.q_bytes);
    const u64 k_rows = wgmma_swizzled_descriptor<plan.row_bytes>(k);
    constexpr int in_slab = plan.slab_columns / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < plan.score_steps; ++step) {
      const int slab = step / in_slab, at = step % in_slab * 32;
      wgmma<T, bn>(scores, wgmma_advance(q_rows, slab * 64 * plan.row_bytes + at),
                   wgmma_advance(k_rows, slab * bn * plan.row_bytes + at), step > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  // The bits of a thread's rows and a block of keys, the first of the thread's columns lowest.
  __device__ __forceinline__ void load_mask(const attention_tile& tile, int block,
                                            mask_words& words) const {
    if constexpr (packed) {
      const packed_mask mask(cta.params, tile.sequence.index, tile.head);
      const int first_query = cta.own_first_query(tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = smaller(cta.query_of(first_query, i), cta.params.q_len - 1);
        const u32* const from = mask.row_bits(row, block * bn);
#pragma unroll
        for (int w = 0; w < bn / 32; w += 2) {
          const uint2 pair = *reinterpret_cast<const uint2*>(from + w);
          words.row[i][w] = pair.x;
          words.row[i][w + 1] = pair.y;
        }
      }
    }
  }

  // Soft cap and bias.
  __device__ __forceinline__ void transform(score_accumulators& scores, const attention_tile& tile,
                                            int block, const score_scaling<form>& scaling) const {
    if constexpr (form.softcap) {
#pragma unroll
      for (int i = 0; i < plan.score_registers; ++i) scores[i] = scaling.cap(scores[i]);
    }
    if constexpr (form.bias) {
      const T* const bias =
          static_cast<const T*>(cta.params.bias) + tile.sequence.index * cta.params.bias_batch;
      const bool pairs = cta.params.bias_row % 2 == 0 && cta.params.bias_head % 2 == 0 &&
                         cta.params.bias_batch % 2 == 0;
      const int left = tile.sequence.kv_len - block * bn - cta.own_column();
      const int first_query = cta.own_first_query(tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = smaller(larger(0, cta.query_of(first_query, i)), tile.sequence.q_len - 1);
        const T* const from = bias + cta.head_of(tile, i) * cta.params.bias_head +
                              static_cast<i64>(row) * cta.params.bias_row + block * bn +
                              cta.own_column();
#pragma unroll
        for (int j = 0; j < bn / 8; ++j) {
          float first = 0, second = 0;
          if (pairs) {
            if (j * 8 < left) unpack<T>(*reinterpret_cast<const u32*>(from + j * 8), first, second);
          } else {
            if (j * 8 < left) first = to_float(from[j * 8]);
            if (j * 8 + 1 < left) second = to_float(from[j * 8 + 1]);
          }
          scores[j * 4 + i * 2] = scaling.add_bias(scores[j * 4 + i * 2], first);
          scores[j * 4 + i * 2 + 1] = scaling.add_bias(scores[j * 4 + i * 2 + 1], second);
        }
      }
    }
  }

  __device__ __forceinline__ void apply_mask(score_accumulators& scores, const attention_tile& tile,
                                             int block, const mask_words& words) const {
    const int start = block * bn + cta.own_column(), first_query = cta.own_first_query(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const key_range keys =
          keys_of_row<form>(cta.params, tile.sequence, cta.query_of(first_query, i));
      const int first = keys.first - start, last = keys.last - start;
#pragma unroll
      for (int j = 0; j < bn / 8; ++j) {
        u32 bits = 0;
        if constexpr (packed) bits = words.row[i][j / 4] >> cta.own_column();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + i * 2 + e];
          bool visible = true;
          if constexpr (cta_type::has_ranges) visible = j * 8 + e < last;
          if constexpr (form.window) visible = visible && j * 8 + e >= first;
          if constexpr (packed) visible = visible && (bits >> (j % 4 * 8 + e) & 1) != 0;
          if (!visible) score = minus_infinity();
        }
      }
    }
  }

  // Turns scores into powers of two and adds them up. Returns whether the rows of this warp have
  // been given other references, and by how much their sums of values are to be multiplied.
  template <bool is_first>
  __device__ __forceinline__ bool exponentiate(score_accumulators& scores, tile_rows& rows,
                                               float factor, float (&rescale)[2]) const {
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most[2] = {scores[i * 2], scores[i * 2 + 1]};
#pragma unroll
      for (int j = 1; j < bn / 8; ++j) {
        most[0] = fmaxf(most[0], scores[j * 4 + i * 2]);
        most[1] = fmaxf(most[1], scores[j * 4 + i * 2 + 1]);
      }
      largest[i] = fmaxf(most[0], most[1]);
    }
    const auto of_row = [&] {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], step));
        }
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] *= factor;
    bool rescales = false;
    if constexpr (is_first) {
      of_row();
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.softmax[i] = {largest[i], 0};
    } else {
      // If no thread's own scores exceed the references, those of rows do not.
      rescales = __any_sync(
          ~0u, rows.softmax[0].exceeded_by(largest[0]) || rows.softmax[1].exceeded_by(largest[1]));
      if (rescales) {
        of_row();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rescale[i] = rows.softmax[i].rescale_if_exceeded(largest[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float offset = rows.softmax[i].offset();
      float sums[2] = {rows.softmax[i].sum, 0};
#pragma unroll
      for (int j = 0; j < bn / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + i * 2 + e];
          score = approximate_exp2(__fmaf_rn(score, factor, -offset));
          sums[e] += score;
        }
      }
      rows.softmax[i].sum = sums[0] + sums[1];
    }
    return rescales;
  }

  static __device__ __forceinline__ void convert(const score_accumulators& scores,
                                                 probabilities& to) {
#pragma unroll
    for (int i = 0; i < plan.score_registers / 2; ++i) {
      to[i / 4][i % 4] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
    }
  }

  // Keeps everything that `value`, which is not negative, is computed from before the next wait for
  // MMAs: ptxas would move it below, to where the tensor cores are idle. The store never happens.
  __device__ __forceinline__ void complete_before_wait(float value) const {
    asm volatile(
        "{.reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.f32 [%1], %0;}" ::"f"(value),
        "r"(cta.base)
        : "memory");
  }
};

}  // namespace fftune
