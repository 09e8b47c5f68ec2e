// The rows of a matrix in two groups by a mask in device memory: first those that it marks, then
// the others, each in their order. Every block works the grouping out by itself, from the mask,
// which is a byte a row: that costs less than a kernel before this one.
//
// A block keeps how many rows are marked before each of 1024 chunks of the mask. A row is found by
// a search for its chunk and a look at the bytes there, 16 of them for up to 16,384 rows; all rows
// of a tile by a warp, whose lanes take a chunk each.
#pragma once

#include "common/types.cuh"

namespace fftune {

class row_groups {
 public:
  static constexpr int chunks = 1024;

 private:
  // Words of shared memory: rows marked before each chunk, then the sums of the warps. These keep
  // 16 bytes away from what is written while they are read: as its neighbours racecheck reported
  // them.
  static constexpr int warp_sums_at = chunks + 4, most_warps = 32;
  static constexpr u32 highest_bits = 0x80808080;

  const u8* mask_;
  const u32* before_;  // in shared memory
  u32 rows_, marked_;

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
  // Of 16 rows from `at` on a bit for each that is marked. There is none past the end.
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

  // Adds the rows marked among 16 of each of `own` chunks, `offset` from their starts. All loads
  // are on their way before the first is waited for.
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

  // All `threads` threads of the block build it together.
  template <int threads>
  static __device__ __forceinline__ row_groups build(const u8* mask, int rows, u32* shared) {
    const row_groups groups = scan<threads>(mask, rows, shared);
    __syncthreads();
    return groups;
  }
  // The same without the last barrier: all know the sizes of the groups, but must meet once more
  // before the first of them looks for a row.
  template <int threads>
  static __device__ __forceinline__ row_groups scan(const u8* mask, int rows, u32* shared) {
    constexpr u32 own = (chunks + threads - 1) / threads;  // chunks of a thread
    constexpr u32 warps = threads / 32;
    static_assert(threads % 32 == 0 && warps <= most_warps);
    row_groups groups;
    groups.mask_ = mask;
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
    groups.marked_ = __reduce_add_sync(~0u, of_warp);
    u32 total = __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + inclusive - sum;
#pragma unroll
    for (u32 i = 0; i < own; ++i) {
      if (first + i < chunks) shared[first + i] = total;
      total += counts[i];
    }
    return groups;
  }

  __device__ __forceinline__ int rows() const {
    return static_cast<int>(rows_);
  }
  __device__ __forceinline__ int marked() const {
    return static_cast<int>(marked_);
  }
  // Rows of a group.
  __device__ __forceinline__ int count(int group) const {
    return static_cast<int>(group == 0 ? marked_ : rows_ - marked_);
  }

  // The chunk of row number `rank` of a group. All lanes of a warp.
  __device__ __forceinline__ u32 chunk_of(int group, u32 rank) const {
    static_assert(chunks == 32 * 32);
    const u32 lane = threadIdx.x % 32;
    const u32 parts = __ballot_sync(~0u, before(group, lane * 32) <= rank);
    const u32 first = (__popc(parts) - 1) * 32;
    return first + __popc(__ballot_sync(~0u, before(group, first + lane) <= rank)) - 1;
  }
  // Row number `rank` of the marked ones (group 0), or of the others (group 1).
  __device__ __forceinline__ u32 row_of(int group, u32 rank) const {
    u32 chunk = 0;
#pragma unroll 1
    for (u32 step = chunks / 2; step > 0; step /= 2) {
      if (before(group, chunk + step) <= rank) chunk += step;
    }
    return row_in(group, chunk, rank);
  }
  // The place of a row in the order of the groups.
  __device__ __forceinline__ u32 place_of(u32 row) const {
    const u32 chunk = row / chunk_rows();
    u32 before = before_[chunk];
#pragma unroll 1
    for (u32 at = chunk * chunk_rows(); at < row; at += 16) {
      before += __popc(marks(at) & (at + 16 <= row ? 0xffffu : (1u << (row - at)) - 1));
    }
    return mask_[row] != 0 ? before : marked_ + row - before;
  }
  // Writes rows [rank, rank + count) of a group, which it has, to `rows`. `first` is the chunk of
  // the first one; returns one from which those that follow may be looked for. All lanes of a warp,
  // each of which takes a chunk.
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

}  // namespace fftune
