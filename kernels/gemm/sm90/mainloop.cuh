// The main loop of the sm_90a GEMM: the MMAs of an MMA warpgroup over the K blocks of a work tile.
// A main loop knows only pipeline stages and accumulators; hooks do everything else that happens to
// a stage. The variants are types:
//
//   mainloop_of    mma_mainloop, levelled_mainloop, promoting_mainloop (fp8)
//   mma_order_of   cooperative_order, pingpong_order: how the MMA warpgroups share tiles
//   stages_of      tma_stages, gathered_row_stages, token_stages: fences, replay, zero fill
//   terms_of       no_terms, accumulator_terms: row factors and group biases
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/groups.cuh"
#include "gemm/sm90/load.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace fftune {

template <class Traits>
struct mma_mainloop {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int b_operands = form.b_operands(), m64_tiles = plan.m64_tiles;
  static constexpr int values = plan.accumulators;
  using T = element_type<form.ab>;
  using accumulators = accumulators_of<Traits>;
  using stages = pipeline<config.stages, plan.stage_bytes>;

  u32 first_row;  // of the warpgroup, on the 64-row side of the tile
  u32 rank;       // of the CTA in its cluster

  template <class Scheduler>
  __device__ __forceinline__ mma_mainloop(int first, u32 cta, const gemm_params&, u32,
                                          const Scheduler&, const work_tile&)
      : first_row(static_cast<u32>(first)), rank(cta) {}

  // Arrivals of a warpgroup at an empty barrier. MMAs read for all four warps; scales of K blocks
  // are read by each warp itself.
  static constexpr u32 releases = form.scales_k_blocks() ? 4 : 1;

  // Arrives at the empty barrier of this stage in every CTA that loads into it.
  __device__ __forceinline__ void release(u32 empty_barrier) const {
    if constexpr (releases > 1) __syncwarp();
    const u32 thread = threadIdx.x % (128 / releases);
    if constexpr (config.cluster_m * config.cluster_n == 1) {
      if (thread == 0) barrier_arrive(empty_barrier);
    } else {
      const bool shares = thread / config.cluster_n == rank / config.cluster_n ||
                          thread % config.cluster_n == rank % config.cluster_n;
      if (thread < plan.cluster_ctas && shares) barrier_arrive_remote(empty_barrier, thread);
    }
  }

  // Hooks, for each K block, counted from 0: on_full(buffer, k_block): the stage is full, its MMAs
  // come next. on_issued(k_block): they are issued. on_read<pending>(): all but the last `pending`
  // stages have been read by their MMAs, and are released next. on_all_issued(): those of the last
  // K blocks still run.
  template <class Hooks>
  __device__ __forceinline__ void run(accumulators& acc, stages& pipe, const k_range& k,
                                      const Hooks& hooks) const {
    run_columns<plan.columns>(acc, pipe, k.count(), hooks);
  }
  // From accumulators of elements to accumulators of numbers.
  __device__ __forceinline__ void scale(accumulators&) const {}

 protected:
  template <int columns, class Hooks>
  __device__ __forceinline__ void run_columns(accumulators& acc, stages& pipe, int k_blocks,
                                              const Hooks& hooks) const {
    u32 previous = 0;
    for (int k_block = 0; k_block < k_blocks; ++k_block, pipe.advance()) {
      pipe.wait_full();
      hooks.on_full(pipe.buffer(), k_block);
      issue<columns>(acc, pipe.buffer(), k_block > 0);
      if (k_block > 0) {
        wgmma_wait<1>();  // the MMAs before these have read their stage
        hooks.template on_read<1>();
        release(previous);
      }
      previous = pipe.empty_barrier();
      hooks.on_issued(k_block);
    }
    hooks.on_all_issued();
    wgmma_wait<0>();
    hooks.template on_read<0>();
    release(previous);
  }

  template <major layout>
  static __device__ __forceinline__ u64 descriptor(u32 shared) {
    if constexpr (layout == major::mn) return wgmma_transposed_descriptor(shared);
    return wgmma_descriptor(shared);
  }

  // The MMAs of one K block: four k16 steps (k32 of fp8). `columns`: of the MMAs with swap-AB.
  template <int columns>
  __device__ __forceinline__ void issue(accumulators& acc, u32 buffer, int accumulate) const {
    constexpr bool a_mn = form.a_major == major::mn, b_mn = form.b_major == major::mn;
    // Rows of a tile are 128 bytes apart, or in slabs of 64 rows of 64 * 128 bytes: the same
    // places.
    const u64 a = descriptor<form.a_major>(buffer + (config.swap_ab() ? 0 : first_row * 128));
    const u64 b =
        descriptor<form.b_major>(buffer + plan.a_bytes + (config.swap_ab() ? first_row * 128 : 0));
    constexpr int a_step = a_mn ? 16 * 128 >> 4 : 32 >> 4, b_step = b_mn ? 16 * 128 >> 4 : 32 >> 4;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 128 / 32; ++step) {
#pragma unroll
      for (int m64 = 0; m64 < m64_tiles; ++m64) {
        const int m64_offset = m64 * 64 * 128 >> 4;
        if constexpr (plan.fused_b) {
          auto& both = reinterpret_cast<float(&)[b_operands * values]>(acc[m64]);
          wgmma<T, plan.wgmma_columns, a_mn, b_mn>(both, a + m64_offset + step * a_step,
                                                   b + step * b_step, step > 0 ? 1 : accumulate);
        } else {
#pragma unroll
          for (int operand = 0; operand < b_operands; ++operand) {
            const int operand_offset = operand * plan.b_bytes >> 4;
            if constexpr (config.swap_ab()) {
              auto& own = reinterpret_cast<float(&)[columns / 2]>(acc[m64][operand]);
              wgmma<T, columns>(own, b + operand_offset + m64_offset + step * b_step,
                                a + step * a_step, step > 0 ? 1 : accumulate);
            } else {
              wgmma<T, config.bn, a_mn, b_mn>(acc[m64][operand], a + m64_offset + step * a_step,
                                              b + operand_offset + step * b_step,
                                              step > 0 ? 1 : accumulate);
            }
          }
        }
      }
    }
    wgmma_commit();
  }
};

// The main loop of tiles with swap-AB whose rows are nearly equal in number (sm90_levels_tiles):
// the MMAs are as wide as the tile's rows need. Only the accumulators of these rows are written.
template <class Traits>
struct levelled_mainloop : mma_mainloop<Traits> {
  using base = mma_mainloop<Traits>;
  using typename base::accumulators;
  using typename base::stages;
  static constexpr int widest = Traits::plan.columns;

  int rows;

  template <class Scheduler>
  __device__ __forceinline__ levelled_mainloop(int first, u32 cta, const gemm_params& gemm,
                                               u32 scales, const Scheduler& work,
                                               const work_tile& tile)
      : base(first, cta, gemm, scales, work, tile), rows(work.rows(tile).count) {}

  template <class Hooks>
  __device__ __forceinline__ void run(accumulators& acc, stages& pipe, const k_range& k,
                                      const Hooks& hooks) const {
    run_rows<widest>(acc, pipe, k.count(), hooks);
  }

 private:
  template <int most, class Hooks>
  __device__ __forceinline__ void run_rows(accumulators& acc, stages& pipe, int k_blocks,
                                           const Hooks& hooks) const {
    // A main loop for each width takes a tenth of a second to compile. Few groups have less than
    // half a tile.
    constexpr int lower = most - (most > widest / 2 ? 16 : 32);
    if constexpr (lower > 0) {
      if (rows <= lower) return run_rows<lower>(acc, pipe, k_blocks, hooks);
    }
    base::template run_columns<most>(acc, pipe, k_blocks, hooks);
  }
};

// The main loop of fp8: the MMAs of each K block of 128 start from zero, and their fp32 results are
// promoted, scaled where scales are of blocks, into the accumulators in registers. The tensor cores
// keep 13 bits of an accumulator below its largest addend, so that none may grow over more than
// that; and 128 is what a scale of a block is for.
template <class Traits>
struct promoting_mainloop : mma_mainloop<Traits> {
  using base = mma_mainloop<Traits>;
  using typename base::accumulators;
  using typename base::stages;
  using typename base::T;
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int b_operands = base::b_operands, m64_tiles = base::m64_tiles;
  static constexpr int values = base::values;
  static constexpr bool by_block = form.scales == scaling::block;
  static constexpr bool by_channel = form.scales == scaling::channel;
  static constexpr bool by_k_block = form.scales_k_blocks();
  static constexpr bool dense = form.groups == grouping::none;

  const gemm_params& params;
  u32 scales;       // of the first stage, in shared memory
  int row, column;  // of C, or of a group's tile: the first of this warpgroup's outputs
  group_tile tile;  // of grouped rows; dense: all rows

  // `shared`: the address of the first stage's scales.
  template <class Scheduler>
  __device__ __forceinline__ promoting_mainloop(int first, u32 cta, const gemm_params& all,
                                                u32 shared, const Scheduler& work,
                                                const work_tile& at)
      : base(first, cta, all, shared, work, at),
        params(all),
        scales(shared),
        row(at.row + (config.swap_ab() ? 0 : first)),
        column(static_cast<int>(at.n) * config.bn + (config.swap_ab() ? first : 0)),
        tile(work.rows(at)) {}

  // Calls the hook on_full() only.
  template <class Hooks>
  __device__ __forceinline__ void run(accumulators& acc, stages& pipe, const k_range& k,
                                      const Hooks& hooks) const {
#pragma unroll
    for (int i = 0; i < m64_tiles * b_operands * values; ++i) {
      reinterpret_cast<float*>(acc)[i] = 0;
    }
    for (int k_block = k.first; k_block < k.last; ++k_block, pipe.advance()) {
      pipe.wait_full();
      hooks.on_full(pipe.buffer(), k_block);
      promote(acc, pipe);
    }
  }

  // With a scale for each tensor: accumulators of elements become those of numbers. Where C alone
  // is stored, its own scale joins that of the last operand, which every epilogue is linear in.
  __device__ __forceinline__ void scale(accumulators& acc) const {
    if constexpr (by_channel) {
      scale_channels(acc);
    } else if constexpr (!by_block) {
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        float factor = *params.a_scale * *b_scales(operand, 1);
        if (form.c_quantised && !epilogue_ops<form>::scales_c_late && operand == b_operands - 1) {
          factor *= 1.0f / *params.c_scale;
        }
#pragma unroll
        for (int i = 0; i < m64_tiles * values; ++i) {
          acc[i / values][operand][i % values] *= factor;
        }
      }
    }
  }

 private:
  // Factors that a thread multiplies its accumulators of a K block by. For A, one for each of its
  // two rows of an m64 tile, or with swap-AB one for each of its columns; for B, one for each
  // operand and m64 tile.
  static constexpr int a_factors = config.swap_ab() ? values / 2 : 2 * m64_tiles;
  static constexpr int b_factors = config.swap_ab() ? m64_tiles : 1;
  struct block_factors {
    float a[a_factors];
    float b[b_factors][b_operands];
  };
  struct no_factors {};
  using factors = typename choose_type<by_k_block, block_factors, no_factors>::type;

  // The scales of a B operand, of `each` numbers for a group.
  __device__ __forceinline__ const float* b_scales(int operand, i64 each) const {
    const float* const all = operand == 0 ? params.b_scale[0] : params.b_scale[1];
    if constexpr (dense) return all;
    const int matrix = form.b_packing == packing::halves ? 2 * tile.group + operand : tile.group;
    return all + matrix * each;
  }
  // Row of A's scales for a row of this warpgroup's outputs; padding takes the last row's.
  __device__ __forceinline__ int a_place(int own) const {
    if constexpr (dense) {
      return smaller(row + own, params.m - 1);
    } else {
      const int rank = larger(smaller(row + own, tile.count - 1), 0);
      const int sorted = smaller(tile.first + rank, params.m - 1);
      return form.a_scales_sorted ? sorted : params.permutation[sorted];
    }
  }
  static __device__ __forceinline__ int own_row(int i) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    return config.swap_ab() ? i / 2 * 8 + lane % 4 * 2 + i % 2
                            : i / 2 * 64 + warp * 16 + lane / 4 + i % 2 * 8;
  }

  // Scales of channels: those of B's rows, and those of A's unless they are of blocks.
  __device__ __forceinline__ void scale_channels(accumulators& acc) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const auto of_a = [&](int i) {
      return form.a_scaled_by_block ? 1.0f : params.a_scale[a_place(own_row(i))];
    };
    const auto of_b = [&](int operand, int own) {
      const int at = smaller(column + own, params.n - 1);
      return b_scales(operand, params.n)[at];
    };
    if constexpr (config.swap_ab()) {
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        float b[m64_tiles][2];
#pragma unroll
        for (int i = 0; i < 2 * m64_tiles; ++i) {
          b[i / 2][i % 2] = of_b(operand, i / 2 * 64 + warp * 16 + lane / 4 + i % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < a_factors; ++i) {
          const float a = of_a(i);
#pragma unroll
          for (int j = 0; j < 2 * m64_tiles; ++j) {
            acc[j / 2][operand][i / 2 * 4 + j % 2 * 2 + i % 2] *= a * b[j / 2][j % 2];
          }
        }
      }
    } else {
      float a[a_factors];
#pragma unroll
      for (int i = 0; i < a_factors; ++i) a[i] = of_a(i);
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
        for (int j = 0; j < values / 2; ++j) {
          if (j % 2 == 0) asm volatile("" ::: "memory");  // else all scales are loaded at once
          const float b = of_b(operand, j / 2 * 8 + lane % 4 * 2 + j % 2);
#pragma unroll
          for (int i = 0; i < a_factors; ++i) {
            acc[i / 2][operand][j / 2 * 4 + i % 2 * 2 + j % 2] *= a[i] * b;
          }
        }
      }
    }
  }

  // Factors of the K block in a stage.
  __device__ __forceinline__ factors factors_of(u32 stage) const {
    if constexpr (!by_k_block) {
      return {};
    } else {
      const u32 first = config.swap_ab() ? base::first_row : 0;
      factors result;
      const u32 of_a =
          scales + stage * plan.scale_bytes + (config.swap_ab() ? 0 : base::first_row * 4);
      // With swap-AB a thread's columns are neighbours in pairs, which one load of a warp brings.
      if constexpr (config.swap_ab()) {
#pragma unroll
        for (int i = 0; i < a_factors; i += 2) {
          const float2 pair = load_shared_pair(of_a + own_row(i) * 4);
          result.a[i] = pair.x;
          result.a[i + 1] = pair.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < a_factors; ++i) {
          result.a[i] = load_shared_float(of_a + own_row(i) * 4);
        }
      }
      // From the first block of 128 that the tile's columns lie in.
      const u32 behind = (column - first) % scale_block + first;
      const u32 of_b = scales + stage * plan.scale_bytes + config.bm * 4;
#pragma unroll
      for (int i = 0; i < b_factors; ++i) {
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
          if constexpr (by_channel) {
            result.b[i][operand] = 1;
          } else if constexpr (plan.b_scale_blocks == 1) {
            result.b[i][operand] = load_shared_float(of_b + operand * 4);
          } else {
            const u32 block = (behind + i * 64) / scale_block;
            result.b[i][operand] =
                load_shared_float(of_b + (operand * plan.b_scale_blocks + block) * 4);
          }
        }
      }
      return result;
    }
  }

  // A K block, pair by pair of an m64 tile and an operand; then its stage is released.
  __device__ __forceinline__ void promote(accumulators& acc, const stages& pipe) const {
    constexpr int pairs = m64_tiles * b_operands, ahead = plan.promotions - 1;
    const u32 buffer = pipe.buffer(), first_row = base::first_row;
    const u64 a = wgmma_descriptor(buffer + (config.swap_ab() ? 0 : first_row * 128));
    const u64 b =
        wgmma_descriptor(buffer + plan.a_bytes + (config.swap_ab() ? first_row * 128 : 0));
    float partial[plan.promotions][values];
    factors scale;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      multiply(partial[pair % plan.promotions], a, b, pair / b_operands, pair % b_operands);
      if (pair == 0) scale = factors_of(pipe.index);
      if (pair < ahead) continue;
      if (pair < pairs - 1) {
        wgmma_wait<ahead>();
        add(acc, partial, scale, pair - ahead);
      }
    }
    wgmma_wait<0>();
    base::release(pipe.empty_barrier());
#pragma unroll
    for (int pair = pairs - 1 - ahead; pair < pairs; ++pair) add(acc, partial, scale, pair);
  }

  static __device__ __forceinline__ void multiply(float (&partial)[values], u64 a, u64 b, int m64,
                                                  int operand) {
    const int m64_offset = m64 * 64 * 128 >> 4, operand_offset = operand * plan.b_bytes >> 4;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 128 / 32; ++step) {
      if constexpr (config.swap_ab()) {
        wgmma<T, config.bm>(partial, b + operand_offset + m64_offset + step * 2, a + step * 2,
                            step > 0);
      } else {
        wgmma<T, config.bn>(partial, a + m64_offset + step * 2, b + operand_offset + step * 2,
                            step > 0);
      }
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void add(accumulators& acc,
                                             const float (&partial)[plan.promotions][values],
                                             const factors& scale, int pair) {
    const int m64 = pair / b_operands, operand = pair % b_operands;
    add(acc[m64][operand], partial[pair % plan.promotions], scale, m64, operand);
  }

  static __device__ __forceinline__ void add(float (&acc)[values], const float (&partial)[values],
                                             const factors& scale, int m64, int operand) {
    if constexpr (!by_k_block) {
#pragma unroll
      for (int i = 0; i < values; ++i) acc[i] += partial[i];
    } else if constexpr (config.swap_ab()) {
#pragma unroll
      for (int i = 0; i < values; ++i) {
        acc[i] += partial[i] * (scale.a[i / 4 * 2 + i % 2] * scale.b[m64][operand]);
      }
    } else {
      const float factor[2] = {scale.a[m64 * 2] * scale.b[0][operand],
                               scale.a[m64 * 2 + 1] * scale.b[0][operand]};
#pragma unroll
      for (int i = 0; i < values; ++i) acc[i] += partial[i] * factor[i / 2 % 2];
    }
  }
};

template <class Traits>
using mainloop_of = typename choose_type<
    Traits::promotes, promoting_mainloop<Traits>,
    typename choose_type<sm90_levels_tiles(Traits::form, Traits::config), levelled_mainloop<Traits>,
                         mma_mainloop<Traits>>::type>::type;

// --- How the MMA warpgroups share tiles ---

// The MMA warpgroups split each tile.
struct cooperative_order {
  static constexpr u32 step = 1;  // tiles to the next one of a warpgroup

  int warpgroup;

  __device__ __forceinline__ u32 first() const { return 0; }
  template <class Epilogue, class Scheduler, class Pipeline, class RowIndices>
  __device__ __forceinline__ void start(Scheduler&, Pipeline&, RowIndices&) const {}
  __device__ __forceinline__ void before_mmas() const {}
  template <class Scheduler, class Pipeline>
  __device__ __forceinline__ void after_mmas(const Scheduler&, Pipeline&) const {}
};

// Two MMA warpgroups alternate tiles. Each lets the other have the tensor cores after its MMAs.
struct pingpong_order {
  static constexpr u32 step = 2;

  int warpgroup;

  __device__ __forceinline__ u32 first() const { return warpgroup; }
  // The second warpgroup begins with the second tile. The first one has the tensor cores first, and
  // the epilogue stages if they share those.
  template <class Epilogue, class Scheduler, class Pipeline, class RowIndices>
  __device__ __forceinline__ void start(Scheduler& work, Pipeline& pipe,
                                        RowIndices& indices) const {
    if (warpgroup != 1) return;
    work.skip_tile(pipe);
    work.next(1);
    indices.advance(1);
    arrive(named_barrier::mma_order, 256);
    Epilogue::yield_stages();
  }
  __device__ __forceinline__ void before_mmas() const {
    sync(named_barrier::mma_order, 256, warpgroup);
  }
  template <class Scheduler, class Pipeline>
  __device__ __forceinline__ void after_mmas(const Scheduler& work, Pipeline& pipe) const {
    arrive(named_barrier::mma_order, 256, warpgroup ^ 1);
    Scheduler other = work;
    other.next(1);
    other.skip_tile(pipe);
  }
};

template <class Traits>
using mma_order_of =
    typename choose_type<Traits::config.pingpong(), pingpong_order, cooperative_order>::type;

// --- Work on stages beside their MMAs ---

// TMA alone has written the stages.
template <class Traits>
struct tma_stages {
  template <class Replay>
  __device__ __forceinline__ tma_stages(int, bool, const Replay&, int) {}
  __device__ __forceinline__ void on_full(u32, int) const {}
  template <int pending>
  __device__ __forceinline__ void on_read() const {}
};

// Grouped rows that may be gathered: wgmma sees writes of cp.async only after a fence. With A reuse
// the K blocks of gathered rows are stored for the replay.
template <class Traits>
struct gathered_row_stages {
  using replay_type = typename replay_of<Traits>::store;
  bool gathered;
  replay_type replay;

  __device__ __forceinline__ gathered_row_stages(int, bool generic_writes, const replay_type& to,
                                                 int)
      : gathered(generic_writes), replay(to) {}
  __device__ __forceinline__ void on_full(u32 buffer, int k_block) const {
    if (gathered) async_proxy_fence();
    replay.store(buffer, k_block * Traits::plan.bk);
  }
  template <int pending>
  __device__ __forceinline__ void on_read() const {
    replay.template wait_read<pending>();
  }
};

// Tokens of a grouped reduction: rows past the group's last token become zeros.
template <class Traits>
struct token_stages {
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  int tokens;  // from the first K block to the end of the group
  int warpgroup;

  template <class Replay>
  __device__ __forceinline__ token_stages(int left, bool, const Replay&, int own)
      : tokens(left), warpgroup(own) {}
  __device__ __forceinline__ void on_full(u32 buffer, int k_block) const {
    const int count = larger(tokens - k_block * plan.bk, 0);
    if (count < plan.bk) zero_fill(buffer, count);
    if (Traits::gathers) async_proxy_fence();
  }
  template <int pending>
  __device__ __forceinline__ void on_read() const {}

 private:
  // Overwrites with zeros what a stage has from token `count` on: in each slab of 64 elements of
  // either operand a token is a row of 128 bytes. All MMA warpgroups of the tile.
  __device__ __forceinline__ void zero_fill(u32 buffer, int count) const {
    constexpr int threads = (config.pingpong() ? 1 : config.mma_warpgroups) * 128;
    constexpr int slabs = plan.stage_bytes / wgmma_slab_bytes;
    const int thread = config.pingpong() ? threadIdx.x % 128 : threadIdx.x;
    const int vectors = (64 - count) * (128 / 16);  // of a slab
    for (int i = thread; i < slabs * vectors; i += threads) {
      const int slab = i / vectors;
      store_shared(buffer + slab * wgmma_slab_bytes + count * 128 + (i - slab * vectors) * 16,
                   make_float4(0, 0, 0, 0));
    }
    async_proxy_fence();
    sync(named_barrier::zero_fill, threads, config.pingpong() ? warpgroup : 0);
  }
};

template <class Traits>
using stages_of =
    typename choose_type<Traits::reduction, token_stages<Traits>,
                         typename choose_type<Traits::gathers, gathered_row_stages<Traits>,
                                              tma_stages<Traits>>::type>::type;

// --- Terms of accumulators before the epilogue ---

struct no_terms {
  template <class Accumulators, class Scheduler>
  static __device__ __forceinline__ void apply(Accumulators&, const gemm_params&, const Scheduler&,
                                               const work_tile&, int) {}
};

// The factors of rows and the biases of groups (group_terms). The side of the MMAs with 64 rows is
// m, or n with swap-AB: it has the factors or the biases, and their columns have the others.
template <class Traits>
struct accumulator_terms {
  static constexpr sm90_config config = Traits::config;
  static constexpr int b_operands = Traits::form.b_operands(), m64_tiles = Traits::plan.m64_tiles;
  using terms = group_terms<Traits::form>;
  static_assert(!terms::present ||
                (Traits::grouped_rows && Traits::form.c_sorted && !Traits::splits_k));

  template <class Accumulators, class Scheduler>
  static __device__ __forceinline__ void apply(Accumulators& acc, const gemm_params& gemm,
                                               const Scheduler& work, const work_tile& tile,
                                               int first_row) {
    constexpr int eights = Traits::plan.accumulators / 4;  // of the columns of the MMAs
    constexpr bool swap = config.swap_ab();
    const group_tile own = work.rows(tile);
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int first_of_64 = first_row + warp * 16 + lane / 4, first_of_8 = lane % 4 * 2;
    const int first_column = static_cast<int>(tile.n) * config.bn;
    const auto factor = [&](int row) {
      return row < own.count ? terms::factor(gemm, own.first + row) : 0.0f;
    };
    const auto bias = [&](int operand, int column) {
      return terms::bias(gemm, own.group, operand, first_column + column);
    };
    // Terms of the side with 64 rows per m64 tile; a thread has two of them:
    float factors[m64_tiles][2], biases[m64_tiles][2][b_operands];
#pragma unroll
    for (int i = 0; i < 2 * m64_tiles; ++i) {
      const int at = first_of_64 + i / 2 * 64 + i % 2 * 8;
      factors[i / 2][i % 2] = swap ? 0.0f : factor(at);
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
        biases[i / 2][i % 2][operand] = swap ? bias(operand, at) : 0.0f;
      }
    }
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int at = eight * 8 + first_of_8 + next;
        asm volatile("" ::: "memory");  // else all biases are loaded at once, into registers
        const float of_row = swap ? factor(at) : 0.0f;
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
          const float of_column = swap ? 0.0f : bias(operand, at);
#pragma unroll
          for (int i = 0; i < 2 * m64_tiles; ++i) {
            float& value = acc[i / 2][operand][eight * 4 + i % 2 * 2 + next];
            value = swap ? value * of_row + biases[i / 2][i % 2][operand]
                         : value * factors[i / 2][i % 2] + of_column;
          }
        }
      }
    }
  }
};

template <class Traits>
using terms_of = typename choose_type<group_terms<Traits::form>::present, accumulator_terms<Traits>,
                                      no_terms>::type;

}  // namespace fftune
