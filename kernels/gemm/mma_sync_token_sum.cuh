// Sums over the rows of each of two groups, C_g = epilogue(A_g^T B_g), where a mask says of which
// group a row of A and B is: the gradients of two sets of weights, with mma.sync, for sm_80 and
// newer.
//
// The engine of mma_sync.cuh over the tiles of both groups' C, those of the group with more tokens
// first, as they take longer. A [k, m] and B [k, n] are row-major and read as their transposes;
// k counts the tokens. cp.async gathers the tokens of a k tile by a list that an earlier kernel
// wrote, in their order; a row's part of a tile is 64 bytes or more, so tokens that are no
// neighbours cost no more than others. An operand may be in the order of the groups instead.
#pragma once

#include "gemm/mma_sync.cuh"

namespace fftune {

// As transposed_tile_copy, of tokens that a list names.
template <int rows, int bk, int threads, bool sorted>
class token_tile_copy {
  using layout = transposed_tile_layout<rows>;
  static constexpr int chunks = bk * layout::row_chunks;
  static constexpr int k_step = threads / layout::row_chunks;  // between a thread's chunks
  static_assert(threads % layout::row_chunks == 0);

 public:
  static constexpr int steps = ceil_div(chunks, threads);
  static constexpr int bytes = bk * layout::row_bytes;

  // `place` is that of the first token in the order of the groups.
  template <class T>
  __device__ __forceinline__ token_tile_copy(const T* matrix, const u32* order, u32 place,
                                             i64 first_row, int valid_rows, i64 pitch, int thread)
      : thread_(thread),
        k_(thread / layout::row_chunks),
        chunk_(thread % layout::row_chunks),
        row_is_valid_(chunk_ * 8 < valid_rows),
        pitch_bytes_(static_cast<u32>(pitch) * 2),
        place_(place + k_),
        order_(order),
        source_(reinterpret_cast<const char*>(matrix + first_row + chunk_ * 8)) {}

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
#pragma unroll
    for (int step = first; step < last; ++step) {
      if ((step + 1) * threads <= chunks || thread_ + step * threads < chunks) {
        const int k = k_ + step * k_step;
        const bool valid = row_is_valid_ && k < valid_k;
        const u32 place = place_ + step * k_step;
        const u32 token = !valid ? 0 : sorted ? place : order_[place];
        copy_async(shared_tile + layout::offset(k, chunk_),
                   source_ + static_cast<u64>(token) * pitch_bytes_, valid);
      }
    }
  }

  __device__ __forceinline__ void next_tile() {
    place_ += bk;
  }

 private:
  int thread_, k_, chunk_;
  bool row_is_valid_;
  u32 pitch_bytes_, place_;
  const u32* order_;
  const char* source_;
};

// Of both operands.
template <int bm, int bn, int bk, int threads, bool sorted_a, bool sorted_b>
struct token_producer {
  using a_copy = token_tile_copy<bm, bk, threads, sorted_a>;
  using b_copy = token_tile_copy<bn, bk, threads, sorted_b>;
  a_copy a;
  b_copy b;
  int k_left;  // tokens from the start of the next tile to the end of this block's range

  template <int share, int shares>
  __device__ __forceinline__ void issue(u32 slot) const {
    a.template issue<share * a_copy::steps / shares, (share + 1) * a_copy::steps / shares>(slot,
                                                                                           k_left);
    b.template issue<share * b_copy::steps / shares, (share + 1) * b_copy::steps / shares>(
        slot + a_copy::bytes, k_left);
  }
  __device__ __forceinline__ void next_tile() {
    a.next_tile();
    b.next_tile();
    k_left -= bk;
  }
};

// The operands of each group's results, of which there are one or two, each with an A and a C.
template <class T>
struct token_sum_arguments {
  const T* a[2];
  const T* b;
  const u32* order;       // [k] tokens, those of the first group first, and how many these are
  const T* addend[2][2];  // of the first group, then of the other; unused where nothing is added
  T* c[2][2];
  split_k_workspace workspace;  // unused when split_k is 1
  int m, n, k;
  int split_k;  // gridDim.y
  int group_m;
};

template <class T, class Epilogue, bool sorted_a, bool sorted_b, int results, int bm, int bn,
          int bk, int warps_m, int warps_n, int stages>
class mma_sync_token_sum : mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages,
                                         matrix_operands<true, true, 1, results, true>> {
  using engine = mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages,
                               matrix_operands<true, true, 1, results, true>>;
  using typename engine::a_layout;
  using typename engine::b_layout;
  using typename engine::output_tile;
  using typename engine::place;
  using source_type = token_producer<bm, bn, bk, engine::threads, sorted_a, sorted_b>;
  static_assert(Epilogue::products == 1);

 public:
  static __device__ __forceinline__ void run(const token_sum_arguments<T>& arguments,
                                             unsigned char* block_shared) {
    // As in the engine, what only the end needs waits in shared memory.
    output_tile& output = *reinterpret_cast<output_tile*>(block_shared);
    unsigned char* const shared = block_shared + engine::kept_bytes;
    alignas(16) typename engine::sums sum = {};
    {
      const place here;
      const u32 tiles_m = ceil_div(static_cast<u32>(arguments.m), static_cast<u32>(bm));
      const u32 tiles_n = ceil_div(static_cast<u32>(arguments.n), static_cast<u32>(bn));
      tile_position tile =
          grouped_tile(blockIdx.x, tiles_m * 2 * results, tiles_n, arguments.group_m);
      const u32 result = tile.m / tiles_m;
      tile.m -= result * tiles_m;
      const int marked = static_cast<int>(arguments.order[arguments.k]);
      const int longer = 2 * marked >= arguments.k ? 0 : 1;
      const int group = result < results ? longer : 1 - longer;
      const bool second = results == 2 && result % 2 == 1;
      const int tokens = group == 0 ? marked : arguments.k - marked;
      const i64 first_m = static_cast<i64>(tile.m) * bm, first_n = static_cast<i64>(tile.n) * bn;
      const int rows = smaller(bm, static_cast<int>(arguments.m - first_m));
      const int columns = smaller(bn, static_cast<int>(arguments.n - first_n));
      if (here.thread == 0) {
        const i64 first = first_m * arguments.n + first_n;
        output.origin[0] = (group == 0 ? arguments.c[0][second] : arguments.c[1][second]) + first;
        if constexpr (Epilogue::adds_residual) {
          output.more.residual =
              (group == 0 ? arguments.addend[0][second] : arguments.addend[1][second]) + first;
        }
        output.rows = rows;
        output.columns = columns;
        output.pitch = arguments.n;
      }
      const mma_sync_range range(tokens, bk, 1, arguments.split_k);
      const u32 first_k = range.first * bk;
      const u32 begin = (group == 0 ? 0 : marked) + first_k;
      source_type source = {
          {second ? arguments.a[1] : arguments.a[0], arguments.order, begin, first_m, rows,
           arguments.m, here.thread},
          {arguments.b, arguments.order, begin, first_n, columns, arguments.n, here.thread},
          range.end_in_term(0) - static_cast<int>(first_k)};
      engine::main_loop(sum, source, range.tiles(), shared_address(shared),
                        a_layout::a_fragment(here.warp_row, here.lane),
                        b_layout::b_fragment(here.warp_column, here.lane));
    }
    if (arguments.split_k > 1) {
      if (!reduce_splits<engine::threads>(reinterpret_cast<float4(&)[engine::vectors]>(sum), true,
                                          arguments.split_k, arguments.workspace, shared)) {
        return;
      }
      __syncthreads();  // what was exchanged through shared memory is read
    }
    engine::store_tile(sum, output, shared);
  }
};

}  // namespace fftune
