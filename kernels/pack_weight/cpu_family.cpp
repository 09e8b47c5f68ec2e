// pack-weight on the CPU: tiles of 16 rows on all threads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/pack_weight/pack_weight.hpp"

namespace fftune::pack_weight {
namespace {

/// Both sides of a weight in memory.
struct Sides {
  std::byte *codes, *packed, *scale, *packed_scale, *zero, *packed_zero, *row_scale;
};

/// The codes of a tile of 16 rows, one way or back.
void move_codes(const Sides& sides, const PackedWeight& weight, bool back, std::int64_t tile) {
  const packed_code code = weight.format.code;
  const std::int64_t k = weight.k, width = plain_width(weight);
  const std::int64_t parts = packed_k_blocks(k) * packed_parts(code);
  const int bits = packed_bits(code), in_byte = 8 / bits;
  const auto mask = static_cast<std::byte>((1 << bits) - 1);
  const std::int64_t end = std::min(weight.n, (tile + 1) * packed_rows);
  const std::int64_t first = (1 + tile * parts) * packed_part_bytes;
  std::vector<std::byte> own(static_cast<std::size_t>(parts * packed_part_bytes));
  const auto for_each_word = [&](const auto& reordered) {
    for (std::size_t i = 0; i < own.size(); i += 4) {
      std::uint32_t word;
      std::memcpy(&word, own.data() + i, sizeof(word));
      word = reordered(word, code);
      std::memcpy(own.data() + i, &word, sizeof(word));
    }
  };
  if (back) {
    std::memcpy(own.data(), sides.packed + first, own.size());
    for_each_word(packed_nibbles_of);
  }
  for (std::int64_t row = tile * packed_rows; row < end; ++row) {
    std::byte* const plain = sides.codes + row * width;
    if (back) std::memset(plain, 0, static_cast<std::size_t>(width));
    for (std::int64_t i = 0; i < k; ++i) {
      const auto [byte, shift] = packed_place_of(row, i, k, code);
      const int plain_shift = static_cast<int>(i % in_byte * bits);
      std::byte &one = plain[i / in_byte], &other = own[static_cast<std::size_t>(byte - first)];
      if (back)
        one |= (other >> shift & mask) << plain_shift;
      else
        other |= (one >> plain_shift & mask) << shift;
    }
  }
  if (back) return;
  for_each_word(packed_word_of);
  std::memcpy(sides.packed + first, own.data(), own.size());
}

/// Numbers of `bytes` for each row of a tile and each group.
void move_numbers(std::byte* plain, std::byte* packed, std::size_t bytes,
                  const PackedWeight& weight, bool back, std::int64_t tile) {
  const std::int64_t groups = weight.format.groups(weight.k);
  for (std::int64_t row = tile * packed_rows; row < (tile + 1) * packed_rows; ++row)
    for (std::int64_t group = 0; group < groups; ++group) {
      std::byte* const to = packed + static_cast<std::size_t>(packed_scale_place(
                                         row, group, groups, weight.format.code)) *
                                         bytes;
      if (row >= weight.n) {
        if (!back) std::memset(to, 0, bytes);
        continue;
      }
      std::byte* const from = plain + static_cast<std::size_t>(row * groups + group) * bytes;
      std::memcpy(back ? from : to, back ? to : from, bytes);
    }
}

/// The scales of rows, in front of those of their tile's groups.
void move_row_scales(const Sides& sides, const PackedWeight& weight, bool back, std::int64_t tile) {
  const std::int64_t end = std::min(weight.n, (tile + 1) * packed_rows);
  for (std::int64_t row = tile * packed_rows; row < end; ++row) {
    std::byte* const plain = sides.row_scale + row * 4;
    std::byte* const packed =
        sides.packed_scale + packed_row_scale_place(row, weight.format.groups(weight.k));
    std::memcpy(back ? plain : packed, back ? packed : plain, sizeof(float));
  }
}

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const TensorPlaces places(pack_weight_op().tensors(problem));
  const auto at = [&](const char* name) { return places.at(name); };
  const PlainNames names = plain_names(problem);
  return host_program(places.count(), [weight = weight_of(problem), back = unpacks(problem),
                                       codes = at(names.codes), w = at("w"),
                                       scale = at(names.scale), w_scale = at("w_scale"),
                                       zero = at(names.zero), w_zero = at("w_zero"),
                                       row_scale = at(names.row_scale)](const HostCall& call) {
    const auto place = [&](std::size_t tensor) {
      return static_cast<std::byte*>(address_of(call, tensor));
    };
    const Sides sides{place(codes), place(w),      place(scale),    place(w_scale),
                      place(zero),  place(w_zero), place(row_scale)};
    const bool scales_rows = packed_scales_rows(weight.format.code);
    if (back) {
      const auto reason = packed_header_error(sides.packed, weight.format.code, weight.n, weight.k);
      if (!reason.empty()) throw Error(ErrorKind::invalid_input, reason);
    } else {
      std::memset(sides.packed, 0, packed_part_bytes);
      write_packed_header(sides.packed, weight.format.code, weight.n, weight.k);
    }
    call.parallel.run(
        static_cast<int>(packed_tiles(weight.n)), call.parallel.max_threads(), [&](int tile) {
          move_codes(sides, weight, back, tile);
          if (scales_rows) {
            const auto bytes =
                static_cast<std::size_t>(weight.format.stored_groups(weight.k) * packed_rows * 2);
            if (!back)
              std::memset(sides.packed_scale + static_cast<std::size_t>(tile) * bytes, 0, bytes);
            move_row_scales(sides, weight, back, tile);
          }
          move_numbers(sides.scale, sides.packed_scale,
                       dtype_bytes(weight.format.scale_type(weight.dtype)), weight, back, tile);
          if (!weight.zeros.empty())
            move_numbers(sides.zero, sides.packed_zero, 1, weight, back, tile);
        });
  });
}

}  // namespace

const Family& cpu_family() {
  static const StageFamily family = cpu_fallback({.name = "cpu_pack_weight",
                                                  .summary = "tiles of 16 rows on several threads",
                                                  .stage = stage_pack,
                                                  .sources = {"pack_weight/cpu_family.cpp"},
                                                  .program = program});
  return family;
}

}  // namespace fftune::pack_weight
