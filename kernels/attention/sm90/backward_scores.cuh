// S and dP of a key block and a query block, and what follows from them: P, dS.
#pragma once

#include "attention/sm90/backward_cta.cuh"
#include "attention/softmax.cuh"
#include "common/numerics.cuh"
#include "common/wgmma_widths.cuh"

namespace fftune {

template <attention_form form, sm90_backward_config config>
struct attention_backward_scores {
  using cta_type = attention_backward_cta<form, config>;
  static constexpr sm90_backward_plan plan = cta_type::plan;
  static constexpr int bm = config.bm, bn = config.bn, warpgroups = config.mma_warpgroups;
  static constexpr bool splits_dim = plan.splits_dim;
  static constexpr int score_columns = plan.score_columns;
  static constexpr int score_steps = cta_type::score_steps;
  using T = typename cta_type::T;
  using visit = typename cta_type::visit;
  using fragments = typename cta_type::fragments;
  static constexpr int mma_threads = cta_type::mma_threads;
  using scores = typename cta_type::scores;

  cta_type cta;

  // Sᵀ or dPᵀ: 64 rows of k or v times rows of q or d_out.
  __device__ __forceinline__ void multiply_scores(scores& c, int keys_at, u32 queries,
                                                  int warpgroup) const {
    const u64 a = wgmma_descriptor(cta.base + keys_at + (splits_dim ? 0 : warpgroup * 64 * 128));
    const u64 b = wgmma_descriptor(queries + (splits_dim ? warpgroup * score_columns * 128 : 0));
    cta.forget(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < plan.score_k_steps; ++step) {
      const int slab = step / 4, in_slab = step % 4 * 2;
      wgmma<T, score_columns>(c, a + (slab * plan.kv_slab_bytes >> 4) + in_slab,
                              b + (slab * plan.q_slab_bytes >> 4) + in_slab, step > 0);
    }
    wgmma_commit();
  }

  // The first key of this thread's scores, in the tile; the other is 8 later.
  static __device__ __forceinline__ int own_key(int warpgroup) {
    const int thread = threadIdx.x % 128;
    return (splits_dim ? 0 : warpgroup * 64) + thread / 32 * 16 + thread % 32 / 4;
  }

  // Scores to probabilities, in place; to fragments, too. With a soft cap the probabilities are
  // then multiplied by the cap's derivative, which dS needs.
  template <bool masked>
  __device__ __forceinline__ void probabilities(scores& s, fragments& p, const visit& visit,
                                                u32 lse, int warpgroup) const {
    const int first_column = splits_dim ? warpgroup * score_columns : 0;
    const int own_column = threadIdx.x % 4 * 2;
    const int query = visit.block * bm + first_column + own_column;  // in the sequence
    const int key = cta.work.first_key + own_key(warpgroup);
    const float factor =
        form.softcap ? cta.attention.softcap * log2_e : cta.attention.scale * log2_e;
    const float inner = form.softcap ? cta.attention.scale / cta.attention.softcap : 1.0f;
    // Queries [first, last] of this tile see a key.
    int first[2] = {0, 0}, last[2] = {bm, bm};
    if constexpr (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        last[i] = cta.work.sequence.q_len - 1 - query;
        const int diagonal = key + 8 * i - cta.work.sequence.shift() - query;
        if constexpr (form.mask == attention_mask::causal) first[i] = diagonal;
        if constexpr (form.window) last[i] = smaller(last[i], diagonal + cta.attention.window - 1);
        if (key + 8 * i >= cta.work.sequence.kv_len) last[i] = -1;
      }
    }
    const u32* bits = nullptr;
    int words = 0;
    if constexpr (masked && form.mask == attention_mask::packed) {
      const packed_mask mask(cta.attention, cta.work.sequence.index, visit.head);
      words = mask.words;
      bits = mask.bits + smaller(key / 32, words - 1);
    }
    const T* bias = nullptr;
    if constexpr (form.bias) {
      bias = static_cast<const T*>(cta.attention.bias) +
             cta.work.sequence.index * cta.attention.bias_batch +
             visit.head * cta.attention.bias_head;
    }
#pragma unroll
    for (int step = 0; step < score_steps; ++step) {
      float derivative[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = step * 16 + half * 8;
        const float2 row_lse = load_shared_pair(lse + (first_column + own_column + column) * 4);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          u32 word = 0;
          if constexpr (masked && form.mask == attention_mask::packed) {
            const int row = smaller(query + column + j, cta.work.sequence.q_len - 1);
            word = bits[static_cast<i64>(row) * words] >> key % 32;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = s[step * 8 + half * 4 + i * 2 + j];
            if constexpr (form.softcap) {
              value = tanh_by_exp2(value * inner);
              derivative[half * 4 + i * 2 + j] = 1.0f - value * value;
            }
            float exponent = value * factor;
            if constexpr (form.bias) {
              const int row = smaller(query + column + j, cta.work.sequence.q_len - 1);
              const int column_of_key = smaller(key + 8 * i, cta.work.sequence.kv_len - 1);
              exponent +=
                  to_float(bias[static_cast<i64>(row) * cta.attention.bias_row + column_of_key]) *
                  log2_e;
            }
            value = approximate_exp2(exponent - (j == 0 ? row_lse.x : row_lse.y));
            if constexpr (masked) {
              bool seen = column + j >= first[i] && column + j <= last[i];
              if constexpr (form.mask == attention_mask::packed) seen &= (word >> 8 * i & 1) != 0;
              if (!seen) {
                value = masked_probability;
                if constexpr (form.softcap) derivative[half * 4 + i * 2 + j] = 1.0f;
              }
            }
          }
        }
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        p[step][pair] = pack<T>(s[step * 8 + pair * 2], s[step * 8 + pair * 2 + 1]);
      }
      if constexpr (form.softcap) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[step * 8 + i] *= derivative[i];
      }
    }
  }

  // dS from P and dP, as fragments.
  template <bool masked>
  __device__ __forceinline__ void score_gradients(const scores& p, const scores& dp, fragments& ds,
                                                  u32 delta, int warpgroup) const {
    const u32 own =
        delta + ((splits_dim ? warpgroup * score_columns : 0) + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int step = 0; step < score_steps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 row_delta = load_shared_pair(own + (step * 16 + half * 8) * 4);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int i = step * 8 + half * 4 + row * 2;
          const float x = dp[i] - row_delta.x, y = dp[i + 1] - row_delta.y;
          ds[step][half * 2 + row] =
              masked ? pack<T>(score_gradient(p[i], x), score_gradient(p[i + 1], y))
                     : pack<T>(p[i] * x, p[i + 1] * y);
        }
      }
    }
  }

  // Pᵀ or dSᵀ to shared memory. Keys of each warpgroup in a slab [queries][64 keys], or, where the
  // warpgroups split the queries, slabs [64 keys][64 queries].
  static __device__ __forceinline__ void store_scores(u32 at, const fragments& values,
                                                      int warpgroup) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (splits_dim) {
      const int key = warp * 16 + matrix % 2 * 8 + row;
#pragma unroll
      for (int step = 0; step < score_steps; ++step) {
        const int chunk = (warpgroup * score_columns + step * 16) / 8 + matrix / 2;
        store_matrices<false>(
            at + chunk / 8 * wgmma_slab_bytes + key * 128 + ((chunk % 8 ^ row) << 4), values[step]);
      }
    } else {
      const u32 own = at + warpgroup * bm * 128 + (matrix / 2 * 8 + row) * 128 +
                      (((warp * 2 + matrix % 2) ^ row) << 4);
#pragma unroll
      for (int step = 0; step < score_steps; ++step) {
        store_matrices<true>(own + step * 16 * 128, values[step]);
      }
    }
  }

  // Overwrites rows of a tile in shared memory from `count` on with zeros: what follows a sequence
  // may hold NaN, which a probability of zero does not cancel. All MMA warpgroups.
  template <int rows>
  static __device__ __forceinline__ void zero_rows(u32 at, int count) {
    const int vectors = (rows - count) * 8;  // of a slab
    for (int i = threadIdx.x; i < plan.slabs * vectors; i += mma_threads) {
      const int slab = i / vectors;
      store_shared(at + slab * rows * 128 + count * 128 + (i - slab * vectors) * 16,
                   make_float4(0, 0, 0, 0));
    }
  }
  __device__ __forceinline__ void zero_keys() const {
    const int count = cta.work.sequence.kv_len - cta.work.first_key;
    if (!(form.foreign_keys() || plan.head_boxes) || count >= bn) return;
    barrier_wait(cta.v_full(), 0);
    zero_rows<bn>(cta.base + plan.k_at, count);
    zero_rows<bn>(cta.base + plan.v_at, count);
    async_proxy_fence();
    cta.sync(backward_barrier::scores, mma_threads);
  }
  __device__ __forceinline__ void zero_queries(u32 at, const visit& visit) const {
    const int count = cta.work.sequence.q_len - visit.block * bm;
    if (!(form.packed_sequences() || plan.head_boxes) || count >= bm) return;
    zero_rows<bm>(at, count);
    async_proxy_fence();
    cta.sync(backward_barrier::scores, mma_threads);
  }
};

}  // namespace fftune
