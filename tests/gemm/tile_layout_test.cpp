// The index arithmetic of the tensor-core engine, run on the host: device headers without
// instructions compile anywhere once CUDA's function attributes mean nothing.
#define __host__
#define __device__
#define __forceinline__ inline
#include "kernels/gemm/sm80/tile_layout.cuh"
#include "kernels/common/types.cuh"
#undef __host__
#undef __device__
#undef __forceinline__

#include <array>
#include <set>
#include <utility>
#include <vector>

#include "support/catch.hpp"

namespace {

using fftune::divider;
using fftune::grouped_tile;
using fftune::k_major_layout;
using fftune::mn_major_layout;
using fftune::u32;

/// A tile whose every element is its own (row, column), as 1000 row + column, stored swizzled.
template <int bk>
std::vector<int> swizzled_tile(int rows) {
  std::vector<int> shared(static_cast<std::size_t>(rows) * bk, -1);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < bk; ++column)
      shared[k_major_layout<bk>::offset(row, column / 8) / 2 + static_cast<u32>(column % 8)] =
          1000 * row + column;
  return shared;
}

/// Element of ldmatrix.x4 as the PTX ISA defines it. Lane 8 i + r points at row r of matrix i.
/// Register i of a lane holds elements 2 (lane % 4) and the next of row lane / 4 of matrix i.
template <class Address>
int load_matrix_element(const std::vector<int>& shared, Address address, int lane, int matrix,
                        int element) {
  const u32 row_start = address(matrix * 8 + lane / 4);
  return shared[row_start / 2 + static_cast<u32>(lane % 4 * 2 + element)];
}

/// How many of the eight 16-byte bank groups the eight rows of a matrix touch.
template <class Address>
std::size_t bank_groups(Address address, int matrix) {
  std::set<u32> groups;
  for (int row = 0; row < 8; ++row) groups.insert(address(matrix * 8 + row) / 16 % 8);
  return groups.size();
}

template <int bk>
void check_fragments() {
  using layout = k_major_layout<bk>;
  const int rows = 64;
  const auto shared = swizzled_tile<bk>(rows);
  for (int row = 0; row < rows; row += 16) {
    for (int step = 0; step < bk / 16; ++step) {
      const auto a = [&](int lane) { return layout::advance(layout::a_fragment(row, lane), step); };
      const auto b = [&](int lane) { return layout::advance(layout::b_fragment(row, lane), step); };
      // Register by register, the first row and first k of its matrix within the 16 x 16 block.
      constexpr std::array<std::pair<int, int>, 4> a_blocks{{{0, 0}, {8, 0}, {0, 8}, {8, 8}}};
      constexpr std::array<std::pair<int, int>, 4> b_blocks{{{0, 0}, {0, 8}, {8, 0}, {8, 8}}};
      for (int matrix = 0; matrix < 4; ++matrix) {
        CHECK(bank_groups(a, matrix) == 8);
        CHECK(bank_groups(b, matrix) == 8);
        for (int lane = 0; lane < 32; ++lane) {
          const auto expected = [&](std::pair<int, int> block) {
            return 1000 * (row + block.first + lane / 4) + step * 16 + block.second + lane % 4 * 2;
          };
          const auto place = static_cast<std::size_t>(matrix);
          REQUIRE(load_matrix_element(shared, a, lane, matrix, 0) == expected(a_blocks[place]));
          REQUIRE(load_matrix_element(shared, b, lane, matrix, 1) == expected(b_blocks[place]) + 1);
        }
      }
    }
  }
}

/// The same for a tile [k][rows]: with .trans, register i of a lane holds rows 2 (lane % 4) and the
/// next, which are k, of column lane / 4 of matrix i.
template <int rows>
void check_transposed_fragments() {
  using layout = mn_major_layout<rows>;
  constexpr int depth = 64;
  std::vector<int> shared(static_cast<std::size_t>(rows) * depth, -1);
  for (int k = 0; k < depth; ++k)
    for (int row = 0; row < rows; ++row)
      shared[layout::offset(k, row / 8) / 2 + static_cast<u32>(row % 8)] = 1000 * row + k;
  constexpr int extent = rows < 64 ? rows : 64;  // of a warp
  for (int first = 0; first < rows; first += extent)
    for (int index = 0; index < extent / 16; ++index)
      for (int step = 0; step < depth / 16; ++step) {
        const auto fragment = [&](u32 base) {
          return layout::next(layout::advance(base, step), index);
        };
        const auto a = [&](int lane) { return fragment(layout::a_fragment(first, lane)); };
        const auto b = [&](int lane) { return fragment(layout::b_fragment(first, lane)); };
        constexpr std::array<std::pair<int, int>, 4> a_blocks{{{0, 0}, {8, 0}, {0, 8}, {8, 8}}};
        constexpr std::array<std::pair<int, int>, 4> b_blocks{{{0, 0}, {0, 8}, {8, 0}, {8, 8}}};
        const auto element = [&](auto address, int lane, int matrix) {
          const u32 start = address(matrix * 8 + lane % 4 * 2);
          return shared[start / 2 + static_cast<u32>(lane / 4)];
        };
        for (int matrix = 0; matrix < 4; ++matrix) {
          CHECK(bank_groups(a, matrix) == 8);
          CHECK(bank_groups(b, matrix) == 8);
          for (int lane = 0; lane < 32; ++lane) {
            const auto expected = [&](std::pair<int, int> block) {
              return 1000 * (first + index * 16 + block.first + lane / 4) + step * 16 +
                     block.second + lane % 4 * 2;
            };
            const auto place = static_cast<std::size_t>(matrix);
            REQUIRE(element(a, lane, matrix) == expected(a_blocks[place]));
            REQUIRE(element(b, lane, matrix) == expected(b_blocks[place]));
          }
        }
      }
}

}  // namespace

TEST_CASE("ldmatrix.trans finds the same fragments of what lies transposed", "[kernels]") {
  check_transposed_fragments<32>();
  check_transposed_fragments<64>();
  check_transposed_fragments<128>();
  check_transposed_fragments<256>();
}

TEST_CASE("the swizzled tile holds every 16-byte chunk once", "[kernels]") {
  const auto tile = swizzled_tile<32>(64);
  CHECK(std::set<int>(tile.begin(), tile.end()).size() == tile.size());
  CHECK(std::set<int>(tile.begin(), tile.end()).count(-1) == 0);
}

TEST_CASE("ldmatrix finds the fragments of mma.m16n8k16 without bank conflicts", "[kernels]") {
  SECTION("64-byte rows") {
    check_fragments<32>();
  }
  SECTION("128-byte rows") {
    check_fragments<64>();
  }
  SECTION("256-byte rows") {
    check_fragments<128>();
  }
}

TEST_CASE("a divider finds what a division does", "[kernels]") {
  constexpr u32 most = 0xffffffff;
  for (const u32 by : {1u, 2u, 3u, 7u, 8u, 448u, 641u, 65535u, 65536u, 0x80000001u, most}) {
    const divider divided(by);
    for (const u32 of : {0u, 1u, 6u, 447u, 448u, 449u, 99999u, 0x7fffffffu, 0x80000000u, most - 1,
                         most / by * by, most / by * by - 1, most})
      REQUIRE(divided.quotient(of) == of / by);
  }
}

TEST_CASE("the raster order visits every tile once, bands first", "[kernels]") {
  for (const u32 tiles_m : {1u, 3u, 8u, 13u})
    for (const u32 tiles_n : {1u, 5u, 16u})
      for (const u32 group_m : {1u, 4u, 8u, 16u}) {
        std::set<std::pair<u32, u32>> seen;
        for (u32 index = 0; index < tiles_m * tiles_n; ++index) {
          const auto tile = grouped_tile(index, tiles_m, tiles_n, group_m);
          REQUIRE(tile.m < tiles_m);
          REQUIRE(tile.n < tiles_n);
          REQUIRE(tile.m / group_m == index / (group_m * tiles_n));
          seen.insert({tile.m, tile.n});
        }
        CHECK(seen.size() == tiles_m * tiles_n);
      }
}
