// Sums over the rows of each of two groups, C_g = epilogue(A_g^T B_g), where a mask says of which
// group a row of A and B is: the gradients of two sets of weights, with TMA and wgmma, for sm_90a.
//
// A [k, m] and B [k, n] are row-major, and k, the tokens, is what the mask counts; either may be in
// the order of the groups (sorted_a, sorted_b). The engine of wgmma_gemm.cuh over the tiles of both
// groups' C. A k tile is 64 tokens of one group. TMA copies it where its tokens are neighbours, or
// sorted; else warps gather them: two of the producer warpgroup, or four that are a warpgroup of
// their own. What a group's last k tile has too many, the consumers overwrite with zeros in shared
// memory.
//
// Tokens are added in their order, whatever the mask. A group without tokens has sums of zero.
//
// Blocks that share k share a tile of each group (token_tasks.cuh). Who has a part of a tile that
// it does not finish sends its sums to the one who does, most often while that one is still busy.
#pragma once

#include "gemm/row_tables.cuh"
#include "gemm/token_tasks.cuh"
#include "gemm/wgmma_gather.cuh"
#include "gemm/wgmma_gemm.cuh"
#include "gemm/wgmma_sent_sums.cuh"

namespace fftune {

// The operands of each group's results, of which there are one or two, each with an A and a C of
// its own; and the addresses of what is gathered.
template <class T>
struct token_sum_operands {
  const tensor_map& a;
  const tensor_map& a1;  // of the second result, as the others of that number
  const tensor_map& b;
  const tensor_map& true_c0;
  const tensor_map& true_c1;
  const tensor_map& false_c0;
  const tensor_map& false_c1;
  const tensor_map& true_residual0;  // of the boxes of C; unused where nothing is added
  const tensor_map& true_residual1;
  const tensor_map& false_residual0;
  const tensor_map& false_residual1;
  const u8* mask;
  const T* a_rows;
  const T* b_rows;
};

// Threads of a block with so many gathering warps, and how many blocks fit a multiprocessor.
__host__ __device__ constexpr int token_sum_threads(const wgmma_tile& tile, int gatherers) {
  return wgmma_threads(tile) + (gatherers == 4 ? 128 : 0);
}
__host__ __device__ constexpr int token_sum_blocks(const wgmma_tile& tile, int gatherers) {
  return gatherers == 4 ? 1 : wgmma_blocks_per_multiprocessor(tile, 1);
}

template <class T, class Epilogue, wgmma_tile tile, bool sorted_a, bool sorted_b, int gatherers,
          int results>
class wgmma_token_sum
    : wgmma_gemm<T, Epilogue, tile, T, no_scales, matrix_operands<true, true, 1, 1, true>> {
  using engine =
      wgmma_gemm<T, Epilogue, tile, T, no_scales, matrix_operands<true, true, 1, 1, true>>;
  using typename engine::loader;
  using typename engine::ring;
  using typename engine::sums;
  using store = wgmma_store<T, Epilogue, tile>;
  using operands = token_sum_operands<T>;

 public:
  using typename engine::layout;

 private:
  static_assert(results == 1 || (results == 2 && sorted_a));
  static_assert(gatherers == 2 || (gatherers == 4 && tile.consumers == 2));
  static_assert(tile.one_owner || tile.split_k == 1);
  static constexpr int height = 64;  // tokens of a k tile
  static_assert(engine::bk == height);
  // A warp alone would not find the tokens of one k tile after another in time.
  static constexpr int k_tiles_together = 4;
  using tables = row_tables<height, k_tiles_together>;
  static constexpr int blanking_barrier = 6, groups_barrier = 7;
  // Else all k tiles are copied by TMA, from where the order of the groups has them.
  static constexpr bool finds = !sorted_a || !sorted_b;
  static constexpr int threads = token_sum_threads(tile, gatherers);
  static constexpr int producers = threads / 128 - tile.consumers;  // warpgroups
  static constexpr bool light = token_sum_blocks(tile, gatherers) == 2;
  // Gathering takes more registers than the plain engine's producer has, and accumulators leave
  // them where they are few. A warpgroup more takes its own from the consumers.
  static constexpr int own_sums = layout::parts * store::values;
  static constexpr int producer_registers = producers == 2        ? own_sums > 64 ? 56 : 96
                                            : tile.consumers == 1 ? 80
                                            : tile.consumers == 2 && own_sums >= 192 ? 40
                                                                                     : 56;
  static constexpr int consumer_registers = producers == 2        ? own_sums > 64 ? 200 : 160
                                            : tile.consumers == 3 ? 152
                                            : own_sums < 192      ? 224
                                                                  : 232;
  static_assert(producers == 2 ? own_sums <= 128 && consumer_registers + producer_registers <= 256
                               : wgmma_registers_fit(tile, consumer_registers, producer_registers));

  // Where the threads of the producers begin that each have a part of their own: both operands,
  // gathered or not, and which tokens the k tiles have.
  static constexpr int gather_threads = gatherers * 32;
  static constexpr int operands_thread = gatherers == 4 ? 0 : 32;
  static constexpr int tokens_thread = operands_thread + gather_threads;
  static_assert(tokens_thread + 32 <= producers * 128);
  using tasks = token_tasks<tile, height, results>;
  using sent_sums = wgmma_sent_sums<layout::parts * store::values, tile.consumers * 128>;

  // In shared memory after the engine's: what row_groups needs, and the tables of tokens.
  static constexpr int groups_at = (layout::sums_barrier_at + 8 + 15) / 16 * 16;
  static constexpr int tables_at = groups_at + row_groups::shared_words * 4;

  // The tokens from a k tile of a group on, `most` of them; there are none past the group's last.
  static __device__ __forceinline__ grouped_place place_of(const row_groups& groups, int group,
                                                           int k_tile, int most) {
    const int rank = k_tile * height, left = groups.count(group) - rank;
    return {group, rank, (group == 0 ? 0 : groups.marked()) + rank, smaller(left, most)};
  }

  // The gathering warps: both operands of every k tile. Of what TMA copies the first thread of one
  // has A, that of the other B, and each announces its bytes.
  static __device__ __forceinline__ void produce(const operands& from, const row_groups& groups,
                                                 const wgmma_gemm_shape& shape, ring pipe, u32 rank,
                                                 tables found) {
    const int thread = threadIdx.x - tile.consumers * 128 - operands_thread;
    const bool has_a = thread == 0, has_b = thread == 32;
    const loader source({from.a, from.b, from.b, nullptr}, shape.k, rank);
    for (tasks work(shape); work.pending(); work.advance(1)) {
      const token_task own = work.current(groups, shape, rank);
      const tensor_map& a = results == 2 && own.second ? from.a1 : from.a;
      const int row = own.at.m * tile.bm, column = own.at.n * tile.bn;
      for (int k_tile = own.range.first; k_tile < own.range.last; ++k_tile, pipe.advance()) {
        const int sorted = place_of(groups, own.group, k_tile, height).first;
        const int in_table = (k_tile - own.range.first) % k_tiles_together;
        const tile_rows tokens = finds ? found.wait(in_table) : found.unread();
        const wgmma_gather<height, gather_threads> gather(tokens.rows, thread);
        if (finds && (in_table == k_tiles_together - 1 || k_tile == own.range.last - 1)) {
          found.release();
          found.advance();
        }
        const bool consecutive = !finds || tokens.consecutive();
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
        if (has_a && (sorted_a || consecutive)) {
          barrier_expect(pipe.full_barrier(), layout::a_bytes);
          loader::template load_share<tile.cluster_n, true, loader::a_share>(
              pipe.slot() + source.j * loader::a_share * layout::row_bytes, a, pipe.full_barrier(),
              sorted_a ? sorted : tokens.first(), row + source.j * loader::a_share,
              source.row_blocks, l2_policy::evict_normal);
        }
        if (has_b && (sorted_b || consecutive)) {
          barrier_expect(pipe.full_barrier(), layout::b_bytes);
          loader::template load_share<tile.cluster_m, true, loader::b_share>(
              pipe.slot() + layout::a_bytes + source.i * loader::b_share * layout::row_bytes,
              from.b, pipe.full_barrier(), sorted_b ? sorted : tokens.first(),
              column + source.i * loader::b_share, source.column_blocks, l2_policy::evict_normal);
        }
        __syncwarp();
        if (consecutive) {
          if (thread % 32 == 0) barrier_arrive(pipe.full_barrier(), 32);  // in place of its warp
          continue;
        }
        if constexpr (!sorted_a)
          gather.template copy<tile.bm / 64>(from.a_rows, shape.m, row, pipe.slot());
        if constexpr (!sorted_b)
          gather.template copy<tile.bn / 64>(from.b_rows, shape.n, column,
                                             pipe.slot() + layout::a_bytes);
        barrier_arrive_copied(pipe.full_barrier());
      }
    }
    // A block may not exit while peers still multicast into it or signal its barriers.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) {
      for (int stage = 0; stage < tile.stages; ++stage, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      }
    }
  }

  // One warp.
  static __device__ __forceinline__ void find_tokens(const row_groups& groups,
                                                     const wgmma_gemm_shape& shape, u32 rank,
                                                     tables found) {
    for (tasks work(shape); work.pending(); work.advance(1)) {
      const token_task own = work.current(groups, shape, rank);
      for (int k_tile = own.range.first; k_tile < own.range.last; k_tile += k_tiles_together) {
        found.fill(groups, place_of(groups, own.group, k_tile, tables::rows));
      }
    }
  }

  // Overwrites with zeros what a slot has from token `count` on: in each slab of 64 elements of
  // either operand a token is a row of 128 bytes. All consumers of the tile.
  static __device__ __forceinline__ void blank(u32 slot, int count, int consumer) {
    constexpr int threads = (tile.ping_pong ? 1 : tile.consumers) * 128;
    constexpr int slabs = layout::stage_bytes / wgmma_slab_bytes;
    const int thread = tile.ping_pong ? threadIdx.x % 128 : threadIdx.x;
    const int vectors = (64 - count) * (layout::row_bytes / 16);  // of a slab
    for (int i = thread; i < slabs * vectors; i += threads) {
      const int slab = i / vectors;
      store_shared(
          slot + slab * wgmma_slab_bytes + count * layout::row_bytes + (i - slab * vectors) * 16,
          make_float4(0, 0, 0, 0));
    }
    async_proxy_fence();
    named_barrier_sync(tile.ping_pong ? 1 + consumer : blanking_barrier, threads);
  }

  // As the plain engine's, but that the last k tile, of `tokens` in all, may be a part.
  static __device__ __forceinline__ void main_loop(sums& sum, ring& pipe, const k_range& range,
                                                   int tokens, u32 first_row, u32 rank,
                                                   int consumer) {
    u32 previous = 0;
    for (int k_tile = range.first; k_tile < range.last; ++k_tile, pipe.advance()) {
      barrier_wait(pipe.full_barrier(), pipe.parity);
      const int count = larger(tokens - k_tile * engine::bk, 0);
      if (count < engine::bk) blank(pipe.slot(), count, consumer);
      if (finds) async_proxy_fence();  // its tokens may have been gathered
      engine::multiply(sum, pipe.slot(), first_row, k_tile > range.first);
      if (k_tile > range.first) {
        wgmma_wait<1>();  // the group before this one has read its slot
        engine::release(previous, rank);
      }
      previous = pipe.empty_barrier();
    }
    wgmma_wait<0>();
    engine::release(previous, rank);
  }

  static __device__ __forceinline__ wgmma_outputs outputs_of(const operands& from,
                                                             const token_task& own) {
    const bool second = results == 2 && own.second, marked = own.group == 0;
    const tensor_map& c = second   ? marked ? from.true_c1 : from.false_c1
                          : marked ? from.true_c0
                                   : from.false_c0;
    if constexpr (!Epilogue::adds_residual) return wgmma_outputs(c);
    const tensor_map& residual = second   ? marked ? from.true_residual1 : from.false_residual1
                                 : marked ? from.true_residual0
                                          : from.false_residual0;
    return {c, c, c, residual, nullptr};
  }

  static __device__ __forceinline__ void consume(const operands& from, const row_groups& groups,
                                                 const wgmma_gemm_shape& shape, ring pipe, u32 base,
                                                 u32 rank, int consumer) {
    const int first_row = tile.ping_pong ? 0 : consumer * layout::consumer_rows;
    typename store::boxes boxes{
        base + layout::output_at + consumer * layout::consumer_output_bytes,
        base + layout::output_barriers_at + consumer * tile.output_boxes * 8};
    tasks work(shape);
    // Ping-pong: past the k tiles of the tile that is the other consumer's.
    const auto skip = [&](const tasks& other) {
      if (other.pending()) pipe.skip(other.current(groups, shape, rank).k_tiles());
    };
    if constexpr (tile.ping_pong) {
      if (consumer == 1) {
        skip(work);
        work.advance(1);
        named_barrier_arrive(4, 256);  // the first consumer multiplies first
      }
    }
    constexpr u32 turn = tile.ping_pong ? 2 : 1;
    alignas(16) sums sum;
    bool met = false;
    for (; work.pending(); work.advance(turn)) {
      {
        const token_task own = work.current(groups, shape, rank);
        if (tile.split_k > 1 && own.k_tiles() == 0) continue;
        if constexpr (store::fetches) {
          if (rank == own.owner) {
            store::fetch_residual(boxes, outputs_of(from, own), own.at.m * tile.bm + first_row,
                                  own.at.n * tile.bn);
          }
        }
        if constexpr (tile.ping_pong) named_barrier_sync(4 + consumer, 256);
        main_loop(sum, pipe, own.range, groups.count(own.group), first_row, rank, consumer);
      }
      if constexpr (tile.ping_pong) {
        named_barrier_arrive(4 + (consumer ^ 1), 256);
        tasks next = work;
        next.advance(1);
        skip(next);
      }
      // Once more: until here every register is needed.
      const token_task own = work.current(groups, shape, rank);
      if constexpr (tile.split_k > 1) {
        if (!met) cluster_wait();  // the other blocks have started, and their barriers are there
        met = true;
        auto& mine = reinterpret_cast<float(&)[layout::parts * store::values]>(sum);
        const u32 places = base + layout::exchange_at, arrived = base + layout::sums_barrier_at;
        if (rank != own.owner) {
          sent_sums::send(mine, places, arrived, rank, own.owner);
          continue;
        }
        sent_sums::receive(mine, places, arrived, own.senders, own.owner);
      }
      store::store(sum, boxes, outputs_of(from, own), own.at.m * tile.bm + first_row,
                   own.at.n * tile.bn, shape.n, 1 + consumer);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

 public:
  // Bytes of shared memory after the layout's, 8 of which align.
  static constexpr int more_bytes = 8 + row_groups::shared_words * 4 + tables::bytes;

  // `shape`: C is m x n, and k counts all tokens.
  static __device__ __forceinline__ void run(const operands& from, const wgmma_gemm_shape& shape,
                                             unsigned char* memory) {
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    unsigned char* const aligned = memory + (base - start);
    ring pipe{base, base + layout::barriers_at, base + layout::barriers_at + tile.stages * 8};
    const u32 rank = layout::cluster_blocks == 1 ? 0 : cluster_rank();
    const int producer = threadIdx.x - tile.consumers * 128;  // negative: a consumer
    const tables found(aligned + tables_at, base + tables_at);
    if (producer == 64) {
      tma_prefetch(from.b);
      tma_prefetch(from.a);
      tma_prefetch(from.true_c0);
      tma_prefetch(from.false_c0);
    }
    if (producer == 0) {
      found.init(gatherers);
      engine::init_barriers(pipe, base, rank, gather_threads);
    }
    __syncwarp();
    if constexpr (layout::cluster_blocks > 1) cluster_arrive();
    // The mask is older than the kernel before this one, so it is read without a wait.
    const row_groups groups =
        row_groups::scan<threads>(from.mask, shape.k, reinterpret_cast<u32*>(aligned + groups_at));
    // A split's blocks need each other only for the sums: they wait there.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) cluster_wait();
    launch_dependents();
    const bool looks = producer >= tokens_thread && producer < tokens_thread + 32;
    if (!looks) named_barrier_arrive(groups_barrier, threads);
    wait_for_dependencies();  // all operands may be an earlier kernel's work
    if (producer >= 0) {
      if constexpr (!light)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers));
      if (looks) {
        named_barrier_sync(groups_barrier, threads);
        if constexpr (finds) find_tokens(groups, shape, rank, found);
      } else if (producer >= operands_thread && producer < tokens_thread) {
        produce(from, groups, shape, pipe, rank, found);
      }
      if constexpr (tile.split_k > 1) {
        __syncwarp();
        cluster_wait();
      }
    } else {
      if constexpr (!light)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers));
      consume(from, groups, shape, pipe, base, rank, threadIdx.x / 128);
    }
  }
};

}  // namespace fftune
