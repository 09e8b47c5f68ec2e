// What the kernels of latent attention share: the division of the keys among groups of CTAs, the
// rows of queries of a CTA, and sequences that are cut, whose groups add up their parts.
//
// Each of the CTAs that share a sequence leaves its part in the workspace, counts itself, and at
// the end of its share waits until all have done so. Then each adds up a share of the elements of
// the result, over the parts in their order: the same bits in every run. The launch is cooperative,
// since CTAs wait for one another. The last to have read sets the counters back.
#pragma once

#include "attention/tile_division.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "mla/cache.cuh"
#include "mla/grid.cuh"

namespace fftune {

// Of CTAs with tiles of `keys` keys and blocks of `rows` rows, whose threads 0 to threads - 1 have
// the results; Sync::sync() is their barrier.
template <mla_form form, int keys, int rows, int threads, class Sync>
struct mla_shares {
  using T = element_type<form.type>;
  static constexpr int rank = form.rank;

  // A sequence needs one tile at least, for zeros to be written where it has no keys.
  static __device__ __forceinline__ int tile_count(const mla_params& p, int sequence) {
    return larger(1, ceil_div(mla_length<form>(p, sequence), keys));
  }

  static __device__ __forceinline__ tile_division divide(const mla_params& p) {
    return divide_tiles < form.lengths &&
           !form.chosen > (p.batch, [&](int index) { return tile_count(p, index); });
  }
  static __device__ __forceinline__ sequence_tile find(const mla_params& p, int tile) {
    return find_tile < form.lengths &&
           !form.chosen > (p.batch, tile, [&](int index) { return tile_count(p, index); });
  }

  // The rows of queries of this CTA in a sequence: row r is head r % heads of query r / heads.
  struct rows_of_queries {
    int first, count;
    __device__ __forceinline__ int query(const mla_params& p, int row) const {
      return (first + row) / p.heads;
    }
    __device__ __forceinline__ i64 at(const mla_params& p, int sequence, int row) const {
      return static_cast<i64>(sequence) * p.queries * p.heads + first + row;
    }
  };

  static __device__ __forceinline__ void store_result(const mla_params& p, i64 at, int column,
                                                      float first, float second) {
    *reinterpret_cast<u32*>(static_cast<T*>(p.out) + at * rank + column) = pack<T>(first, second);
  }
  static __device__ __forceinline__ void store_lse(const mla_params& p, int sequence, int row,
                                                   float lse) {
    if constexpr (form.lse) {
      const int query = row / p.heads, head = row % p.heads;
      p.lse[mla_lse_place<form>(p, sequence, query, head)] = lse * natural_log_of_2;
    }
  }

  // --- Sequences that several groups share ---

  struct cut_sequence {
    int index, first_group, count;
    int first_part;  // of the first group; of the others the sequence is the first
  };

  static __device__ __forceinline__ float* part_of(const mla_params& p, int group, int part) {
    const i64 number = (static_cast<i64>(group) * 2 + part) * gridDim.x + blockIdx.x;
    return p.partials + number * mla_part_floats(form, rows);
  }
  // Arrivals, then departures, of the groups that share a sequence.
  static __device__ __forceinline__ int* counters_of(const mla_params& p, const cut_sequence& cut) {
    return p.counters + (static_cast<i64>(cut.first_group) * gridDim.x + blockIdx.x) * 2;
  }

  static __device__ __forceinline__ int load_acquired(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }

  // All threads, when they have stored their part.
  static __device__ __forceinline__ void arrive(const mla_params& p, const cut_sequence& cut) {
    __threadfence();
    Sync::sync();
    if (threadIdx.x == 0) atomicAdd(counters_of(p, cut), 1);
  }

  // Adds up the parts of elements [begin, end) of a sequence that is cut, four of a row each:
  // `lanes` lanes of a warp share the parts of an element. A lane has `batch` parts of `at_once`
  // elements in flight.
  template <int batch, int at_once>
  static __device__ __forceinline__ void add_parts(const mla_params& p, const cut_sequence& cut,
                                                   const rows_of_queries& own, int begin, int end,
                                                   int lanes) {
    constexpr int quads = rank / 4;
    const int elements = 32 / lanes, lane = threadIdx.x % 32, first_part = lane / elements;
    const int first = static_cast<int>(threadIdx.x) / 32 * elements + lane % elements;
    const int step = threads / lanes;
    for (int base = begin; base < end; base += step * at_once) {
      partial_row sum[at_once];
      const auto item_of = [&](int j) { return smaller(base + first + j * step, end - 1); };
      for (int of = 0; of < cut.count; of += lanes * batch) {
        softmax_row other[at_once][batch];
        float4 value[at_once][batch];
        const auto number_of = [&](int i) { return of + first_part + i * lanes; };
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          // Past the end the last one again, which then counts as nothing.
          const int number = smaller(number_of(i), cut.count - 1);
          const float* const part =
              part_of(p, cut.first_group + number, number == 0 ? cut.first_part : 0);
#pragma unroll
          for (int j = 0; j < at_once; ++j) {
            const int row = item_of(j) / quads, column = item_of(j) % quads * 4;
            const float2 pair = load_coherent_pair(part + rows * rank + row * 2);
            value[j][i] = load_coherent(part + row * rank + column);
            other[j][i] = {pair.x, pair.y};
            if (number_of(i) >= cut.count) other[j][i] = {minus_infinity(), 0.0f};
          }
        }
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
          sum[j].add(other[j], value[j], [&](int i) { return number_of(i) < cut.count; });
        }
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        for (int distance = elements; distance < 32; distance *= 2) {
          const auto shuffled = [&](float mine) { return __shfl_xor_sync(~0u, mine, distance); };
          const partial_row& mine = sum[j];
          const softmax_row other[1] = {
              {shuffled(mine.softmax.reference), shuffled(mine.softmax.sum)}};
          const float4 value[1] = {
              {shuffled(mine.o.x), shuffled(mine.o.y), shuffled(mine.o.z), shuffled(mine.o.w)}};
          sum[j].add(other, value);
        }
        if (first_part != 0 || base + first + j * step >= end) continue;
        const int row = item_of(j) / quads, column = item_of(j) % quads * 4;
        const float4 o = sum[j].o;
        const softmax_result result = finish_softmax(sum[j].softmax, minus_infinity());
        const i64 at = own.at(p, cut.index, row);
        store_result(p, at, column, o.x * result.factor, o.y * result.factor);
        store_result(p, at, column + 2, o.z * result.factor, o.w * result.factor);
        if (column == 0) store_lse(p, cut.index, own.first + row, result.lse);
      }
    }
  }

  // Adds up this group's share of the elements of a sequence that is cut.
  static __device__ __forceinline__ void combine(const mla_params& p, const cut_sequence& cut,
                                                 const rows_of_queries& own) {
    if (threadIdx.x == 0) {
      while (load_acquired(counters_of(p, cut)) != cut.count) {
      }
      __threadfence();
    }
    Sync::sync();
    const int share = static_cast<int>(blockIdx.y) - cut.first_group;
    const int items = own.count * (rank / 4);
    const int begin = static_cast<int>(static_cast<i64>(items) * share / cut.count);
    const int end = static_cast<int>(static_cast<i64>(items) * (share + 1) / cut.count);
    int lanes = 1;  // as many as give each thread two elements
    while (lanes < 32 && lanes < cut.count && (end - begin) * lanes < 2 * threads) lanes *= 2;
    if (cut.count <= 2 * lanes) {
      add_parts<2, 4>(p, cut, own, begin, end, lanes);
    } else {
      add_parts<4, 2>(p, cut, own, begin, end, lanes);
    }
    Sync::sync();
    if (threadIdx.x == 0) {
      int* const counters = counters_of(p, cut);
      if (atomicAdd(counters + 1, 1) == cut.count - 1) {
        counters[0] = 0;
        counters[1] = 0;
      }
    }
  }
};

}  // namespace fftune
