// Rows from anywhere into the ring of the wgmma engine: by cp.async, 16 bytes a thread, laid down
// as TMA would.
//
// wgmma reads through another proxy than cp.async writes, so that a fence has to stand between the
// two. Those who multiply have it, in front of each k tile that was gathered: it costs them nothing
// that can be measured. Gathering warps that wait for their own copies to have it instead lose a
// tenth of the rate of the copies.
#pragma once

#include "common/async_copy.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

// The threads that gather for a block, where a kernel does not say otherwise; each arrives at the
// full barrier of a slot.
constexpr int wgmma_gather_threads = 64;

// What a thread copies: of every eighth or sixteenth row of a tile 16 of each 128 bytes. So its
// swizzle is that of its first row.
template <int height, int threads = wgmma_gather_threads>
class wgmma_gather {
  static constexpr int row_bytes = 128, chunks = row_bytes / 16;
  static constexpr int step = threads / chunks;  // rows of a pass
  static constexpr int passes = height / step;
  static_assert(step % 8 == 0 && height % step == 0);
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
  // `rows` in shared memory, of which the first `kept` of this thread are read at once. `thread` is
  // one of the warps'.
  __device__ __forceinline__ wgmma_gather(const u32* rows, int thread)
      : chunk_(thread % chunks), first_(thread / chunks) {
    rows_ = rows + first_;
#pragma unroll
    for (int i = 0; i < kept; ++i) kept_[i] = rows_[i * step];
  }

  // Begins to copy elements [column, column + 64 slabs) of the rows of a matrix with `columns`,
  // zeros past its end, into slabs of `height` rows of 64 elements.
  template <int slabs, class T>
  __device__ __forceinline__ void copy(const T* matrix, int columns, int column, u32 to) const {
    constexpr int elements = row_bytes / sizeof(T);
    const int own = column + chunk_ * 16 / static_cast<int>(sizeof(T));
    const u32 pitch = static_cast<u32>(columns) * sizeof(T);
    const char* const from = reinterpret_cast<const char*>(matrix + (own < columns ? own : 0));
    to += first_ * row_bytes + ((chunk_ ^ (first_ & 7)) << 4);
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
