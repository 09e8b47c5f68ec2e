// Which rows belong to which group: the rows of A and C for grouped rows, the summed tokens for a
// grouped reduction. The sorted order has the rows of group 0 first, then those of group 1 and so
// on, each group's in ascending order.
//
// Two sources, one interface, so that engines are templates on it:
//   mask_groups     two groups by a byte mask. Every block scans the mask itself, a byte a row,
//                   which costs less than a kernel before this one.
//   routed_groups   any number of groups, sorted by an earlier kernel: offsets and a permutation.
//
//   groups()                 how many there are
//   rows()                   rows of the matrices, whatever the groups
//   count(group)             rows of a group
//   first(group)             sorted place of its first row
//   row_of(group, rank)      the row (token) of that rank in the group
//   locate, list             the rows of a tile, by all lanes of a warp
#pragma once

#include "common/types.cuh"
#include "common/vectors.cuh"
#include "gemm/form.cuh"

namespace fftune {

// The most groups of routed_groups, and the 32-bit words of shared memory that a table of them
// takes.
constexpr int most_groups = 1024;
constexpr int routed_groups_words = (most_groups + 1 + 3) / 4 * 4;

// Two groups by a mask: group 0 has the rows whose byte is not zero.
//
// A block keeps how many such rows are before each of 1024 chunks of the mask. A row is found by a
// search for its chunk and a look at the bytes there, 16 of them for up to 16,384 rows; all rows of
// a tile by a warp, whose lanes take a chunk each.
class mask_groups {
 public:
  static constexpr int chunks = 1024;
  static constexpr bool rows_may_repeat = false;  // in a group

 private:
  // Words of shared memory: rows of group 0 before each chunk, then the sums of the warps. These
  // keep 16 bytes away from what is written while they are read: as its neighbours racecheck
  // reported them.
  static constexpr int warp_sums_at = chunks + 4, most_warps = 32;
  static constexpr u32 highest_bits = 0x80808080;

  const u8* mask_;
  const u32* before_;  // in shared memory
  u32 rows_, first_group_;

  // The highest bit of each byte that is not zero.
  static __device__ __forceinline__ u32 nonzero(u32 bytes) {
    return (((bytes & ~highest_bits) + ~highest_bits) | bytes) & highest_bits;
  }
  // A bit for each byte that is not zero: the product has the four bits side by side at its top.
  static __device__ __forceinline__ u32 bits_of(u32 bytes) {
    return (nonzero(bytes) >> 7) * 0x01020408 >> 24;
  }
  // Whether 16 rows from `at` on are one aligned vector within the mask.
  __device__ __forceinline__ bool whole(u32 at) const {
    return at + 16 <= rows_ && (reinterpret_cast<u64>(mask_ + at) & 15) == 0;
  }
  // A bit for each of the 16 rows from `at` on: set where the row exists and is of group 0.
  __device__ __forceinline__ u32 marks(u32 at) const {
    u32 bits = 0;
    if (whole(at)) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(mask_ + at);
      return bits_of(bytes.x) | bits_of(bytes.y) << 4 | bits_of(bytes.z) << 8 |
             bits_of(bytes.w) << 12;
    }
#pragma unroll 1
    for (u32 i = 0; i < 16 && at + i < rows_; ++i) bits |= (mask_[at + i] != 0 ? 1u : 0u) << i;
    return bits;
  }
  // The same of the rows of a group.
  __device__ __forceinline__ u32 members(int group, u32 at) const {
    const u32 bits = marks(at);
    if (group == 0) return bits;
    return ~bits & (at + 16 <= rows_ ? 0xffffu : (1u << (rows_ - at)) - 1);
  }
  // The place of set bit number `rank` among 16.
  static __device__ __forceinline__ u32 select(u32 bits, u32 rank) {
    u32 place = 0;
#pragma unroll
    for (u32 width = 8; width > 0; width /= 2) {
      const u32 low = __popc(bits & ((1u << width) - 1));
      if (rank >= low) {
        rank -= low;
        bits >>= width;
        place += width;
      }
    }
    return place;
  }

  // Adds the rows of group 0 among 16 of each of `own` chunks, `offset` from their starts. All
  // loads are in flight before the first is used.
  template <u32 own>
  __device__ __forceinline__ void count(u32 (&counts)[own], u32 first_chunk, u32 offset) const {
    uint4 bytes[own];
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      const u32 at = rows_before(first_chunk + i) + offset;
      bytes[i] = whole(at) ? *reinterpret_cast<const uint4*>(mask_ + at) : uint4{};
    }
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      counts[i] += __popc(nonzero(bytes[i].x)) + __popc(nonzero(bytes[i].y)) +
                   __popc(nonzero(bytes[i].z)) + __popc(nonzero(bytes[i].w));
    }
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      const u32 at = rows_before(first_chunk + i) + offset;
      if (at < rows_ && !whole(at)) counts[i] += __popc(marks(at));
    }
  }

  // A multiple of 16.
  __device__ __forceinline__ u32 chunk_rows() const {
    return (rows_ + 16 * chunks - 1) / (16 * chunks) * 16;
  }
  __device__ __forceinline__ u32 rows_before(u32 chunk) const {
    const u64 at = static_cast<u64>(chunk) * chunk_rows();
    return at < rows_ ? static_cast<u32>(at) : rows_;
  }
  // Rows of the group before a chunk.
  __device__ __forceinline__ u32 before(int group, u32 chunk) const {
    return group == 0 ? before_[chunk] : rows_before(chunk) - before_[chunk];
  }

  // Row number `rank` of a group, which is in this chunk.
  __device__ __forceinline__ u32 row_in(int group, u32 chunk, u32 rank) const {
    rank -= before(group, chunk);
#pragma unroll 1
    for (u32 at = rows_before(chunk); at < rows_; at += 16) {
      const u32 bits = members(group, at), count = __popc(bits);
      if (rank < count) return at + select(bits, rank);
      rank -= count;
    }
    return rows_ - 1;  // there is no such row
  }

 public:
  // 32-bit words of shared memory that a block takes.
  static constexpr int shared_words = warp_sums_at + most_warps;

  // All `threads` threads of the block build it together; `rows` are those of the matrices.
  template <int threads>
  static __device__ __forceinline__ mask_groups build(const gemm_params& params, int rows,
                                                      u32* shared) {
    const mask_groups groups = scan<threads>(params, rows, shared);
    __syncthreads();
    return groups;
  }
  // The same without the last barrier: all know the sizes of the groups, but must meet once more
  // before the first of them looks for a row.
  template <int threads>
  static __device__ __forceinline__ mask_groups scan(const gemm_params& params, int rows,
                                                     u32* shared) {
    constexpr u32 own = (chunks + threads - 1) / threads;  // chunks of a thread
    constexpr u32 warps = threads / 32;
    static_assert(threads % 32 == 0 && warps <= most_warps);
    mask_groups groups;
    groups.mask_ = params.mask;
    groups.before_ = shared;
    groups.rows_ = rows;
    const u32 first = threadIdx.x * own, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 chunk_rows = groups.chunk_rows();
    u32 counts[own] = {}, sum = 0;
    for (u32 offset = 0; offset < chunk_rows; offset += 16) {
      groups.template count<own>(counts, first, offset);
    }
#pragma unroll
    for (u32 i = 0; i < own; ++i) sum += counts[i];
    u32 inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    u32* const warp_sums = shared + warp_sums_at;
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const u32 of_warp = lane < warps ? warp_sums[lane] : 0;
    groups.first_group_ = __reduce_add_sync(~0u, of_warp);
    u32 total = __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + inclusive - sum;
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      if (first + i < chunks) shared[first + i] = total;
      total += counts[i];
    }
    return groups;
  }

  static __device__ __forceinline__ int groups() {
    return 2;
  }
  __device__ __forceinline__ int rows() const {
    return static_cast<int>(rows_);
  }
  __device__ __forceinline__ int count(int group) const {
    return static_cast<int>(group == 0 ? first_group_ : rows_ - first_group_);
  }
  __device__ __forceinline__ int first(int group) const {
    return group == 0 ? 0 : static_cast<int>(first_group_);
  }

  // Where list() begins to look for row number `rank` of a group: its chunk. All lanes of a warp.
  __device__ __forceinline__ u32 locate(int group, u32 rank) const {
    static_assert(chunks == 32 * 32);
    const u32 lane = threadIdx.x % 32;
    const u32 parts = __ballot_sync(~0u, before(group, lane * 32) <= rank);
    const u32 first = (__popc(parts) - 1) * 32;
    return first + __popc(__ballot_sync(~0u, before(group, first + lane) <= rank)) - 1;
  }
  // Row number `rank` of a group.
  __device__ __forceinline__ u32 row_of(int group, u32 rank) const {
    u32 chunk = 0;
#pragma unroll 1
    for (u32 step = chunks / 2; step > 0; step /= 2) {
      if (before(group, chunk + step) <= rank) chunk += step;
    }
    return row_in(group, chunk, rank);
  }
  // The sorted place of a row.
  __device__ __forceinline__ u32 place_of(u32 row) const {
    const u32 chunk = row / chunk_rows();
    u32 before = before_[chunk];
#pragma unroll 1
    for (u32 at = chunk * chunk_rows(); at < row; at += 16) {
      before += __popc(marks(at) & (at + 16 <= row ? 0xffffu : (1u << (row - at)) - 1));
    }
    return mask_[row] != 0 ? before : first_group_ + row - before;
  }
  // Writes rows [rank, rank + count) of a group to `rows`; the group must have them. `first` is the
  // result of locate() for the first one; returns the start of the search for the rows that follow.
  // Called by all lanes of a warp; each takes a chunk.
  __device__ __forceinline__ u32 list(int group, u32 rank, u32 count, u32 first, u32* rows) const {
    const u32 lane = threadIdx.x % 32, own_rows = chunk_rows();
    while (true) {
      const u32 begin = rows_before(first + lane);
      const bool exists = first + lane < chunks;
      const u32 own_rank = exists ? before(group, first + lane) : ~0u;
      u32 place = own_rank - rank;  // beyond every count where it is before `rank`
#pragma unroll 1
      for (u32 at = begin; at < begin + own_rows && at < rows_ && exists; at += 16) {
        const u32 bits = members(group, at);
        // A predicate a store, and no branch: of 16 that differ between the lanes each would take
        // its time.
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
          const u32 set = bits >> i & 1;
          if (set != 0 && place < count) rows[place] = at + i;
          place += set;
        }
      }
      const u32 begun = __popc(__ballot_sync(~0u, own_rank < rank + count));
      if (begun < 32 || first + 32 >= chunks) return first + begun - 1;
      first += 32;
    }
  }
};

// The first warp of a block: sums[i] = count(0) + ... + count(i - 1) for each i up to n. `count`
// may read sums[i]. Returns the last.
template <class Count>
__device__ __forceinline__ u32 write_sums(int n, u32* sums, const Count& count) {
  const int lane = static_cast<int>(threadIdx.x);
  u32 before = 0;
  for (int first = 0; first < n; first += 32) {
    const int i = first + lane;
    const u32 own = i < n ? count(i) : 0;
    u32 inclusive = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (i < n) sums[i] = before + inclusive - own;
    before += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) sums[n] = before;
  return before;
}

// Any number of groups up to most_groups, sorted by an earlier kernel: gemm_params::offsets, the
// first sorted row of each group and the end of the last, and permutation, the row of each sorted
// place. A block keeps the offsets in shared memory. It has waited for the launch before
// (griddepcontrol) when it builds this, unless the form says that the groups are ready; it reads no
// row of the permutation before it has.
template <groups_ready ready>
class routed_groups {
  const int* permutation_;
  const u32* offsets_;  // in shared memory
  u32 rows_, groups_;

  // The offsets that the sort of the ids will have. All threads; the first warp writes the last.
  template <int threads>
  static __device__ __forceinline__ void count_ids(const gemm_params& params, int rows,
                                                   u32* offsets) {
    const int counted = params.groups - params.whole_groups;
    for (int i = threadIdx.x; i < counted; i += threads) offsets[i] = 0;
    __syncthreads();
    constexpr int together = 8;  // loads in flight
    for (int first = threadIdx.x; first < params.id_count; first += threads * together) {
      int id[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int at = first + i * threads;
        id[i] = at < params.id_count ? load_coherent_word(params.ids + at) : -1;
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (id[i] >= 0 && id[i] < counted) atomicAdd(&offsets[id[i]], 1);
      }
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const u32 before = write_sums(counted, offsets, [&](int group) { return offsets[group]; });
    const int whole = params.whole_groups;
    const u32 of_whole = whole == 0 ? 0 : (rows - params.id_count) / whole;
    for (int i = threadIdx.x + 1; i <= whole; i += 32) {
      offsets[counted + i] = before + i * of_whole;
    }
  }

 public:
  // 32-bit words of shared memory that a block takes.
  static constexpr int shared_words = routed_groups_words;
  static constexpr bool rows_may_repeat = true;  // in a group, where a token's choices do

  template <int threads>
  static __device__ __forceinline__ routed_groups build(const gemm_params& params, int rows,
                                                        u32* shared) {
    routed_groups groups;
    groups.permutation_ = params.permutation;
    groups.offsets_ = shared;
    groups.rows_ = rows;
    groups.groups_ = params.groups;
    if constexpr (ready == groups_ready::counted) {
      count_ids<threads>(params, rows, shared);
    } else {
      for (int i = threadIdx.x; i <= params.groups; i += threads) {
        shared[i] = static_cast<u32>(load_coherent_word(params.offsets + i));
      }
    }
    __syncthreads();
    return groups;
  }
  template <int threads>
  static __device__ __forceinline__ routed_groups scan(const gemm_params& params, int rows,
                                                       u32* shared) {
    return build<threads>(params, rows, shared);
  }

  __device__ __forceinline__ int groups() const {
    return static_cast<int>(groups_);
  }
  __device__ __forceinline__ int rows() const {
    return static_cast<int>(rows_);
  }
  __device__ __forceinline__ int count(int group) const {
    return static_cast<int>(offsets_[group + 1] - offsets_[group]);
  }
  __device__ __forceinline__ int first(int group) const {
    return static_cast<int>(offsets_[group]);
  }

  __device__ __forceinline__ u32 row_of(int group, u32 rank) const {
    return static_cast<u32>(permutation_[offsets_[group] + rank]);
  }
  __device__ __forceinline__ u32 locate(int, u32) const {
    return 0;
  }
  __device__ __forceinline__ u32 list(int group, u32 rank, u32 count, u32 from, u32* rows) const {
    const int* const own = permutation_ + offsets_[group] + rank;
    for (u32 i = threadIdx.x % 32; i < count; i += 32) rows[i] = static_cast<u32>(own[i]);
    return from;
  }
};

// Those of a source.
template <group_source source, groups_ready ready = groups_ready::awaited>
using groups_of =
    typename choose_type<source == group_source::mask, mask_groups, routed_groups<ready>>::type;

// A tile of rows of one group, by its place in the sorted order.
struct group_tile {
  int group;
  int rank;   // of its first row in the group
  int first;  // sorted place of its first row
  int count;  // its rows; zero or less for a padding tile of a cluster
};

// The tiles of a group.
struct group_span {
  int group;
  u32 first, count;
};

// How the rows of each group are split into tiles.
struct group_tiling {
  int height;           // Maximum rows of a tile.
  int cluster = 1;      // The number of tiles of a group is a multiple of it.
  bool levels = false;  // The tiles of a group have nearly equal rows, a multiple of 8; otherwise
                        // all but the last have the maximum.
};

// Tiles of rows of one group each, those of group 0 first.
template <class Groups, group_tiling tiling>
class group_tiles;

template <group_tiling tiling>
class group_tiles<mask_groups, tiling> {
  static constexpr int height = tiling.height, cluster = tiling.cluster;
  static_assert(!tiling.levels);
  mask_groups groups_;

  __device__ __forceinline__ u32 count(int group) const {
    return ceil_div(static_cast<u32>(groups_.count(group)), static_cast<u32>(height * cluster)) *
           cluster;
  }

 public:
  static constexpr int shared_words = 0;

  // All threads of the block, right after those of the groups.
  __device__ __forceinline__ group_tiles(const mask_groups& groups, u32*) : groups_(groups) {}

  __device__ __forceinline__ const mask_groups& groups() const { return groups_; }
  __device__ __forceinline__ u32 count() const { return count(0) + count(1); }
  __device__ __forceinline__ group_tile at(u32 tile) const {
    const u32 first_of_other = count(0);
    const int group = tile >= first_of_other ? 1 : 0;
    const int rank = static_cast<int>(group == 0 ? tile : tile - first_of_other) * height;
    const int left = groups_.count(group) - rank;
    return {group, rank, groups_.first(group) + rank, left < height ? left : height};
  }
};

// Where they begin is a table in shared memory, which is searched.
template <groups_ready ready, group_tiling tiling>
class group_tiles<routed_groups<ready>, tiling> {
  static constexpr int height = tiling.height, cluster = tiling.cluster;
  using routed_groups = fftune::routed_groups<ready>;
  routed_groups groups_;
  const u32* begins_;  // [groups + 1]

 public:
  static constexpr int shared_words = routed_groups_words;

  // All threads of the block; the first warp writes the table.
  __device__ __forceinline__ group_tiles(const routed_groups& groups, u32* shared)
      : groups_(groups), begins_(shared) {
    if (threadIdx.x < 32) {
      write_sums(groups.groups(), shared, [&](int group) {
        return ceil_div(static_cast<u32>(groups.count(group)), static_cast<u32>(height * cluster)) *
               cluster;
      });
    }
    __syncthreads();
  }

  __device__ __forceinline__ const routed_groups& groups() const { return groups_; }
  __device__ __forceinline__ u32 count() const { return begins_[groups_.groups()]; }
  // The tiles of the group that has a tile.
  __device__ __forceinline__ group_span span(u32 tile) const {
    int group = 0, end = groups_.groups();  // the last group that begins at the tile or before it
#pragma unroll 1
    while (end - group > 1) {
      const int middle = (group + end) / 2;
      if (begins_[middle] <= tile) {
        group = middle;
      } else {
        end = middle;
      }
    }
    return span_of(group);
  }
  // The same by all lanes of a warp: a lane looks at one group of 32, then at one of the 32 that
  // contain the tile.
  __device__ __forceinline__ group_span span_in_warp(u32 tile) const {
    static_assert(most_groups <= 32 * 32);
    const int lane = static_cast<int>(threadIdx.x % 32), groups = groups_.groups();
    const auto begun = [&](int group) {
      return __popc(__ballot_sync(~0u,
                                  group < groups && begins_[group < groups ? group : 0] <= tile)) -
             1;
    };
    const int first = begun(lane * 32) * 32;
    return span_of(first + begun(first + lane));
  }
  __device__ __forceinline__ group_tile at(const group_span& own, u32 tile) const {
    const int rows = groups_.count(own.group);
    int most = height;
    if constexpr (tiling.levels) most = ceil_div(static_cast<u32>(rows), 8 * own.count) * 8;
    const int rank = static_cast<int>(tile - own.first) * most;
    const int left = rows - rank;
    return {own.group, rank, groups_.first(own.group) + rank, left < most ? left : most};
  }
  __device__ __forceinline__ group_tile at(u32 tile) const {
    return at(span(tile), tile);
  }

 private:
  __device__ __forceinline__ group_span span_of(int group) const {
    return {group, begins_[group], begins_[group + 1] - begins_[group]};
  }
};

}  // namespace fftune
