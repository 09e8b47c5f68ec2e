#include "kernels/gemm/packed/packed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "core/hash.hpp"
#include "device/parallel.hpp"

namespace fftune {
namespace {

using Header = std::array<std::uint32_t, 4>;

Header header_of(std::int64_t n, std::int64_t k) {
  return {packed_magic, packed_version, static_cast<std::uint32_t>(n),
          static_cast<std::uint32_t>(k)};
}

/// The deviation of q - z over codes and zero points drawn evenly from 0..15.
double code_deviation(bool zeros) {
  return zeros ? 6.52 : 4.61;
}

}  // namespace

std::vector<OptionField> packed_options() {
  return {{.name = "weights",
           .help = "format of the weights: those of x, or packed integers of 4 bits with scales",
           .choices = {"dense", "int4"},
           .rare = true,
           .pass = "fwd"},
          {.name = "group",
           .help = "weights=int4: elements of a row of the weight that share a scale",
           .choices = {"128", "64", "32", "row"},
           .rare = true,
           .pass = "fwd"},
          {.name = "zeros",
           .help = "weights=int4: whether each group has a zero point, instead of 8",
           .choices = {"no", "yes"},
           .rare = true,
           .pass = "fwd"}};
}

PackedFormat packed_format(const Problem& problem) {
  PackedFormat format;
  format.packed = problem.has("weights", "int4");
  if (!format.packed) return format;
  format.group = problem.has("group", "row")  ? 0
                 : problem.has("group", "64") ? 64
                 : problem.has("group", "32") ? 32
                                              : 128;
  format.zeros = problem.has("zeros", "yes");
  return format;
}

std::string packed_contradiction(const Problem& problem, std::string_view name, std::int64_t k) {
  const PackedFormat format = packed_format(problem);
  if (!format.packed) {
    if (problem.options.contains("group") && !problem.has("group", "128"))
      return "group is of packed weights: give weights=int4 too";
    if (problem.has("zeros", "yes")) return "zeros is of packed weights: give weights=int4 too";
    return "";
  }
  if (format.group != 0 && k % format.group != 0)
    return fmt::format("groups of {} do not divide {}={}: give group=row or another size",
                       format.group, name, k);
  return "";
}

std::vector<TensorSpec> packed_tensors(const PackedWeight& weight, double deviation) {
  const std::int64_t n = weight.n, k = weight.k;
  const std::int64_t tiles = packed_tiles(n), groups = weight.format.groups(k);
  const double scale = deviation / code_deviation(weight.format.zeros);
  TensorSpec codes{
      std::string(weight.codes), DType::u8, {packed_blocks(n, k), packed_block_bytes}, Role::input};
  codes.draw = [=](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); i += 8) {
      const std::uint64_t bits = mix(seed + golden * (i + 1));
      for (std::size_t j = 0; j < 8; ++j) values[i + j] = static_cast<double>(bits >> 8 * j & 255);
    }
    std::array<std::uint8_t, sizeof(Header)> header;
    write_packed_header(header.data(), n, k);
    std::fill_n(values.begin(), packed_block_bytes, 0.0);
    std::copy(header.begin(), header.end(), values.begin());
  };
  std::vector<TensorSpec> tensors{codes,
                                  {std::string(weight.scales),
                                   weight.dtype,
                                   {tiles, groups, packed_rows},
                                   Role::input,
                                   scale / 4,
                                   scale}};
  if (weight.zeros.empty()) return tensors;
  TensorSpec zeros{std::string(weight.zeros), DType::u8, {tiles, groups, packed_rows}, Role::input};
  zeros.draw = [](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(mix(seed + golden * (i + 1)) >> 60);
  };
  tensors.push_back(zeros);
  return tensors;
}

TensorSpec expanded_tensor(const PackedWeight& weight) {
  return {std::string(weight.dense), weight.dtype, {weight.n, weight.k}, Role::intermediate};
}

StageSpec expand_spec(std::string_view name, const std::vector<PackedWeight>& weights,
                      const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = name;
  for (const PackedWeight& weight : weights) {
    for (const std::string_view input : {weight.codes, weight.scales, weight.zeros})
      if (!input.empty()) stage.inputs.emplace_back(input);
    stage.outputs.emplace_back(weight.dense);
  }
  for (const auto& names : {stage.inputs, stage.outputs})
    for (const auto& tensor : names)
      stage.bytes += static_cast<double>(tensors[tensor_index(tensors, tensor)].bytes());
  return stage;
}

void reference_expand(const std::vector<PackedWeight>& weights, ReferenceTensors& tensors,
                      Parallel& parallel) {
  for (const PackedWeight& weight : weights) {
    const double* const codes = tensors.at(std::string(weight.codes)).data();
    const double* const scales = tensors.at(std::string(weight.scales)).data();
    const double* const zeros =
        weight.zeros.empty() ? nullptr : tensors.at(std::string(weight.zeros)).data();
    const std::int64_t k = weight.k, groups = weight.format.groups(k);
    const std::int64_t group = weight.format.group == 0 ? k : weight.format.group;
    const auto width = static_cast<std::size_t>(k);
    auto dense = large_vector<double>(static_cast<std::size_t>(weight.n) * width, parallel);
    for_each_row(static_cast<std::size_t>(weight.n), width, parallel, [&](std::size_t row) {
      for (std::int64_t i = 0; i < k; ++i) {
        const auto [byte, shift] = packed_place_of(static_cast<std::int64_t>(row), i, k);
        const int code = static_cast<int>(codes[byte]) >> shift & 15;
        const std::int64_t place =
            packed_scale_place(static_cast<std::int64_t>(row), i / group, groups);
        dense[row * width + static_cast<std::size_t>(i)] =
            (code - (zeros != nullptr ? zeros[place] : 8)) * scales[place];
      }
    });
    tensors[std::string(weight.dense)] = std::move(dense);
  }
}

std::string packed_header_error(const void* header, std::int64_t n, std::int64_t k) {
  Header given;
  std::memcpy(given.data(), header, sizeof(given));
  if (given == header_of(n, k)) return "";
  if (given[0] != packed_magic)
    return "these bytes are no packed weight: pack it with pack-weight first";
  if (given[1] != packed_version)
    return fmt::format(
        "the weight is packed in layout {}, and this library reads {}: pack it again", given[1],
        packed_version);
  return fmt::format("the packed weight is [{}, {}], not [{}, {}]", given[2], given[3], n, k);
}

void write_packed_header(void* header, std::int64_t n, std::int64_t k) {
  const Header values = header_of(n, k);
  std::memcpy(header, values.data(), sizeof(values));
}

}  // namespace fftune
