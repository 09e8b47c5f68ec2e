// C = epilogue(A B1^T[, A B2^T]), or A1 B1^T + A2 B2^T, where a mask says for each row of A which
// of two sets of B it takes, with mma.sync, for sm_80 and newer.
//
// The engine of mma_sync.cuh over tiles of one group's rows each (row_groups.cuh), so that no row
// is computed twice. cp.async gathers them, and the stores scatter them, 16 bytes a thread: a row's
// part of a tile is 64 bytes or more, so rows that are no neighbours cost no more than others.
// A or C may be in the order of the groups instead, and what the epilogue reads is as C.
#pragma once

#include "gemm/mma_sync.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

// As tile_copy, of rows that a table in shared memory names.
template <int rows, int bk, int threads>
class tile_gather {
  using layout = tile_layout<bk>;
  static constexpr int chunks = rows * layout::row_chunks;
  static constexpr int row_step = threads / layout::row_chunks;
  static_assert(threads % layout::row_chunks == 0);

 public:
  static constexpr int steps = ceil_div(chunks, threads);
  static constexpr int bytes = rows * layout::row_bytes;

  template <class T>
  __device__ __forceinline__ tile_gather(const T* matrix, const u32* table, int valid_rows, i64 k,
                                         i64 first_k, int thread)
      : thread_(thread),
        row_(thread / layout::row_chunks),
        valid_(valid_rows - row_),
        chunk_k_(thread % layout::row_chunks * 8),
        pitch_(static_cast<u32>(k) * 2),
        table_(table + row_),
        source_(reinterpret_cast<const char*>(matrix + first_k + chunk_k_)) {}

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const bool k_is_valid = chunk_k_ < valid_k;
#pragma unroll
    for (int step = first; step < last; ++step) {
      if ((step + 1) * threads <= chunks || thread_ + step * threads < chunks) {
        const bool valid = k_is_valid && step * row_step < valid_;
        const u32 row = valid ? table_[step * row_step] : 0;
        copy_async(shared_tile + layout::offset(row_ + step * row_step, chunk_k_ / 8),
                   source_ + static_cast<u64>(row) * pitch_, valid);
      }
    }
  }

  __device__ __forceinline__ void next_tile() {
    source_ += layout::row_bytes;
  }
  __device__ __forceinline__ void move(i64 bytes) {
    source_ += bytes;
  }
  // Bytes from one element of a row to that `walked` further along k.
  static __device__ __forceinline__ i64 distance(i64 walked) {
    return walked * 2;
  }

 private:
  int thread_, row_, valid_, chunk_k_;
  u32 pitch_;
  const u32* table_;
  const char* source_;
};

template <class T>
struct grouped_arguments {
  const T* a;
  const T* a1;  // of the second term
  const u8* mask;
  const T* b[2][2];  // of the marked rows, then of the others: of each product or term
  T* c[most_outputs];
  const T *gate, *up;           // of a gradient
  split_k_workspace workspace;  // unused when split_k is 1
  int m, n, k;
  int split_k;  // gridDim.y
  int group_m;
};

template <class T, class Epilogue, bool sorted_a, bool sorted_c, int bm, int bn, int bk,
          int warps_m, int warps_n, int stages, class Operands = forward_operands>
class mma_sync_grouped_gemm
    : mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages, Operands, true> {
  using engine = mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages, Operands, true>;
  using typename engine::a_layout;
  using typename engine::b_copy;
  using typename engine::b_layout;
  using typename engine::output_tile;
  using typename engine::place;
  using a_gather = tile_gather<bm, bk, engine::threads>;
  using source_type =
      mma_sync_copies<a_gather, Operands, Epilogue::products, bn, bk, engine::threads>;
  static_assert(!Operands::a_transposed && (sorted_c || !is_gradient<Epilogue>));

  // From the first k tile of this block's range on, which may begin in the second term.
  static __device__ __forceinline__ source_type source_of(const grouped_arguments<T>& from,
                                                          const mma_sync_range& range, int group,
                                                          const u32* rows_of_a, int rows,
                                                          i64 first_n, int columns, int thread) {
    const bool late = Operands::terms == 2 && range.first >= range.term_tiles;
    const u32 before = late ? range.term_tiles : 0;
    const int first_k = static_cast<int>((range.first - before) * bk);
    const T* const b0 = group == 0 ? from.b[0][0] : from.b[1][0];
    const T* const b1 = group == 0 ? from.b[0][1] : from.b[1][1];
    const i64 b_pitch = Operands::b_transposed ? from.n : from.k;
    source_type source = {
        a_gather(late ? from.a1 : from.a, rows_of_a, rows, from.k, first_k, thread),
        {b_copy(late ? b1 : b0, first_n, columns, b_pitch, first_k, thread),
         b_copy(Epilogue::products == 2 ? b1 : b0, first_n, columns, b_pitch, first_k, thread)}};
    const i64 walked = static_cast<i64>(range.term_tiles) * bk;
    source.begin(range, late, (from.a1 - from.a) * 2 - a_gather::distance(walked),
                 (b1 - b0) * 2 - b_copy::distance(walked, b_pitch));
    return source;
  }

 public:
  using engine::threads;
  // Words of shared memory before the engine's: those of row_groups, then the tile's rows of A and
  // of C, rounded up to whole lines.
  static constexpr int table_words = (row_groups::shared_words + 2 * bm + 31) / 32 * 32;

  static __device__ __forceinline__ void run(const grouped_arguments<T>& arguments,
                                             unsigned char* memory) {
    u32* const words = reinterpret_cast<u32*>(memory);
    u32* const rows_of_a = words + row_groups::shared_words;
    u32* const rows_of_c = rows_of_a + bm;
    unsigned char* const block_shared = memory + table_words * 4;
    output_tile& output = *reinterpret_cast<output_tile*>(block_shared);
    unsigned char* const shared = block_shared + engine::kept_bytes;

    const row_groups groups = row_groups::build<threads>(arguments.mask, arguments.m, words);
    const u32 marked = groups.marked(), others = arguments.m - marked;
    const u32 marked_tiles = ceil_div(marked, static_cast<u32>(bm));
    const u32 tiles_m = marked_tiles + ceil_div(others, static_cast<u32>(bm));
    const u32 tiles_n = ceil_div(static_cast<u32>(arguments.n), static_cast<u32>(bn));
    // The grid has a row of tiles more than there may be: all splits of one leave together.
    if (blockIdx.x >= tiles_m * tiles_n) return;
    const tile_position tile = grouped_tile(blockIdx.x, tiles_m, tiles_n, arguments.group_m);
    const int group = tile.m >= marked_tiles ? 1 : 0;
    const u32 rank = (group == 0 ? tile.m : tile.m - marked_tiles) * bm;
    const u32 left = (group == 0 ? marked : others) - rank;
    const int rows = static_cast<int>(left < bm ? left : bm);
    for (int row = threadIdx.x; row < rows; row += threads) {
      const u32 sorted = rank + row + (group == 0 ? 0 : marked);
      const u32 token = sorted_a && sorted_c ? sorted : groups.row_of(group, rank + row);
      rows_of_a[row] = sorted_a ? sorted : token;
      rows_of_c[row] = sorted_c ? sorted : token;
    }

    alignas(16) typename engine::sums sum = {};
    {
      const place here;
      const i64 first_n = static_cast<i64>(tile.n) * bn;
      const int columns = smaller(bn, static_cast<int>(arguments.n - first_n));
      if (here.thread == 0) {
#pragma unroll
        for (int i = 0; i < Epilogue::outputs; ++i) {
          output.origin[i] = arguments.c[i] + first_n;
        }
        if constexpr (is_gradient<Epilogue>) {
          const i64 first_row = static_cast<i64>(rank) + (group == 0 ? 0 : marked);
          output.gate = arguments.gate + first_row * arguments.n + first_n;
          output.up = arguments.up + first_row * arguments.n + first_n;
        }
        output.rows = rows;
        output.columns = columns;
        output.pitch = arguments.n;
        output.places = rows_of_c;
      }
      __syncthreads();
      const mma_sync_range range(arguments.k, bk, Operands::terms, arguments.split_k);
      source_type source =
          source_of(arguments, range, group, rows_of_a, rows, first_n, columns, here.thread);
      engine::main_loop(sum, source, range.tiles(), shared_address(shared),
                        a_layout::a_fragment(here.warp_row, here.lane),
                        b_layout::b_fragment(here.warp_column, here.lane));
    }
    if (arguments.split_k > 1) {
      if (!reduce_splits<threads>(reinterpret_cast<float4(&)[engine::vectors]>(sum), true,
                                  arguments.split_k, arguments.workspace, shared)) {
        return;
      }
      __syncthreads();  // what was exchanged through shared memory is read
    }
    engine::store_tile(sum, output, shared);
  }
};

}  // namespace fftune
