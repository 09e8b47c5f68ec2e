// Packed weights to dense ones on the CPU: tiles of 16 rows on all threads.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/packed/packed.hpp"

namespace fftune {
namespace {

/// A packed weight in memory.
struct Packed {
  const std::uint8_t* codes;
  const std::byte* scales;
  const std::uint8_t* zeros;
  std::byte* dense;
  std::int64_t n, k, group, groups;
  DType dtype, scale_type;
  packed_code code;
};

/// The values of codes before zero points are subtracted, and before scales.
std::array<float, 256> values_of(packed_code code) {
  std::array<float, 256> values{};
  for (int bits = 0; bits < 1 << packed_bits(code); ++bits)
    values[static_cast<std::size_t>(bits)] = static_cast<float>(code_value(code, bits, 0));
  return values;
}

/// A tile of 16 rows: its words one after the other, then whole rows.
void expand_tile(const Packed& weight, std::int64_t tile) {
  const std::int64_t k = weight.k, width = packed_k_blocks(k) * packed_k;
  const std::int64_t count = std::min<std::int64_t>(packed_rows, weight.n - tile * packed_rows);
  const std::size_t bytes = dtype_bytes(weight.dtype);
  std::vector<float> scales(static_cast<std::size_t>(weight.groups * packed_rows));
  std::vector<float> values(static_cast<std::size_t>(packed_rows * width));
  std::array<float, packed_rows> row_scales;
  row_scales.fill(1);
  const std::size_t first = static_cast<std::size_t>(tile) * scales.size();
  const int bits = packed_bits(weight.code);
  if (weight.code == packed_code::mxfp4) {
    for (std::size_t i = 0; i < scales.size(); ++i)
      scales[i] = static_cast<float>(e8m0_value(std::to_integer<int>(weight.scales[first + i])));
  } else if (packed_scales_rows(weight.code)) {
    const std::int64_t own = tile * packed_rows;
    std::memcpy(row_scales.data(), weight.scales + packed_row_scale_place(own, weight.groups),
                sizeof(row_scales));
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const auto group = static_cast<std::int64_t>(i) / packed_rows,
                 row = static_cast<std::int64_t>(i) % packed_rows;
      const std::int64_t at = packed_scale_place(own + row, group, weight.groups, weight.code);
      scales[i] = static_cast<float>(e4m3_value(std::to_integer<int>(weight.scales[at])));
    }
  } else {
    decode(weight.scale_type, weight.scales + first * dtype_bytes(weight.scale_type),
           std::span(scales));
  }
  const std::uint8_t* const zeros = weight.zeros == nullptr ? nullptr : weight.zeros + first;
  const float no_zero = weight.code == packed_code::int4 ? 8 : 0;
  const auto table = values_of(weight.code);
  const auto put = [&](std::int64_t row, std::int64_t column, int code) {
    const auto place =
        static_cast<std::size_t>(std::min(column, k - 1) / weight.group * packed_rows + row);
    const float zero = zeros != nullptr ? static_cast<float>(zeros[place]) : no_zero;
    values[static_cast<std::size_t>(row * width + column)] =
        (table[static_cast<std::size_t>(code)] - zero) * scales[place] *
        row_scales[static_cast<std::size_t>(row)];
  };
  const std::uint8_t* byte =
      weight.codes +
      (1 + tile * packed_k_blocks(k) * packed_parts(weight.code)) * std::int64_t{packed_part_bytes};
  const int steps = 4 / packed_parts(weight.code);  // of a part
  for (std::int64_t block = 0; block < width; block += 16 * steps)
    for (int lane = 0; lane < 32; ++lane)
      for (int step = 0; step < steps; ++step) {
        const std::int64_t row = lane / 4 * 2, column = block + step * 16 + lane % 4 * 2;
        if (bits == 4) {
          std::uint32_t word;
          std::memcpy(&word, byte, sizeof(word));
          word = packed_nibbles_of(word, weight.code);
          for (int i = 0; i < 8; ++i)
            put(row + i % 2, column + i / 2 % 2 * 8 + i / 4, static_cast<int>(word >> 4 * i & 15));
        } else {
          for (int i = 0; i < 8; ++i) put(row + i % 2, column + i / 2 % 2 + i / 4 * 8, byte[i]);
        }
        byte += bits;
      }
  for (std::int64_t row = 0; row < count; ++row)
    encode(weight.dtype,
           std::span<const float>(values.data() + row * width, static_cast<std::size_t>(k)),
           weight.dense + static_cast<std::size_t>((tile * packed_rows + row) * k) * bytes);
}

Program expand(const ExpandStage& stage, const Problem& problem, const DeviceFacts&) {
  const TensorPlaces places(stage.op().tensors(problem));
  Program program;
  program.host_tensors = places.count();
  for (const PackedWeight& weight : stage.operands(problem)) {
    const std::size_t codes = places.at(weight.codes), scales = places.at(weight.scales),
                      zeros = places.at(weight.zeros), dense = places.at(weight.dense);
    const Packed sizes{.codes = nullptr,
                       .scales = nullptr,
                       .zeros = nullptr,
                       .dense = nullptr,
                       .n = weight.n,
                       .k = weight.k,
                       .group = weight.format.group == 0 ? weight.k : weight.format.group,
                       .groups = weight.format.groups(weight.k),
                       .dtype = weight.dtype,
                       .scale_type = weight.format.scale_type(weight.dtype),
                       .code = weight.format.code};
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      Packed packed = sizes;
      packed.codes = static_cast<const std::uint8_t*>(call.tensors[codes]);
      packed.scales = static_cast<const std::byte*>(call.tensors[scales]);
      packed.zeros = static_cast<const std::uint8_t*>(address_of(call, zeros));
      packed.dense = static_cast<std::byte*>(call.tensors[dense]);
      if (auto reason = packed_header_error(packed.codes, packed.code, packed.n, packed.k);
          !reason.empty())
        throw Error(ErrorKind::invalid_input, reason);
      call.parallel.run(static_cast<int>(packed_tiles(packed.n)), call.parallel.max_threads(),
                        [&](int tile) { expand_tile(packed, tile); });
    }));
  }
  return program;
}

}  // namespace

ExpandFamily cpu_expand_family(const ExpandStage& stage) {
  return {stage,
          "packed weights to dense ones, by tiles of 16 rows",
          "gemm/packed/cpu_expand.cpp",
          DeviceKind::cpu,
          refuse_dense,
          expand};
}

}  // namespace fftune
