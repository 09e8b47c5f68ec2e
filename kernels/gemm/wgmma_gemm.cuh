// C = epilogue(A B1^T[, A B2^T]) with TMA and wgmma, for sm_90a.
//
// A [m, k], B [n, k], a C [m, n] for each output, row-major, through tensor maps with 128-byte
// swizzled boxes of 64 elements of k. Operands that lie transposed, [k, m] or [k, n], come in boxes
// of 64 k x 64 elements of the other extent, side by side; wgmma reads either.
//
// Blocks are specialised by warpgroup. Two threads of the producer warpgroup keep a ring of k tiles
// filled; the consumer warpgroups multiply. Cooperative: the consumers split every tile. Ping-pong:
// each of two consumers owns whole tiles in turn, so that one multiplies while the other runs its
// epilogue.
//
// In a cluster of cluster_m x cluster_n blocks, side by side along m and n, the blocks of one tile
// row each load a share of its A and multicast it to the others, and those of one tile column its
// B: less traffic from L2. Or, where tiles are too few to fill the device, the blocks of a cluster
// share the k of one tile.
//
// B is a weight, which no kernel before this one writes: its first tiles are fetched without a wait
// for those.
#pragma once

#include "common/dependency.cuh"
#include "common/wgmma.cuh"
#include "gemm/scales.cuh"
#include "gemm/wgmma_loader.cuh"
#include "gemm/wgmma_promotion.cuh"
#include "gemm/wgmma_ring.cuh"
#include "gemm/wgmma_store_of.cuh"

namespace fftune {

template <class T, class Epilogue, wgmma_tile tile, class Out = T, class Scales = no_scales,
          class Operands = forward_operands>
class wgmma_gemm {
  static constexpr int products = Epilogue::products;
  static constexpr bool a_transposed = Operands::a_transposed,
                        b_transposed = Operands::b_transposed;
  static_assert(!tile.swapped || !(a_transposed || b_transposed));
  static_assert(Operands::terms == 1 || products == 1);
  using store = wgmma_store_of<Out, Epilogue, tile>;

 public:
  using layout = typename store::layout;

  struct maps {
    const tensor_map& a;
    const tensor_map& b0;
    const tensor_map& b1;  // of the second product or term
    typename store::outputs c;
    Scales scales = {};
    const tensor_map* a1 = nullptr;               // of the second term or result
    const typename store::outputs* c1 = nullptr;  // of the second result
  };

 protected:
  static constexpr int bk = 128 / sizeof(T);  // elements of a k tile
  using ring = wgmma_ring<tile.stages, layout::stage_bytes>;
  using schedule = wgmma_schedule<tile>;
  using loader = wgmma_loader<T, products, tile, layout, Operands>;
  using sums = typename store::sums;
  using promotion = wgmma_promotion<T, products, tile, layout, Scales>;

  // Registers move from the producer, which needs few, to the consumers, whose accumulators need
  // many.
  static constexpr int producer_registers = tile.consumers == 3 ? 32 : 40;
  static constexpr int consumer_registers = tile.consumers == 3 ? 160 : 232;

  // The tiles of two results are below each other, in whole clusters.
  static __device__ __forceinline__ u32 result_rows(const wgmma_gemm_shape& shape) {
    return ceil_div(static_cast<u32>(shape.m), static_cast<u32>(tile.bm * tile.cluster_m)) *
           tile.cluster_m;
  }
  static __device__ __forceinline__ schedule schedule_of(const wgmma_gemm_shape& shape) {
    if constexpr (Operands::results == 1) return schedule(shape);
    return schedule(
        {static_cast<int>(2 * result_rows(shape) * tile.bm), shape.n, shape.k, shape.group_m});
  }
  static __device__ __forceinline__ wgmma_result_tile position(const schedule& work,
                                                               const wgmma_gemm_shape& shape,
                                                               u32 rank) {
    tile_position at = work.position(rank);
    bool second = false;
    if constexpr (Operands::results == 2) {
      second = at.m >= result_rows(shape);
      if (second) at.m -= result_rows(shape);
    }
    return {at, second, first_token(at.m * tile.bm, shape.m)};
  }

  // A block that copied only the rows that there are would run ahead of those that share the
  // weights with it: requests that come together are one to the L2, and apart each is one. So the
  // last tile of tokens is a whole one too, and computes some rows again, to the same bits. Not
  // where what is stored is added to what was there: that may be the same memory.
  static __device__ __forceinline__ int first_token(int token, int m) {
    if constexpr (!a_transposed && !store::fetches) {
      if (token < m && token + tile.bm > m) return m > tile.bm ? m - tile.bm : 0;
    }
    return token;
  }

  // The k tiles of this block, over all terms.
  static __device__ __forceinline__ k_range range_of(const wgmma_gemm_shape& shape, u32 rank) {
    if constexpr (Operands::terms == 1) return wgmma_k_range<tile, bk>(shape.k, rank);
    return wgmma_k_range<tile, bk>(ceil_div(shape.k, bk) * bk * Operands::terms, rank);
  }

  // One thread each keeps the ring filled with B and with A: a thread issues a copy every 60 clock
  // cycles or so, and the first copies through a tensor map stall it until the map is there. B's
  // announces the bytes of both, which A's may well have begun to copy.
  static __device__ __forceinline__ void produce_b(const maps& map, const wgmma_gemm_shape& shape,
                                                   ring pipe, u32 rank) {
    const k_range range = range_of(shape, rank);
    const loader source({map.a, map.b0, map.b1, map.a1}, shape.k, rank);
    if constexpr (Operands::b_is_written) wait_for_dependencies();
    for (schedule work = schedule_of(shape); work.pending(); work.advance(1)) {
      const wgmma_result_tile at = position(work, shape, rank);
      for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
        barrier_arrive_expect(pipe.full_barrier(), layout::stage_bytes);
        source.load_b(pipe.slot(), pipe.full_barrier(), tile_k, at);
      }
    }
    // A block may not exit while peers still multicast into it or signal its barriers.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) {
      for (int stage = 0; stage < tile.stages; ++stage, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      }
    }
  }

  static __device__ __forceinline__ void produce_a(const maps& map, const wgmma_gemm_shape& shape,
                                                   ring pipe, u32 rank) {
    const k_range range = range_of(shape, rank);
    const loader source({map.a, map.b0, map.b1, map.a1}, shape.k, rank);
    wait_for_dependencies();
    for (schedule work = schedule_of(shape); work.pending(); work.advance(1)) {
      const wgmma_result_tile at = position(work, shape, rank);
      for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
        source.load_a(pipe.slot(), pipe.full_barrier(), tile_k, at);
      }
    }
  }

  // Tells every block that copies into this slot that this warpgroup is done with it.
  static __device__ __forceinline__ void release(u32 empty_barrier, u32 rank) {
    const u32 thread = threadIdx.x % 128;
    if constexpr (tile.cluster_m * tile.cluster_n == 1) {
      if (thread == 0) barrier_arrive(empty_barrier);
    } else {
      const bool shares = thread / tile.cluster_n == rank / tile.cluster_n ||
                          thread % tile.cluster_n == rank % tile.cluster_n;
      if (thread < layout::cluster_blocks && shares) barrier_arrive_remote(empty_barrier, thread);
    }
  }

  template <bool transposed>
  static __device__ __forceinline__ u64 descriptor(u32 shared) {
    if constexpr (transposed) return wgmma_transposed_descriptor(shared);
    return wgmma_descriptor(shared);
  }

  static __device__ __forceinline__ void multiply(sums& sum, u32 slot, u32 first_row,
                                                  int accumulate) {
    // Rows of a tile are 128 bytes apart, or in slabs of 64 rows of 64 * 128 bytes: the same
    // places.
    const u64 a = descriptor<a_transposed>(slot + (tile.swapped ? 0 : first_row * 128));
    const u64 b =
        descriptor<b_transposed>(slot + layout::a_bytes + (tile.swapped ? first_row * 128 : 0));
    constexpr int a_step = a_transposed ? 16 * 128 >> 4 : 32 >> 4,
                  b_step = b_transposed ? 16 * 128 >> 4 : 32 >> 4;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < layout::row_bytes / 32; ++step) {
#pragma unroll
      for (int part = 0; part < layout::parts; ++part) {
        const int part_offset = part * 64 * 128 >> 4;
        if constexpr (layout::side_by_side) {
          auto& both = reinterpret_cast<float(&)[products * store::values]>(sum[part]);
          wgmma<T, products * tile.bn, a_transposed, b_transposed>(
              both, a + part_offset + step * a_step, b + step * b_step, step > 0 ? 1 : accumulate);
        } else {
#pragma unroll
          for (int product = 0; product < products; ++product) {
            const int product_offset = product * layout::b_bytes >> 4;
            if constexpr (tile.swapped) {
              wgmma<T, tile.bm>(sum[part][product],
                                b + product_offset + part_offset + step * b_step, a + step * a_step,
                                step > 0 ? 1 : accumulate);
            } else {
              wgmma<T, tile.bn, a_transposed, b_transposed>(
                  sum[part][product], a + part_offset + step * a_step,
                  b + product_offset + step * b_step, step > 0 ? 1 : accumulate);
            }
          }
        }
      }
    }
    wgmma_commit();
  }

  // One thread: all barriers of the block. `fills` arrivals fill a slot of the ring.
  static __device__ __forceinline__ void init_barriers(const ring& pipe, u32 base, u32 rank,
                                                       u32 fills) {
    for (int stage = 0; stage < tile.stages; ++stage) {
      barrier_init(pipe.full + stage * 8, fills);
      barrier_init(pipe.empty + stage * 8,
                   (tile.ping_pong ? 1 : tile.consumers) * (tile.cluster_m + tile.cluster_n - 1));
    }
    if constexpr (store::fetches) {
      for (int box = 0; box < layout::output_barriers; ++box) {
        barrier_init(base + layout::output_barriers_at + box * 8, 1);
      }
    }
    if constexpr (tile.split_k > 1) {
      barrier_init(base + layout::sums_barrier_at, 1);
      if (!tile.one_owner && rank < layout::owners) {
        barrier_arrive_expect(base + layout::sums_barrier_at, layout::exchange_bytes);
      }
    }
    barrier_init_fence();
  }

  static __device__ __forceinline__ void prefetch_maps(const maps& map) {
    tma_prefetch(map.b0);
    if constexpr (products * Operands::terms == 2) tma_prefetch(map.b1);
    tma_prefetch(map.a);
    tma_prefetch(map.c.first());
  }

  // Calls `fetch` once, after k tile `fetch_at`. `foreign`: ordinary copies filled the ring, which
  // wgmma does not see without a fence.
  template <class Fetch>
  static __device__ __forceinline__ void main_loop(sums& sum, ring& pipe, int k_tiles,
                                                   u32 first_row, u32 rank, int fetch_at,
                                                   const Fetch& fetch, bool foreign = false) {
    u32 previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, pipe.advance()) {
      barrier_wait(pipe.full_barrier(), pipe.parity);
      if (foreign) async_proxy_fence();
      multiply(sum, pipe.slot(), first_row, k_tile > 0);
      if (k_tile > 0) {
        wgmma_wait<1>();  // the group before this one has read its slot
        release(previous, rank);
      }
      previous = pipe.empty_barrier();
      if constexpr (store::fetch_after > 0) {
        if (k_tile == fetch_at) fetch();
      }
    }
    wgmma_wait<0>();
    release(previous, rank);
  }

  static __device__ __forceinline__ void consume(const maps& map, const wgmma_gemm_shape& shape,
                                                 ring pipe, u32 base, u32 rank, int consumer) {
    const k_range range = range_of(shape, rank);
    const int k_tiles = range.last - range.first;
    const int first_row = tile.ping_pong ? 0 : consumer * layout::consumer_rows;
    const int ring_of = store::fetches_ahead && tile.ping_pong ? 0 : consumer;
    typename store::boxes boxes{
        base + layout::output_at + ring_of * layout::consumer_output_bytes,
        base + layout::output_barriers_at + ring_of * tile.output_boxes * 8};
    schedule work = schedule_of(shape);
    if constexpr (tile.ping_pong) {
      if (consumer == 1) {
        work.advance(1);
        pipe.skip(k_tiles);
        named_barrier_arrive(4, 256);  // the first consumer multiplies first
        if constexpr (store::fetches_ahead) named_barrier_arrive(6, 256);  // and stores first
      }
    }
    constexpr u32 turn = tile.ping_pong ? 2 : 1;
    if constexpr (Scales::in_blocks) wait_for_dependencies();  // it reads scales of A itself
    alignas(16) sums sum;
    for (u32 ordinal = tile.ping_pong ? consumer : 0; work.pending();
         work.advance(turn), ordinal += turn) {
      const wgmma_result_tile at = position(work, shape, rank);
      const typename store::outputs& to = Operands::results == 2 && at.second ? *map.c1 : map.c;
      int token = at.token, feature = at.n * tile.bn;
      (tile.swapped ? feature : token) += first_row;
      const auto place_of = [&](u32 later) {
        schedule then = work;
        then.advance(later);
        const wgmma_result_tile next = position(then, shape, rank);
        return tile_place{then.pending(), static_cast<int>(next.m) * tile.bm + first_row,
                          static_cast<int>(next.n) * tile.bn};
      };
      const auto fetch = [&] {
        if constexpr (store::fetches_ahead) {
          if (ordinal == 0) store::begin(boxes, to, place_of);
        } else if constexpr (store::fetches) {
          const int share = tile.split_k > 1 ? rank * layout::owned_columns : 0;
          if (rank < layout::owners || tile.split_k == 1) {
            store::fetch_residual(boxes, to, token + (tile.swapped ? share : 0),
                                  feature + (tile.swapped ? 0 : share));
          }
        }
      };
      if constexpr (store::fetches && store::fetch_after == 0) fetch();
      if constexpr (tile.ping_pong) named_barrier_sync(4 + consumer, 256);
      if constexpr (Scales::present) {
        promotion::clear(sum);
        const promotion scaled{map.scales, shape, token, feature};
        for (int k_tile = range.first; k_tile < range.last; ++k_tile, pipe.advance()) {
          const typename promotion::factors factors = scaled.factors_of(k_tile);
          barrier_wait(pipe.full_barrier(), pipe.parity);
          promotion::multiply(sum, pipe.slot(), first_row, factors);
          release(pipe.empty_barrier(), rank);
        }
      } else {
        main_loop(sum, pipe, k_tiles, first_row, rank, smaller(store::fetch_after, k_tiles) - 1,
                  fetch);
      }
      if constexpr (tile.ping_pong) {
        named_barrier_arrive(4 + (consumer ^ 1), 256);
        pipe.skip(k_tiles);
      }
      if constexpr (Scales::present)
        promotion::template finish<Epilogue::outputs == 1>(sum, map.scales);
      if constexpr (tile.split_k > 1) {
        typename store::owned_sums total;
        store::exchange_sums(sum, total, base + layout::exchange_at, base + layout::sums_barrier_at,
                             rank);
        if (rank >= layout::owners) return;
        (tile.swapped ? token : feature) += rank * layout::owned_columns;
        store::store(total, boxes, to, token, feature, shape.n, 1 + consumer);
      } else if constexpr (store::fetches_ahead) {
        store::store_ahead(sum, boxes, to, ordinal, place_of, 1 + consumer);
      } else {
        store::store(sum, boxes, to, token, feature, shape.n, 1 + consumer);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

 public:
  static __device__ __forceinline__ void run(const maps& map, const wgmma_gemm_shape& shape,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    ring pipe{base, base + layout::barriers_at, base + layout::barriers_at + tile.stages * 8};
    const u32 rank = layout::cluster_blocks == 1 ? 0 : cluster_rank();
    const int group = threadIdx.x / 128;
    if (threadIdx.x == tile.consumers * 128 + 64) prefetch_maps(map);
    if (threadIdx.x == 0) init_barriers(pipe, base, rank, 1);
    if constexpr (tile.split_k > 1) {
      __syncthreads();
      cluster_arrive();  // a split's blocks need each other only for the sums: they wait there
    } else if constexpr (layout::cluster_blocks > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
    launch_dependents();
    if (group == tile.consumers) {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers));
      if (threadIdx.x == tile.consumers * 128) produce_b(map, shape, pipe, rank);
      if (threadIdx.x == tile.consumers * 128 + 32) produce_a(map, shape, pipe, rank);
      if constexpr (tile.split_k > 1) {
        __syncwarp();
        cluster_wait();
      }
    } else {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers));
      consume(map, shape, pipe, base, rank, group);
    }
  }
};

}  // namespace fftune
