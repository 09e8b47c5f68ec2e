// The main loop: K blocks from the shared-memory pipeline through the tensor cores into a thread's
// accumulators.
//
// The fragments of the next k16 step are loaded while the tensor cores work on the current one,
// across the K block's boundary too. So there is one barrier per K block: it both publishes the
// next stage and frees the previous one's.
#pragma once

#include "common/mma.cuh"
#include "gemm/sm80/load.cuh"

namespace fftune {

template <gemm_form form, sm80_config config>
class sm80_mainloop {
  using loader = operand_loader<form, config>;
  using a_copy = typename loader::a_copy;
  using b_copy = typename loader::b_copy;
  using a_layout = typename a_copy::layout;
  using b_layout = typename b_copy::layout;
  using T = element_type<form.ab>;
  static constexpr bool a_mn_major = form.a_major == major::mn;
  static constexpr bool b_mn_major = form.b_major == major::mn;
  static constexpr int b_operands = form.b_operands();
  static constexpr int k_steps = config.bk / 16, stages = config.stages;
  static constexpr int stage_bytes = config.stage_bytes(b_operands);
  static_assert(config.bm % (16 * config.warps_m) == 0 && config.bn % (16 * config.warps_n) == 0);
  static_assert(k_steps % 2 == 0, "fragments alternate between two buffers");
  static_assert(stages >= 2);

 public:
  static constexpr int m_fragments = config.warp_m() / 16, n_fragments = config.warp_n() / 8;
  using accumulators = float[b_operands][m_fragments][n_fragments][4];
  static constexpr int vectors = b_operands * m_fragments * n_fragments;  // float4 of a thread

  // Where a thread's part of the tile is. Two special registers away, so it is worked out anew
  // after the main loop.
  struct position {
    int thread = threadIdx.x;
    int lane = thread % 32;
    int warp_row = thread / 32 / config.warps_n * config.warp_m();
    int warp_column = thread / 32 % config.warps_n * config.warp_n();
  };

  static __device__ __forceinline__ void run(accumulators& sum, loader& load, int k_blocks,
                                             u32 pipeline) {
    const position here;
    const u32 a_offset = a_layout::a_fragment(here.warp_row, here.lane);
    const u32 b_offset = b_layout::b_fragment(here.warp_column, here.lane);
    constexpr u32 pipeline_bytes = stages * stage_bytes;
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
      load.template issue<0, 1>(pipeline + stage * stage_bytes);  // past the end of k are zeros
      load.next_k_block();
      copy_async_commit();
    }
    copy_async_wait<stages - 2>();
    __syncthreads();

    fragments buffer[2];
    load_fragments(buffer[0], pipeline, a_offset, b_offset, 0);
    u32 stage = pipeline;
    u32 free_stage = pipeline + (stages - 1) * stage_bytes;
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      const u32 current = stage;
      const u32 next_stage =
          stage + stage_bytes == pipeline + pipeline_bytes ? pipeline : stage + stage_bytes;
      k_step<0>(sum, buffer, load, stage, next_stage, free_stage, a_offset, b_offset);
      free_stage = current;  // its last reads were before this K block's barrier
    }
    copy_async_wait<0>();
    __syncthreads();  // the pipeline's shared memory is reused for the output
  }

 private:
  struct fragments {
    u32 a[m_fragments][4];
    u32 b[b_operands][n_fragments][2];
  };

  template <bool mn_major>
  static __device__ __forceinline__ void load_x4(u32& r0, u32& r1, u32& r2, u32& r3, u32 shared) {
    if constexpr (mn_major) {
      load_matrices_transposed(r0, r1, r2, r3, shared);
    } else {
      load_matrices(r0, r1, r2, r3, shared);
    }
  }

  static __device__ __forceinline__ void load_fragments(fragments& to, u32 stage, u32 a_offset,
                                                        u32 b_offset, int step) {
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
      load_x4<a_mn_major>(to.a[i][0], to.a[i][1], to.a[i][2], to.a[i][3],
                          stage + a_layout::next(a_layout::advance(a_offset, step), i));
    }
#pragma unroll
    for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
      for (int j = 0; j < n_fragments; j += 2) {
        u32(&pair)[n_fragments][2] = to.b[operand];
        load_x4<b_mn_major>(pair[j][0], pair[j][1], pair[j + 1][0], pair[j + 1][1],
                            stage + a_copy::bytes + operand * b_copy::bytes +
                                b_layout::next(b_layout::advance(b_offset, step), j / 2));
      }
    }
  }

  static __device__ __forceinline__ void mma(accumulators& sum, const fragments& from) {
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
        for (int column = 0; column < n_fragments; ++column) {
          // Alternate rows run backwards, so that consecutive MMAs share an operand register.
          const int j = (i & 1) ? n_fragments - 1 - column : column;
          mma_16x8x16<T>(sum[operand][i][j], from.a[i], from.b[operand][j]);
        }
      }
    }
  }

  // One k16 step of the K block in `stage`: load the next step's fragments, feed the pipeline, MMA.
  template <int step>
  static __device__ __forceinline__ void k_step(accumulators& sum, fragments (&buffer)[2],
                                                loader& load, u32& stage, u32 next_stage,
                                                u32 free_stage, u32 a_offset, u32 b_offset) {
    constexpr bool last = step == k_steps - 1;
    if constexpr (last) {
      copy_async_commit();
      load.next_k_block();
      copy_async_wait<stages - 2>();
      __syncthreads();
      stage = next_stage;
    }
    load_fragments(buffer[(step + 1) & 1], stage, a_offset, b_offset, last ? 0 : step + 1);
    if constexpr (!last) load.template issue<step, k_steps - 1>(free_stage);
    mma(sum, buffer[step & 1]);
    if constexpr (!last) {
      k_step<step + 1>(sum, buffer, load, stage, next_stage, free_stage, a_offset, b_offset);
    }
  }
};

}  // namespace fftune
