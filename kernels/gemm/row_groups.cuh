// The rows of a matrix in two groups by a mask in device memory: first those that it marks, then
// the others, each in their order. Every block works the grouping out by itself, from the mask,
// which is a byte a row: that costs less than a kernel before this one.
//
// A block keeps how many rows are marked before each of 1024 chunks of the mask. A row is found by
// a binary search for its chunk and a look at the bytes there, 16 of them for up to 16,384 rows.
#pragma once

#include "common/types.cuh"

namespace fftune {

class row_groups {
 public:
  static constexpr int chunks = 1024;

 private:
  static constexpr int most_warps = 30;
  // Words of shared memory after those of the chunks and the sum of all: the rows of a chunk, and
  // the sums of the warps. These are read while the sum of all is written, and keep 16 bytes away
  // from it: as its neighbours they were reported by racecheck.
  static constexpr int chunk_rows_at = chunks + 1, warp_sums_at = chunks + 4;
  static constexpr u32 all_bytes = 0x80808080;

  const u8* mask_;
  const u32* before_;  // in shared memory: rows marked before each chunk, and in all
  u32 rows_;

  // Of 4 rows from `at` on: the highest bit of each byte says whether its row is marked. There is
  // none past the end.
  __device__ __forceinline__ u32 load(u32 at) const {
    const u8* const from = mask_ + at;
    u32 word = 0;
    if (at + 4 <= rows_ && (reinterpret_cast<u64>(from) & 3) == 0) {
      word = *reinterpret_cast<const u32*>(from);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < 4 && at + i < rows_; ++i) word |= static_cast<u32>(from[i]) << i * 8;
    }
    return marks(word);
  }
  static __device__ __forceinline__ u32 marks(u32 word) {
    return (((word & ~all_bytes) + ~all_bytes) | word) & all_bytes;
  }

  // Adds the rows marked among 16 of each of `own` chunks, `offset` from their starts. All loads
  // are on their way before the first is waited for.
  template <u32 own>
  __device__ __forceinline__ void count(u32 (&counts)[own], u32 first_chunk, u32 offset) const {
    uint4 words[own];
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      const u32 at = rows_before(first_chunk + i) + offset;
      words[i] = whole(first_chunk + i, at) ? *reinterpret_cast<const uint4*>(mask_ + at) : uint4{};
    }
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      counts[i] += __popc(marks(words[i].x)) + __popc(marks(words[i].y)) +
                   __popc(marks(words[i].z)) + __popc(marks(words[i].w));
    }
#pragma unroll 1
    for (u32 i = 0; i < own; ++i) {
      const u32 chunk = first_chunk + i, at = rows_before(chunk) + offset;
      if (chunk >= chunks || at >= rows_ || whole(chunk, at)) continue;
      u32 more = 0;
#pragma unroll 1
      for (u32 four = 0; four < 16; four += 4) more += __popc(load(at + four));
#pragma unroll
      for (u32 j = 0; j < own; ++j) counts[j] += j == i ? more : 0;
    }
  }
  // Whether 16 rows from `at` on are one aligned vector within the mask.
  __device__ __forceinline__ bool whole(u32 chunk, u32 at) const {
    return chunk < chunks && at + 16 <= rows_ && (reinterpret_cast<u64>(mask_ + at) & 15) == 0;
  }

  // Rows of a chunk: a multiple of 16. In shared memory too: registers are dear.
  __device__ __forceinline__ u32 chunk_rows() const {
    return before_[chunk_rows_at];
  }
  __device__ __forceinline__ u32 rows_before(u32 chunk) const {
    const u64 at = static_cast<u64>(chunk) * chunk_rows();
    return at < rows_ ? static_cast<u32>(at) : rows_;
  }

 public:
  // Rows of the group before a chunk.
  __device__ __forceinline__ u32 before(int group, u32 chunk) const {
    return group == 0 ? before_[chunk] : rows_before(chunk) - before_[chunk];
  }
  // 32-bit words of shared memory that the constructor takes.
  static constexpr int shared_words = warp_sums_at + most_warps;

  // All `threads` threads of the block build it together.
  template <int threads>
  static __device__ __forceinline__ row_groups build(const u8* mask, int rows, u32* shared) {
    constexpr int own = (chunks + threads - 1) / threads;  // chunks of a thread
    static_assert(threads % 32 == 0 && threads <= most_warps * 32);
    row_groups groups;
    groups.mask_ = mask;
    groups.before_ = shared;
    groups.rows_ = rows;
    if (threadIdx.x == 0) {
      shared[chunk_rows_at] = (static_cast<u32>(rows) + 16 * chunks - 1) / (16 * chunks) * 16;
    }
    __syncthreads();
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 counts[own] = {}, sum = 0;
    for (u32 offset = 0; offset < groups.chunk_rows(); offset += 16) {
      groups.template count<own>(counts, thread * own, offset);
    }
#pragma unroll
    for (u32 i = 0; i < own; ++i) sum += counts[i];
    u32 inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    u32* const warp_sums = shared + warp_sums_at;
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    u32 total = inclusive - sum;
    for (u32 i = 0; i < warp; ++i) total += warp_sums[i];
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      const u32 chunk = thread * own + i;
      if (chunk <= chunks) shared[chunk] = total;
      total += counts[i];
    }
    if (thread == threads - 1) shared[chunks] = total;
    __syncthreads();
    return groups;
  }

  __device__ __forceinline__ int rows() const {
    return static_cast<int>(rows_);
  }
  __device__ __forceinline__ int marked() const {
    return static_cast<int>(before_[chunks]);
  }

  // The last chunk with no more than `rank` rows of the group before it.
  __device__ __forceinline__ u32 chunk_of(int group, u32 rank) const {
    u32 chunk = 0;
#pragma unroll 1
    for (u32 step = chunks / 2; step > 0; step /= 2) {
      if (before(group, chunk + step) <= rank) chunk += step;
    }
    return chunk;
  }
  // Row number `rank` of those that the group has in the chunk.
  __device__ __forceinline__ u32 row_in(int group, u32 chunk, u32 rank) const {
    const u32 flip = group == 0 ? 0 : all_bytes;
#pragma unroll 1
    for (u32 at = rows_before(chunk); at < rows_; at += 4) {
      u32 word = load(at) ^ flip;
      const u32 count = __popc(word);
      if (rank < count) {
#pragma unroll 1
        for (; rank > 0; --rank) word &= word - 1;
        return at + (__ffs(static_cast<int>(word)) - 1) / 8;
      }
      rank -= count;
    }
    return rows_ - 1;  // there is no such row
  }
  // Row number `rank` of the marked ones (group 0), or of the others (group 1).
  __device__ __forceinline__ u32 row_of(int group, u32 rank) const {
    const u32 chunk = chunk_of(group, rank);
    return row_in(group, chunk, rank - before(group, chunk));
  }
};

// A tile of rows of one group.
struct grouped_rows {
  int group;
  int rank;          // of its first row in the group
  int first;         // of its first row in the order of the groups
  int count;         // rows that it has; none or less of one that only fills a cluster
  int row;           // its first row
  bool consecutive;  // whether its rows follow each other
};

// The tiles of `height` rows of both groups, a multiple of `cluster` of each.
template <int height, int cluster>
class grouped_tiles {
  // In shared memory: how many tiles are of the first group, then two words a tile, its first row
  // and its last.
  u32* table_;

  static __device__ __forceinline__ u32 tiles_of(int rows) {
    return ceil_div(static_cast<u32>(rows), static_cast<u32>(height * cluster)) * cluster;
  }
  __device__ __forceinline__ grouped_rows place(u32 tile) const {
    const u32 first_of_other = table_[0];
    const int group = tile >= first_of_other ? 1 : 0, marked = groups.marked();
    const int rank = static_cast<int>(group == 0 ? tile : tile - first_of_other) * height;
    const int left = (group == 0 ? marked : groups.rows() - marked) - rank;
    return {group, rank, (group == 0 ? 0 : marked) + rank, left < height ? left : height, 0, true};
  }

 public:
  const row_groups groups;

  // All `threads` threads of the block fill the table together: one word and two for each tile, of
  // which there are no more than cluster * (ceil(rows / (height * cluster)) + 1). Every chunk of
  // the mask yields the ends of tiles that fall into it.
  __device__ __forceinline__ grouped_tiles(const row_groups& by_mask, u32* table, u32 threads)
      : table_(table), groups(by_mask) {
    const u32 marked = groups.marked(), first_of_other = tiles_of(marked);
    if (threadIdx.x == 0) table[0] = first_of_other;
    for (u32 chunk = threadIdx.x; chunk < row_groups::chunks; chunk += threads) {
#pragma unroll 1
      for (int group = 0; group < 2; ++group) {
        const u32 begin = groups.before(group, chunk), end = groups.before(group, chunk + 1);
        const u32 total = group == 0 ? marked : groups.rows() - marked;
        u32* const own = table + 1 + (group == 0 ? 0 : 2 * first_of_other);
#pragma unroll 1
        for (u32 tile = ceil_div(begin, u32{height}); tile * height < end; ++tile) {
          own[2 * tile] = groups.row_in(group, chunk, tile * height - begin);
        }
#pragma unroll 1
        for (u32 tile = begin / height; begin < end; ++tile) {
          const u32 next = (tile + 1) * height < total ? (tile + 1) * height : total;
          if (next > end || tile * height >= total) break;
          own[2 * tile + 1] = groups.row_in(group, chunk, next - 1 - begin);
        }
      }
    }
    __syncthreads();
  }

  // The first tile of a group.
  __device__ __forceinline__ u32 first_of(int group) const {
    return group == 0 ? 0 : table_[0];
  }
  __device__ __forceinline__ u32 count() const {
    return table_[0] + tiles_of(groups.rows() - groups.marked());
  }
  __device__ __forceinline__ grouped_rows at(u32 tile) const {
    grouped_rows own = place(tile);
    if (own.count > 0) {
      const u32 first = table_[1 + 2 * tile], last = table_[2 + 2 * tile];
      own.row = static_cast<int>(first);
      own.consecutive = last - first + 1 == static_cast<u32>(own.count);
    }
    return own;
  }
};

}  // namespace fftune
