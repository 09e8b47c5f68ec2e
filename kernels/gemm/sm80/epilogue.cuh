// The epilogue: accumulators through the epilogue's operations (epilogue_ops.cuh), one rounding,
// and out through shared memory, so that global accesses are 16 bytes and whole rows of the tile.
#pragma once

#include "common/vectors.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/sm80/mainloop.cuh"

namespace fftune {

template <gemm_form form, sm80_config config>
class sm80_epilogue {
  using T = element_type<form.ab>;
  using ops = epilogue_ops<form>;
  using mainloop = sm80_mainloop<form, config>;
  using accumulators = typename mainloop::accumulators;
  using position = typename mainloop::position;
  static constexpr int b_operands = form.b_operands();
  static constexpr int m_fragments = mainloop::m_fragments, n_fragments = mainloop::n_fragments;
  static constexpr bool scatters = form.groups == grouping::rows;
  static constexpr int row_bytes = config.output_row_bytes();
  static_assert(form.c == form.ab && form.wide == form.ab);

 public:
  // The tile's data that the epilogue needs. It is kept in shared memory, because the main loop
  // needs every register.
  struct tile_addresses {
    T* stored[form.stored_values()];  // the tile's first element of each
    const void* broadcasts[row_broadcasts];
    const T *source, *gate, *up;
    int rows, columns, pitch;
    const u32* rows_of_c;  // grouped rows: of each row of the tile
    int sorted, group, first_n;
  };
  static_assert(sizeof(tile_addresses) <= sm80_config::epilogue_tile_bytes);

  // Written by one thread.
  static __device__ __forceinline__ void locate(tile_addresses& to, const gemm_params& p,
                                                const work_tile& tile, const u32* rows_of_c) {
    i64 first = (scatters ? 0 : tile.first_m * p.n) + tile.first_n;
    if constexpr (form.groups == grouping::reduction && form.stacked) {
      first += static_cast<i64>(tile.group) * p.m * p.n;
    }
#pragma unroll
    for (int i = 0; i < form.stored_values(); ++i) {
      to.stored[i] = static_cast<T*>(ops::destination(p, i, tile.output, tile.group)) + first;
    }
    if constexpr (form.is_gradient()) {
      const i64 first_read =
          scatters && form.c_sorted ? static_cast<i64>(tile.sorted) * p.n + tile.first_n : first;
      to.gate = static_cast<const T*>(p.gate) + first_read;
      to.up = static_cast<const T*>(p.up) + first_read;
    }
#pragma unroll
    for (int i = 0; i < row_broadcasts; ++i) {
      if (form.broadcasts[i])
        to.broadcasts[i] = static_cast<const char*>(p.broadcasts[i]) +
                           tile.first_n * (is_f32(row_broadcast(i)) ? 4 : sizeof(T));
    }
    if constexpr (form.adds_source) to.source = ops::source(p, tile.output, tile.group) + first;
    to.rows = tile.rows;
    to.columns = tile.columns;
    to.pitch = p.n;
    to.rows_of_c = rows_of_c;
    to.sorted = static_cast<int>(tile.sorted);
    to.group = tile.group;
    to.first_n = static_cast<int>(tile.first_n);
  }

  // The factors of rows and the biases of groups, into the accumulators.
  static __device__ __forceinline__ void apply_terms(accumulators& sum, const gemm_params& p,
                                                     const tile_addresses& tile) {
    using terms = group_terms<form>;
    const position here;
    const int group = tile.group, first_n = tile.first_n + here.warp_column + here.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = here.warp_row + i * 16 + here.lane / 4 + half * 8;
        factor[half] = row < tile.rows ? terms::factor(p, tile.sorted + row) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            const float bias = terms::bias(p, group, operand, first_n + j * 8 + next);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& value = sum[operand][i][j][half * 2 + next];
              value = value * factor[half] + bias;
            }
          }
        }
      }
    }
  }

  // Stores value number `index` of each element, then those after it. All threads, after a barrier;
  // `shared` has room for the tile.
  template <int index = 0>
  static __device__ __forceinline__ void store(const accumulators& sum, const tile_addresses& tile,
                                               unsigned char* shared) {
    const position here;
    if constexpr (form.adds_source) {  // through the cells that the output will take
      for_each_chunk(tile, shared,
                     [&](i64 at, vector16* chunk) { *chunk = load_dependent(tile.source + at); });
      __syncthreads();
    }
    typename ops::columns own[n_fragments];
    if constexpr (form.broadcasts_any()) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const int column = here.warp_column + j * 8 + here.lane % 4 * 2;
        if (column < tile.columns) own[j] = ops::columns_from(tile.broadcasts, column);
      }
    }
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const int row = here.warp_row + i * 16 + here.lane / 4;
        const int column = here.warp_column + j * 8 + here.lane % 4 * 2;
        float value[4];
#pragma unroll
        for (int element = 0; element < 4; ++element) {
          float accumulator[b_operands];
#pragma unroll
          for (int operand = 0; operand < b_operands; ++operand) {
            accumulator[operand] = sum[operand][i][j][element];
          }
          if constexpr (form.is_gradient()) {
            value[element] = accumulator[0];
          } else {
            value[element] = ops::template stored<index>(accumulator);
          }
        }
        if constexpr (form.is_gradient()) gradient<index>(value, tile, row, column);
        unsigned char* const cell = shared + row * row_bytes + column * 2;
        u32* const words[2] = {reinterpret_cast<u32*>(cell),
                               reinterpret_cast<u32*>(cell + 8 * row_bytes)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &first = value[half * 2], &second = value[half * 2 + 1];
          ops::apply_broadcasts(own[j], first, second);
          if constexpr (form.adds_source) add_pair<T>(first, second, *words[half]);
          *words[half] = pack<T>(first, second);
        }
      }
    }
    __syncthreads();
    for_each_chunk(tile, shared, [&](i64 at, const vector16* chunk) {
      fftune::store(tile.stored[index] + at, *chunk);
    });
    if constexpr (index + 1 < form.stored_values()) {
      __syncthreads();  // this value has left shared memory
      store<index + 1>(sum, tile, shared);
    }
  }

 private:
  static __device__ __forceinline__ i64 row_at(const tile_addresses& tile, int row) {
    if constexpr (scatters) return static_cast<i64>(tile.rows_of_c[row]) * tile.pitch;
    return static_cast<i64>(row) * tile.pitch;
  }

  // Value number `index` of four accumulators of a thread, of two rows that are 8 apart.
  template <int index>
  static __device__ __forceinline__ void gradient(float (&value)[4], const tile_addresses& tile,
                                                  int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float gate[2] = {}, up[2] = {};
      if (row + half * 8 < tile.rows && column < tile.columns) {
        const i64 at =
            (scatters && !form.c_sorted ? row_at(tile, row + half * 8)
                                        : static_cast<i64>(row + half * 8) * tile.pitch) +
            column;
        unpack<T>(*reinterpret_cast<const u32*>(tile.gate + at), gate[0], gate[1]);
        unpack<T>(*reinterpret_cast<const u32*>(tile.up + at), up[0], up[1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float result[form.stored_values()];
        ops::gradient(value[half * 2 + i], gate[i], up[i], result);
        value[half * 2 + i] = result[index];
      }
    }
  }

  // Calls body(global element, shared address) for this thread's 16-byte chunks of the tile.
  template <class Body>
  static __device__ __forceinline__ void for_each_chunk(const tile_addresses& tile,
                                                        unsigned char* shared, const Body& body) {
    constexpr int row_chunks = config.bn / 8;
    for (int chunk = threadIdx.x; chunk < config.bm * row_chunks; chunk += config.threads()) {
      const int row = chunk / row_chunks, column = chunk % row_chunks * 8;
      if (row < tile.rows && column < tile.columns) {
        body(row_at(tile, row) + column,
             reinterpret_cast<vector16*>(shared + row * row_bytes + column * 2));
      }
    }
  }
};

}  // namespace fftune
