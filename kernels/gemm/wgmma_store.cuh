// From the accumulators of the wgmma engine to memory: across the split, through the epilogue, by
// TMA.
#pragma once

#include "common/store_matrix.cuh"
#include "common/tma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/wgmma_bytes.cuh"
#include "gemm/wgmma_outputs.cuh"
#include "gemm/wgmma_tile.cuh"

namespace fftune {

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_store {
  static constexpr int products = Epilogue::products;
  using layout = wgmma_layout<tile, products>;
  static constexpr int values = layout::columns / 2;  // accumulators a thread, product and part
  static constexpr int owned = layout::owned_columns / 2;
  using sums = float[layout::parts][products][values];
  using owned_sums = float[layout::parts][products][owned];
  using boxes = wgmma_boxes<tile.output_boxes, layout::box_bytes>;
  using outputs = wgmma_outputs;
  // The elements of an output: sums that are stored beside one of fp8 are bf16.
  template <int output>
  using element = typename choose_type<output == 0 || sizeof(T) == 2, T, bf16>::type;
  // Whether boxes are filled before they are stored, and after how many k tiles that begins.
  static constexpr bool fetches = Epilogue::adds_residual;
  static constexpr int fetch_after = 0;
  static constexpr bool fetches_ahead = false;

  // Gives every owner its columns of all the blocks' sums, added in the order of the blocks.
  // `exchange` is shared memory for this alone, and `arrived` a barrier that expects all of it: so
  // no block waits for another but for its sums.
  static __device__ __forceinline__ void exchange_sums(const sums& mine, owned_sums& total,
                                                       u32 exchange, u32 arrived, u32 rank) {
    constexpr int vectors = products * layout::parts * owned / 4;
    const u32 thread = threadIdx.x;
    cluster_wait();  // the other blocks have started, and their barriers are there
#pragma unroll
    for (int owner = 0; owner < layout::owners; ++owner) {
      if (owner == static_cast<int>(rank)) continue;
      const u32 from = rank < owner ? rank : rank - 1;  // an owner has no slot for itself
      const u32 to =
          cluster_address(exchange, owner) + (from * vectors * tile.consumers * 128 + thread) * 16;
      const u32 barrier = cluster_address(arrived, owner);
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        const float* value = &mine[vector / (products * owned / 4)][vector / (owned / 4) % products]
                                  [owner * owned + vector % (owned / 4) * 4];
        store_cluster_async(to + vector * tile.consumers * 128 * 16,
                            make_float4(value[0], value[1], value[2], value[3]), barrier);
      }
    }
    if (rank >= layout::owners) return;
    barrier_wait(arrived, 0);
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const int part = vector / (products * owned / 4), product = vector / (owned / 4) % products;
      const int at = vector % (owned / 4) * 4;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int block = 0; block < tile.split_k; ++block) {
        float4 term;
        if (block == static_cast<int>(rank)) {
          term = own(mine[part][product], at, rank);
        } else {
          const u32 slot = block < static_cast<int>(rank) ? block : block - 1;
          term = load_shared(exchange +
                             ((slot * vectors + vector) * tile.consumers * 128 + thread) * 16);
        }
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
      total[part][product][at] = sum.x;
      total[part][product][at + 1] = sum.y;
      total[part][product][at + 2] = sum.z;
      total[part][product][at + 3] = sum.w;
    }
  }

  // Starts to fetch what is added to this consumer's first boxes, for store() to find; in time if
  // it is called before the main loop. `token` and `feature` are as in store().
  static __device__ __forceinline__ void fetch_residual(const boxes& ring, const wgmma_outputs& to,
                                                        int token, int feature) {
    if (threadIdx.x % 128 != 0) return;
    tma_store_wait_read<0>();
#pragma unroll
    for (int box = 0; box < tile.output_boxes; ++box) {
      ring.fetch((ring.index + box) % tile.output_boxes, to.residual,
                 feature + box * layout::box_features, token);
    }
  }

  // Rounds the outputs into shared memory, box by box through a ring of buffers, and starts the
  // stores. `token` and `feature` are the first of this consumer's outputs, `n` the features of C.
  static __device__ __forceinline__ void store(const owned_sums& sum, boxes& ring,
                                               const wgmma_outputs& to, int token, int feature,
                                               int n, int barrier_id) {
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      store_box<0>(sum, ring, to, token, feature, n, box, barrier_id);
    }
  }

 protected:
  template <int output, class Outputs>
  static __device__ __forceinline__ void store_box(const owned_sums& sum, boxes& ring,
                                                   const Outputs& to, int token, int feature, int n,
                                                   int box, int barrier_id) {
    const int thread = threadIdx.x % 128;
    const u32 place = ring.take(), buffer = ring.buffer(place);
    if constexpr (Epilogue::adds_residual) {
      ring.wait(place);
    } else {
      if (thread == 0) tma_store_wait_read<tile.output_boxes - 1>();
      named_barrier_sync(barrier_id, 128);
    }
    if constexpr (sizeof(element<output>) == 1) {
      const float factor = to.factor();
      wgmma_write_bytes<layout, tile.swapped>(buffer, box, thread, [&](int part, int at) {
        return finish_bytes<output>(sum, part, at, factor);
      });
    } else if constexpr (tile.swapped) {
      write_swapped<output>(sum, buffer, box, thread, to.bias, feature + box * layout::box_features,
                            n);
    } else {
      write<output>(sum, buffer, box, thread, to.bias, feature + box * layout::box_features, n);
    }
    async_proxy_fence();
    named_barrier_sync(barrier_id, 128);
    if (thread == 0) {
      tma_store(to.template map<output>(), buffer, feature + box * layout::box_features, token);
      tma_store_commit();
      if constexpr (Epilogue::adds_residual) {
        if (box + tile.output_boxes < layout::boxes) {
          tma_store_wait_read<0>();
          ring.fetch(place, to.residual, feature + (box + tile.output_boxes) * layout::box_features,
                     token);
        }
      }
    }
    if constexpr (output + 1 < Epilogue::outputs) {
      store_box<output + 1>(sum, ring, to, token, feature, n, box, barrier_id);
    }
  }

  // This block's own sums of the columns that it finishes; a register array takes no index known
  // only at run time.
  static __device__ __forceinline__ float4 own(const float (&mine)[values], int at, u32 rank) {
    float4 value = make_float4(mine[at], mine[at + 1], mine[at + 2], mine[at + 3]);
#pragma unroll
    for (int owner = 1; owner < layout::owners; ++owner) {
      if (owner == static_cast<int>(rank)) {
        const float* from = &mine[owner * owned + at];
        value = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    return value;
  }

  // Two neighbouring elements of the bias, or one of them twice.
  static __device__ __forceinline__ u32 bias_pair(const void* bias, int feature, int n) {
    if constexpr (!Epilogue::adds_bias) return 0;
    return feature < n ? *reinterpret_cast<const u32*>(static_cast<const T*>(bias) + feature) : 0;
  }
  static __device__ __forceinline__ u32 bias_twice(const void* bias, int feature, int n) {
    if constexpr (!Epilogue::adds_bias) return 0;
    return feature < n ? static_cast<const T*>(bias)[feature].bits * 0x10001u : 0;
  }

  // Two neighbouring accumulators through the epilogue.
  template <int output>
  static __device__ __forceinline__ void finish(const owned_sums& sum, int part, int at,
                                                float& value, float& next) {
    float first[products], second[products];
#pragma unroll
    for (int product = 0; product < products; ++product) {
      first[product] = sum[part][product][at];
      second[product] = sum[part][product][at + 1];
    }
    value = output_of<Epilogue, output>(first);
    next = output_of<Epilogue, output>(second);
  }
  template <int output>
  static __device__ __forceinline__ u32 finish_pair(const owned_sums& sum, int part, int at,
                                                    u32 bias, u32 residual) {
    float value, next;
    finish<output>(sum, part, at, value, next);
    if constexpr (Epilogue::adds_bias) add_pair<T>(value, next, bias);
    if constexpr (Epilogue::adds_residual) add_pair<T>(value, next, residual);
    return pack<element<output>>(value, next);
  }
  template <int output>
  static __device__ __forceinline__ u16 finish_bytes(const owned_sums& sum, int part, int at,
                                                     float factor) {
    float value, next;
    finish<output>(sum, part, at, value, next);
    if constexpr (Epilogue::outputs > 1) value *= factor, next *= factor;
    return pack_fp8(value, next);
  }

  // Four 8x8 matrices from the accumulators at `at` on, added to what is at their place already.
  template <int output>
  static __device__ __forceinline__ void write_matrices(const owned_sums& sum, int part, int at,
                                                        u32 place, const u32 (&bias)[4]) {
    u32 old[4] = {};
    if constexpr (Epilogue::adds_residual) reload_matrices<tile.swapped>(place, old);
    const u32 word[4] = {finish_pair<output>(sum, part, at, bias[0], old[0]),
                         finish_pair<output>(sum, part, at + 2, bias[1], old[1]),
                         finish_pair<output>(sum, part, at + 4, bias[2], old[2]),
                         finish_pair<output>(sum, part, at + 6, bias[3], old[3])};
    store_matrices<tile.swapped>(place, word);
  }

  // consumer_rows tokens x box_features, under the swizzle of that width. stmatrix takes a row
  // address from each lane: 16 tokens x two 16-byte chunks.
  template <int output>
  static __device__ __forceinline__ void write(const owned_sums& sum, u32 buffer, int box,
                                               int thread, const void* bias, int feature, int n) {
    constexpr int steps = layout::box_features / 16;
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int part = 0; part < layout::parts; ++part) {
      const int row = part * 64 + warp * 16 + (lane & 15);
      const int swizzle = layout::box_features == 64   ? row & 7
                          : layout::box_features == 32 ? row >> 1 & 3
                                                       : row >> 2 & 1;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const int column = feature + step * 16 + (lane & 3) * 2;
        const u32 low = bias_pair(bias, column, n), high = bias_pair(bias, column + 8, n);
        const int chunk = step * 2 + (lane >> 4);
        write_matrices<output>(sum, part, (box * steps + step) * 8,
                               buffer + row * layout::box_features * 2 + ((chunk ^ swizzle) << 4),
                               {low, low, high, high});
      }
    }
  }

  // box_tokens x 64 features; the accumulators hold features x tokens, which stmatrix transposes.
  // `part` is the box.
  template <int output>
  static __device__ __forceinline__ void write_swapped(const owned_sums& sum, u32 buffer, int part,
                                                       int thread, const void* bias, int feature,
                                                       int n) {
    const int warp = thread / 32, lane = thread % 32;
    constexpr int pairs = layout::box_tokens / 16;
    const int chunk = warp * 2 + (lane >> 3 & 1);
    const int first = feature + warp * 16 + (lane >> 2);
    const u32 low = bias_twice(bias, first, n), high = bias_twice(bias, first + 8, n);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8;
      write_matrices<output>(sum, part, pair * 8, buffer + row * 128 + ((chunk ^ (row & 7)) << 4),
                             {low, high, low, high});
    }
    if constexpr (layout::box_tokens % 16 != 0) {
      const int row = pairs * 16 + (lane & 7);
      const u32 place = buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
      u32 word[2] = {};
      if constexpr (Epilogue::adds_residual) reload_matrices_transposed(place, word);
      word[0] = finish_pair<output>(sum, part, pairs * 8, low, word[0]);
      word[1] = finish_pair<output>(sum, part, pairs * 8 + 2, high, word[1]);
      store_matrices_transposed(place, word);
    }
  }
};

}  // namespace fftune
