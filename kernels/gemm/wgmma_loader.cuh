// From memory into the ring of the wgmma engine: a block's shares of its tiles of A and B,
// whichever way these lie.
#pragma once

#include "common/wgmma.cuh"
#include "gemm/operands.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

struct wgmma_operand_maps {
  const tensor_map& a;
  const tensor_map& b0;
  const tensor_map& b1;  // of the second product or term
  const tensor_map* a1;  // of the second term or result
};

// A tile, of which result it is, and its first token.
struct wgmma_result_tile : tile_position {
  bool second;
  int token;
};

// Fills slots with this block's shares: part j of its tile row's A, part i of its tile column's B,
// for block (i, j) of a cluster.
template <class T, int products, wgmma_tile tile, class layout, class Operands>
struct wgmma_loader {
  static constexpr int bk = 128 / sizeof(T);  // elements of a k tile
  static constexpr int a_share = tile.bm / tile.cluster_n, b_share = tile.bn / tile.cluster_m;
  // Few tokens: a weight is read once in all, so it should leave the L2 first.
  static constexpr l2_policy b_policy =
      tile.swapped && tile.bm <= 64 ? l2_policy::evict_first : l2_policy::evict_normal;
  wgmma_operand_maps map;
  int term_tiles;
  u32 i, j;
  u16 row_blocks, column_blocks;

  __device__ __forceinline__ wgmma_loader(const wgmma_operand_maps& all, int k, u32 rank)
      : map(all), term_tiles(ceil_div(k, bk)), i(0), j(0), row_blocks(1), column_blocks(1) {
    if constexpr (tile.split_k == 1) {
      i = rank / tile.cluster_n, j = rank % tile.cluster_n;
      row_blocks = static_cast<u16>(((1 << tile.cluster_n) - 1) << i * tile.cluster_n);
      column_blocks = 0;
#pragma unroll
      for (int block = 0; block < tile.cluster_m; ++block) {
        column_blocks |= static_cast<u16>(1 << (block * tile.cluster_n + j));
      }
    }
  }

  template <int sharers>
  static __device__ __forceinline__ void load(u32 to, const tensor_map& map, u32 barrier, int k,
                                              int row, u16 blocks, l2_policy policy) {
    if constexpr (sharers == 1) {
      tma_load(to, map, barrier, k, row, policy);
    } else {
      tma_load_multicast(to, map, barrier, k, row, blocks, policy);
    }
  }

  // `share` rows of an operand from `row` on, at [k, k + bk).
  template <int sharers, bool transposed, int share>
  static __device__ __forceinline__ void load_share(u32 to, const tensor_map& from, u32 full, int k,
                                                    int row, u16 blocks, l2_policy policy) {
    if constexpr (transposed) {
      static_assert(share % 64 == 0);
#pragma unroll
      for (int slab = 0; slab < share / 64; ++slab) {
        load<sharers>(to + slab * wgmma_slab_bytes, from, full, row + slab * 64, k, blocks, policy);
      }
    } else {
      load<sharers>(to, from, full, k, row, blocks, policy);
    }
  }

  // The k tiles of two terms follow each other.
  __device__ __forceinline__ bool of_second_term(int k_tile) const {
    return Operands::terms == 2 && k_tile >= term_tiles;
  }
  __device__ __forceinline__ int k_of(int k_tile) const {
    return (of_second_term(k_tile) ? k_tile - term_tiles : k_tile) * bk;
  }

  __device__ __forceinline__ void load_a(u32 slot, u32 full, int k_tile,
                                         const wgmma_result_tile& at) const {
    const bool second = of_second_term(k_tile) || (Operands::results == 2 && at.second);
    load_share<tile.cluster_n, Operands::a_transposed, a_share>(
        slot + j * a_share * layout::row_bytes, second ? *map.a1 : map.a, full, k_of(k_tile),
        at.token + static_cast<int>(j) * a_share, row_blocks, l2_policy::evict_normal);
  }

  __device__ __forceinline__ void load_b(u32 slot, u32 full, int k_tile,
                                         const wgmma_result_tile& at) const {
#pragma unroll
    for (int product = 0; product < products; ++product) {
      load_share<tile.cluster_m, Operands::b_transposed, b_share>(
          slot + layout::a_bytes + product * layout::b_bytes + i * b_share * layout::row_bytes,
          product == 0 && !of_second_term(k_tile) ? map.b0 : map.b1, full, k_of(k_tile),
          at.n * tile.bn + i * b_share, column_blocks, b_policy);
    }
  }
};

}  // namespace fftune
