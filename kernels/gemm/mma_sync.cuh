// C = epilogue(A B1^T[, A B2^T]) with mma.sync, for sm_80 and newer.
//
// A [m, k], B [n, k], a C [m, n] for each output, row-major; k and n multiples of 8 and all
// pointers 16-byte aligned, m >= 1.
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
#include "gemm/epilogue.cuh"
#include "gemm/split_k.cuh"
#include "gemm/tile_copy.cuh"
#include "gemm/tile_order.cuh"

namespace fftune {

template <class T, int products>
struct gemm_arguments {
  const T* a;
  const T* b[products];
  T* c[most_outputs];
  split_k_workspace workspace;  // unused when split_k is 1
  int m, n, k;
  int split_k;  // gridDim.y
  int group_m;
  addends<T> more = {};
};

// `Copy` brings the tiles of A: neighbouring rows, unless it knows better. `scatters`: the rows of
// a tile of C go to places of their own.
template <class T, class Epilogue, int bm, int bn, int bk, int warps_m, int warps_n, int stages,
          class Copy = tile_copy<bm, bk, warps_m * warps_n * 32>, bool scatters = false>
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

 protected:
  using layout = tile_layout<bk>;
  using a_copy = Copy;
  using b_copy = tile_copy<bn, bk, threads>;
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

  // Everything that fills the ring: the k tiles of this block, in order.
  struct producer {
    a_copy a;
    b_copy b[2];  // the second is unused with one product
    int k_left;   // elements of k from the start of the next tile to the end of this block's range

    // Copies a share of the next tile; spreading it over the k16 steps keeps the load unit from
    // bursting.
    template <int share, int shares>
    __device__ __forceinline__ void issue(u32 slot) const {
      a.template issue<share * a_copy::steps / shares, (share + 1) * a_copy::steps / shares>(
          slot, k_left);
#pragma unroll
      for (int product = 0; product < products; ++product) {
        b[product]
            .template issue<share * b_copy::steps / shares, (share + 1) * b_copy::steps / shares>(
                slot + a_copy::bytes + product * b_copy::bytes, k_left);
      }
    }

    __device__ __forceinline__ void next_tile() {
      a.next_tile();
#pragma unroll
      for (int product = 0; product < products; ++product) {
        b[product].next_tile();
      }
      k_left -= bk;
    }
  };

  static __device__ __forceinline__ void load_fragments(fragments& to, u32 slot, u32 a_offset,
                                                        u32 b_offset, int step) {
    const u32 a_address = slot + layout::advance(a_offset, step);
    const u32 b_address = slot + a_copy::bytes + layout::advance(b_offset, step);
#pragma unroll
    for (int i = 0; i < m_fragments; ++i) {
      load_matrices(to.a[i][0], to.a[i][1], to.a[i][2], to.a[i][3],
                    a_address + i * 16 * layout::row_bytes);
    }
#pragma unroll
    for (int product = 0; product < products; ++product) {
#pragma unroll
      for (int j = 0; j < n_fragments; j += 2) {
        u32(&pair)[n_fragments][2] = to.b[product];
        load_matrices(pair[j][0], pair[j][1], pair[j + 1][0], pair[j + 1][1],
                      b_address + product * b_copy::bytes + j * 8 * layout::row_bytes);
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
    int rows, columns, pitch;
    const u32* places;  // of its rows from the origin on, where they are scattered

    __device__ __forceinline__ i64 row_at(int row) const {
      if constexpr (scatters) return static_cast<i64>(places[row]) * pitch;
      return static_cast<i64>(row) * pitch;
    }
  };

  // Calls body(global element, shared address) for this thread's 16-byte chunks of the tile.
  template <class Body>
  static __device__ __forceinline__ void for_each_chunk(const output_tile& tile,
                                                        unsigned char* shared, const Body& body) {
    constexpr int row_chunks = bn / 8;
    for (int chunk = threadIdx.x; chunk < bm * row_chunks; chunk += threads) {
      const int row = chunk / row_chunks, column = chunk % row_chunks * 8;
      if (row < tile.rows && column < tile.columns) {
        body(tile.row_at(row) + column,
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
          value[element] = output_of<Epilogue, output>(operand);
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
      const tile_position tile = grouped_tile(blockIdx.x, tiles_m, tiles_n, arguments.group_m);
      const i64 first_m = static_cast<i64>(tile.m) * bm, first_n = static_cast<i64>(tile.n) * bn;
      const int rows = smaller(bm, static_cast<int>(arguments.m - first_m));
      const int columns = smaller(bn, static_cast<int>(arguments.n - first_n));
      if (here.thread == 0) {
#pragma unroll
        for (int i = 0; i < outputs; ++i) {
          output.origin[i] = arguments.c[i] + first_m * arguments.n + first_n;
        }
        if constexpr (Epilogue::adds_bias) output.more.bias = arguments.more.bias + first_n;
        if constexpr (Epilogue::adds_residual) {
          output.more.residual = arguments.more.residual + first_m * arguments.n + first_n;
        }
        output.rows = rows;
        output.columns = columns;
        output.pitch = arguments.n;
      }

      // Balanced shares of the k tiles. In 32 bits: k < 2^31, bk >= 32 and under 64 splits.
      const u32 k_tiles = ceil_div(static_cast<u32>(arguments.k), static_cast<u32>(bk));
      const u32 split = blockIdx.y, split_k = arguments.split_k;
      const u32 first_tile = k_tiles * split / split_k;
      const u32 last_tile = k_tiles * (split + 1) / split_k;
      const int first_k = static_cast<int>(first_tile * bk);
      const int end_k = last_tile == k_tiles ? arguments.k : static_cast<int>(last_tile * bk);

      producer source = {
          a_copy(arguments.a, first_m, rows, arguments.k, first_k, here.thread),
          {b_copy(arguments.b[0], first_n, columns, arguments.k, first_k, here.thread),
           b_copy(arguments.b[products - 1], first_n, columns, arguments.k, first_k, here.thread)},
          end_k - first_k};
      main_loop(sum, source, static_cast<int>(last_tile - first_tile), shared_address(shared),
                layout::a_fragment(here.warp_row, here.lane),
                layout::b_fragment(here.warp_column, here.lane));
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
