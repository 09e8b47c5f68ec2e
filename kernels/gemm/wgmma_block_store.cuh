// From the accumulators of the wgmma engine to fp8 with a scale for each 128 features of a token,
// which is found here: a consumer has all of the 128.
#pragma once

#include "common/quantise.cuh"
#include "gemm/scales.cuh"
#include "gemm/wgmma_store.cuh"

namespace fftune {

struct wgmma_block_outputs {
  const tensor_map& c;
  float* scales;  // [tokens, blocks of features]
  int tokens;
  const tensor_map& first_sums;  // unused with one output
  const tensor_map& second_sums;
  const void* bias = nullptr;

  __device__ __forceinline__ const tensor_map& first() const { return c; }
  template <int output>
  __device__ __forceinline__ const tensor_map& map() const {
    static_assert(output == 1 || output == 2, "the first is stored in units of its own scales");
    return output == 1 ? first_sums : second_sums;
  }
};

template <class Epilogue, wgmma_tile tile>
struct wgmma_block_store : wgmma_store<fp8, Epilogue, tile> {
  using base = wgmma_store<fp8, Epilogue, tile>;
  using layout = typename base::layout;
  using typename base::boxes;
  using typename base::owned_sums;
  using outputs = wgmma_block_outputs;
  static_assert(tile.swapped ? layout::consumer_rows % scale_block == 0
                             : tile.bn == scale_block && tile.split_k == 1);

  static __device__ __forceinline__ void store(const owned_sums& sum, boxes& ring,
                                               const outputs& to, int token, int feature, int n,
                                               int barrier_id) {
    if constexpr (Epilogue::outputs > 1) {
#pragma unroll
      for (int box = 0; box < layout::boxes; ++box) {
        base::template store_box<1>(sum, ring, to, token, feature, n, box, barrier_id);
      }
      // The sums' boxes fill the whole of a buffer.
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
      named_barrier_sync(barrier_id, 128);
    }
    values value;
#pragma unroll
    for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
      for (int i = 0; i < base::owned; ++i) {
        const float sums[2] = {sum[part][0][i], sum[part][1][i]};
        value[part][i] = Epilogue::apply(sums);
      }
    }
    if constexpr (tile.swapped) {
#pragma unroll
      for (int block = 0; block < layout::parts / 2; ++block) {
        const int first = feature + block * scale_block;
        quantise_columns(value, ring.buffers + layout::box_bytes / 2, to, block, token, first, n,
                         barrier_id);
        put(value, ring, to, token, feature, block * 2, barrier_id);
        put(value, ring, to, token, feature, block * 2 + 1, barrier_id);
      }
    } else {
      quantise_rows(value, to, token, feature, n);
#pragma unroll
      for (int box = 0; box < layout::boxes; ++box) {
        put(value, ring, to, token, feature, box, barrier_id);
      }
    }
  }

 private:
  using values = float[layout::parts][base::owned];

  // 128 features are a row of a part, in the hands of four lanes.
  static __device__ __forceinline__ void quantise_rows(values& value, const outputs& to, int token,
                                                       int feature, int n) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < base::owned / 2; ++i) {
          largest = fmaxf(largest, fabsf(value[part][i / 2 * 4 + half * 2 + i % 2]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float scale = scale_of<fp8>(largest), factor = 1 / scale;
#pragma unroll
        for (int i = 0; i < base::owned / 2; ++i) {
          value[part][i / 2 * 4 + half * 2 + i % 2] *= factor;
        }
        const int row = token + part * 64 + warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0) put_scale(scale, to, row, feature, n);
      }
    }
  }

  // 128 features are a column of two parts, in the hands of eight lanes of each of the four warps,
  // which meet in `exchange`: the half of a buffer that boxes of one-byte elements leave.
  static __device__ __forceinline__ void quantise_columns(values& value, u32 exchange,
                                                          const outputs& to, int block, int token,
                                                          int feature, int n, int barrier_id) {
    constexpr int columns = layout::owned_columns;
    static_assert(4 * columns * 4 <= layout::box_bytes / 2);
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const auto column_of = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };
#pragma unroll
    for (int i = 0; i < base::owned / 2; ++i) {
      float largest = 0;
#pragma unroll
      for (int part = block * 2; part < block * 2 + 2; ++part) {
        largest = fmaxf(largest, fabsf(value[part][i / 2 * 4 + i % 2]));
        largest = fmaxf(largest, fabsf(value[part][i / 2 * 4 + 2 + i % 2]));
      }
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      if (lane < 4) store_shared(exchange + (warp * columns + column_of(i)) * 4, largest);
    }
    named_barrier_sync(barrier_id, 128);
#pragma unroll
    for (int i = 0; i < base::owned / 2; ++i) {
      float largest = 0;
#pragma unroll
      for (int other = 0; other < 4; ++other) {
        largest =
            fmaxf(largest, load_shared_float(exchange + (other * columns + column_of(i)) * 4));
      }
      const float scale = scale_of<fp8>(largest), factor = 1 / scale;
#pragma unroll
      for (int part = block * 2; part < block * 2 + 2; ++part) {
        value[part][i / 2 * 4 + i % 2] *= factor;
        value[part][i / 2 * 4 + 2 + i % 2] *= factor;
      }
      if (warp == 0 && lane < 4) put_scale(scale, to, token + column_of(i), feature, n);
    }
  }

  static __device__ __forceinline__ void put_scale(float scale, const outputs& to, int token,
                                                   int feature, int n) {
    if (token < to.tokens && feature < n) {
      to.scales[static_cast<i64>(token) * blocks_of(n) + feature / scale_block] = scale;
    }
  }

  static __device__ __forceinline__ void put(const values& value, boxes& ring, const outputs& to,
                                             int token, int feature, int box, int barrier_id) {
    const int thread = threadIdx.x % 128;
    const u32 buffer = ring.buffer(ring.take());
    if (thread == 0) tma_store_wait_read<tile.output_boxes - 1>();
    named_barrier_sync(barrier_id, 128);
    wgmma_write_bytes<layout, tile.swapped>(buffer, box, thread, [&](int part, int at) {
      return pack_fp8(value[part][at], value[part][at + 1]);
    });
    async_proxy_fence();
    named_barrier_sync(barrier_id, 128);
    if (thread == 0) {
      tma_store(to.c, buffer, feature + box * layout::box_features, token);
      tma_store_commit();
    }
  }
};

}  // namespace fftune
