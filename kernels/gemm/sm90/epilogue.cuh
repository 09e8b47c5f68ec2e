// The epilogue of the sm_90a GEMM: from the accumulators of an MMA warpgroup to memory, one subtile
// of C after the other, each through one of the warpgroup's epilogue stages in shared memory.
//
//   accumulators ── visitors ── round ── stmatrix ──> epilogue stage ── TMA store ─────> C
//                      ^                                  ^     └────── scatter rows ──> C
//                      └── ldmatrix ── source, gate, up ──┘ TMA load
//
// The visitors of an element, in their order, are chosen by the form at compile time.
//   Activation:            C = accumulator, or act(gate) ⊙ up (epilogue_ops::value).
//   Save pre-activations:  gate and up are stored values of their own (epilogue_ops::stored).
//   Row broadcasts:        + bias[n], and the others of row_broadcast (form.cuh).
//   Source:                + source[m, n], loaded into the stage that the subtile will take.
//   Quantise:              by the tensor's scale, or by scales of 128 columns, found here.
//   Activation gradient:   d_gate, d_up and hidden, from gate and up (gradient_epilogue).
//
// value_epilogue is all of them but the last. That of a QKV product is in qkv_epilogue.cuh.
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/sm90/config.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace fftune {

// The destination of a warpgroup's share of a tile.
struct output_tile {
  int row, column;  // of C: its first element; row is unused where a table has the rows
  int group, output;
  // Grouped rows: the row of C of each row, in shared memory, null if they are consecutive; the
  // number of rows to store, as the rest is padding; and whether TMA may store whole subtiles,
  // because the padding falls outside of C.
  const u32* table;
  int count;
  bool whole;
};

// Where an MMA warpgroup's share of a work tile goes: from `m` on in its rows, to `column` on.
//
// Dense GEMMs and grouped reductions: a whole tile.
struct whole_tiles {
  template <class Scheduler, class RowIndices>
  static __device__ __forceinline__ output_tile place(const gemm_params&, const Scheduler& work,
                                                      const work_tile& tile, const RowIndices&,
                                                      int m, int column) {
    return {work.row_of_c(tile) + m, column, tile.group, tile.output, nullptr, 0, true};
  }
};
// Grouped rows, C in the sorted order.
template <class Traits>
struct sorted_rows {
  template <class Scheduler, class RowIndices>
  static __device__ __forceinline__ output_tile place(const gemm_params& gemm,
                                                      const Scheduler& work, const work_tile& tile,
                                                      const RowIndices&, int m, int column) {
    const group_tile own = work.rows(tile);
    return consecutive(gemm, own, own.first, m, own.count - m, column);
  }

 protected:
  static __device__ __forceinline__ output_tile consecutive(const gemm_params& gemm,
                                                            const group_tile& own, int first, int m,
                                                            int count, int column) {
    const bool last = first + own.count == gemm.m;  // what follows is no row of C
    return {first + m,
            column,
            0,
            0,
            nullptr,
            count,
            count > 0 && (count >= Traits::plan.subtile_m || last)};
  }
};
// Grouped rows, C in the order of the tokens: the index warp has found the rows.
template <class Traits>
struct scattered_rows : sorted_rows<Traits> {
  template <class Scheduler, class RowIndices>
  static __device__ __forceinline__ output_tile place(const gemm_params& gemm,
                                                      const Scheduler& work, const work_tile& tile,
                                                      const RowIndices& indices, int m,
                                                      int column) {
    const group_tile own = work.rows(tile);
    const int count = own.count - m;
    const tile_rows rows = indices.wait();
    if (!rows.consecutive()) return {0, column, 0, 0, rows.rows + m, count, false};
    return sorted_rows<Traits>::consecutive(gemm, own, rows.first(), m, count, column);
  }
};
template <class Traits>
using destination_of =
    typename choose_type<!Traits::grouped_rows, whole_tiles,
                         typename choose_type<Traits::form.c_sorted, sorted_rows<Traits>,
                                              scattered_rows<Traits>>::type>::type;

// The epilogue stages of a warpgroup. TMA loads a subtile's source into the stage that its result
// will use; the stage's barrier completes when the source has arrived.
template <int count, int bytes>
struct epilogue_stages {
  u32 buffers, barriers;
  u32 index = 0;
  u32 phases = 0;  // one bit a stage

  // The stage to use next.
  __device__ __forceinline__ u32 take() {
    const u32 stage = index;
    index = index + 1 == count ? 0 : index + 1;
    return stage;
  }
  __device__ __forceinline__ u32 buffer(u32 stage) const { return buffers + stage * bytes; }
  __device__ __forceinline__ u32 barrier(u32 stage) const { return barriers + stage * 8; }
  // All threads: until the source is there.
  __device__ __forceinline__ void wait(u32 stage) {
    barrier_wait(barrier(stage), phases >> stage & 1);
    phases ^= 1u << stage;
  }
};

// The swizzle of a subtile with rows of `columns` 16-bit elements permutes the 16-byte chunks of a
// row.
template <int columns>
__device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
  const int swizzle = columns == 64 ? row & 7 : columns == 32 ? row >> 1 & 3 : row >> 2 & 1;
  return row * columns * 2 + ((chunk ^ swizzle) << 4);
}

// From a subtile to rows of C [rows, n], 16 bytes a thread: neighbours take one row.
template <class Traits, int element_bytes = 2>
__device__ __forceinline__ void scatter_rows(const output_tile& to, void* c, u32 buffer, int column,
                                             int n, int thread) {
  constexpr int pairs = Traits::plan.subtile_n * element_bytes / 2, row_chunks = pairs / 8;
  const int chunk = thread % row_chunks, first = column + chunk * (16 / element_bytes);
  if (first >= n) return;
#pragma unroll 4
  for (int row = thread / row_chunks; row < Traits::plan.subtile_m; row += 128 / row_chunks) {
    if (row >= to.count) return;
    const float4 value = load_shared(buffer + chunk_offset<pairs>(row, chunk));
    const u32 target = to.table != nullptr ? to.table[row] : to.row + row;
    *reinterpret_cast<float4*>(static_cast<u8*>(c) +
                               (static_cast<u64>(target) * static_cast<u32>(n) + first) *
                                   element_bytes) = value;
  }
}

__device__ __forceinline__ void store_two_bytes(u32 address, u16 bytes) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bytes) : "memory");
}
// The lower of two bytes.
__device__ __forceinline__ void store_byte(u32 address, u16 bytes) {
  asm volatile("st.shared.b8 [%0], %1;" ::"r"(address), "h"(bytes) : "memory");
}
// The place of byte `column` of row `row` in a subtile of that width, under its swizzle.
template <int row_bytes>
__device__ __forceinline__ u32 byte_place(u32 buffer, int row, int column) {
  static_assert(row_bytes == 64 || row_bytes == 32);
  const int swizzle = row_bytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
  return buffer + row * row_bytes + ((column >> 4 ^ swizzle) << 4) + (column & 15);
}

template <class Traits>
struct value_epilogue {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int b_operands = form.b_operands(), m64_tiles = plan.m64_tiles;
  static constexpr int values = plan.reduced_columns / 2;
  static constexpr bool swap_ab = config.swap_ab();
  static constexpr bool scatters = form.groups == grouping::rows;
  static constexpr bool stacked = form.groups == grouping::reduction && form.stacked;
  static constexpr bool quantises_by_block = form.finds_scales();
  static_assert(!scatters || (!form.adds_source && !form.broadcasts_any()));
  // With swap-AB, warpgroups that have the 128 columns of a scale of C together.
  static constexpr int scale_sharers = swap_ab && plan.warpgroup_rows == 64 ? 2 : 1;
  static_assert(!quantises_by_block ||
                (swap_ab ? plan.warpgroup_rows * scale_sharers % scale_block == 0 &&
                               (scale_sharers == 1 || config.mma_warpgroups == 2)
                         : config.bn == scale_block && config.split_k == 1));
  using ops = epilogue_ops<form>;
  using columns = typename ops::columns;
  using Wide = element_type<form.wide>;
  static constexpr bool prefetches_next = false;
  template <int value>
  using stored_type = element_type<value == 0 ? form.c : form.wide>;
  using fragment = float[m64_tiles][b_operands][values];
  using stages_type = epilogue_stages<config.epilogue_stages, plan.epilogue_stage_bytes>;

  const sm90_params& params;
  const gemm_params& gemm;
  stages_type stages;
  int warpgroup;

  __device__ __forceinline__ value_epilogue(const sm90_params& all, const gemm_params& own_gemm,
                                            u32 base, int own)
      : params(all),
        gemm(own_gemm),
        stages{base + plan.epilogue_at + own * plan.warpgroup_epilogue_bytes,
               base + plan.epilogue_barriers_at + own * config.epilogue_stages * 8},
        warpgroup(own) {}

  // As those of gradient_epilogue.
  static __device__ __forceinline__ void yield_stages() {}
  static __device__ __forceinline__ int source_k_block(int) { return 0; }

  // Prefetches the source of this warpgroup's first subtiles, which store() waits for. Call it
  // before the main loop, so that it overlaps. An earlier kernel may write it: in a parallel block
  // of a layer the one before the last.
  __device__ __forceinline__ void prefetch_source(const output_tile& to) const {
    if (threadIdx.x % 128 != 0) return;
    wait_for_dependencies();
    tma_store_wait_read<0>();
#pragma unroll
    for (int subtile = 0; subtile < config.epilogue_stages; ++subtile) {
      load_source((stages.index + subtile) % config.epilogue_stages, to, subtile);
    }
  }

  __device__ __forceinline__ void store(const fragment& acc, const output_tile& to) {
    if constexpr (quantises_by_block) {
      store_quantised(acc, to);
    } else {
#pragma unroll
      for (int subtile = 0; subtile < plan.subtiles; ++subtile) store_values<0>(acc, to, subtile);
    }
  }

 protected:
  __device__ __forceinline__ void sync_warpgroup() const {
    sync(named_barrier::epilogue, 128, warpgroup);
  }
  template <int value>
  __device__ __forceinline__ const tensor_map& map(const output_tile& to) const {
    return params.out[sm90_out_index(form, value, to.output, stacked ? 0 : to.group)];
  }
  static __device__ __forceinline__ int column_of(const output_tile& to, int subtile) {
    return to.column + subtile * plan.subtile_n;
  }

  // One thread: starts to fill a stage whose last store has been read.
  __device__ __forceinline__ void load_source(u32 stage, const output_tile& to, int subtile) const {
    const tensor_map& map =
        params.source[sm90_out_index(form, 0, to.output, stacked ? 0 : to.group)];
    barrier_arrive_expect(stages.barrier(stage), plan.subtile_bytes);
    if constexpr (stacked) {
      tma_load(stages.buffer(stage), map, stages.barrier(stage), column_of(to, subtile), to.row,
               to.group, l2_policy::evict_first);
    } else {
      tma_load(stages.buffer(stage), map, stages.barrier(stage), column_of(to, subtile), to.row,
               l2_policy::evict_first);
    }
  }
  // One thread.
  template <int value>
  __device__ __forceinline__ void store_subtile(u32 buffer, const output_tile& to,
                                                int subtile) const {
    if constexpr (stacked) {
      tma_store(map<value>(to), buffer, column_of(to, subtile), to.row, to.group);
    } else {
      tma_store(map<value>(to), buffer, column_of(to, subtile), to.row);
    }
  }

  // A subtile of stored value number `value`, then of those after it.
  template <int value>
  __device__ __forceinline__ void store_values(const fragment& acc, const output_tile& to,
                                               int subtile) {
    const int thread = threadIdx.x % 128;
    const u32 stage = stages.take(), buffer = stages.buffer(stage);
    if constexpr (form.adds_source) {
      stages.wait(stage);
    } else {
      if (thread == 0) tma_store_wait_read<config.epilogue_stages - 1>();
      sync_warpgroup();
    }
    if constexpr (sizeof(stored_type<value>) == 1) {
      const float factor = stored_factor();
      write_bytes(buffer, subtile, thread, [&](int m64, int at) {
        float first, next;
        visit<value>(acc, m64, at, first, next);
        if constexpr (ops::scales_c_late) first *= factor, next *= factor;
        return pack_fp8(first, next);
      });
    } else if constexpr (swap_ab) {
      write_swapped<value>(acc, buffer, subtile, thread, column_of(to, subtile));
    } else {
      write<value>(acc, buffer, subtile, thread, column_of(to, subtile));
    }
    if constexpr (scatters) {
      if (to.whole) async_proxy_fence();
      sync_warpgroup();
      if (!to.whole) {
        scatter_rows<Traits, sizeof(stored_type<value>)>(
            to, ops::destination(gemm, value, 0), buffer, column_of(to, subtile), gemm.n, thread);
      }
      if (thread == 0) {
        if (to.whole) store_subtile<value>(buffer, to, subtile);
        tma_store_commit();  // an empty group too: the wait above counts them
      }
    } else {
      async_proxy_fence();
      sync_warpgroup();
      if (thread == 0) {
        store_subtile<value>(buffer, to, subtile);
        tma_store_commit();
        if constexpr (form.adds_source) {
          if (subtile + config.epilogue_stages < plan.subtiles) {
            tma_store_wait_read<0>();
            load_source(stage, to, subtile + config.epilogue_stages);
          }
        }
      }
    }
    if constexpr (value + 1 < form.stored_values()) store_values<value + 1>(acc, to, subtile);
  }

  // For fp8 whose accumulators are stored too: the factor that turns them into elements of C.
  __device__ __forceinline__ float stored_factor() const {
    if constexpr (form.c_quantised && ops::scales_c_late) return 1 / *gemm.c_scale;
    return 1;
  }

  // Two neighbouring accumulators through the activation.
  template <int value>
  static __device__ __forceinline__ void visit(const fragment& acc, int m64, int at, float& first,
                                               float& next) {
    float one[b_operands], other[b_operands];
#pragma unroll
    for (int operand = 0; operand < b_operands; ++operand) {
      one[operand] = acc[m64][operand][at];
      other[operand] = acc[m64][operand][at + 1];
    }
    first = ops::template stored<value>(one);
    next = ops::template stored<value>(other);
  }
  // And through the rounded additions.
  template <int value>
  static __device__ __forceinline__ u32 visit(const fragment& acc, int m64, int at,
                                              const columns& own, u32 source) {
    float first, next;
    visit<value>(acc, m64, at, first, next);
    ops::apply_broadcasts(own, first, next);
    if constexpr (form.adds_source) add_pair<Wide>(first, next, source);
    return pack<stored_type<value>>(first, next);
  }

  // Row broadcasts of two neighbouring columns, or of one of them twice.
  __device__ __forceinline__ columns column_pair(int column) const {
    return column < gemm.n ? ops::columns_from(gemm.broadcasts, column) : columns{};
  }
  __device__ __forceinline__ columns column_twice(int column) const {
    return column < gemm.n ? ops::column_twice(gemm.broadcasts, column) : columns{};
  }

  // Four 8x8 matrices from the accumulators at `at` on, added to the values in place.
  template <int value>
  static __device__ __forceinline__ void write_matrices(const fragment& acc, int m64, int at,
                                                        u32 place, const columns (&own)[4]) {
    u32 old[4] = {};
    if constexpr (form.adds_source) reload_matrices<swap_ab>(place, old);
    const u32 word[4] = {visit<value>(acc, m64, at, own[0], old[0]),
                         visit<value>(acc, m64, at + 2, own[1], old[1]),
                         visit<value>(acc, m64, at + 4, own[2], old[2]),
                         visit<value>(acc, m64, at + 6, own[3], old[3])};
    store_matrices<swap_ab>(place, word);
  }

  // subtile_m rows x subtile_n columns. stmatrix takes a row address from each lane: 16 rows x two
  // 16-byte chunks.
  template <int value>
  __device__ __forceinline__ void write(const fragment& acc, u32 buffer, int subtile, int thread,
                                        int column) const {
    constexpr int steps = plan.subtile_n / 16;
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int m64 = 0; m64 < m64_tiles; ++m64) {
      const int row = m64 * 64 + warp * 16 + (lane & 15);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const int own = column + step * 16 + (lane & 3) * 2;
        const columns low = column_pair(own), high = column_pair(own + 8);
        write_matrices<value>(acc, m64, (subtile * steps + step) * 8,
                              buffer + chunk_offset<plan.subtile_n>(row, step * 2 + (lane >> 4)),
                              {low, low, high, high});
      }
    }
  }

  // subtile_m rows x 64 columns; the accumulators hold columns x rows, which stmatrix transposes.
  // The subtile is the m64 tile.
  template <int value>
  __device__ __forceinline__ void write_swapped(const fragment& acc, u32 buffer, int m64,
                                                int thread, int column) const {
    const int warp = thread / 32, lane = thread % 32;
    constexpr int pairs = plan.subtile_m / 16;
    const int chunk = warp * 2 + (lane >> 3 & 1);
    const int first = column + warp * 16 + (lane >> 2);
    const columns low = column_twice(first), high = column_twice(first + 8);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8;
      write_matrices<value>(acc, m64, pair * 8, buffer + chunk_offset<64>(row, chunk),
                            {low, high, low, high});
    }
    if constexpr (plan.subtile_m % 16 != 0) {
      const int row = pairs * 16 + (lane & 7);
      const u32 place = buffer + chunk_offset<64>(row, chunk);
      u32 word[2] = {};
      if constexpr (form.adds_source) reload_matrices_transposed(place, word);
      word[0] = visit<value>(acc, m64, pairs * 8, low, word[0]);
      word[1] = visit<value>(acc, m64, pairs * 8 + 2, high, word[1]);
      store_matrices_transposed(place, word);
    }
  }

  // A subtile of one-byte elements; finish(m64, at) yields the elements at and at + 1 as two bytes.
  // stmatrix would put four neighbouring bytes where a thread holds two, so these are ordinary
  // stores.
  template <class Finish>
  static __device__ __forceinline__ void write_bytes(u32 buffer, int subtile, int thread,
                                                     const Finish& finish) {
    constexpr int width = plan.subtile_n;
    const int first_row = thread / 32 * 16 + thread % 32 / 4, first_column = thread % 4 * 2;
    if constexpr (swap_ab) {  // columns x rows; the subtile is the m64 tile
#pragma unroll
      for (int at = 0; at < plan.subtile_m / 2; at += 2) {
        const int row = at / 4 * 8 + first_column, column = first_row + (at & 2) * 4;
        const u16 pair = finish(subtile, at);
        store_byte(byte_place<width>(buffer, row, column), pair);
        store_byte(byte_place<width>(buffer, row + 1, column), static_cast<u16>(pair >> 8));
      }
    } else {
#pragma unroll
      for (int m64 = 0; m64 < m64_tiles; ++m64) {
#pragma unroll
        for (int at = 0; at < width / 2; at += 2) {
          const int row = m64 * 64 + first_row + (at & 2) * 4, column = at / 4 * 8 + first_column;
          store_two_bytes(byte_place<width>(buffer, row, column),
                          finish(m64, subtile * width / 2 + at));
        }
      }
    }
  }

  // Scales of 128 columns of a row: C in fp8 and its scales, after
  // gate and up where they are stored.
  using block_values = float[m64_tiles][values];
  static constexpr int of_scale = 2 / scale_sharers;  // with swap-AB: m64 tiles of a scale

  __device__ __forceinline__ void store_quantised(const fragment& acc, const output_tile& to) {
    if constexpr (form.stored_values() > 1) {
#pragma unroll
      for (int subtile = 0; subtile < plan.subtiles; ++subtile) store_values<1>(acc, to, subtile);
      // The subtiles of gate and up fill the whole of a stage.
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
      sync_warpgroup();
    }
    block_values value;
#pragma unroll
    for (int m64 = 0; m64 < m64_tiles; ++m64) {
#pragma unroll
      for (int i = 0; i < values; ++i) {
        float one[b_operands];
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) one[operand] = acc[m64][operand][i];
        value[m64][i] = ops::value(one);
      }
    }
    if constexpr (swap_ab) {
#pragma unroll
      for (int block = 0; block < m64_tiles * scale_sharers / 2; ++block) {
        quantise_columns(value, stages.buffers + plan.subtile_bytes / 2, to, block);
#pragma unroll
        for (int i = 0; i < of_scale; ++i) store_bytes(value, to, block * of_scale + i);
      }
    } else {
      quantise_rows(value, to);
#pragma unroll
      for (int subtile = 0; subtile < plan.subtiles; ++subtile) store_bytes(value, to, subtile);
    }
  }

  // 128 columns of C are a row of an m64 tile, held by four lanes.
  __device__ __forceinline__ void quantise_rows(block_values& value, const output_tile& to) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m64 = 0; m64 < m64_tiles; ++m64) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < values / 2; ++i) {
          largest =
              larger_magnitude::join(largest, fabsf(value[m64][i / 2 * 4 + half * 2 + i % 2]));
        }
        largest = larger_magnitude::join(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = larger_magnitude::join(largest, __shfl_xor_sync(~0u, largest, 2));
        const float scale = scale_of<fp8>(largest), factor = 1 / scale;
#pragma unroll
        for (int i = 0; i < values / 2; ++i) {
          value[m64][i / 2 * 4 + half * 2 + i % 2] *= factor;
        }
        const int row = to.row + m64 * 64 + warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0) store_scale(scale, to, row, to.column);
      }
    }
  }

  // With swap-AB 128 columns of C are a column of two m64 tiles, held by eight lanes of each of the
  // four warps, or of those of two warpgroups. The warps exchange their maxima through `exchange`,
  // the half of a stage that one-byte elements leave free.
  __device__ __forceinline__ void quantise_columns(block_values& value, u32 exchange,
                                                   const output_tile& to, int block) const {
    constexpr int columns = plan.reduced_columns;
    static_assert(5 * columns * 4 <= plan.subtile_bytes / 2);
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const auto column_of = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };
#pragma unroll
    for (int i = 0; i < values / 2; ++i) {
      float largest = 0;
#pragma unroll
      for (int m64 = block * of_scale; m64 < (block + 1) * of_scale; ++m64) {
        largest = larger_magnitude::join(largest, fabsf(value[m64][i / 2 * 4 + i % 2]));
        largest = larger_magnitude::join(largest, fabsf(value[m64][i / 2 * 4 + 2 + i % 2]));
      }
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = larger_magnitude::join(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      if (lane < 4) store_shared(exchange + (warp * columns + column_of(i)) * 4, largest);
    }
    const auto sync_sharers = [&] {
      if constexpr (scale_sharers == 1) {
        sync_warpgroup();
      } else {
        sync(named_barrier::block_scales, 128 * scale_sharers);
      }
    };
    sync_sharers();
    // A thread of each warpgroup finds the scale of a column, and leaves its inverse behind the
    // maxima.
    const u32 first =
        scale_sharers == 1 ? exchange : exchange - warpgroup * plan.warpgroup_epilogue_bytes;
    const u32 factors = exchange + 4 * columns * 4;
    for (int column = threadIdx.x % 128; column < columns; column += 128) {
      float largest = 0;
#pragma unroll
      for (int other = 0; other < 4 * scale_sharers; ++other) {
        largest = larger_magnitude::join(
            largest, load_shared_float(first + other / 4 * plan.warpgroup_epilogue_bytes +
                                       (other % 4 * columns + column) * 4));
      }
      const float scale = scale_of<fp8>(largest);
      store_shared(factors + column * 4, 1 / scale);
      if (scale_sharers == 1 || warpgroup == 0) {
        store_scale(scale, to, to.row + column, to.column + block * scale_block);
      }
    }
    sync_sharers();  // and the other's maxima may be written again
#pragma unroll
    for (int i = 0; i < values / 2; ++i) {
      const float factor = load_shared_float(factors + column_of(i) * 4);
#pragma unroll
      for (int m64 = block * of_scale; m64 < (block + 1) * of_scale; ++m64) {
        value[m64][i / 2 * 4 + i % 2] *= factor;
        value[m64][i / 2 * 4 + 2 + i % 2] *= factor;
      }
    }
  }

  __device__ __forceinline__ void store_scale(float scale, const output_tile& to, int row,
                                              int column) const {
    const gemm_params& p = gemm;
    if ((scatters ? row - to.row < to.count : row < p.m) && column < p.n) {
      p.c_scale[static_cast<i64>(row) * blocks_of(p.n) + column / scale_block] = scale;
    }
  }

  __device__ __forceinline__ void store_bytes(const block_values& value, const output_tile& to,
                                              int subtile) {
    const int thread = threadIdx.x % 128;
    const u32 buffer = stages.buffer(stages.take());
    if (thread == 0) tma_store_wait_read<config.epilogue_stages - 1>();
    sync_warpgroup();
    write_bytes(buffer, subtile, thread,
                [&](int m64, int at) { return pack_fp8(value[m64][at], value[m64][at + 1]); });
    async_proxy_fence();
    sync_warpgroup();
    if constexpr (scatters) {
      if (!to.whole) {
        scatter_rows<Traits, 1>(to, ops::destination(gemm, 0, 0), buffer, column_of(to, subtile),
                                gemm.n, thread);
      }
    }
    if (thread == 0) {
      if (!scatters || to.whole) store_subtile<0>(buffer, to, subtile);
      tma_store_commit();  // an empty group too: the wait above counts them
    }
  }
};

// The activation gradient: subtiles of gate and up come in by TMA while the main loop runs, and
// d_gate and d_up leave from where these were.
//
// Loads begin a few K blocks into the main loop, when the last tile's stores have left the stages
// (source_k_block). Or, in a dense GEMM with enough stages (prefetches_next), subtiles are
// numbered through all tiles in the order in which they are finished, and each is loaded when its
// stage is free, while the next one is finished in another. In ping-pong the warpgroups alternate
// tiles and share the stages; a stage then serves a tile once at most. A wait by parity cannot tell
// a round that has not come from one that is past, so a warpgroup waits for its subtiles only after
// the other one has had all of its own.
template <class Traits>
struct gradient_epilogue {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int m64_tiles = plan.m64_tiles, values = plan.accumulators;
  static constexpr int stored = form.stored_values();  // buffers of a stage: gate, up, hidden
  static constexpr bool scatters = form.groups == grouping::rows;
  static constexpr u32 sharers = config.pingpong() ? config.mma_warpgroups : 1;
  static constexpr u32 shared_stages = config.epilogue_stages * sharers;
  static constexpr bool prefetches_next =
      !scatters && shared_stages >= (config.pingpong() ? plan.subtiles : 2);
  static_assert(!config.swap_ab() && config.split_k == 1);
  using ops = epilogue_ops<form>;
  using T = element_type<form.c>;
  using fragment = float[m64_tiles][1][values];
  using stages_type = epilogue_stages<config.epilogue_stages, plan.epilogue_stage_bytes>;

  const sm90_params& params;
  const gemm_params& gemm;
  stages_type stages;
  int warpgroup;

  __device__ __forceinline__ gradient_epilogue(const sm90_params& all, const gemm_params& own_gemm,
                                               u32 base, int own)
      : params(all), gemm(own_gemm), warpgroup(own) {
    const int owner = prefetches_next && config.pingpong() ? 0 : own;
    stages = {base + plan.epilogue_at + owner * plan.warpgroup_epilogue_bytes,
              base + plan.epilogue_barriers_at + owner * config.epilogue_stages * 8};
  }

  // Ping-pong: the first warpgroup has shared stages first.
  static __device__ __forceinline__ void yield_stages() {
    if (prefetches_next) arrive(named_barrier::source_order, 256);
  }
  // The K block of `count` after whose MMAs the source is prefetched.
  static __device__ __forceinline__ int source_k_block(int count) { return smaller(4, count) - 1; }

  // Prefetches gate and up of this warpgroup's first subtiles, which store() waits for. An earlier
  // kernel may write them.
  __device__ __forceinline__ void prefetch_source(const output_tile& to) const {
    if (threadIdx.x % 128 != 0) return;
    wait_for_dependencies();
    tma_store_wait_read<0>();
#pragma unroll
    for (int subtile = 0; subtile < config.epilogue_stages; ++subtile) {
      load((stages.index + subtile) % config.epilogue_stages, to.column + subtile * plan.subtile_n,
           to.row);
    }
  }

  __device__ __forceinline__ void store(const fragment& acc, const output_tile& to) {
    const int thread = threadIdx.x % 128;
    if constexpr (scatters) {
      if (!to.whole) return store_rows(acc, to);
    }
#pragma unroll
    for (int subtile = 0; subtile < plan.subtiles; ++subtile) {
      const u32 stage = stages.take(), buffer = stages.buffer(stage);
      stages.wait(stage);
      const int column = to.column + subtile * plan.subtile_n;
      finish(acc, buffer, subtile, column, to.row);
      if (thread == 0 && subtile + config.epilogue_stages < plan.subtiles) {
        tma_store_wait_read<0>();
        load(stage, column + config.epilogue_stages * plan.subtile_n, to.row);
      }
    }
  }

  // prefetches_next, for the first tile's warpgroup to call: starts to fill all stages.
  // `tile_after(n)` is the n-th tile after this one, and whether there is one.
  template <class TileAfter>
  __device__ __forceinline__ void prefetch_first(const TileAfter& tile_after) const {
    if (threadIdx.x % 128 != 0) return;
    wait_for_dependencies();
#pragma unroll
    for (u32 number = 0; number < shared_stages; ++number) refill(number, 0, tile_after);
  }

  // prefetches_next: the tile that is `ordinal` among those of the stages. All of its subtiles, but
  // the CTA's first ones, have been asked for when others were done with their stages.
  template <class TileAfter>
  __device__ __forceinline__ void store_and_prefetch(const fragment& acc, u32 ordinal,
                                                     const TileAfter& tile_after) const {
    const bool first = threadIdx.x % 128 == 0;
    bool is_valid;
    const output_tile here = tile_after(0, is_valid);
    if (first) wait_for_dependencies();
    const int turn = config.pingpong() ? ordinal % 2 : 0;
    if constexpr (config.pingpong()) sync(named_barrier::source_order, 256, turn);
#pragma unroll
    for (int subtile = 0; subtile < plan.subtiles; ++subtile) {
      const u32 number = ordinal * plan.subtiles + subtile;
      barrier_wait(stages.barrier(number % shared_stages), number / shared_stages & 1);
      if (config.pingpong() && subtile + 1 == plan.subtiles) {
        arrive(named_barrier::source_order, 256, turn ^ 1);
      }
      finish(acc, stages.buffer(number % shared_stages), subtile,
             here.column + subtile * plan.subtile_n, here.row);
      if (first && subtile > 0) {
        tma_store_wait_read<1>();
        refill(number - 1 + shared_stages, ordinal, tile_after);
      }
    }
    if (first) {
      tma_store_wait_read<0>();
      refill(ordinal * plan.subtiles + plan.subtiles - 1 + shared_stages, ordinal, tile_after);
    }
  }

 private:
  __device__ __forceinline__ void sync_warpgroup() const {
    sync(named_barrier::epilogue, 128, warpgroup);
  }

  __device__ __forceinline__ void load(u32 stage, int column, int row) const {
    const u32 barrier = stages.barrier(stage), buffer = stages.buffer(stage);
    barrier_arrive_expect(barrier, 2 * plan.subtile_bytes);
    tma_load(buffer, params.source[0], barrier, column, row, l2_policy::evict_first);
    tma_load(buffer + plan.subtile_bytes, params.source[1], barrier, column, row,
             l2_policy::evict_first);
  }

  // The stage of the subtile that is `number` among all, if there is a tile for it; `ordinal` is
  // that of tile_after(0).
  template <class TileAfter>
  __device__ __forceinline__ void refill(u32 number, u32 ordinal,
                                         const TileAfter& tile_after) const {
    bool is_valid;
    const output_tile at = tile_after(number / plan.subtiles - ordinal, is_valid);
    if (!is_valid) return;
    const int column = at.column + static_cast<int>(number % plan.subtiles) * plan.subtile_n;
    load(number % shared_stages, column, at.row);
  }

  // One subtile: gate and up in the stage become the stored values, which one thread starts to
  // store.
  __device__ __forceinline__ void finish(const fragment& acc, u32 buffer, int subtile, int column,
                                         int row) const {
    write(acc, buffer, subtile);
    async_proxy_fence();
    sync_warpgroup();
    if (threadIdx.x % 128 != 0) return;
#pragma unroll
    for (int value = 0; value < stored; ++value) {
      tma_store(params.out[value], buffer + value * plan.subtile_bytes, column, row);
    }
    tma_store_commit();
  }

  // A tile whose rows are not those of whole subtiles: the last one of a group would reach into the
  // next.
  __device__ __forceinline__ void store_rows(const fragment& acc, const output_tile& to) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int subtile = 0; subtile < plan.subtiles; ++subtile) {
      const u32 stage = stages.take(), buffer = stages.buffer(stage);
      const int column = to.column + subtile * plan.subtile_n;
      stages.wait(stage);
      write(acc, buffer, subtile);
      sync_warpgroup();
#pragma unroll
      for (int value = 0; value < stored; ++value) {
        scatter_rows<Traits>(to, ops::destination(gemm, value, 0),
                             buffer + value * plan.subtile_bytes, column, gemm.n, thread);
      }
      sync_warpgroup();  // the stage is read: it may be filled again
      if (thread == 0 && subtile + config.epilogue_stages < plan.subtiles) {
        load(stage, column + config.epilogue_stages * plan.subtile_n, to.row);
      }
    }
  }

  // Two neighbouring elements.
  static __device__ __forceinline__ void visit(float first, float next, u32 gate, u32 up,
                                               u32 (&word)[stored]) {
    float gates[2], ups[2], low[stored], high[stored];
    unpack<T>(gate, gates[0], gates[1]);
    unpack<T>(up, ups[0], ups[1]);
    ops::gradient(first, gates[0], ups[0], low);
    ops::gradient(next, gates[1], ups[1], high);
#pragma unroll
    for (int i = 0; i < stored; ++i) word[i] = pack<T>(low[i], high[i]);
  }

  // The place of a thread's row and chunk for stmatrix in a subtile, as in value_epilogue.
  static __device__ __forceinline__ u32 place_of(u32 buffer, int m64, int step) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int row = m64 * 64 + thread / 32 * 16 + (lane & 15);
    return buffer + chunk_offset<plan.subtile_n>(row, step * 2 + (lane >> 4));
  }

  // subtile_m rows x subtile_n columns of each value, 32 columns at a time: of these all of gate
  // and up is loaded first. The loads and stores keep their order, and would wait for each other.
  static __device__ __forceinline__ void write(const fragment& acc, u32 buffer, int subtile) {
    constexpr int all = plan.subtile_n / 16, steps = smaller(all, 2);
#pragma unroll
    for (int first = 0; first < all; first += steps) {
      u32 gate[m64_tiles][steps][4], up[m64_tiles][steps][4];
#pragma unroll
      for (int m64 = 0; m64 < m64_tiles; ++m64) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          const u32 place = place_of(buffer, m64, first + step);
          reload_matrices<false>(place, gate[m64][step]);
          reload_matrices<false>(place + plan.subtile_bytes, up[m64][step]);
        }
      }
#pragma unroll
      for (int m64 = 0; m64 < m64_tiles; ++m64) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          write_matrices(&acc[m64][0][(subtile * all + first + step) * 8], gate[m64][step],
                         up[m64][step], place_of(buffer, m64, first + step));
        }
      }
    }
  }

  // A thread's eight elements of a step, as stmatrix has them.
  static __device__ __forceinline__ void write_matrices(const float* value, const u32 (&gate)[4],
                                                        const u32 (&up)[4], u32 place) {
    u32 result[stored][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 word[stored];
      visit(value[i * 2], value[i * 2 + 1], gate[i], up[i], word);
#pragma unroll
      for (int output = 0; output < stored; ++output) result[output][i] = word[output];
    }
#pragma unroll
    for (int output = 0; output < stored; ++output) {
      store_matrices<false>(place + output * plan.subtile_bytes, result[output]);
    }
  }
};

// The epilogue of a form.
template <class Traits, epilogue_kind kind = Traits::form.epilogue>
struct epilogue_choice {
  using type = value_epilogue<Traits>;
};
template <class Traits>
struct epilogue_choice<Traits, epilogue_kind::activation_gradient> {
  using type = gradient_epilogue<Traits>;
};
template <class Traits>
using epilogue_of = typename epilogue_choice<Traits>::type;

}  // namespace fftune
