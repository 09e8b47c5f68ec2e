// Tensor cores: fragments over the lanes of a warp, ldmatrix and its kin, mma.sync and wgmma.
//
// A warp computes its own 16 rows of a wgmma where it issues it; waiting for it is a barrier of the
// four warps, behind which all of them have read their operands. Until then the operands in shared
// memory must stay as they are, which is checked.
#include <algorithm>

#include "emulator/decoder.hpp"
#include "emulator/numerics.hpp"

namespace fftune::emulator {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

std::vector<u32> targets(Decoder& decoder, const Operand& vector) {
  std::vector<u32> slots;
  for (const Operand& element : vector.elements) slots.push_back(decoder.target(element, 4));
  return slots;
}

/// ldmatrix and stmatrix: lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i.
Execute decode_matrices(Decoder& decoder, bool loads) {
  if (decoder.type() != "b16" || !decoder.has("m8n8")) return {};
  const Address address = decoder.address(decoder.operand(loads ? 1 : 0));
  const Operand& vector = decoder.operand(loads ? 0 : 1);
  const std::vector<u32> words = loads ? targets(decoder, vector) : decoder.sources(vector, 4);
  const bool transposed = decoder.has("trans");
  return [=](Warp& warp, Mask) {
    if (!warp.together(all_lanes)) return Outcome::wait;
    for (std::size_t matrix = 0; matrix < words.size(); ++matrix) {
      std::array<std::byte*, 8> rows;
      for (int row = 0; row < 8; ++row)
        rows[static_cast<std::size_t>(row)] =
            address.bytes(warp, 16, static_cast<int>(8 * matrix) + row);
      for (unsigned lane = 0; lane < warp_lanes; ++lane)
        for (unsigned i = 0; i < 2; ++i) {
          const unsigned row = transposed ? lane % 4 * 2 + i : lane / 4;
          const unsigned column = transposed ? lane / 4 : lane % 4 * 2 + i;
          std::byte* const element = rows[row] + 2 * column;
          std::byte* const own = warp.at<std::byte>(words[matrix]) + 4 * lane + 2 * i;
          loads ? std::memcpy(own, element, 2) : std::memcpy(element, own, 2);
        }
    }
    if (!loads) ++warp.cta->cluster->launch->events;
    return Outcome::next;
  };
}

Execute decode_movmatrix(Decoder& decoder) {
  const u32 d = decoder.target(0, 4), a = decoder.source(1, 4);
  return [=](Warp& warp, Mask) {
    if (!warp.together(all_lanes)) return Outcome::wait;
    std::array<std::uint16_t, 64> matrix;
    std::memcpy(matrix.data(), warp.at<std::byte>(a), sizeof matrix);
    for (unsigned row = 0; row < 8; ++row)
      for (unsigned column = 0; column < 8; ++column)
        warp.at<std::uint16_t>(d)[8 * row + column] = matrix[8 * column + row];
    return Outcome::next;
  };
}

// --- mma.sync ---

struct f8 {
  std::uint8_t bits;
  operator float() const {
    static const auto table = [] {
      std::array<float, 256> values;
      for (unsigned i = 0; i < 256; ++i) values[i] = float_of_e4m3(static_cast<std::uint8_t>(i));
      return values;
    }();
    return table[bits];
  }
};

struct tf32 {
  u32 bits;
  operator float() const { return std::bit_cast<float>(bits & ~0x1fffu); }
};

/// Reads a fragment of A (16 rows) or B (8 columns). A register has a word of 4 bytes of each row
/// of a block of 8 rows and 4 words along k. The blocks of A alternate between the upper and the
/// lower rows.
template <class T, std::size_t rows, std::size_t k>
void read_fragment(const Warp& warp, const std::vector<u32>& words, float (&to)[rows][k]) {
  constexpr std::size_t in_word = 4 / sizeof(T);
  for (std::size_t i = 0; i < words.size(); ++i) {
    const T* const elements = warp.at<T>(words[i]);
    const std::size_t first_row = rows == 16 ? i % 2 * 8 : 0;
    const std::size_t first_word = (rows == 16 ? i / 2 : i) * 4;
    for (std::size_t lane = 0; lane < warp_lanes; ++lane)
      for (std::size_t j = 0; j < in_word; ++j)
        to[first_row + lane / 4][(first_word + lane % 4) * in_word + j] =
            elements[lane * in_word + j];
  }
}

template <class T, std::size_t k>
Execute mma(Decoder& decoder) {
  const std::vector<u32> d = targets(decoder, decoder.operand(0)),
                         a = decoder.sources(decoder.operand(1), 4),
                         b = decoder.sources(decoder.operand(2), 4),
                         c = decoder.sources(decoder.operand(3), 4);
  return [=](Warp& warp, Mask) {
    if (!warp.together(all_lanes)) return Outcome::wait;
    float left[16][k], right[8][k], of_k[k][8], sums[16][8];
    read_fragment<T>(warp, a, left);
    read_fragment<T>(warp, b, right);
    for (std::size_t i = 0; i < k; ++i)
      for (std::size_t column = 0; column < 8; ++column) of_k[i][column] = right[column][i];
    for (std::size_t lane = 0; lane < warp_lanes; ++lane)
      for (std::size_t i = 0; i < 4; ++i)
        sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = warp.at<float>(c[i])[lane];
    for (std::size_t row = 0; row < 16; ++row)
      for (std::size_t i = 0; i < k; ++i)
        for (std::size_t column = 0; column < 8; ++column)
          sums[row][column] += left[row][i] * of_k[i][column];
    for (std::size_t lane = 0; lane < warp_lanes; ++lane)
      for (std::size_t i = 0; i < 4; ++i)
        warp.at<float>(d[i])[lane] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    return Outcome::next;
  };
}

Execute decode_mma(Decoder& decoder) {
  const auto& opcode = decoder.statement().opcode;
  std::string kind;
  for (std::size_t i = 3; i < opcode.size(); ++i) kind += (i > 3 ? "." : "") + opcode[i];
  if (kind == "m16n8k16.row.col.f32.bf16.bf16.f32") return mma<bfloat, 16>(decoder);
  if (kind == "m16n8k16.row.col.f32.f16.f16.f32") return mma<half, 16>(decoder);
  if (kind == "m16n8k8.row.col.f32.bf16.bf16.f32") return mma<bfloat, 8>(decoder);
  if (kind == "m16n8k8.row.col.f32.f16.f16.f32") return mma<half, 8>(decoder);
  if (kind == "m16n8k8.row.col.f32.tf32.tf32.f32") return mma<tf32, 8>(decoder);
  if (kind == "m16n8k32.row.col.f32.e4m3.e4m3.f32") return mma<f8, 32>(decoder);
  return {};
}

// --- wgmma ---

constexpr std::size_t most_columns = 256, k_bytes = 32;

/// An operand in shared memory: PTX ISA, "Matrix descriptor format" and "Strides".
struct SharedOperand {
  u64 begin, leading, stride, row_bytes;  // of a row of the swizzle; 16 without
  bool transposed;                        // the extent that is not k is contiguous

  SharedOperand(u64 descriptor, bool is_transposed)
      : begin((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        row_bytes(std::array{16, 128, 64, 32}[descriptor >> 62]),
        transposed(is_transposed) {
    if ((descriptor >> 49 & 7) != 0) throw Fault("a matrix descriptor with a base offset");
  }

  /// Address of a piece of 16 bytes: of row `row`, at 16 * `piece` bytes of k; transposed, of the k
  /// that is `row`, at 16 * `piece` bytes of the other extent.
  u64 address(std::size_t row, std::size_t piece) const {
    const std::size_t pieces = row_bytes / 16;
    u64 at = begin + row / 8 * stride + row % 8 * row_bytes + piece % pieces * 16;
    at += piece / pieces * leading;
    const u64 mask = row_bytes / 16 - 1;
    return at ^ (at >> 7 & mask) << 4;
  }

  /// f(row, piece, bytes) of every piece of `extent` rows.
  template <class F>
  void for_pieces(Cta& cta, std::size_t first, std::size_t extent, std::size_t element_bytes,
                  F f) const {
    const std::size_t rows = transposed ? k_bytes / element_bytes : extent;
    const std::size_t from = transposed ? first * element_bytes / 16 : 0;
    const std::size_t pieces = transposed ? extent * element_bytes / 16 : k_bytes / 16;
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t piece = 0; piece < pieces; ++piece)
        f(row, piece, cta.shared_bytes(address(row + (transposed ? 0 : first), piece + from), 16));
  }

  u64 hash(Cta& cta, std::size_t first, std::size_t extent, std::size_t element_bytes) const {
    u64 sum = 0;
    for_pieces(cta, first, extent, element_bytes,
               [&](std::size_t, std::size_t, const std::byte* bytes) {
                 u64 words[2];
                 std::memcpy(words, bytes, sizeof words);
                 sum = ((sum ^ words[0]) * 0x9e3779b97f4a7c15 ^ words[1]) * 0xff51afd7ed558ccd;
               });
    return sum;
  }
};

template <class T>
Execute wgmma(Decoder& decoder, std::size_t columns) {
  constexpr std::size_t k = k_bytes / sizeof(T);
  const std::vector<u32> d = targets(decoder, decoder.operand(0));
  if (d.size() != columns / 2 || columns % 8 != 0 || columns > most_columns) return {};
  const Operand& left = decoder.operand(1);
  const bool in_registers = left.kind == Operand::Kind::vector;
  const std::vector<u32> words = in_registers ? decoder.sources(left, 4) : std::vector<u32>();
  const u32 a = in_registers ? 0 : decoder.source(left, 8), b = decoder.source(2, 8);
  const Predicate accumulates = decoder.predicate(decoder.operand(3));
  if (decoder.number(decoder.operand(4)) != 1 || decoder.number(decoder.operand(5)) != 1) return {};
  const auto flag = [&](std::size_t i) {
    return decoder.operands() > i && decoder.number(decoder.operand(i)) != 0;
  };
  const bool a_transposed = !in_registers && flag(6), b_transposed = flag(in_registers ? 6 : 7);
  const std::string_view text = decoder.statement().text;
  return [=](Warp& warp, Mask) {
    if (!warp.together(all_lanes)) return Outcome::wait;
    Cta& cta = *warp.cta;
    float of_rows[16][k], of_k[k][most_columns];
    const auto watch = [&](const SharedOperand& operand, std::size_t first, std::size_t extent) {
      const u64 before = operand.hash(cta, first, extent, sizeof(T));
      warp.products.work.push_back([=, &cta] {
        if (operand.hash(cta, first, extent, sizeof(T)) != before)
          throw Fault("changed before this wait: the shared memory of " + std::string(text));
      });
    };
    const std::size_t first_row = warp.index % 4 * 16;
    if (in_registers) {
      read_fragment<T>(warp, words, of_rows);
    } else {
      const SharedOperand operand(warp.at<u64>(a)[0], a_transposed);
      operand.for_pieces(cta, first_row, 16, sizeof(T),
                         [&](std::size_t row, std::size_t piece, const std::byte* bytes) {
                           T elements[16 / sizeof(T)];
                           std::memcpy(elements, bytes, 16);
                           for (std::size_t i = 0; i < std::size(elements); ++i)
                             (a_transposed ? of_rows[piece * std::size(elements) + i][row]
                                           : of_rows[row][piece * std::size(elements) + i]) =
                                 elements[i];
                         });
      watch(operand, first_row, 16);
    }
    const SharedOperand operand(warp.at<u64>(b)[0], b_transposed);
    operand.for_pieces(cta, 0, columns, sizeof(T),
                       [&](std::size_t row, std::size_t piece, const std::byte* bytes) {
                         T elements[16 / sizeof(T)];
                         std::memcpy(elements, bytes, 16);
                         for (std::size_t i = 0; i < std::size(elements); ++i)
                           (b_transposed ? of_k[row][piece * std::size(elements) + i]
                                         : of_k[piece * std::size(elements) + i][row]) =
                               elements[i];
                       });
    watch(operand, 0, columns);
    const bool adds = (accumulates.of(warp) & 1) != 0;
    for (std::size_t row = 0; row < 16; ++row) {
      float sums[most_columns];
      const std::size_t lane = row % 8 * 4, upper = row / 8 * 2;
      for (std::size_t column = 0; column < columns; ++column)
        sums[column] =
            adds ? warp.at<float>(d[column / 8 * 4 + upper + column % 2])[lane + column % 8 / 2]
                 : 0;
      for (std::size_t i = 0; i < k; ++i)
        for (std::size_t column = 0; column < columns; ++column)
          sums[column] += of_rows[row][i] * of_k[i][column];
      for (std::size_t column = 0; column < columns; ++column)
        warp.at<float>(d[column / 8 * 4 + upper + column % 2])[lane + column % 8 / 2] =
            sums[column];
    }
    return Outcome::next;
  };
}

Execute decode_wgmma(Decoder& decoder) {
  const auto& opcode = decoder.statement().opcode;
  if (opcode.at(1) == "fence") return nothing();
  if (opcode[1] == "commit_group")
    return [](Warp& warp, Mask) {
      warp.products.commit();
      return Outcome::next;
    };
  if (opcode[1] == "wait_group") {
    const auto left = static_cast<std::size_t>(decoder.number(decoder.operand(0)));
    return [left](Warp& warp, Mask mask) {
      if (!warp.together(all_lanes)) return Outcome::wait;
      Split& split = warp.split();
      const u32 barrier = named_barriers + warp.index / 4;
      if (split.wait.kind == Wait::Kind::none) {
        warp.products.complete(left);
        const u64 generation = warp.cta->barriers.at(barrier).generation;
        if (!warp.cta->arrive(barrier, static_cast<u32>(std::popcount(mask)), 4 * warp_lanes)) {
          split.wait = {Wait::Kind::barrier, barrier, generation};
          return Outcome::wait;
        }
      }
      split.wait = {};
      return Outcome::next;
    };
  }
  // wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
  if (opcode[1] != "mma_async" || opcode.size() != 8 || opcode[5] != "f32" ||
      opcode[6] != opcode[7])
    return {};
  const std::string& shape = opcode[4];
  const auto columns = static_cast<std::size_t>(std::stoul(shape.substr(4)));
  if (opcode[6] == "bf16") return wgmma<bfloat>(decoder, columns);
  if (opcode[6] == "f16") return wgmma<half>(decoder, columns);
  if (opcode[6] == "e4m3") return wgmma<f8>(decoder, columns);
  return {};
}

}  // namespace

Execute decode_tensor(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  if (name == "ldmatrix") return decode_matrices(decoder, true);
  if (name == "stmatrix") return decode_matrices(decoder, false);
  if (name == "movmatrix") return decode_movmatrix(decoder);
  if (name == "mma") return decode_mma(decoder);
  if (name == "wgmma") return decode_wgmma(decoder);
  return {};
}

}  // namespace fftune::emulator
