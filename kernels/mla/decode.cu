// Latent attention of a few queries over a long cache, for sm_80 and newer: each row of the cache
// is read once, and is key and value in one place of shared memory.
//
// All heads of a query see the same cache, so heads times queries are the rows of mma.sync tiles.
// The keys of all sequences are divided evenly among groups of CTAs, so that any mix of lengths
// keeps every SM busy to the end.
//
//   group of CTAs   tiles [begin, end) of the keys of all sequences, one after the other
//   CTA             one block of rows of its group's tiles
//   warp            scores: its rows, and keys / column_warps keys; result: its rows, and its
//                   columns of the latent
//
//   all warps       cp.async: a tile of keys, whole rows -> the stage that was read last
//                   __syncthreads: a stage is there, and the one before it is read
//   each warp       S = Q Kᵀ of its keys -> shared memory, f32
//                   __syncthreads
//                   S of all keys -> softmax in registers, the same in all warps of a row;
//                   O += P V of its columns
//
//   shared memory   [stage][key] rows of the cache; Q; S
//   workspace       [group][first, last sequence of its share][row block] parts of results
//
// Where a sequence is cut, its groups add up their parts (shares.cuh).
//
// Grid: (row blocks, groups). Block: config.threads().
#include "attention/mma_tile.cuh"
#include "common/async.cuh"
#include "mla/decode_config.cuh"
#include "mla/shares.cuh"

namespace fftune {

struct mla_decode_sync {
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

template <mla_form form, mla_decode_config config>
class mla_decode_kernel
    : mla_shares<form, config.keys, config.rows(), config.threads(), mla_decode_sync> {
  using shares_type =
      mla_shares<form, config.keys, config.rows(), config.threads(), mla_decode_sync>;
  using shares_type::arrive;
  using shares_type::combine;
  using shares_type::divide;
  using shares_type::find;
  using shares_type::part_of;
  using shares_type::store_lse;
  using shares_type::store_result;
  using shares_type::tile_count;
  using typename shares_type::cut_sequence;
  using typename shares_type::rows_of_queries;
  using T = element_type<form.type>;
  static constexpr mla_decode_plan plan = mla_decode_plan_of(form, config);
  static_assert(mla_decode_misfit(form, config) == nullptr);
  using layout = attention_row_layout<plan.width>;
  static constexpr int rank = form.rank, width = form.width(), keys = config.keys;
  static constexpr int warps = config.warps(), threads = config.threads(), stages = config.stages;
  static constexpr int rows = config.rows(), m_tiles = config.m_tiles;
  static constexpr int key_blocks = config.keys_of_warp() / 8;  // of a warp's scores
  static constexpr int pairs = config.columns(form) / 16;       // of blocks of 8 columns of a warp
  static constexpr int chunks = width / 8;                      // of 16 bytes of a row of the cache
  static_assert(rank % 8 == 0 && form.rope % 8 == 0);

  // The tiles of a share, on their way to shared memory. A warp copies whole rows; a lane finds the
  // place of one of these a tile ahead, so that no load waits for the table of pages.
  class loader {
    static constexpr int rows_of_warp = ceil_div(keys, warps);
    const mla_params& p_;
    int index_, tile_, tiles_;  // the sequence, its next tile, and how many it has
    int left_;                  // tiles of the share that are not yet found
    int slot_ = 0;
    bool found_;  // whether there is a tile to load
    i64 place_;   // of the lane's row of it: -1 for zeros

    __device__ __forceinline__ void find_rows() {
      place_ = mla_zeros;
      found_ = left_ > 0;
      if (!found_) return;
      const int lane = threadIdx.x % 32, row = lane * warps + static_cast<int>(threadIdx.x) / 32;
      const int key = tile_ * keys + row;
      if (lane < rows_of_warp && row < keys && key < mla_length<form>(p_, index_)) {
        place_ = mla_place<form>(p_, index_, key);
      }
      --left_;
      if (++tile_ == tiles_ && left_ > 0) {
        tile_ = 0;
        tiles_ = tile_count(p_, ++index_);
      }
    }

   public:
    __device__ __forceinline__ loader(const mla_params& p, sequence_tile from, int begin, int end)
        : p_(p),
          index_(from.index),
          tile_(begin - from.before),
          tiles_(tile_count(p, from.index)),
          left_(end - begin) {
      find_rows();
    }

    // Starts to load the next tile. There is a group of copies also where none is left, so that
    // waits can count them.
    __device__ __forceinline__ void load(u32 shared) {
      if (found_) {
        copy(shared + slot_ * plan.stage_bytes, shared + plan.exists_at + slot_ * keys * 4);
      }
      copy_async_commit();
      slot_ = slot_ + 1 == stages ? 0 : slot_ + 1;
      find_rows();
    }

   private:
    __device__ __forceinline__ void copy(u32 to, [[maybe_unused]] u32 exists) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const T* const cache = static_cast<const T*>(p_.cache);
#pragma unroll
      for (int i = 0; i < rows_of_warp; ++i) {
        const int row = i * warps + warp;
        const i64 place = __shfl_sync(~0u, place_, i);
        if (keys % warps != 0 && row >= keys) continue;
        if constexpr (form.chosen) {
          if (lane == 0) {
            store_shared(exists + row * 4, place == mla_no_key ? 0.0f : 1.0f);
          }
        }
#pragma unroll
        for (int first = 0; first < chunks; first += 32) {
          const int chunk = first + lane;
          if (first + 32 <= chunks || chunk < chunks) {
            copy_async(to + layout::offset(row, chunk),
                       cache + (place >= 0 ? place + chunk * 8 : 0), place >= 0);
          }
        }
      }
    }
  };

  // Chunks behind the features of a row are zeros.
  static __device__ __forceinline__ void clear_padding(u32 shared) {
    constexpr int extra = plan.width / 8 - chunks;
    if constexpr (extra > 0) {
      for (int i = threadIdx.x; i < stages * keys * extra; i += threads) {
        const int row = i / extra, chunk = chunks + i % extra;
        store_shared(shared + row / keys * plan.stage_bytes + layout::offset(row % keys, chunk),
                     float4{});
      }
    }
  }

  // Several loads are in flight at once.
  static __device__ __forceinline__ void load_q(const mla_params& p, int sequence,
                                                const rows_of_queries& own, u32 shared_q) {
    constexpr int all = plan.width / 8, at_once = 8;
    for (int base = threadIdx.x; base < rows * all; base += threads * at_once) {
      vector16 value[at_once];
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int i = base + j * threads, row = i / all, chunk = i % all;
        value[j] = {};
        if (i < rows * all && row < own.count) {
          const i64 at = own.at(p, sequence, row);
          if (chunk * 8 < rank) {
            value[j] = load_dependent(static_cast<const T*>(p.q_latent) + at * rank + chunk * 8);
          } else if (chunk * 8 < width) {
            value[j] =
                load_dependent(static_cast<const T*>(p.q_rope) + at * form.rope + chunk * 8 - rank);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int i = base + j * threads;
        if (i >= rows * all) continue;
        store_shared(shared_q + layout::offset(i / all, i % all),
                     float4{__uint_as_float(value[j].word[0]), __uint_as_float(value[j].word[1]),
                            __uint_as_float(value[j].word[2]), __uint_as_float(value[j].word[3])});
      }
    }
  }

 public:
  static __device__ __forceinline__ void run(const mla_params& p, u32 shared) {
    rows_of_queries own;
    own.first = static_cast<int>(blockIdx.x) * rows;
    own.count = smaller(rows, p.queries * p.heads - own.first);
    clear_padding(shared);
    wait_and_launch_dependents();

    const tile_division shares = divide(p);
    const int group = blockIdx.y;
    if (group >= shares.groups) return;
    const int begin = shares.begin(group), end = shares.begin(group + 1);
    sequence_tile here = find(p, begin);
    loader tiles(p, here, begin, end);
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) tiles.load(shared);

    const warp_place place(shared);
    cut_sequence cut = {}, second_cut = {};
    int cuts = 0, slot = 0;

    for (int at = begin;;) {
      const int length = mla_length<form>(p, here.index);
      const int after = here.before + tile_count(p, here.index), stop = smaller(after, end);
      load_q(p, here.index, own, shared + plan.q_at);
      const visible_keys visible(p, own, place, length);
      output o = {};
      mma_softmax<m_tiles> softmax;
      for (; at < stop; ++at) {
        const int key = (at - here.before) * keys;
        copy_async_wait<stages - 2>();
        __syncthreads();
        tiles.load(shared);
        const u32 stage = shared + slot * plan.stage_bytes;
        const u32 exists = shared + plan.exists_at + slot * keys * 4;
        slot = slot + 1 == stages ? 0 : slot + 1;

        multiply_keys(place, stage, exists, key, visible);
        __syncthreads();
        scores s;
        load_scores(s, place);
        softmax.update(s, o, p.scale * log2_e);
        multiply_values(o, s, place, stage);
      }

      const int first_group = shares.group_of(here.before), last_group = shares.group_of(after - 1);
      const bool is_cut = first_group != last_group;
      const int part = here.before > begin ? 1 : 0;
      store_rows(p, here.index, own, place, o, softmax, is_cut ? part_of(p, group, part) : nullptr,
                 is_cut);
      if (is_cut) {
        cut_sequence& own_cut = cuts++ == 0 ? cut : second_cut;
        own_cut = {here.index, first_group, last_group - first_group + 1,
                   shares.begin(first_group) < here.before ? 1 : 0};
        arrive(p, own_cut);
      }
      if (after >= end) break;
      here = {here.index + 1, after};
    }
    copy_async_wait<0>();
    if (cuts > 0) combine(p, cut, own);
    if (cuts > 1) combine(p, second_cut, own);
  }

 private:
  using output = float[m_tiles][2 * pairs][4];
  using scores = float[m_tiles][keys / 8][4];

  // This warp's rows of queries, its keys of a stage and its columns of the result, and its lanes'
  // fragments of them in shared memory. Those of keys and of values are offsets in a stage.
  struct warp_place {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row_warp = warp / config.column_warps, column_warp = warp % config.column_warps;
    int first_row = row_warp * m_tiles * 16;
    int first_key = column_warp * config.keys_of_warp();
    int first_pair = column_warp * pairs;
    u32 q_fragment, k_fragment, v_fragment, score_rows;

    __device__ __forceinline__ explicit warp_place(u32 shared)
        : q_fragment(shared + plan.q_at + layout::next_rows(layout::row_fragment(lane), first_row)),
          // Eight keys by 32 features: two steps of k.
          k_fragment(layout::next_rows(layout::offset(lane & 7, lane >> 3), first_key)),
          v_fragment(layout::row_fragment(lane)),
          score_rows(shared + plan.scores_at + (first_row + lane / 4) * plan.score_row * 4 +
                     lane % 4 * 8) {}
  };

  // Keys that all rows see, and that each of this thread's sees.
  struct visible_keys {
    int common, of_row[m_tiles][2];

    __device__ __forceinline__ visible_keys(const mla_params& p, const rows_of_queries& own,
                                            const warp_place& place, int length)
        : common(mla_visible(p, own.query(p, 0), length)) {
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = place.first_row + tile * 16 + half * 8 + place.lane / 4;
          of_row[tile][half] = mla_visible(p, own.query(p, row), length);
        }
      }
    }
  };

  // S of this warp's keys of a stage, from `key` on, to shared memory.
  static __device__ __forceinline__ void multiply_keys(const warp_place& place, u32 stage,
                                                       [[maybe_unused]] u32 exists, int key,
                                                       const visible_keys& visible) {
    float s[2][m_tiles][key_blocks][4] = {};  // of even and odd steps: shorter chains
#pragma unroll
    for (int step = 0; step < plan.width / 16; step += 2) {
      u32 a[2][m_tiles][4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int tile = 0; tile < m_tiles; ++tile) {
          load_matrices(
              a[odd][tile][0], a[odd][tile][1], a[odd][tile][2], a[odd][tile][3],
              layout::next_rows(layout::advance(place.q_fragment, step + odd), tile * 16));
        }
      }
#pragma unroll
      for (int block = 0; block < key_blocks; ++block) {
        u32 b[2][2];
        load_matrices(
            b[0][0], b[0][1], b[1][0], b[1][1],
            layout::next_rows(layout::advance(stage + place.k_fragment, step), block * 8));
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
            mma_16x8x16<T>(s[odd][tile][block], a[odd][tile], b[odd]);
          }
        }
      }
    }
    const bool masked = key + keys > visible.common;
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int block = 0; block < key_blocks; ++block) {
        float2 has_key = {1.0f, 1.0f};
        if constexpr (form.chosen) {
          has_key =
              load_shared_pair(exists + (place.first_key + block * 8 + place.lane % 4 * 2) * 4);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float pair[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            pair[i] = s[0][tile][block][half * 2 + i] + s[1][tile][block][half * 2 + i];
            const int j = key + place.first_key + block * 8 + place.lane % 4 * 2 + i;
            if (masked && j >= visible.of_row[tile][half]) pair[i] = minus_infinity();
          }
          if constexpr (form.chosen) {
            if (has_key.x == 0.0f) pair[0] = minus_infinity();
            if (has_key.y == 0.0f) pair[1] = minus_infinity();
          }
          store_shared(place.score_rows + (tile * 16 + half * 8) * plan.score_row * 4 +
                           (place.first_key + block * 8) * 4,
                       float2{pair[0], pair[1]});
        }
      }
    }
  }

  // S of all keys of a stage.
  static __device__ __forceinline__ void load_scores(scores& s, const warp_place& place) {
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int block = 0; block < keys / 8; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair = load_shared_pair(
              place.score_rows + (tile * 16 + half * 8) * plan.score_row * 4 + block * 32);
          s[tile][block][half * 2] = pair.x;
          s[tile][block][half * 2 + 1] = pair.y;
        }
      }
    }
  }

  // o += P V of this warp's columns.
  static __device__ __forceinline__ void multiply_values(output& o, const scores& probabilities,
                                                         const warp_place& place, u32 stage) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      u32 a[m_tiles][4];
      pack_step<T>(a, probabilities, step);
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        u32 b[2][2];
        const u32 column =
            pairs % 4 == 0
                ? layout::advance(layout::advance(place.v_fragment, place.first_pair), pair)
                : layout::advance(place.v_fragment, place.first_pair + pair);
        load_matrices_transposed(b[0][0], b[0][1], b[1][0], b[1][1],
                                 stage + layout::next_rows(column, step * 16));
#pragma unroll
        for (int tile = 0; tile < m_tiles; ++tile) {
          mma_16x8x16<T>(o[tile][2 * pair], a[tile], b[0]);
          mma_16x8x16<T>(o[tile][2 * pair + 1], a[tile], b[1]);
        }
      }
    }
  }

  // The results of a sequence, or of a part of one to `words`.
  static __device__ __forceinline__ void store_rows(const mla_params& p, int sequence,
                                                    const rows_of_queries& own,
                                                    const warp_place& place, const output& o,
                                                    const mma_softmax<m_tiles>& softmax,
                                                    float* words, bool is_cut) {
    const int lane = place.lane;
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.first_row + tile * 16 + half * 8 + lane / 4;
        const softmax_row whole = softmax.whole(tile, half);
        if (row >= own.count) continue;
        const softmax_result result = finish_softmax(whole, minus_infinity());
        const bool leads = place.column_warp == 0 && lane % 4 == 0;
#pragma unroll
        for (int block = 0; block < 2 * pairs; ++block) {
          const int column = place.first_pair * 16 + block * 8 + lane % 4 * 2;
          if (column >= rank) continue;
          const float first = o[tile][block][half * 2], second = o[tile][block][half * 2 + 1];
          if (is_cut) {
            store_coherent(words + row * rank + column, float2{first, second});
          } else {
            store_result(p, own.at(p, sequence, row), column, first * result.factor,
                         second * result.factor);
          }
        }
        if (is_cut && leads) {
          store_coherent(words + rows * rank + row * 2, float2{whole.reference, whole.sum});
        } else if (leads) {
          store_lse(p, sequence, own.first + row, result.lse);
        }
      }
    }
  }
};

template <mla_form form, mla_decode_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    mla_decode(const __grid_constant__ mla_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  mla_decode_kernel<form, config>::run(p, shared_address(shared_memory));
}

template <mla_form form, mla_decode_config config>
__global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
    mla_decode_lists(const __grid_constant__ mla_list_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  mla_decode_kernel<form, config>::run(p.mla, shared_address(shared_memory));
}

}  // namespace fftune
