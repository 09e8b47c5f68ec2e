// The sm_90a kernel for packed weights: C = epilogue(A B^T) for a B of packed codes with scales
// (gemm/packed/layout.cuh). They are expanded in registers. wgmma takes its operand A from
// registers, so the operands are swapped: weights are the 64 rows of the MMA, tokens its columns.
//
//   warps            MMA warpgroups, [k group][row group]: a row group has `tiles` tiles of 64 rows
//                    of each B, a k group every k_groups-th stage. Then a producer warpgroup, whose
//                    first thread loads by TMA.
//   shared memory    stages of   tokens  [k_blocks][tokens][128 bytes], 128-byte swizzle
//                                codes   [operand][box][16 rows][1 or 2 parts of 512 bytes]
//                                scales  [operand][16 rows][groups][16], then zero points
//                    later the accumulators of k groups; shares of split-K; barriers
//   barriers         full (bytes) and empty (a warp of each row group) of each stage
//   split-K          blockIdx.y is the share of k; the CTAs of a tile are a cluster. Each adds up
//                    its part of the accumulators of all, in order, and stores that part of C. The
//                    others send it theirs; it has room for these beside the stages.
//   tiles            one after the other, without k groups and split-K: the next one's loads run
//                    while the last one is stored. Row groups are some stages behind each other,
//                    so that one multiplies while another stores.
//   dependencies     behind a launch of the plan weights of all stages are on the way before
//                    griddepcontrol.wait, tokens after it; else each stage's tokens follow its
//                    weights, as TMA takes its copies in turn
//
// A warp expands its 16 rows: two k16 steps (a batch) become 8 registers, which two MMAs read while
// the next batch is expanded. Up to 64 tokens a group of k has accumulators of its own, which are
// multiplied by the scale in fp32; with more the operands are. Past the end of k tokens, codes and
// scales are zeros.
//
// One TMA load brings the codes of all rows of a CTA. A bulk copy for each 16 rows took more than
// 50 ns, whatever its size, and was the limit at every number of tokens.
//
// Rows of A in groups that are sorted before, such as those of experts: A is in the sorted order, a
// tile has rows of one group, and begins with the wait where the launch before may be the one that
// sorts (groups_ready). Rows behind its last one are those of the next group, and are not stored.
//
// It is a kernel beside gemm.cu, not a form of it: there both operands come from shared memory, and
// a warpgroup has rows of C; here codes pass through registers on their way to the MMA, a warp has
// its scales beside them, and row groups take turns at whole tiles. Both use the parts of
// common/async.cuh. group_rows.cuh and store_pair.cuh are shared with the decode engine.
//
// A header of another layout, or of another size, makes C NaN.
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "common/wgmma_widths.cuh"
#include "gemm/decode/store_pair.cuh"
#include "gemm/packed/codes.cuh"
#include "gemm/packed/group_rows.cuh"
#include "gemm/sm90/packed_config.cuh"

namespace fftune {

// Instead of cluster_arrive(), where cluster_wait() is for barriers that the other blocks
// initialised, with barrier_init_fence(): no other access is ordered.
__device__ __forceinline__ void cluster_arrive_initialised() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

template <gemm_form form, packed_form format, sm90_packed_config config>
class packed_sm90_kernel {
  using T = element_type<form.ab>;
  using codes = packed_codes<T, format.code>;
  using scale = typename codes::scale;
  using two_scales = typename codes::two_scales;
  using step_codes = typename codes::step_codes;
  static constexpr int operands = form.b_operands(), tiles = config.tiles;
  static constexpr int units = config.units(operands), n_fragments = config.tokens / 8;
  static constexpr int row_groups = config.row_groups, k_groups = config.k_groups;
  static constexpr int k_blocks = config.k_blocks, groups = config.groups(format);
  static constexpr int row_tiles = config.row_tiles(), parts = format.parts();
  static constexpr int stage_parts = config.stage_parts(format);
  static constexpr int box_parts = config.box_parts(format);
  static constexpr int values = config.tokens / 2;  // accumulators of a thread and tile
  static constexpr bool by_row = format.group == 0;
  static constexpr bool scales_operands = config.scales_operands(operands, format);
  static constexpr bool separate_sums = !by_row && !scales_operands;
  // Accumulators are those of packed_codes::scaled_pair.
  static constexpr bool takes_scales = scales_operands && format.takes_scales() && is_same<T, bf16>;
  // Where the parts of a stage begin.
  static constexpr int codes_at = config.token_bytes();
  static constexpr int scales_at = codes_at + config.code_bytes(operands, format);
  static constexpr int zeros_at = scales_at + config.scale_bytes(operands, format);
  static constexpr int stage_bytes = config.stage_bytes(operands, format);
  static constexpr int stages = config.stages(operands, format), splits = config.split_k;
  static constexpr int shares_at = config.shares_at(operands, format);
  static constexpr int arrived_at = config.barriers_at(operands, format) + stages * 16;
  using stage_pipeline = pipeline<stages, stage_bytes>;
  using accumulators = float[units][values];
  static constexpr bool grouped = form.groups == grouping::rows;
  static constexpr bool persistent = config.persistent(operands, format, grouped);
  // Stages from a row group to the next. Loads keep half of them; few tokens wait for these alone.
  static constexpr int lag = persistent && config.tokens > 64 && row_groups > 1
                                 ? stages / 2 / (row_groups - 1)
                                 : 0;
  // Columns of the MMAs of a tile of a group's last rows, where these are few.
  static constexpr int few_columns = config.few_columns(operands, format, grouped);
  static_assert(stages >= 2);

  // A value that all lanes of a warp have, as one that ptxas knows to be so.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

  // Rows of B, those of all groups.
  static __device__ __forceinline__ i64 all_rows(const gemm_params& p) {
    return static_cast<i64>(p.n) * (grouped ? p.groups : 1);
  }

  static __device__ __forceinline__ int row_blocks(const gemm_params& p) {
    return ceil_div(p.n, config.rows());
  }
  static __device__ __forceinline__ int all_token_tiles(const gemm_params& p) {
    if constexpr (grouped) return count_group_tiles(p, config.tokens);
    return ceil_div(p.m, config.tokens);
  }

  // The work of a CTA: columns of C from `column` on, which are rows of B from a tile of 16 on;
  // tokens; and stages [first, last) of k.
  struct cta_tile {
    int work, token_tiles, column, first_tile, first, last;
    group_rows rows;   // the tokens
    l2_policy policy;  // of weights

    __device__ __forceinline__ cta_tile(const gemm_params& p, int all_token_tiles, int at)
        : work(at), token_tiles(all_token_tiles) {
      const int split = static_cast<int>(blockIdx.y);
      const tile_position position = grouped_tile(work, token_tiles, row_blocks(p), p.group_m);
      const int tile = static_cast<int>(position.m);
      first_tile = static_cast<int>(position.n) * row_tiles;
      column = first_tile * packed_rows;
      if constexpr (grouped) {
        rows = find_group_tile(p, tile, config.tokens);
        first_tile += rows.index * (p.n / packed_rows);
      } else {
        rows.first = tile * config.tokens;
        rows.count = smaller(config.tokens, p.m - rows.first);
      }
      policy = token_tiles == 1 ? l2_policy::evict_first : l2_policy::evict_normal;
      const int all = ceil_div(static_cast<int>(packed_k_blocks(p.k)), k_blocks);
      first = all * split / splits, last = all * (split + 1) / splits;
    }
    // The next one of this CTA; false: there is none. All lanes of a warp.
    __device__ __forceinline__ bool advance(const gemm_params& p) {
      if constexpr (!persistent) return false;
      const int next = work + static_cast<int>(gridDim.x);
      if (next >= token_tiles * row_blocks(p)) return false;
      *this = cta_tile(p, token_tiles, next);
      return true;
    }
  };

  // --- The producer warp, whose first lane loads ---

  static __device__ __forceinline__ int scale_column(int stage) {
    return (format.first_group() + stage * k_blocks * packed_k / format.group) * packed_rows;
  }
  // Codes, scales and zero points of a stage. Rows and groups that do not exist are zeros.
  static __device__ __forceinline__ void load_weights(const sm90_packed_params& p,
                                                      const cta_tile& own,
                                                      const stage_pipeline& pipe, int stage) {
    const u32 full = pipe.full_barrier(), buffer = pipe.buffer();
    barrier_arrive_expect(full, config.copied_bytes(operands, format));
    const int block = stage * k_blocks;
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int box = 0; box < stage_parts / box_parts; ++box) {
        tma_load(buffer + codes_at +
                     (operand * stage_parts + box * box_parts) * row_tiles * packed_part_bytes,
                 p.codes[operand], full,
                 (block * parts + box * box_parts) * (packed_part_bytes / 4), own.first_tile,
                 own.policy);
      }
      if constexpr (!by_row) {
        const int column = scale_column(stage);
        const int at = operand * row_tiles * groups * packed_rows;
        tma_load(buffer + scales_at + at * sizeof(scale), p.scales[operand], full, column,
                 own.first_tile, own.policy);
        if constexpr (format.zeros) {
          tma_load(buffer + zeros_at + operand * config.zero_stride(format), p.zeros[operand], full,
                   column, own.first_tile, own.policy);
        }
      }
    }
  }
  static __device__ __forceinline__ void load_tokens(const sm90_packed_params& p,
                                                     const cta_tile& own,
                                                     const stage_pipeline& pipe, int stage) {
#pragma unroll
    for (int i = 0; i < k_blocks; ++i) {
      tma_load(pipe.buffer() + i * config.tokens * 128, p.tokens, pipe.full_barrier(),
               (stage * k_blocks + i) * packed_k, own.rows.first, l2_policy::evict_last);
    }
  }
  static __device__ __forceinline__ void produce(const sm90_packed_params& p, cta_tile own,
                                                 stage_pipeline pipe) {
    const bool loads = is_elected();
    int stage = own.first;
    if (p.packed.loads_early) {
      const int loaded = smaller(own.first + stages, own.last);
      stage_pipeline of_tokens = pipe;
#pragma unroll 1
      for (; stage < loaded; ++stage, pipe.advance()) {
        if (loads) load_weights(p, own, pipe, stage);
      }
      wait_for_dependencies();
#pragma unroll 1
      for (stage = own.first; stage < loaded; ++stage, of_tokens.advance()) {
        if (loads) load_tokens(p, own, of_tokens, stage);
      }
    } else {
      wait_for_dependencies();
    }
    do {
#pragma unroll 1
      for (; stage < own.last; ++stage, pipe.advance()) {
        pipe.wait_empty();
        if (loads) {
          load_weights(p, own, pipe, stage);
          load_tokens(p, own, pipe, stage);
        }
      }
      stage = 0;
    } while (own.advance(p.packed.gemm));
  }

  // --- The MMA warpgroups ---

  struct warp_place {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int warpgroup = uniform(threadIdx.x / 128);
    int row_group = warpgroup % row_groups, k_group = warpgroup / row_groups;

    // A tile of 16 rows of the CTA's, of each B.
    __device__ __forceinline__ int tile(int i) const { return (row_group * tiles + i) * 4 + warp; }
  };

  // Scales of this lane's two rows, and the addends of their codes.
  struct row_terms {
    two_scales scales;
    u32 offsets[2];

    __device__ __forceinline__ void set(two_scales of_rows, u32 zero_points) {
      scales = of_rows;
      offsets[0] = codes::template offset<0>(format.zeros ? zero_points & 15 : 8);
      offsets[1] = codes::template offset<1>(format.zeros ? zero_points >> 8 & 15 : 8);
    }
  };
  static __device__ __forceinline__ void load_terms(row_terms& terms, u32 buffer, int operand,
                                                    int tile, int group, int lane) {
    const int in_operand = (tile * groups + group) * packed_rows;
    const int at = operand * row_tiles * groups * packed_rows + in_operand;
    const auto bytes_of_rows = [&](u32 from) {  // of two rows, a byte each
      return load_shared_word(from + lane / 8 * 4) >> lane / 4 % 2 * 16;
    };
    two_scales scales;
    u32 zeros = 0;
    if constexpr (sizeof(scale) == 1) {
      scales = bytes_of_rows(buffer + scales_at + at);
    } else if constexpr (sizeof(scale) == 4) {
      const float2 both = load_shared_pair(buffer + scales_at + at * 4 + lane / 4 * 8);
      scales = static_cast<u64>(__float_as_uint(both.y)) << 32 | __float_as_uint(both.x);
    } else {
      scales = load_shared_word(buffer + scales_at + at * sizeof(scale) + lane / 4 * 4);
    }
    if constexpr (format.zeros) {
      zeros = bytes_of_rows(buffer + zeros_at + operand * config.zero_stride(format) + in_operand);
    }
    terms.set(scales, zeros);
  }
  // The tile of 16 rows that a unit has; the last one stands for those behind it.
  static __device__ __forceinline__ i64 tile_of(const packed_params& p, const cta_tile& own,
                                                const warp_place& place, int unit) {
    const int last_tile = static_cast<int>(packed_tiles(all_rows(p.gemm))) - 1;
    return smaller(own.first_tile + place.tile(unit % tiles), last_tile);
  }
  // The scales of rows beside those of their groups.
  static __device__ __forceinline__ void load_row_scales(float2 (&scales)[units],
                                                         const packed_params& p,
                                                         const cta_tile& own,
                                                         const warp_place& place) {
#pragma unroll
    for (int unit = 0; unit < units; ++unit) {
      const u16* const of_tile = static_cast<const u16*>(p.scales[unit / tiles]) +
                                 tile_of(p, own, place, unit) * p.groups * packed_rows;
      scales[unit] = *reinterpret_cast<const float2*>(of_tile + place.lane / 4 * 4);
    }
  }
  // The terms of whole rows.
  static __device__ __forceinline__ void load_row_terms(row_terms (&terms)[units],
                                                        const packed_params& p, const cta_tile& own,
                                                        const warp_place& place) {
#pragma unroll
    for (int unit = 0; unit < units; ++unit) {
      const int operand = unit / tiles;
      const i64 at = tile_of(p, own, place, unit) * packed_rows + place.lane / 4 * 2;
      const scale* const scales = static_cast<const scale*>(p.scales[operand]) + at;
      u32 zeros = 0;
      if constexpr (format.zeros) zeros = *reinterpret_cast<const u16*>(p.zeros[operand] + at);
      terms[unit].set(*reinterpret_cast<const two_scales*>(scales), zeros);
    }
  }

  // The operand of k16 step 0 or 1 of a batch. Registers 0 and 2 are of the first row, 1 and 3 of
  // the second.
  static __device__ __forceinline__ void expand(u32 (&a)[4], const step_codes& word, int step,
                                                const row_terms& terms) {
    if constexpr (takes_scales) {
      a[0] = codes::template scaled_pair<0>(word, terms.scales);
      a[1] = codes::template scaled_pair<1>(word, terms.scales);
      a[2] = codes::template scaled_pair<2>(word, terms.scales);
      a[3] = codes::template scaled_pair<3>(word, terms.scales);
      return;
    }
    a[0] = codes::template pair<0>(word, terms.offsets[0]);
    a[1] = codes::template pair<1>(word, terms.offsets[1]);
    a[2] = codes::template pair<2>(word, terms.offsets[0]);
    a[3] = codes::template pair<3>(word, terms.offsets[1]);
    if constexpr (scales_operands) {
      const auto first = codes::twice(terms.scales, 0, step);
      const auto second = codes::twice(terms.scales, 1, step);
      a[0] = multiply_pairs<T>(a[0], first);
      a[1] = multiply_pairs<T>(a[1], second);
      a[2] = multiply_pairs<T>(a[2], first);
      a[3] = multiply_pairs<T>(a[3], second);
    }
  }
  static __device__ __forceinline__ void add_scaled(float (&sum)[values],
                                                    const float (&part)[values],
                                                    two_scales scales) {
    float first, second;
    codes::values(scales, first, second);
#pragma unroll
    for (int i = 0; i < values; ++i) sum[i] += part[i] * (i % 4 < 2 ? first : second);
  }
  static __device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  // The MMAs of a stage. Without separate sums its last batch is still running at the end: then
  // `previous` is the empty barrier of this warpgroup's stage before, or 0, which is released.
  template <int columns>
  static __device__ __forceinline__ void multiply(accumulators& sum, row_terms (&terms)[units],
                                                  u32 buffer, u32 previous,
                                                  const warp_place& place) {
    constexpr int steps = k_blocks * 4, runs = by_row ? 1 : groups, batches = steps / runs / 2;
    const u64 tokens = wgmma_descriptor(buffer);
    vector16 words[units][stage_parts];
#pragma unroll
    for (int unit = 0; unit < units; ++unit) {
#pragma unroll
      for (int i = 0; i < stage_parts; ++i) {
        const int box = unit / tiles * (stage_parts / box_parts) + i / box_parts;
        const int part = (box * row_tiles + place.tile(unit % tiles)) * box_parts + i % box_parts;
        const float4 own =
            load_shared(buffer + codes_at + part * packed_part_bytes + place.lane * 16);
        words[unit][i] = {{__float_as_uint(own.x), __float_as_uint(own.y), __float_as_uint(own.z),
                           __float_as_uint(own.w)}};
      }
    }
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      accumulators part;
#pragma unroll
      for (int batch = 0; batch < batches; ++batch) {
        const int step = (run * batches + batch) * 2;
        // The batch before the last one has read its registers.
        if (!separate_sums || batch >= 2) wgmma_wait<units>();
        if constexpr (!separate_sums) {
          if (step == 2 && previous != 0) release(previous);
        }
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
          if (!by_row && batch == 0) {
            load_terms(terms[unit], buffer, unit / tiles, place.tile(unit % tiles), run,
                       place.lane);
          }
          constexpr int part_steps = 4 / parts;  // k16 steps of a part
          const u32* const own = words[unit][step / part_steps].word;
          u32 first[4], second[4];
          expand(first, step_codes::of(own, step % part_steps), 0, terms[unit]);
          expand(second, step_codes::of(own, step % part_steps + 1), 1, terms[unit]);
          // One addition of 64 bits; halves would take three instructions a MMA.
          const u64 at = tokens + ((step / 4 * config.tokens * 128 + step % 4 * 32) >> 4);
          wgmma_fence();
          // Those of the first columns.
          using own_accumulators = float[columns / 2];
          auto& into = reinterpret_cast<own_accumulators&>(separate_sums ? part[unit] : sum[unit]);
          wgmma_of_width<T, columns>(into, first, at, !separate_sums || batch > 0);
          wgmma_of_width<T, columns>(into, second, at + (32 >> 4), 1);
          wgmma_commit();
        }
      }
      if constexpr (separate_sums) {
        for_each_unit([&](auto unit) {
          wgmma_wait<units - 1 - unit.value>();
          add_scaled(sum[unit.value], part[unit.value], terms[unit.value].scales);
        });
      }
    }
  }
  template <int value_>
  struct constant {
    static constexpr int value = value_;
  };
  template <int unit = 0, class Body>
  static __device__ __forceinline__ void for_each_unit(const Body& body) {
    body(constant<unit>{});
    if constexpr (unit + 1 < units) for_each_unit<unit + 1>(body);
  }

  // A row group begins a tile once the one before it has multiplied `lag` stages of it, which it
  // does at the full rate meanwhile.
  static __device__ __forceinline__ void lead(int row_group) {
#pragma unroll
    for (int i = 0; i < row_groups - 1; ++i) {
      if (row_group == i) named_barrier_arrive(2 + i, 256);
    }
  }
  static __device__ __forceinline__ void follow(int row_group) {
#pragma unroll
    for (int i = 0; i < row_groups - 1; ++i) {
      if (row_group == i + 1) named_barrier_sync(2 + i, 256);
    }
  }

  // All stages of a tile.
  template <int columns>
  static __device__ __forceinline__ void multiply_stages(accumulators& sum,
                                                         row_terms (&terms)[units],
                                                         const cta_tile& own, stage_pipeline& pipe,
                                                         const warp_place& place) {
    u32 previous = 0;
    if constexpr (k_groups > 1) pipe.advance(place.k_group);
    // With fewer stages a row group could be two tiles ahead of the next one.
    const bool staggered = lag > 0 && own.last - own.first >= stages;
    if (staggered) follow(place.row_group);
#pragma unroll 1
    for (int stage = own.first + place.k_group; stage < own.last; stage += k_groups) {
      if (staggered && stage == own.first + lag) lead(place.row_group);
      pipe.wait_full();
      multiply<columns>(sum, terms, pipe.buffer(), previous, place);
      if constexpr (separate_sums) {
        release(pipe.empty_barrier());
      } else {
        previous = pipe.empty_barrier();
      }
      if constexpr (k_groups == 1) {
        pipe.advance();
      } else {
        pipe.advance(k_groups);
      }
    }
    wgmma_wait<0>();
    if constexpr (persistent) {
      if (previous != 0) release(previous);
    }
  }

  static __device__ __forceinline__ void consume(accumulators& sum, const packed_params& p,
                                                 const cta_tile& own, stage_pipeline& pipe,
                                                 const warp_place& place) {
    row_terms terms[units];
    float2 row_scales[units];
    if constexpr (by_row) load_row_terms(terms, p, own, place);
    if constexpr (format.scales_rows()) load_row_scales(row_scales, p, own, place);
    if constexpr (few_columns < config.tokens) {
      if (uniform(own.rows.count) <= few_columns)
        multiply_stages<few_columns>(sum, terms, own, pipe, place);
      else
        multiply_stages<config.tokens>(sum, terms, own, pipe, place);
    } else {
      multiply_stages<config.tokens>(sum, terms, own, pipe, place);
    }
    if constexpr (format.scales_rows() || takes_scales) {
#pragma unroll
      for (int i = 0; i < units * values; ++i) {
        float factor;
        if constexpr (takes_scales) {
          factor = codes::scaled_unit;
        } else {
          const float2& rows = row_scales[i / values];
          factor = (i % 4 < 2 ? rows.x : rows.y) * codes::unit;
        }
        sum[i / values][i % values] *= factor;
      }
    }
    if constexpr (by_row) {
      for_each_unit([&](auto unit) {
        accumulators zero = {};
        add_scaled(zero[unit.value], sum[unit.value], terms[unit.value].scales);
#pragma unroll
        for (int i = 0; i < values; ++i) sum[unit.value][i] = zero[unit.value][i];
      });
    }
  }

  // --- The end ---

  static __device__ __forceinline__ float4 vector_of(const accumulators& sum, int i) {
    const float(&of)[values] = sum[i / n_fragments];
    const int at = i % n_fragments * 4;
    return {of[at], of[at + 1], of[at + 2], of[at + 3]};
  }
  static __device__ __forceinline__ void set_vector(accumulators& sum, int i, const float4& to) {
    float(&of)[values] = sum[i / n_fragments];
    const int at = i % n_fragments * 4;
    of[at] = to.x, of[at + 1] = to.y, of[at + 2] = to.z, of[at + 3] = to.w;
  }
  // Adds the accumulators of the other k groups to those of the first, in order.
  static __device__ __forceinline__ void reduce_k_groups(accumulators& sum, u32 shared,
                                                         const warp_place& place) {
    constexpr int vectors = config.vectors(operands), stride = config.row_threads() * 16;
    const u32 at = shared + threadIdx.x % config.row_threads() * 16;
    sync_mma_threads();  // all stages are read
    if (place.k_group > 0 && place.k_group < k_groups) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        store_shared(at + ((place.k_group - 1) * vectors + i) * stride, vector_of(sum, i));
      }
    }
    sync_mma_threads();
    if (place.k_group == 0) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        float4 total = vector_of(sum, i);
#pragma unroll
        for (int other = 0; other < k_groups - 1; ++other) {
          add(total, load_shared(at + (other * vectors + i) * stride));
        }
        set_vector(sum, i, total);
      }
    }
    sync_mma_threads();
  }

  using terms = column_terms<form>;
  // The first of the two columns of vector `i` of this thread.
  static __device__ __forceinline__ int column_of(const cta_tile& own, const warp_place& place,
                                                  int i) {
    return own.column + place.tile(i / n_fragments) * packed_rows + place.lane / 4 * 2;
  }
  // Stores the accumulators `vector` of each B, of a tile's 16 rows and 8 tokens.
  static __device__ __forceinline__ void store_vector(const gemm_params& p, const cta_tile& own,
                                                      const warp_place& place, int i,
                                                      const terms& of_columns,
                                                      const float4 (&vector)[operands],
                                                      bool known) {
    const int column = column_of(own, place, i);
    const int token = i % n_fragments * 8 + place.lane % 4 * 2;
    const float nan = __uint_as_float(0x7fffffff);
    float value[4][operands];
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
      value[0][operand] = known ? vector[operand].x : nan;
      value[1][operand] = known ? vector[operand].y : nan;
      value[2][operand] = known ? vector[operand].z : nan;
      value[3][operand] = known ? vector[operand].w : nan;
    }
    store_token(p, own, of_columns, token, column, value[0], value[2]);
    store_token(p, own, of_columns, token + 1, column, value[1], value[3]);
  }
  static __device__ __forceinline__ void store_token(const gemm_params& p, const cta_tile& own,
                                                     const terms& of_columns, int token, int column,
                                                     float (&first)[operands],
                                                     float (&second)[operands]) {
    const int row = own.rows.first + token;
    if constexpr (grouped) {
      if (token >= own.rows.count || column >= p.n) return;
      of_columns.apply(p, row, first, second);
    }
    store_pair<form>(p, row, column, first, second);
  }

  // All vectors of this thread.
  static __device__ __forceinline__ void store_own(const gemm_params& p, const cta_tile& own,
                                                   const accumulators& sum, const warp_place& place,
                                                   bool known) {
    constexpr int of_operand = tiles * n_fragments;
#pragma unroll
    for (int begin = 0; begin < of_operand; begin += n_fragments) {
      const terms of_columns(p, own.rows.index, column_of(own, place, begin));
#pragma unroll
      for (int i = begin; i < begin + n_fragments; ++i) {
        float4 vector[operands];
#pragma unroll
        for (int operand = 0; operand < operands; ++operand) {
          vector[operand] = vector_of(sum, operand * of_operand + i);
        }
        store_vector(p, own, place, i, of_columns, vector, known);
      }
    }
  }
  // Each CTA of a cluster finishes every split_k-th vector of a thread: the others send it theirs,
  // and it adds them up in their order.
  static __device__ __forceinline__ void store_split(const gemm_params& p, const cta_tile& own,
                                                     const accumulators& sum, u32 base,
                                                     const warp_place& place, bool known) {
    constexpr int of_operand = tiles * n_fragments, stride = config.row_threads() * 16;
    const int split = static_cast<int>(blockIdx.y);
    const u32 shares = base + shares_at + threadIdx.x * 16, arrived = base + arrived_at;
    // The place of CTA `from`'s vector i of a B in the CTA that finishes it, which has none for its
    // own.
    const auto place_of = [](int i, int operand, int from) {
      const int sender = from < i % splits ? from : from - 1;
      return ((i / splits * operands + operand) * (splits - 1) + sender) * stride;
    };
    cluster_wait();  // the other CTAs have started, and their barriers are there
    if (threadIdx.x >= config.row_threads()) return;
#pragma unroll
    for (int i = 0; i < of_operand; ++i) {
      if (i % splits == split) continue;
      const u32 to = cluster_address(shares, i % splits);
      const u32 barrier = cluster_address(arrived, i % splits);
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
        store_cluster_async(to + place_of(i, operand, split),
                            vector_of(sum, operand * of_operand + i), barrier);
      }
    }
    barrier_wait(arrived, 0);
#pragma unroll
    for (int i = 0; i < of_operand; ++i) {
      if (i % splits != split) continue;
      float4 total[operands] = {};
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int from = 0; from < splits; ++from) {
          add(total[operand], from == split ? vector_of(sum, operand * of_operand + i)
                                            : load_shared(shares + place_of(i, operand, from)));
        }
      }
      store_vector(p, own, place, i, terms(p, own.rows.index, column_of(own, place, i)), total,
                   known);
    }
  }
  // One thread, at the start: the barrier that counts the shares of this CTA.
  static __device__ __forceinline__ void init_shares(u32 base) {
    const int split = static_cast<int>(blockIdx.y);
    const int vectors = (tiles * n_fragments + splits - 1 - split) / splits;
    barrier_init(base + arrived_at, 1);
    barrier_arrive_expect(base + arrived_at,
                          (splits - 1) * vectors * operands * config.row_threads() * 16);
  }

 public:
  static __device__ __forceinline__ void run(const sm90_packed_params& all, unsigned char* memory) {
    const packed_params& p = all.packed;
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    const u32 barriers = base + config.barriers_at(operands, format);
    const stage_pipeline pipe{base, barriers, barriers + stages * 8};
    if constexpr (grouped && form.ready != groups_ready::settled) wait_for_dependencies();
    const int work = static_cast<int>(blockIdx.x), token_tiles = all_token_tiles(p.gemm);
    if (grouped && work >= token_tiles * row_blocks(p.gemm)) {
      wait_for_dependencies();  // a launch is complete after the one before
      return;
    }
    const cta_tile own(p.gemm, token_tiles, work);
    if (threadIdx.x == config.mma_threads()) {
      tma_prefetch(all.tokens);
      for (int i = 0; i < operands; ++i) {
        tma_prefetch(all.codes[i]);
        if constexpr (!by_row) tma_prefetch(all.scales[i]);
        if constexpr (format.zeros) tma_prefetch(all.zeros[i]);
      }
      for (int i = 0; i < stages; ++i) {
        barrier_init(pipe.full + i * 8, 1);
        barrier_init(pipe.empty + i * 8, row_groups * 4);
      }
      if constexpr (splits > 1) init_shares(base);
      barrier_init_fence();
    }
    __syncthreads();
    if constexpr (splits > 1) cluster_arrive_initialised();
    launch_dependents();
    if (uniform(threadIdx.x / 128) == config.mma_warpgroups()) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{config.producer_registers}));
      if (threadIdx.x < config.mma_threads() + 32) produce(all, own, pipe);
      if constexpr (splits > 1) cluster_wait();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{config.mma_registers()}));
      compute(all, own, pipe, base);
    }
  }

 private:
  static __device__ __forceinline__ void sync_mma_threads() {
    named_barrier_sync(1, config.mma_threads());
  }

  static __device__ __forceinline__ void compute(const sm90_packed_params& all, cta_tile own,
                                                 stage_pipeline pipe, u32 shared) {
    const packed_params& p = all.packed;
    const warp_place place;
    bool known = true;
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
      known = known &&
              is_packed(load_cached(p.gemm.b[0][operand]), format.code, all_rows(p.gemm), p.gemm.k);
    }
    do {
      accumulators sum = {};
      consume(sum, p, own, pipe, place);
      wait_for_dependencies();  // the launch before may still read C, and write its source
      if constexpr (k_groups > 1) reduce_k_groups(sum, shared, place);
      if constexpr (splits > 1) {
        store_split(p.gemm, own, sum, shared, place, known);
      } else if (threadIdx.x < config.row_threads()) {
        store_own(p.gemm, own, sum, place, known);
      }
    } while (own.advance(p.gemm));
  }
};

// Grid: (works, split_k), with clusters of (1, split_k); or fewer CTAs, which take several works
// each. Block: config.threads(). Shared memory: config.shared_bytes(operands, format).
template <gemm_form form, packed_form format, sm90_packed_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas)
    packed_sm90(const __grid_constant__ sm90_packed_params p) {
  extern __shared__ unsigned char shared_memory[];
  packed_sm90_kernel<form, format, config>::run(p, shared_memory);
}

}  // namespace fftune
