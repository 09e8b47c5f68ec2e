// From the accumulators of the wgmma engine to memory: across the split, through the epilogue, by
// TMA.
#pragma once

#include "common/store_matrix.cuh"
#include "common/tma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/wgmma_tile.cuh"

namespace fftune {

// Where the outputs of the epilogue go.
struct wgmma_outputs {
  const tensor_map& c;
  const tensor_map& first_sums;  // unused with one output
  const tensor_map& second_sums;

  explicit __device__ __forceinline__ wgmma_outputs(const tensor_map& only)
      : c(only), first_sums(only), second_sums(only) {}
  __device__ __forceinline__ wgmma_outputs(const tensor_map& value, const tensor_map& first,
                                           const tensor_map& second)
      : c(value), first_sums(first), second_sums(second) {}

  template <int output>
  __device__ __forceinline__ const tensor_map& map() const {
    if constexpr (output == 0) {
      return c;
    } else if constexpr (output == 1) {
      return first_sums;
    } else {
      return second_sums;
    }
  }
};

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_store {
  static constexpr int products = Epilogue::products;
  using layout = wgmma_layout<tile, products>;
  static constexpr int values = layout::columns / 2;  // accumulators a thread, product and part
  static constexpr int owned = layout::owned_columns / 2;
  using sums = float[products][layout::parts][values];
  using owned_sums = float[products][layout::parts][owned];

  // Gives every owner its columns of all the blocks' sums, added in the order of the blocks.
  // `exchange` is shared memory that all blocks of the cluster have finished with once they reach
  // the first barrier here. Every thread of the cluster comes here; those outside of the consumers
  // through skip_exchange.
  static __device__ __forceinline__ void exchange_sums(const sums& mine, owned_sums& total,
                                                       u32 exchange, u32 rank) {
    constexpr int vectors = products * layout::parts * owned / 4;
    const u32 thread = threadIdx.x;
    cluster_barrier();
#pragma unroll
    for (int owner = 0; owner < layout::owners; ++owner) {
      if (owner == static_cast<int>(rank)) continue;
      const u32 from = rank < owner ? rank : rank - 1;  // an owner has no slot for itself
      const u32 to =
          cluster_address(exchange, owner) + (from * vectors * tile.consumers * 128 + thread) * 16;
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        const float* value =
            &mine[vector / (layout::parts * owned / 4)][vector / (owned / 4) % layout::parts]
                 [owner * owned + vector % (owned / 4) * 4];
        store_cluster(to + vector * tile.consumers * 128 * 16,
                      make_float4(value[0], value[1], value[2], value[3]));
      }
    }
    cluster_barrier();
    if (rank >= layout::owners) return;
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const int product = vector / (layout::parts * owned / 4),
                part = vector / (owned / 4) % layout::parts;
      const int at = vector % (owned / 4) * 4;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int block = 0; block < tile.split_k; ++block) {
        float4 term;
        if (block == static_cast<int>(rank)) {
          term = own(mine[product][part], at, rank);
        } else {
          const u32 slot = block < static_cast<int>(rank) ? block : block - 1;
          term = load_shared(exchange +
                             ((slot * vectors + vector) * tile.consumers * 128 + thread) * 16);
        }
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
      total[product][part][at] = sum.x;
      total[product][part][at + 1] = sum.y;
      total[product][part][at + 2] = sum.z;
      total[product][part][at + 3] = sum.w;
    }
  }

  static __device__ __forceinline__ void skip_exchange() {
    cluster_barrier();
    cluster_barrier();
  }

  // Rounds the outputs into shared memory, box by box through a ring of buffers, and starts the
  // stores. `next` is the buffer to use next; `token` and `feature` are the first of this
  // consumer's outputs.
  static __device__ __forceinline__ void store(const owned_sums& sum, u32 buffers,
                                               const wgmma_outputs& to, int token, int feature,
                                               int barrier_id, u32& next) {
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      store_box<0>(sum, buffers, to, token, feature, box, barrier_id, next);
    }
  }

 private:
  template <int output>
  static __device__ __forceinline__ void store_box(const owned_sums& sum, u32 buffers,
                                                   const wgmma_outputs& to, int token, int feature,
                                                   int box, int barrier_id, u32& next) {
    const int thread = threadIdx.x % 128;
    const u32 buffer = buffers + next * layout::box_bytes;
    next = next + 1 == tile.output_boxes ? 0 : next + 1;
    if (thread == 0) tma_store_wait_read<tile.output_boxes - 1>();
    named_barrier_sync(barrier_id, 128);
    if constexpr (tile.swapped) {
      write_swapped<output>(sum, buffer, box, thread);
    } else {
      write<output>(sum, buffer, box, thread);
    }
    async_proxy_fence();
    named_barrier_sync(barrier_id, 128);
    if (thread == 0) {
      tma_store(to.template map<output>(), buffer, feature + box * layout::box_features, token);
      tma_store_commit();
    }
    if constexpr (output + 1 < Epilogue::outputs) {
      store_box<output + 1>(sum, buffers, to, token, feature, box, barrier_id, next);
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

  // Two neighbouring accumulators through the epilogue.
  template <int output>
  static __device__ __forceinline__ u32 finish(const owned_sums& sum, int part, int at) {
    float first[products], second[products];
#pragma unroll
    for (int product = 0; product < products; ++product) {
      first[product] = sum[product][part][at];
      second[product] = sum[product][part][at + 1];
    }
    return pack<T>(output_of<Epilogue, output>(first), output_of<Epilogue, output>(second));
  }

  // consumer_rows tokens x box_features, under the swizzle of that width. stmatrix takes a row
  // address from each lane: 16 tokens x two 16-byte chunks.
  template <int output>
  static __device__ __forceinline__ void write(const owned_sums& sum, u32 buffer, int box,
                                               int thread) {
    constexpr int steps = layout::box_features / 16;
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int part = 0; part < layout::parts; ++part) {
      const int row = part * 64 + warp * 16 + (lane & 15);
      const int swizzle = layout::box_features == 64 ? row & 7 : row >> 1 & 3;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const int at = (box * steps + step) * 8;
        const u32 word[4] = {finish<output>(sum, part, at), finish<output>(sum, part, at + 2),
                             finish<output>(sum, part, at + 4), finish<output>(sum, part, at + 6)};
        const int chunk = step * 2 + (lane >> 4);
        store_matrices<false>(buffer + row * layout::box_features * 2 + ((chunk ^ swizzle) << 4),
                              word);
      }
    }
  }

  // box_tokens x 64 features; the accumulators hold features x tokens, which stmatrix transposes.
  // `part` is the box.
  template <int output>
  static __device__ __forceinline__ void write_swapped(const owned_sums& sum, u32 buffer, int part,
                                                       int thread) {
    const int warp = thread / 32, lane = thread % 32;
    constexpr int pairs = layout::box_tokens / 16;
    const int chunk = warp * 2 + (lane >> 3 & 1);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8;
      const u32 word[4] = {
          finish<output>(sum, part, pair * 8), finish<output>(sum, part, pair * 8 + 2),
          finish<output>(sum, part, pair * 8 + 4), finish<output>(sum, part, pair * 8 + 6)};
      store_matrices<true>(buffer + row * 128 + ((chunk ^ (row & 7)) << 4), word);
    }
    if constexpr (layout::box_tokens % 16 != 0) {
      const int row = pairs * 16 + (lane & 7);
      const u32 word[2] = {finish<output>(sum, part, pairs * 8),
                           finish<output>(sum, part, pairs * 8 + 2)};
      store_matrices_transposed(buffer + row * 128 + ((chunk ^ (row & 7)) << 4), word);
    }
  }
};

}  // namespace fftune
