// dq, dk and dv: their products, the sums of dq, and the stores of dk and dv.
#pragma once

#include "attention/sm90/backward_cta.cuh"
#include "attention/sm90/backward_rows.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "common/wgmma_widths.cuh"

namespace fftune {

__device__ __forceinline__ void add_global(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

template <attention_form form, sm90_backward_config config>
struct attention_backward_gradients {
  using cta_type = attention_backward_cta<form, config>;
  static constexpr sm90_backward_plan plan = cta_type::plan;
  static constexpr int bm = config.bm, bn = config.bn, warpgroups = config.mma_warpgroups;
  static constexpr bool splits_dim = plan.splits_dim;
  static constexpr int score_columns = plan.score_columns;
  static constexpr int score_steps = cta_type::score_steps;
  using T = typename cta_type::T;
  using visit = typename cta_type::visit;
  using fragments = typename cta_type::fragments;
  static constexpr int gradient_columns = plan.gradient_columns;
  static constexpr int dq_values = cta_type::dq_values;
  static constexpr bool stages_dq = cta_type::stages_dq;
  using gradient = typename cta_type::gradient;
  using dq_tiles = typename cta_type::dq_tiles;
  using dq_stage = typename cta_type::dq_stage;

  cta_type cta;

  // dv += Pᵀ d_out or dk += dSᵀ q. Pᵀ or dSᵀ: this thread's fragments, or at `at`.
  __device__ __forceinline__ void multiply_gradient(gradient& c, const fragments& own, u32 at,
                                                    u32 queries, int accumulate,
                                                    int warpgroup) const {
    const int first_slab = splits_dim ? warpgroup * gradient_columns / 64 : 0;
    const u64 b =
        wgmma_swizzled_descriptor<128, plan.q_slab_bytes>(queries + first_slab * plan.q_slab_bytes);
    wgmma_fence();
    if constexpr (splits_dim) {
      const u64 a = wgmma_descriptor(at);
#pragma unroll
      for (int step = 0; step < bm / 16; ++step) {
        wgmma<T, gradient_columns, false, true>(
            c, a + (step / 4 * wgmma_slab_bytes >> 4) + step % 4 * 2, b + step * 128,
            step > 0 || accumulate);
      }
    } else {
#pragma unroll
      for (int step = 0; step < bm / 16; ++step) {
        wgmma_of_width<T, gradient_columns, true>(c, own[step], b + step * 128,
                                                  step > 0 || accumulate);
      }
    }
    wgmma_commit();
  }

  // dqᵀ = kᵀ dSᵀ: 64 columns of a head times queries.
  __device__ __forceinline__ void multiply_dq(dq_tiles& c, u32 ds, int warpgroup) const {
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) cta.forget(c[tile]);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) {
      const int slab = plan.splits_dq_rows ? tile : warpgroup * plan.dq_tiles + tile;
      const int first_query = plan.splits_dq_rows ? warpgroup * plan.dq_columns : 0;
      const u64 a = wgmma_transposed_descriptor(cta.base + plan.k_at + slab * plan.kv_slab_bytes);
#pragma unroll
      for (int step = 0; step < bn / 16; ++step) {
        if constexpr (splits_dim) {
          wgmma<T, plan.dq_columns, true, true>(
              c[tile], a + step * 128, wgmma_transposed_descriptor(ds) + step * 128, step > 0);
        } else {
          const u64 b = wgmma_descriptor(ds + first_query * 128);
          wgmma<T, plan.dq_columns, true>(c[tile], a + step * 128,
                                          b + (step / 4 * bm * 128 >> 4) + step % 4 * 2, step > 0);
        }
      }
    }
    wgmma_commit();
  }

  // Passes this warpgroup's stage of dq to the dq warp, with the visit that it is of.
  __device__ __forceinline__ void pass_dq(dq_stage& stage, const visit& visit) const {
    if (threadIdx.x % 128 == 0) cta.store_visit(stage.buffers, visit);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(stage.full);
    stage.advance();
  }

  // Calls store(at, four accumulators) for those of this thread that are columns of a head; at: 16
  // bytes from this thread's first.
  template <class Store>
  static __device__ __forceinline__ void for_dq(const dq_tiles& dq, int warpgroup,
                                                const Store& store) {
    constexpr int vectors = dq_values / 4;
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) {
      const int threads = cta_type::dq_threads(warpgroup, tile);
      if (plan.last_dq_threads < 128 && static_cast<int>(threadIdx.x % 128) >= threads) continue;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const float* const from = dq[tile] + i * 4;
        store(tile * vectors * 128 + i * threads, from[0], from[1], from[2], from[3]);
      }
    }
  }

  // Adds to dq in memory. Where a thread's four neighbouring accumulators lie there is known to the
  // kernel that converts dq, dq_fragment in backward_rows.cuh.
  __device__ __forceinline__ void add_dq(const dq_tiles& dq, const visit& visit, dq_stage& stage,
                                         int warpgroup) const {
    const int thread = threadIdx.x % 128;
    if constexpr (stages_dq) {
      stage.wait_empty();
      const u32 own = cta.base + plan.dq_at + warpgroup * plan.dq_bytes + thread * 16;
      for_dq(dq, warpgroup, [&](int at, float a, float b, float c, float d) {
        store_shared(own + at * 16, make_float4(a, b, c, d));
      });
      async_proxy_fence();
      pass_dq(stage, visit);
    } else {
      if constexpr (form.deterministic) {
        if (thread == 0) cta.wait_turn(visit, warpgroup);
        cta.sync(backward_barrier::warpgroup, 128, warpgroup);
      }
      float* const own = cta.dq_of(visit, warpgroup) + thread * 4;
      for_dq(dq, warpgroup, [&](int at, float a, float b, float c, float d) {
        add_global(own + at * 4, a, b, c, d);
      });
      if constexpr (form.deterministic) {
        __threadfence();
        cta.sync(backward_barrier::warpgroup, 128, warpgroup);
        if (thread == 0) cta.end_turn(visit, warpgroup);
      }
    }
  }

  // By way of the places of k and v, which are read no more.
  __device__ __forceinline__ void store_gradients(const gradient& dk, const gradient& dv,
                                                  int warpgroup) const {
    stage_gradient(dk, plan.k_at, cta.attention.scale, warpgroup);
    stage_gradient(dv, plan.v_at, 1.0f, warpgroup);
    cta.sync(backward_barrier::warpgroup, 128, warpgroup);
    const i64 row = cta.work.sequence.kv_first + cta.work.first_key;
    const i64 sequence = form.packed_sequences() ? 0 : cta.work.sequence.index;
    store_gradient(static_cast<T*>(cta.attention.dk) + sequence * cta.params.dk_batch +
                       row * cta.params.dk_row,
                   cta.params.dk_row, plan.k_at, warpgroup);
    store_gradient(static_cast<T*>(cta.attention.dv) + sequence * cta.params.dv_batch +
                       row * cta.params.dv_row,
                   cta.params.dv_row, plan.v_at, warpgroup);
  }

  // Where a warpgroup's share of dk or dv lies in the place of k or v.
  __device__ __forceinline__ u32 gradient_at(int at, int warpgroup) const {
    return cta.base + at +
           (splits_dim ? warpgroup * gradient_columns / 64 * plan.kv_slab_bytes
                       : warpgroup * 64 * 128);
  }

  __device__ __forceinline__ void stage_gradient(const gradient& values, int at, float factor,
                                                 int warpgroup) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int row = warp * 16 + lane % 16;
    const u32 own = gradient_at(at, warpgroup) + row * 128;
#pragma unroll
    for (int step = 0; step < gradient_columns / 16; ++step) {
      u32 words[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        words[pair] =
            pack<T>(values[step * 8 + pair * 2] * factor, values[step * 8 + pair * 2 + 1] * factor);
      }
      const int chunk = step % 4 * 2 + lane / 16;
      store_matrices<false>(own + step / 4 * plan.kv_slab_bytes + ((chunk ^ (row & 7)) << 4),
                            words);
    }
  }

  __device__ __forceinline__ void store_gradient(T* to, int row_elements, int at,
                                                 int warpgroup) const {
    // The last warpgroup may store fewer of a row.
    constexpr int vectors = (splits_dim ? gradient_columns : form.dim + 7) / 8;
    const int first_row = splits_dim ? 0 : warpgroup * 64;
    const int first_column =
        cta.work.kv_head * form.dim + (splits_dim ? warpgroup * gradient_columns : 0);
    const int rows = smaller(64, cta.work.kv_rows - cta.work.first_key - first_row);
    for (int i = threadIdx.x % 128; i < rows * vectors; i += 128) {
      const int row = i / vectors, chunk = i % vectors;
      float4 value = load_shared(gradient_at(at, warpgroup) + chunk / 8 * plan.kv_slab_bytes +
                                 row * 128 + ((chunk % 8 ^ (row & 7)) << 4));
      // A probability of zero does not cancel the NaN of a query.
      if (form.lengths && cta.work.first_key + first_row + row >= cta.work.sequence.kv_len) {
        value = make_float4(0, 0, 0, 0);
      }
      store_features<form.dim, !splits_dim || plan.slabs * 64 == form.dim>(
          to + static_cast<i64>(first_row + row) * row_elements + first_column + chunk * 8,
          (splits_dim ? warpgroup * gradient_columns : 0) + chunk * 8, value);
    }
  }
};

}  // namespace fftune
