// Products of the persistent form: a CTA's rows of weights, stage by stage, by all tokens, and each
// warp's sums of them in shared memory.
#pragma once

#include "common/mma.cuh"
#include "layer/persistent/input.cuh"

namespace fftune {

// A warp's part of stages of dense weights: the address of this lane's tokens, the MMAs of a stage
// or of what was held of it, and the accumulators' rows.
template <class T, persistent_config c>
struct persistent_dense : stage_product<T, T, c.warps, c.chunk / 32 / c.warps> {
  using layout = persistent_cta<T, c>;
  using product = stage_product<T, T, c.warps, c.chunk / 32 / c.warps>;
  using typename product::accumulators;
  using typename product::fragment;
  static constexpr int stage_k = c.chunk;
  static constexpr bool packs = false;
  static constexpr bool normalises = true;  // whether one of the products has a norm in front
  static __device__ __forceinline__ u32 lane_at(u32 stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return lane / 4 * stride + warp * 64 + lane % 4 * 16;
  }
  static __device__ __forceinline__ void hold(fragment& to, u32 stage) {
    product::load(to, stage + lane_at(layout::row_stride), layout::row_stride);
  }
  static __device__ __forceinline__ void multiply(accumulators& sum, const fragment& of, u32 tokens,
                                                  bool has_token, int at, int end) {
    product::run(sum, of, tokens, has_token, at + static_cast<int>(threadIdx.x) / 32 * 32, end);
  }
  template <class Pipeline>
  static __device__ __forceinline__ void multiply_stage(accumulators& sum, Pipeline& pipeline,
                                                        u32 tokens, bool has_token, int at,
                                                        int end) {
    product::run(sum, pipeline.buffer() + lane_at(layout::row_stride), layout::row_stride, tokens,
                 has_token, at + static_cast<int>(threadIdx.x) / 32 * 32, end);
    pipeline.release();
  }
  static __device__ __forceinline__ float total(const accumulators& sum, int i) {
    return (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
  }
  static __device__ __forceinline__ int row(int group, int half) { return group + half * 8; }
};

// The same of packed weights, of `format`.
template <class T, persistent_config c, packed_form format>
struct persistent_packed {
  static constexpr bool packs = true;
  using product = packed_stage_product<T, c.packed_stage(format), c.warps>;
  using accumulators = typename product::accumulators;
  using fragment = typename product::fragment;
  static constexpr int stage_k = product::stage_k;
  static constexpr bool normalises = !c.has_experts() || c.packs_attention;
  static __device__ __forceinline__ u32 lane_at(u32 stride) {
    const int lane = threadIdx.x % 32;
    return smaller(lane % 8, c.tokens - 1) * stride + lane / 8 * 16;
  }
  static __device__ __forceinline__ void hold(fragment& to, u32 stage) { product::load(to, stage); }
  static __device__ __forceinline__ void multiply(accumulators& sum, const fragment& of, u32 tokens,
                                                  bool has_token, int at, int end) {
    product::run(sum, of, tokens, end - at);
  }
  template <class Pipeline>
  static __device__ __forceinline__ void multiply_stage(accumulators& sum, Pipeline& pipeline,
                                                        u32 tokens, bool has_token, int at,
                                                        int end) {
    fragment of;
    product::load(of, pipeline.buffer());
    pipeline.release();
    multiply(sum, of, tokens, has_token, at, end);
  }
  static __device__ __forceinline__ float total(const accumulators& sum, int i) {
    return sum.value[i];
  }
  static __device__ __forceinline__ int row(int group, int half) { return 2 * group + half; }
};

// Sums of a block of 16 rows [warps][rows][tokens], and those of all warps.
template <persistent_config c>
struct persistent_sums {
  static __device__ __forceinline__ void store(u32 to, int row, int pair, float first, float second,
                                               bool adds) {
    if (c.tokens == 1 ? pair > 0 : 2 * pair >= c.tokens) return;
    const u32 at = to + (row * c.token_columns() + 2 * pair) * 4;
    if (adds) first += read_value<float>(at);
    if constexpr (c.tokens == 1) {
      write_value(at, first);
    } else {
      if (adds) second += read_value<float>(at + 4);
      write_value(at, float2{first, second});
    }
  }

  // The sum of all warps' parts of row `row` of block `block`.
  static __device__ __forceinline__ float of(u32 shared, int block, int row, int column) {
    const u32 from = shared + c.sums_at() + block * (c.warps * c.sums_stride()) +
                     (row * c.token_columns() + column) * 4;
    float part[c.warps];
#pragma unroll
    for (int warp = 0; warp < c.warps; ++warp)
      part[warp] = read_value<float>(from + warp * c.sums_stride());
#pragma unroll
    for (int step = c.warps / 2; step > 0; step /= 2)
#pragma unroll
      for (int warp = 0; warp < step; ++warp) part[warp] += part[warp + step];
    return part[0];
  }
};

template <class T, persistent_config c, class norm>
struct persistent_product {
  using layout = persistent_cta<T, c>;
  const layout& cta;
  typename layout::pipeline& pipeline;
  const persistent_input<T, c, norm>& activations;

  // Multiplies this CTA's blocks of 16 rows of weights by all tokens, and leaves each warp's sums
  // in shared memory. With `loads` false the activations of the product before are there.
  // `by_slot`: k are the features of each slot, one after the other, which are multiplied by the
  // slot's token alone.
  // `given`: where sums of the first tile go if another CTA owns it; or null.
  template <class Weights>
  __device__ __forceinline__ void multiply(const T* from, int k, int blocks, bool normalises,
                                           bool plain, bool loads, bool by_slot,
                                           [[maybe_unused]] float* given) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    constexpr int most_held = held_stages<Weights>;
    // A block of a mixture has a part for each slot.
    const int parts = c.has_experts() && by_slot ? c.slots() : 1;
    vector16 vectors[persistent_input<T, c, norm>::vectors_of(Weights::packs)];
#pragma unroll 1
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      const int part_stages =
          ceil_div(c.has_experts() && by_slot ? c.h : end - begin, Weights::stage_k);
      const int held = smaller(most_held, blocks * parts * part_stages);
      typename Weights::fragment first_stages[larger(most_held, 1)];
      [[maybe_unused]] int taken = 0;  // of those
#pragma unroll
      for (int i = 0; i < most_held; ++i) {
        if (i >= held) break;
        pipeline.wait();
        Weights::hold(first_stages[i], pipeline.buffer());
        pipeline.release();
      }
      if (!(c.has_experts() || c.has_head()) || loads)
        activations.load(vectors, c.requests() && begin > 0, from, k, begin, end,
                         Weights::normalises && normalises, plain);
      else
        cta.sync_consumers();
      if (c.requests() && end < k)
        activations.request(vectors, from, k, end, smaller(k, end + c.input_length()));
      u32 to = cta.shared + c.sums_at() + warp * c.sums_stride();
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, to += c.warps * c.sums_stride()) {
        float total[4] = {};
        const u32 input = cta.shared + c.input_at() + Weights::lane_at(c.input_stride());
        const bool has_token = group < c.tokens;
        int first_part = 0, end_part = parts;
        if constexpr (shares_tiles<Weights>) {
          if (by_slot) own_parts(block, first_part, end_part);
        }
#pragma unroll 1
        for (int part = first_part; part < end_part; ++part) {
          typename Weights::accumulators sum = {};
          u32 token_at = input;
          int first = begin, last = end;
          if (c.has_experts() && by_slot) {
            token_at += part % c.of_token() * c.h * 2;
            last = c.h;
          }
          const int before = (block * parts + part) * part_stages;
          if (!Weights::packs && before < held) {
#pragma unroll
            for (int i = 0; i < most_held; ++i) {
              if (i < before || i >= smaller(held, before + part_stages)) continue;
              Weights::multiply(sum, first_stages[i], token_at, has_token, first, last);
              first += Weights::stage_k;
              token_at += 2 * Weights::stage_k;
            }
          }
#pragma unroll 1
          for (int at = first; at < last; at += Weights::stage_k) {
            if constexpr (Weights::packs && most_held > 0) {
              typename Weights::fragment of = first_stages[0];
              if (taken < held) {
#pragma unroll
                for (int i = 1; i < most_held; ++i) first_stages[i - 1] = first_stages[i];
                ++taken;
              } else {
                pipeline.wait();
                Weights::hold(of, pipeline.buffer());
                pipeline.release();
              }
              Weights::multiply(sum, of, token_at, has_token, at, last);
            } else {
              pipeline.wait();
              Weights::multiply_stage(sum, pipeline, token_at, has_token, at, last);
            }
            token_at += 2 * Weights::stage_k;
          }
          // The other tokens' columns are not the slot's: its weights may be NaN for them.
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool is_own = !c.has_experts() || c.tokens == 1 || !by_slot ||
                                2 * pair + i % 2 == part / c.of_token();
            if (is_own) total[i] += Weights::total(sum, i);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          persistent_sums<c>::store(to, Weights::row(group, half), pair, total[2 * half],
                                    total[2 * half + 1], begin > 0);
        if constexpr (Weights::packs && (c.shares_tiles() || c.shares_pairs())) {
          if (block == 0 && given != nullptr) hand_over(given);
        }
      }
      cta.sync_consumers();
    }
  }

 private:
  template <class Weights>
  static constexpr bool shares_tiles = c.shares_tiles() && Weights::packs;
  // Where packed weights are beside dense ones, these alone wait in registers.
  template <class Weights>
  static constexpr int held_stages =
      Weights::packs && !c.packs_attention && c.packs_network ? 0 : c.held;

  // The parts of a CTA's tile `block` of down.
  static __device__ __forceinline__ void own_parts(int block, int& first, int& end) {
    const int before = layout::parts_before();
    if (before > 0 && block == 0) {
      first = before;
      return;
    }
    const int tile = layout::first_down() / packed_rows + block - (before > 0 ? 1 : 0);
    end = smaller(end, layout::end_down_part() - tile * c.slots());
  }
  // The sums of the first tile to the CTA before this one.
  __device__ __forceinline__ void hand_over(float* to) const {
    cta.sync_consumers();
    if (threadIdx.x < packed_rows)
      store_relaxed(to + threadIdx.x, persistent_sums<c>::of(cta.shared, 0, threadIdx.x, 0));
  }
};

}  // namespace fftune
