// Packed weights of 4 bits to dense ones on the CPU: tiles of 16 rows on all threads.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
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
  DType dtype;
  packed_code code;
};

const std::array<float, 16> e2m1 = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code)
    values[static_cast<std::size_t>(code)] = static_cast<float>(e2m1_value(code));
  return values;
}();

/// A tile of 16 rows: its words one after the other, then whole rows.
void expand_tile(const Packed& weight, std::int64_t tile) {
  const std::int64_t k = weight.k, width = packed_k_blocks(k) * packed_k;
  const std::int64_t count = std::min<std::int64_t>(packed_rows, weight.n - tile * packed_rows);
  const std::size_t bytes = dtype_bytes(weight.dtype);
  std::vector<float> scales(static_cast<std::size_t>(weight.groups * packed_rows));
  std::vector<float> values(static_cast<std::size_t>(packed_rows * width));
  const std::size_t first = static_cast<std::size_t>(tile) * scales.size();
  const bool mxfp4 = weight.code == packed_code::mxfp4;
  if (mxfp4)
    for (std::size_t i = 0; i < scales.size(); ++i)
      scales[i] = static_cast<float>(e8m0_value(std::to_integer<int>(weight.scales[first + i])));
  else
    decode(weight.dtype, weight.scales + first * bytes, std::span(scales));
  const std::uint8_t* const zeros = weight.zeros == nullptr ? nullptr : weight.zeros + first;
  const std::uint8_t* code =
      weight.codes + (1 + tile * packed_k_blocks(k)) * std::int64_t{packed_block_bytes};
  for (std::int64_t block = 0; block < width; block += packed_k)
    for (int lane = 0; lane < 32; ++lane)
      for (int step = 0; step < 4; ++step)
        for (int nibble = 0; nibble < 8; nibble += 2, ++code) {
          const int row = lane / 4 * 2;
          const std::int64_t column =
              block + step * 16 + lane % 4 * 2 + nibble / 2 % 2 * 8 + nibble / 4;
          const auto place =
              static_cast<std::size_t>(std::min(column, k - 1) / weight.group * packed_rows + row);
          for (std::size_t i = 0; i < 2; ++i)
            values[static_cast<std::size_t>((row + std::int64_t(i)) * width + column)] =
                (mxfp4
                     ? e2m1[*code >> 4 * i & 15]
                     : static_cast<float>((*code >> 4 * i & 15) - (zeros ? zeros[place + i] : 8))) *
                scales[place + i];
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
  for (const PackedWeight& weight : stage.weights(problem)) {
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

ExpandFamily cpu_expand_family(const ExpandStage& stage, const char* name) {
  return {stage,
          name,
          "packed weights to dense ones, by tiles of 16 rows",
          "gemm/packed/cpu_expand.cpp",
          DeviceKind::cpu,
          expand};
}

}  // namespace fftune
