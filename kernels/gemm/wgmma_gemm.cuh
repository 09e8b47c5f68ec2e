// C = epilogue(A B1^T[, A B2^T]) with TMA and wgmma, for sm_90a.
//
// A [m, k], B [n, k], a C [m, n] for each output, row-major, through tensor maps with 128-byte
// swizzled boxes of 64 elements of k.
//
// Blocks are specialised by warpgroup. One thread of the producer warpgroup keeps a ring of k tiles
// filled; the consumer warpgroups multiply. Cooperative: the consumers split every tile. Ping-pong:
// each of two consumers owns whole tiles in turn, so that one multiplies while the other runs its
// epilogue.
//
// In a cluster of cluster_m x cluster_n blocks, side by side along m and n, the blocks of one tile
// row each load a share of its A and multicast it to the others, and those of one tile column its
// B: less traffic from L2. Or, where tiles are too few to fill the device, the blocks of a cluster
// share the k of one tile.
//
// B is a weight, which no kernel before this one writes: its first tiles are fetched before the
// wait for those.
#pragma once

#include "common/dependency.cuh"
#include "common/wgmma.cuh"
#include "gemm/wgmma_ring.cuh"
#include "gemm/wgmma_store.cuh"

namespace fftune {

template <class T, class Epilogue, wgmma_tile tile>
class wgmma_gemm {
  static constexpr int products = Epilogue::products;

 public:
  using layout = wgmma_layout<tile, products>;

  struct maps {
    const tensor_map& a;
    const tensor_map& b0;
    const tensor_map& b1;  // unused with one product
    wgmma_outputs c;
  };

 private:
  using ring = wgmma_ring<tile.stages, layout::stage_bytes>;
  using schedule = wgmma_schedule<tile>;
  using store = wgmma_store<T, Epilogue, tile>;
  using sums = typename store::sums;

  // Registers move from the producer, which needs few, to the consumers, whose accumulators need
  // many.
  static constexpr int producer_registers = tile.consumers == 3 ? 32 : 40;
  static constexpr int consumer_registers = tile.consumers == 3 ? 160 : 232;

  template <int sharers>
  static __device__ __forceinline__ void load(u32 to, const tensor_map& map, u32 barrier, int k,
                                              int row, u16 blocks, l2_policy policy) {
    if constexpr (sharers == 1) {
      tma_load(to, map, barrier, k, row, policy);
    } else {
      tma_load_multicast(to, map, barrier, k, row, blocks, policy);
    }
  }

  // Fills slots with this block's shares: part j of its tile row's A, part i of its tile column's
  // B, for block (i, j).
  struct loader {
    static constexpr int a_share = tile.bm / tile.cluster_n, b_share = tile.bn / tile.cluster_m;
    // Few tokens: a weight is read once in all, so it should leave the L2 first.
    static constexpr l2_policy b_policy =
        tile.swapped ? l2_policy::evict_first : l2_policy::evict_normal;
    const maps& map;
    u32 i, j;
    u16 row_blocks, column_blocks;

    __device__ __forceinline__ loader(const maps& all, u32 rank)
        : map(all), i(0), j(0), row_blocks(1), column_blocks(1) {
      if constexpr (tile.split_k == 1) {
        i = rank / tile.cluster_n, j = rank % tile.cluster_n;
        row_blocks = static_cast<u16>(((1 << tile.cluster_n) - 1) << i * tile.cluster_n);
        column_blocks = 0;
#pragma unroll
        for (int block = 0; block < tile.cluster_m; ++block) {
          column_blocks |= static_cast<u16>(1 << (block * tile.cluster_n + j));
        }
      }
    }
    __device__ __forceinline__ void load_a(u32 slot, u32 full, int k, tile_position at) const {
      load<tile.cluster_n>(slot + j * a_share * layout::bk * 2, map.a, full, k,
                           at.m * tile.bm + j * a_share, row_blocks, l2_policy::evict_normal);
    }
    __device__ __forceinline__ void load_b(u32 slot, u32 full, int k, tile_position at) const {
#pragma unroll
      for (int product = 0; product < products; ++product) {
        load<tile.cluster_m>(
            slot + layout::a_bytes + product * layout::b_bytes + i * b_share * layout::bk * 2,
            product == 0 ? map.b0 : map.b1, full, k, at.n * tile.bn + i * b_share, column_blocks,
            b_policy);
      }
    }
  };

  static __device__ __forceinline__ void produce(const maps& map, const wgmma_gemm_shape& shape,
                                                 ring pipe, u32 rank) {
    const k_range range = wgmma_k_range<tile>(shape.k, rank);
    const loader source(map, rank);
    schedule work(shape);
    // The ring is empty: fill it with weights, then wait for the activations to be there.
    const int early =
        range.last - range.first < tile.stages ? range.last - range.first : tile.stages;
    if (work.pending()) {
      const tile_position at = work.position(rank);
      for (int slot = 0; slot < early; ++slot) {
        barrier_arrive_expect(pipe.full + slot * 8, layout::stage_bytes);
        source.load_b(pipe.slots + slot * layout::stage_bytes, pipe.full + slot * 8,
                      (range.first + slot) * layout::bk, at);
      }
    }
    wait_for_dependencies();
    int fetched = early;
    for (; work.pending(); work.advance(1)) {
      const tile_position at = work.position(rank);
      for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
        const u32 slot = pipe.slot(), full = pipe.full_barrier();
        if (fetched > 0) {
          --fetched;
        } else {
          barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
          barrier_arrive_expect(full, layout::stage_bytes);
          source.load_b(slot, full, tile_k * layout::bk, at);
        }
        source.load_a(slot, full, tile_k * layout::bk, at);
      }
    }
    // A block may not exit while peers still multicast into it or signal its barriers.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) {
      for (int stage = 0; stage < tile.stages; ++stage, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
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

  static __device__ __forceinline__ void multiply(sums& sum, u32 slot, u32 first_row,
                                                  int accumulate) {
    const u64 a = wgmma_descriptor(slot + (tile.swapped ? 0 : first_row * 128));
    const u64 b = wgmma_descriptor(slot + layout::a_bytes + (tile.swapped ? first_row * 128 : 0));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < layout::bk / 16; ++step) {
#pragma unroll
      for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
        for (int product = 0; product < products; ++product) {
          const int row_offset = (part * 64 * 128 >> 4) + step * 2,
                    product_offset = product * layout::b_bytes >> 4;
          if constexpr (tile.swapped) {
            wgmma<T, tile.bm>(sum[product][part], b + product_offset + row_offset, a + step * 2,
                              step > 0 ? 1 : accumulate);
          } else {
            wgmma<T, tile.bn>(sum[product][part], a + row_offset, b + product_offset + step * 2,
                              step > 0 ? 1 : accumulate);
          }
        }
      }
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void main_loop(sums& sum, ring& pipe, int k_tiles,
                                                   u32 first_row, u32 rank) {
    u32 previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, pipe.advance()) {
      barrier_wait(pipe.full_barrier(), pipe.parity);
      multiply(sum, pipe.slot(), first_row, k_tile > 0);
      if (k_tile > 0) {
        wgmma_wait<1>();  // the group before this one has read its slot
        release(previous, rank);
      }
      previous = pipe.empty_barrier();
    }
    wgmma_wait<0>();
    release(previous, rank);
  }

  static __device__ __forceinline__ void consume(const maps& map, const wgmma_gemm_shape& shape,
                                                 ring pipe, u32 base, u32 rank, int consumer) {
    const k_range range = wgmma_k_range<tile>(shape.k, rank);
    const int k_tiles = range.last - range.first;
    const int first_row = tile.ping_pong ? 0 : consumer * layout::consumer_rows;
    typename store::boxes boxes{
        base + layout::output_at + consumer * tile.output_boxes * layout::box_bytes,
        base + layout::output_barriers_at + consumer * tile.output_boxes * 8};
    schedule work(shape);
    if constexpr (tile.ping_pong) {
      if (consumer == 1) {
        work.advance(1);
        pipe.skip(k_tiles);
        named_barrier_arrive(4, 256);  // the first consumer multiplies first
      }
    }
    constexpr u32 turn = tile.ping_pong ? 2 : 1;
    alignas(16) sums sum;
    for (; work.pending(); work.advance(turn)) {
      const tile_position at = work.position(rank);
      int token = at.m * tile.bm, feature = at.n * tile.bn;
      (tile.swapped ? feature : token) += first_row;
      if constexpr (Epilogue::adds_residual) {
        const int share = tile.split_k > 1 ? rank * layout::owned_columns : 0;
        if (rank < layout::owners || tile.split_k == 1) {
          store::fetch_residual(boxes, map.c, token + (tile.swapped ? share : 0),
                                feature + (tile.swapped ? 0 : share));
        }
      }
      if constexpr (tile.ping_pong) named_barrier_sync(4 + consumer, 256);
      main_loop(sum, pipe, k_tiles, first_row, rank);
      if constexpr (tile.ping_pong) {
        named_barrier_arrive(4 + (consumer ^ 1), 256);
        pipe.skip(k_tiles);
      }
      if constexpr (tile.split_k > 1) {
        typename store::owned_sums total;
        store::exchange_sums(sum, total, base + layout::exchange_at, base + layout::sums_barrier_at,
                             rank);
        if (rank >= layout::owners) return;
        (tile.swapped ? token : feature) += rank * layout::owned_columns;
        store::store(total, boxes, map.c, token, feature, shape.n, 1 + consumer);
      } else {
        store::store(sum, boxes, map.c, token, feature, shape.n, 1 + consumer);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }

 public:
  static __device__ __forceinline__ void run(const maps& map, const wgmma_gemm_shape& shape,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    ring pipe{base, base + layout::barriers_at, base + layout::barriers_at + tile.stages * 8};
    const u32 rank = layout::cluster_blocks == 1 ? 0 : cluster_rank();
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < tile.stages; ++stage) {
        barrier_init(pipe.full + stage * 8, 1);
        barrier_init(pipe.empty + stage * 8,
                     (tile.ping_pong ? 1 : tile.consumers) * (tile.cluster_m + tile.cluster_n - 1));
      }
      if constexpr (Epilogue::adds_residual) {
        for (int box = 0; box < layout::output_barriers; ++box) {
          barrier_init(base + layout::output_barriers_at + box * 8, 1);
        }
      }
      if constexpr (tile.split_k > 1) {
        barrier_init(base + layout::sums_barrier_at, 1);
        if (rank < layout::owners) {
          barrier_arrive_expect(base + layout::sums_barrier_at, layout::exchange_bytes);
        }
      }
      barrier_init_fence();
    }
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
      if (threadIdx.x == tile.consumers * 128) produce(map, shape, pipe, rank);
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
