// The epilogue of a QKV product (qkv_form in gemm/form.cuh) in the sm80 engine. A tile has whole
// heads of one part. Accumulators go through shared memory in float32, from where a warp finishes
// one head of one row at a time.
#pragma once

#include "gemm/form.cuh"
#include "gemm/head_row.cuh"
#include "gemm/sm80/mainloop.cuh"

namespace fftune {

template <gemm_form form, sm80_config config>
class sm80_heads_epilogue {
  using T = element_type<form.c>;
  using mainloop = sm80_mainloop<form, config>;
  using accumulators = typename mainloop::accumulators;
  static constexpr qkv_form of_heads = form.qkv;
  static constexpr int dim = of_heads.dim, heads = config.bn / dim;  // of a tile
  static constexpr int pitch = config.heads_pitch();
  static constexpr int distance =
      of_heads.rotation == head_rotation::halves ? of_heads.rotary / 2 : 1;
  static_assert(config.bn % dim == 0);
  static_assert(form.c == form.ab && form.wide == form.ab);

 public:
  // Where a tile's heads are. It waits in shared memory, since the main loop needs every register.
  struct tile_addresses {
    i64 first_row;
    int rows, part, column;  // of the part
    int bias;                // its first element
  };
  static_assert(sizeof(tile_addresses) <= sm80_config::epilogue_tile_bytes);

  // Makes `tile` one of its part's weight, where each part has its own. The result is written to
  // `to` by one thread.
  static __device__ __forceinline__ void locate(tile_addresses& to, const qkv_params& qkv,
                                                work_tile& tile) {
    const int first = static_cast<int>(tile.first_n), part = qkv.part_of(first);
    const int column = first - qkv.first_column(part);
    if constexpr (of_heads.separate) {
      tile.first_n = column;
      tile.group = part;
    }
    if (threadIdx.x == 0) {
      to = {tile.first_m, tile.rows, part, column, of_heads.separate ? column : first};
    }
  }

  // All threads, after a barrier; `shared` has room for the tile.
  static __device__ __forceinline__ void store(const accumulators& sum, const tile_addresses& tile,
                                               const plain_params& all, unsigned char* shared) {
    float* const values = reinterpret_cast<float*>(shared);
    const typename mainloop::position here;
#pragma unroll
    for (int i = 0; i < mainloop::m_fragments; ++i) {
#pragma unroll
      for (int j = 0; j < mainloop::n_fragments; ++j) {
        const int row = here.warp_row + i * 16 + here.lane / 4;
        float* const to = values + row * pitch + here.warp_column + j * 8 + here.lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sum[0][i][j][0], sum[0][i][j][1]};
        *reinterpret_cast<float2*>(to + 8 * pitch) = {sum[0][i][j][2], sum[0][i][j][3]};
      }
    }
    __syncthreads();
    const qkv_params& qkv = all.qkv;
    const auto feature_of = [](int i) { return i; };
    const int part = tile.part;
    for (int i = here.thread / 32; i < tile.rows * heads; i += config.warps()) {
      const int row = i / heads, first = i % heads * dim;
      const i64 token = tile.first_row + row, to_row = row_of_part<form>(qkv, part, token);
      if (to_row < 0) continue;
      const head_row<form, dim, distance> head{values + row * pitch + first};
      if constexpr (of_heads.bias || of_heads.normalises) {
        const void* const bias = qkv.bias[of_heads.separate ? part : 0];
        const float squares =
            head.add_bias(static_cast<const T*>(bias) + tile.bias + first, feature_of);
        if (of_heads.normalises && part < 2) {
          head.normalise(static_cast<const T*>(qkv.norms[part]), squares, qkv.epsilon,
                         qkv.norm_offset, feature_of);
        }
      }
      T* const to = static_cast<T*>(all.gemm.c[part / 2][part % 2]) +
                    place_in_part<form>(qkv, part, to_row, tile.column + first);
      const auto* const sines =
          reinterpret_cast<const float2*>(qkv.sines) + token * (of_heads.rotary / 2);
      head.store(to, part == 2, feature_of, [&](int feature) {
        constexpr bool halves = of_heads.rotation == head_rotation::halves;
        return sines[halves ? feature % (of_heads.rotary / 2) : feature / 2];
      });
    }
  }
};

}  // namespace fftune
