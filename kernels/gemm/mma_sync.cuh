// C = epilogue(A B1^T[, A B2^T]) with mma.sync, for sm_80 and newer.
//
// A [m, k], B [n, k], a C [m, n] for each output, row-major; k and n multiples of 8 and all
// pointers 16-byte aligned, m >= 1. An operand may lie transposed, [k, m] or [k, n], and then it is
// m or n that is a multiple of 8, for any k.
//
// A block owns a bm x bn tile of C (of both products, when there are two) and walks k in tiles of
// bk. A ring of `stages` tiles in shared memory is filled by cp.async, stages - 1 tiles ahead of
// use. Warps form a warps_m x warps_n grid; each keeps its part of the sums in registers. Within a
// k tile the fragments of the next k16 step are loaded while the tensor cores work on the current
// one, across the tile boundary too, so there is one barrier per k tile: it both publishes the next
// tile and frees the previous one's slot.
//
// The output passes through the same shared memory, so that global stores are 16 bytes and whole
// rows of the tile.
#pragma once

#include "common/mma.cuh"
#include "gemm/mma_sync_producer.cuh"
#include "gemm/tile_order.cuh"

namespace fftune {

template <class T, class Epilogue, int bm, int bn, int bk, int warps_m, int warps_n, int stages,
          class Operands = forward_operands>
class mma_sync_gemm {
  static constexpr int products = Epilogue::products, outputs = Epilogue::outputs;
  static constexpr int warp_m = bm / warps_m, warp_n = bn / warps_n;
  static constexpr int m_fragments = warp_m / 16, n_fragments = warp_n / 8;
  static constexpr int k_steps = bk / 16;
  static_assert(bm % (16 * warps_m) == 0 && bn % (16 * warps_n) == 0);
  static_assert(k_steps % 2 == 0, "fragments alternate between two buffers");
  static_assert(stages >= 2);

 public:
  static constexpr int threads = warps_m * warps_n * 32;

 private:
  using a_operand = tile_operand<Operands::a_transposed, bm, bk, threads>;
  using b_operand = tile_operand<Operands::b_transposed, bn, bk, threads>;
  using a_layout = typename a_operand::layout;
  using b_layout = typename b_operand::layout;
  using a_copy = typename a_operand::copy;
  using b_copy = typename b_operand::copy;
  using producer = mma_sync_producer<T, Operands, products, bm, bn, bk, threads>;
  static constexpr int stage_bytes = a_copy::bytes + products * b_copy::bytes;
  static constexpr int vectors = products * m_fragments * n_fragments;  // float4 sums of a thread
  static constexpr int kept_bytes = 128;  // a line, so that the ring stays aligned
  static constexpr int output_row_bytes =
      bn * 2 + 16;  // 16 bytes of padding shift each row by four banks

  using sums = float[products][m_fragments][n_fragments][4];

  // Where a thread's part of the tile is. Two special registers away, so it is worked out anew
  // after the main loop.
  struct place {
    int thread = threadIdx.x;
    int lane = thread % 32;
    int warp_row = thread / 32 / warps_n * warp_m;
    int warp_column = thread / 32 % warps_n * warp_n;
  };

  struct fragments {
    u32 a[m_fragments][4];
    u32 b[products][n_fragments][2];
  };

  template <bool transposed>
  static __device__ __forceinline__ void load(u32& r0, u32& r1, u32& r2, u32& r3, u32 shared) {
    if constexpr (transposed) {
      load_matrices_transposed(r0, r1, r2, r3, shared);
    } else {
      load_matrices(r0, r1, r2, r3, shared);
    }
  }

  static __device__ __forceinline__ void load_fragments(fragments& to, u32 slot, u32 a_offset,
                                                        u32 b_offset, int step) {
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
      load<Operands::a_transposed>(to.a[i][0], to.a[i][1], to.a[i][2], to.a[i][3],
                                   slot + a_layout::next(a_layout::advance(a_offset, step), i));
    }
#pragma unroll
    for (int product = 0; product < products; ++product) {
#pragma unroll
      for (int j = 0; j < n_fragments; j += 2) {
        u32(&pair)[n_fragments][2] = to.b[product];
        load<Operands::b_transposed>(pair[j][0], pair[j][1], pair[j + 1][0], pair[j + 1][1],
                                     slot + a_copy::bytes + product * b_copy::bytes +
                                         b_layout::next(b_layout::advance(b_offset, step), j / 2));
      }
    }
  }

  static __device__ __forceinline__ void multiply(sums& sum, const fragments& operand) {
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
#pragma unroll
      for (int product = 0; product < products; ++product) {
#pragma unroll
        for (int column = 0; column < n_fragments; ++column) {
          // Alternate rows run backwards, so that consecutive products share an operand register.
          const int j = (i & 1) ? n_fragments - 1 - column : column;
          mma_16x8x16<T>(sum[product][i][j], operand.a[i], operand.b[product][j]);
        }
      }
    }
  }

  // One k16 step of the tile in `slot`: fetch the next step's fragments, feed the ring, multiply.
  template <int step>
  static __device__ __forceinline__ void k_step(sums& sum, fragments (&buffer)[2], producer& source,
                                                u32& slot, u32 next_slot, u32 free_slot,
                                                u32 a_offset, u32 b_offset) {
    constexpr bool last = step == k_steps - 1;
    if constexpr (last) {
      copy_async_commit();
      source.next_tile();
      copy_async_wait<stages - 2>();
      __syncthreads();
      slot = next_slot;
    }
    load_fragments(buffer[(step + 1) & 1], slot, a_offset, b_offset, last ? 0 : step + 1);
    if constexpr (!last) {
      source.template issue<step, k_steps - 1>(free_slot);
    }
    multiply(sum, buffer[step & 1]);
    if constexpr (!last) {
      k_step<step + 1>(sum, buffer, source, slot, next_slot, free_slot, a_offset, b_offset);
    }
  }

  static __device__ __forceinline__ void main_loop(sums& sum, producer& source, int k_tiles,
                                                   u32 ring, u32 a_offset, u32 b_offset) {
    constexpr u32 ring_bytes = stages * stage_bytes;
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
      source.template issue<0, 1>(ring + stage * stage_bytes);  // tiles past the end of k are zeros
      source.next_tile();
      copy_async_commit();
    }
    copy_async_wait<stages - 2>();
    __syncthreads();

    fragments buffer[2];
    load_fragments(buffer[0], ring, a_offset, b_offset, 0);
    u32 slot = ring;
    u32 free_slot = ring + (stages - 1) * stage_bytes;
#pragma unroll 1
    for (int tile = 0; tile < k_tiles; ++tile) {
      const u32 current = slot;
      const u32 next_slot = slot + stage_bytes == ring + ring_bytes ? ring : slot + stage_bytes;
      k_step<0>(sum, buffer, source, slot, next_slot, free_slot, a_offset, b_offset);
      free_slot = current;  // its last reads were before this tile's barrier
    }
    copy_async_wait<0>();
    __syncthreads();  // the ring is reused for the output
  }

  // Where a tile goes in each C, what is added to it, and how much of it there is.
  struct output_tile {
    T* origin[outputs];
    addends<T> more;
    const T *gate, *up;
    int rows, columns, pitch;
  };

  // Output number `output` of four sums of a thread, of two rows that are 8 apart.
  template <int output>
  static __device__ __forceinline__ void gradient(float (&value)[4], const output_tile& tile,
                                                  int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float gate[2] = {}, up[2] = {};
      if (row + half * 8 < tile.rows && column < tile.columns) {
        const i64 at = static_cast<i64>(row + half * 8) * tile.pitch + column;
        unpack<T>(*reinterpret_cast<const u32*>(tile.gate + at), gate[0], gate[1]);
        unpack<T>(*reinterpret_cast<const u32*>(tile.up + at), up[0], up[1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float result[outputs];
        Epilogue::apply(value[half * 2 + i], gate[i], up[i], result);
        value[half * 2 + i] = result[output];
      }
    }
  }

  // Calls body(global element, shared address) for this thread's 16-byte chunks of the tile.
  template <class Body>
  static __device__ __forceinline__ void for_each_chunk(const output_tile& tile,
                                                        unsigned char* shared, const Body& body) {
    constexpr int row_chunks = bn / 8;
    for (int chunk = threadIdx.x; chunk < bm * row_chunks; chunk += threads) {
      const int row = chunk / row_chunks, column = chunk % row_chunks * 8;
      if (row < tile.rows && column < tile.columns) {
        body(static_cast<i64>(row) * tile.pitch + column,
             reinterpret_cast<vector16*>(shared + row * output_row_bytes + column * 2));
      }
    }
  }

  template <int output = 0>
  static __device__ __forceinline__ void store_tile(const sums& sum, const output_tile& tile,
                                                    unsigned char* shared) {
    const place here;
    if constexpr (Epilogue::adds_residual) {  // through the cells that the output will take
      for_each_chunk(tile, shared, [&](i64 at, vector16* chunk) {
        *chunk = load_dependent(tile.more.residual + at);
      });
      __syncthreads();
    }
    u32 bias[n_fragments] = {};
    if constexpr (Epilogue::adds_bias) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const int column = here.warp_column + j * 8 + here.lane % 4 * 2;
        if (column < tile.columns) {
          bias[j] = *reinterpret_cast<const u32*>(tile.more.bias + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        float value[4];
#pragma unroll
        for (int element = 0; element < 4; ++element) {
          float operand[products];
#pragma unroll
          for (int product = 0; product < products; ++product) {
            operand[product] = sum[product][i][j][element];
          }
          if constexpr (is_gradient<Epilogue>) {
            value[element] = operand[0];
          } else {
            value[element] = output_of<Epilogue, output>(operand);
          }
        }
        if constexpr (is_gradient<Epilogue>) {
          gradient<output>(value, tile, here.warp_row + i * 16 + here.lane / 4,
                           here.warp_column + j * 8 + here.lane % 4 * 2);
        }
        unsigned char* const cell = shared +
                                    (here.warp_row + i * 16 + here.lane / 4) * output_row_bytes +
                                    (here.warp_column + j * 8 + here.lane % 4 * 2) * 2;
        u32* const words[2] = {reinterpret_cast<u32*>(cell),
                               reinterpret_cast<u32*>(cell + 8 * output_row_bytes)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &first = value[half * 2], &second = value[half * 2 + 1];
          if constexpr (Epilogue::adds_bias) add_pair<T>(first, second, bias[j]);
          if constexpr (Epilogue::adds_residual) add_pair<T>(first, second, *words[half]);
          *words[half] = pack<T>(first, second);
        }
      }
    }
    __syncthreads();
    for_each_chunk(tile, shared,
                   [&](i64 at, const vector16* chunk) { store(tile.origin[output] + at, *chunk); });
    if constexpr (output + 1 < outputs) {
      __syncthreads();  // this output has left shared memory
      store_tile<output + 1>(sum, tile, shared);
    }
  }

 public:
  // A launch that splits k in clusters also exchanges 16 * vectors bytes a thread there.
  static constexpr int shared_bytes =
      kept_bytes + larger(stages * stage_bytes, bm* output_row_bytes);

  static __device__ __forceinline__ void run(const gemm_arguments<T, products>& arguments,
                                             unsigned char* block_shared) {
    // The main loop needs every register: what only the end needs waits in shared memory.
    output_tile& output = *reinterpret_cast<output_tile*>(block_shared);
    unsigned char* const shared = block_shared + kept_bytes;
    alignas(16) sums sum = {};
    {
      const place here;
      const u32 tiles_m = ceil_div(static_cast<u32>(arguments.m), static_cast<u32>(bm));
      const u32 tiles_n = ceil_div(static_cast<u32>(arguments.n), static_cast<u32>(bn));
      tile_position tile =
          grouped_tile(blockIdx.x, tiles_m * Operands::results, tiles_n, arguments.group_m);
      const bool second = Operands::results == 2 && tile.m >= tiles_m;
      if (second) tile.m -= tiles_m;
      const i64 first_m = static_cast<i64>(tile.m) * bm, first_n = static_cast<i64>(tile.n) * bn;
      const int rows = smaller(bm, static_cast<int>(arguments.m - first_m));
      const int columns = smaller(bn, static_cast<int>(arguments.n - first_n));
      if (here.thread == 0) {
#pragma unroll
        for (int i = 0; i < outputs; ++i) {
          output.origin[i] = arguments.c[second ? 1 : i] + first_m * arguments.n + first_n;
        }
        if constexpr (is_gradient<Epilogue>) {
          output.gate = arguments.gate + first_m * arguments.n + first_n;
          output.up = arguments.up + first_m * arguments.n + first_n;
        }
        if constexpr (Epilogue::adds_bias) output.more.bias = arguments.more.bias + first_n;
        if constexpr (Epilogue::adds_residual) {
          output.more.residual = (second ? arguments.more1 : arguments.more).residual +
                                 first_m * arguments.n + first_n;
        }
        output.rows = rows;
        output.columns = columns;
        output.pitch = arguments.n;
      }

      const mma_sync_range range(arguments.k, bk, Operands::terms, arguments.split_k);
      producer source(arguments, range, second, first_m, rows, first_n, columns, here.thread);
      main_loop(sum, source, range.tiles(), shared_address(shared),
                a_layout::a_fragment(here.warp_row, here.lane),
                b_layout::b_fragment(here.warp_column, here.lane));
    }
    if (arguments.split_k > 1) {
      if (!reduce_splits<threads>(reinterpret_cast<float4(&)[vectors]>(sum), true,
                                  arguments.split_k, arguments.workspace, shared)) {
        return;
      }
      __syncthreads();  // what was exchanged through shared memory is read
    }
    store_tile(sum, output, shared);
  }
};

}  // namespace fftune
