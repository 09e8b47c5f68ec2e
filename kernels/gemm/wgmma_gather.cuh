// Rows from anywhere into the ring of the wgmma engine: by cp.async, 16 bytes a thread, laid down
// as TMA would.
//
// wgmma reads through another proxy than cp.async writes, so that a fence has to stand between the
// two. The warps that copy have it, once their copies are complete: some k tiles behind, so that
// several are under way, and before they say that a slot is full. So the consumers wait for
// gathered rows as they do for the copy engine's.
#pragma once

#include "common/async_copy.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

// The warps that gather for a block; each arrives at the full barrier of a slot.
constexpr int wgmma_gather_warps = 2, wgmma_gather_threads = wgmma_gather_warps * 32;

// A warp's slots whose copies are under way.
template <class Ring, int stages>
class wgmma_open_slots {
  // So many at most: half of the ring, of which a slot is at work and the next one full.
  static constexpr int most = smaller(stages / 2, stages - 2);
  Ring oldest_;
  int count_ = 0;

  // Says that the oldest is full; its copies are complete.
  __device__ __forceinline__ void close() {
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(oldest_.full_barrier());
    oldest_.advance();
    --count_;
  }

 public:
  explicit __device__ __forceinline__ wgmma_open_slots(const Ring& pipe) : oldest_(pipe) {}

  // All copies into this slot, the next one, have begun.
  __device__ __forceinline__ void add(const Ring& pipe) {
    copy_async_commit();
    if (count_ == 0) oldest_ = pipe;
    if (++count_ <= most) return;
    copy_async_wait<most>();
    close();
  }
  __device__ __forceinline__ void close_all() {
    copy_async_wait<0>();
    while (count_ > 0) close();
  }
};

// What a thread copies: of every eighth row of a tile 16 of each 128 bytes. So its swizzle is that
// of its first row.
template <int height>
class wgmma_gather {
  static constexpr int row_bytes = 128, chunks = row_bytes / 16;
  static constexpr int step = wgmma_gather_threads / chunks;  // rows of a pass
  static constexpr int passes = height / step;
  static_assert(step == 8 && height % step == 0);
  // Rows wait in registers, so that copies do not wait for each other; what is too many is read
  // again.
  static constexpr int kept = smaller(passes, 16);
  // Addresses that are there before the first of their copies, which else would wait for each other
  // to read the same registers.
  static constexpr int together = passes % 4 == 0 ? 4 : 1;

  const u32* rows_;
  u32 kept_[kept];
  int chunk_, first_;

 public:
  // `rows` in shared memory, of which the first 128 are read at once. `thread` is one of the
  // warps'.
  __device__ __forceinline__ wgmma_gather(const u32* rows, int thread)
      : chunk_(thread % chunks), first_(thread / chunks) {
    rows_ = rows + first_;
#pragma unroll
    for (int i = 0; i < kept; ++i) kept_[i] = rows_[i * step];
  }

  // Elements [column, column + 64 slabs) of the rows of a matrix with `columns`, zeros past its
  // end, into slabs of `height` rows of 64 elements.
  template <int slabs, class T>
  __device__ __forceinline__ void copy(const T* matrix, int columns, int column, u32 to) const {
    constexpr int elements = row_bytes / sizeof(T);
    const int own = column + chunk_ * 16 / static_cast<int>(sizeof(T));
    const u32 pitch = static_cast<u32>(columns) * sizeof(T);
    const char* const from = reinterpret_cast<const char*>(matrix + (own < columns ? own : 0));
    to += first_ * row_bytes + ((chunk_ ^ first_) << 4);
#pragma unroll
    for (int i = 0; i < passes; i += together) {
      const char* source[together];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        u32 row = i + j < kept ? kept_[i + j < kept ? i + j : 0] : rows_[(i + j) * step];
        asm volatile("" : "+r"(row));  // else all addresses are kept, twice as many registers
        source[j] = from + static_cast<u64>(row) * pitch;
      }
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        const bool valid = own + slab * elements < columns;
#pragma unroll
        for (int j = 0; j < together; ++j) {
          copy_async(to + (slab * height + (i + j) * step) * row_bytes,
                     source[j] + slab * row_bytes, valid);
        }
      }
    }
  }
};

}  // namespace fftune
