// What feeds the mma.sync engine: its arguments, a block's share of k, and the copies of its k
// tiles into shared memory.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/operands.cuh"
#include "gemm/split_k.cuh"
#include "gemm/tile_copy.cuh"

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
  const T* a1 = nullptr;    // of the second term or result
  const T* b1 = nullptr;    // of the second term
  addends<T> more1 = {};    // of the second result, whose C is c[1]
  const T* gate = nullptr;  // [m, n] of a gradient
  const T* up = nullptr;
};

// The k tiles [first, last) of a block, those of two terms one after the other: balanced shares of
// the splits. In 32 bits: k < 2^31, bk >= 32 and under 64 splits.
struct mma_sync_range {
  int k, bk;
  u32 term_tiles, first, last;

  __device__ __forceinline__ mma_sync_range(int extent, int tile, int terms, int splits)
      : k(extent),
        bk(tile),
        term_tiles(ceil_div(static_cast<u32>(extent), static_cast<u32>(tile))) {
    const u32 tiles = term_tiles * terms;
    first = tiles * blockIdx.y / splits;
    last = tiles * (blockIdx.y + 1) / splits;
  }
  __device__ __forceinline__ int tiles() const { return static_cast<int>(last - first); }
  // Where the range ends within a term that begins after `before` tiles.
  __device__ __forceinline__ int end_in_term(u32 before) const {
    if (last >= before + term_tiles) return k;
    return last > before ? static_cast<int>((last - before) * bk) : 0;
  }
};

// The copies of one k tile after the other, of both operands and over all terms. `copy_of_a` is a
// tile_copy, or the like of it.
template <class copy_of_a, class Operands, int products, int bn, int bk, int threads>
struct mma_sync_copies {
  using a_copy = copy_of_a;
  using b_copy = typename tile_operand<Operands::b_transposed, bn, bk, threads>::copy;

  a_copy a;
  b_copy b[2];     // the second is unused with one product
  int k_left = 0;  // elements of k from the start of the next tile to the end of this block's range
  // Of two terms: the tiles to the end of the first, and how to go on from there.
  int first_term_tiles = 0, second_k = 0;
  i64 a_jump = 0, b_jump = 0;

  // `late`: the range begins in the second term. `to_second_a` and `to_second_b`: bytes from the
  // first tile behind the first term to the second term's first.
  __device__ __forceinline__ void begin(const mma_sync_range& range, bool late, i64 to_second_a,
                                        i64 to_second_b) {
    const u32 before = late ? range.term_tiles : 0;
    k_left = range.end_in_term(before) - static_cast<int>((range.first - before) * bk);
    if constexpr (Operands::terms == 2) {
      first_term_tiles = late ? 0 : static_cast<int>(range.term_tiles - range.first);
      second_k = range.end_in_term(range.term_tiles);
      a_jump = to_second_a;
      b_jump = to_second_b;
    }
  }

  // Copies a share of the next tile; spreading it over the k16 steps keeps the load unit from
  // bursting.
  template <int share, int shares>
  __device__ __forceinline__ void issue(u32 slot) const {
    a.template issue<share * a_copy::steps / shares, (share + 1) * a_copy::steps / shares>(slot,
                                                                                           k_left);
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
    if constexpr (Operands::terms == 2) {
      if (--first_term_tiles == 0) {
        a.move(a_jump);
        b[0].move(b_jump);
        k_left = second_k;
      }
    }
  }
};

template <class T, class Operands, int products, int bm, int bn, int bk, int threads>
struct mma_sync_producer
    : mma_sync_copies<typename tile_operand<Operands::a_transposed, bm, bk, threads>::copy,
                      Operands, products, bn, bk, threads> {
  using copies =
      mma_sync_copies<typename tile_operand<Operands::a_transposed, bm, bk, threads>::copy,
                      Operands, products, bn, bk, threads>;
  using typename copies::a_copy;
  using typename copies::b_copy;

  // `second`: of two results, A is the second one's.
  __device__ __forceinline__ mma_sync_producer(const gemm_arguments<T, products>& from,
                                               const mma_sync_range& range, bool second,
                                               i64 first_m, int rows, i64 first_n, int columns,
                                               int thread)
      : mma_sync_producer(from, range, second,
                          Operands::terms == 2 && range.first >= range.term_tiles, first_m, rows,
                          first_n, columns, thread) {}

 private:
  static __device__ __forceinline__ i64 a_pitch(const gemm_arguments<T, products>& from) {
    return Operands::a_transposed ? from.m : from.k;
  }
  static __device__ __forceinline__ i64 b_pitch(const gemm_arguments<T, products>& from) {
    return Operands::b_transposed ? from.n : from.k;
  }

  // `late`: the range begins in the second term.
  __device__ __forceinline__ mma_sync_producer(const gemm_arguments<T, products>& from,
                                               const mma_sync_range& range, bool second, bool late,
                                               i64 first_m, int rows, i64 first_n, int columns,
                                               int thread)
      : mma_sync_producer(
            from, second || late ? from.a1 : from.a, late ? from.b1 : from.b[0],
            static_cast<int>((late ? range.first - range.term_tiles : range.first) * bk), first_m,
            rows, first_n, columns, thread) {
    const i64 walked = static_cast<i64>(range.term_tiles) * bk;
    this->begin(range, late, (from.a1 - from.a) * 2 - a_copy::distance(walked, a_pitch(from)),
                (from.b1 - from.b[0]) * 2 - b_copy::distance(walked, b_pitch(from)));
  }

  __device__ __forceinline__ mma_sync_producer(const gemm_arguments<T, products>& from,
                                               const T* first_a, const T* first_b, int first_k,
                                               i64 first_m, int rows, i64 first_n, int columns,
                                               int thread)
      : copies{a_copy(first_a, first_m, rows, a_pitch(from), first_k, thread),
               {b_copy(first_b, first_n, columns, b_pitch(from), first_k, thread),
                b_copy(products == 2 ? from.b[products - 1] : first_b, first_n, columns,
                       b_pitch(from), first_k, thread)}} {}
};

}  // namespace fftune
