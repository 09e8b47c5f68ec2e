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

constexpr int wgmma_gather_warps = 2;  // each arrives at the full barrier of a slot

// Tiles of `height` rows, and 128 bytes of k, into slots of Ring, which has `stages`.
template <class T, int height, class Ring, int stages>
class wgmma_gather {
  static constexpr int row_bytes = 128, chunks = row_bytes / 16;
  static constexpr int step = wgmma_gather_warps * 32 / chunks;  // rows of a pass
  static constexpr int passes = height / step;
  static_assert(step == 8 && height % step == 0,
                "the swizzle of a thread is that of its first row");
  // A thread keeps its rows in registers, so that its copies do not wait for each other; what is
  // too many it reads again.
  static constexpr int kept = smaller(passes, 16);
  // Addresses that are there before the first of their copies, which else would wait for each other
  // to read the same registers.
  static constexpr int together = passes % 4 == 0 ? 4 : 1;
  // k tiles that copies are ahead of the slots that are said to be full: half of the ring, of which
  // a slot is at work and the next one full.
  static constexpr int ahead = smaller(stages / 2, stages - 2);

  // Says of the oldest slot that it is full; its copies are complete.
  static __device__ __forceinline__ void signal(Ring& behind) {
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(behind.full_barrier());
    behind.advance();
  }

 public:
  // The k tiles [first, last) of `rows` of a matrix with `k` elements a row; all of these slots are
  // full in the end. `thread` is one of the warps'.
  static __device__ __forceinline__ void copy(const T* matrix, const u32* rows, int k, int first,
                                              int last, Ring& pipe, int thread) {
    const int chunk = thread % chunks, own = thread / chunks;
    u32 kept_rows[kept];
#pragma unroll
    for (int i = 0; i < kept; ++i) kept_rows[i] = rows[own + i * step];
    const u32 pitch = static_cast<u32>(k) * sizeof(T);
    const u32 place = own * row_bytes + ((chunk ^ own) << 4);
    Ring behind = pipe;
    for (int tile_k = first; tile_k < last; ++tile_k, pipe.advance()) {
      const int column = (tile_k * chunks + chunk) * (16 / static_cast<int>(sizeof(T)));
      const bool valid = column < k;  // zeros for the rest
      const char* const from = reinterpret_cast<const char*>(matrix + (valid ? column : 0));
      barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      const u32 to = pipe.slot() + place;
#pragma unroll
      for (int i = 0; i < passes; i += together) {
        const char* source[together];
#pragma unroll
        for (int j = 0; j < together; ++j) {
          u32 row = i + j < kept ? kept_rows[i + j < kept ? i + j : 0] : rows[own + (i + j) * step];
          asm volatile("" : "+r"(row));  // else all addresses are kept, twice as many registers
          source[j] = from + static_cast<u64>(row) * pitch;
        }
#pragma unroll
        for (int j = 0; j < together; ++j) {
          copy_async(to + (i + j) * step * row_bytes, source[j], valid);
        }
      }
      copy_async_commit();
      if (tile_k - first >= ahead) {
        copy_async_wait<ahead>();
        signal(behind);
      }
    }
    copy_async_wait<0>();
    while (behind.index != pipe.index) signal(behind);
  }
};

}  // namespace fftune
