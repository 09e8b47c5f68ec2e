#include "kernels/gemm/packed/packed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "core/hash.hpp"
#include "device/parallel.hpp"

namespace fftune {
namespace {

constexpr packed_code packed_codes[] = {packed_code::int4, packed_code::mxfp4, packed_code::fp8,
                                        packed_code::int8};

using Header = std::array<std::uint32_t, 4>;

Header header_of(packed_code code, std::int64_t n, std::int64_t k) {
  return {packed_magic(code), packed_version, static_cast<std::uint32_t>(n),
          static_cast<std::uint32_t>(k)};
}

/// The deviation of values without scales, over codes and zero points drawn evenly.
double code_deviation(const PackedFormat& format) {
  switch (format.code) {
    case packed_code::int4:
      return format.zeros ? 6.52 : 4.61;
    case packed_code::mxfp4:
      return 2.93;
    case packed_code::fp8:
      return 114;
    case packed_code::int8:
      return 73.9;
  }
  return 1;
}

/// An e8m0 scale near 2^exponent.
TensorSpec e8m0_scales(std::string_view name, std::vector<std::int64_t> shape, double exponent) {
  TensorSpec scales{std::string(name), DType::u8, std::move(shape), Role::input};
  scales.draw = [middle = std::round(exponent) + 127](std::uint64_t seed,
                                                      std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = middle - 1 + static_cast<double>(mix(seed + golden * (i + 1)) % 3);
  };
  return scales;
}

}  // namespace

std::vector<OptionField> packed_options() {
  return {
      rare_option("weights",
                  "format of the weights: those of x, or packed: integers of 4 bits with scales, "
                  "e2m1 with e8m0 scales of 32 (OCP MX), or e4m3 or integers of 8 bits with f32 "
                  "scales",
                  {"dense", "int4", "mxfp4", "fp8", "int8"}, "fwd"),
      rare_option("group",
                  "weights=int4, fp8 or int8: elements of a row of the weight that share a scale",
                  {"128", "64", "32", "row"}, "fwd"),
      rare_option("zeros", "weights=int4: whether each group has a zero point, instead of 8",
                  {"no", "yes"}, "fwd")};
}

PackedFormat packed_format(const Problem& problem) {
  PackedFormat format;
  for (const packed_code code : packed_codes)
    if (problem.has("weights", code_name(code))) {
      format.packed = true;
      format.code = code;
    }
  if (!format.packed) return format;
  if (format.code == packed_code::mxfp4) {
    format.group = 32;
    return format;
  }
  format.group = problem.has("group", "row")  ? 0
                 : problem.has("group", "64") ? 64
                 : problem.has("group", "32") ? 32
                                              : 128;
  format.zeros = problem.has("zeros", "yes");
  return format;
}

PackedWeight packed_weight(const Problem& problem, PackedWeight weight) {
  weight.format = packed_format(problem);
  weight.dtype = problem.dtype;
  if (!weight.format.zeros) weight.zeros = "";
  return weight;
}

GemmProblem reads_packed(GemmProblem gemm, std::vector<PackedWeight> weights, bool follows) {
  for (std::size_t i = 0; i < weights.size(); ++i) gemm.b[i] = {weights[i].codes};
  gemm.packed = std::move(weights);
  gemm.follows = follows;
  gemm.b_depends = false;
  return gemm;
}

ExpandFamily::ExpandFamily(const ExpandStage& stage, const char* name, std::string_view summary,
                           const char* source, DeviceKind kind, Expand expand)
    : StageFamily({.name = name,
                   .summary = summary,
                   .device_kind = kind,
                   .stage = stage.name,
                   .pass = "fwd",
                   .sources = {source},
                   .is_fallback = true,
                   .refusal = refuse_dense}),
      stage_(stage),
      expand_(expand) {}

std::optional<std::string> refuse_dense(const Problem& problem, const DeviceFacts&) {
  if (packed_format(problem).packed) return std::nullopt;
  return "it is for packed weights: weights=int4, mxfp4, fp8 or int8";
}

std::string_view code_name(packed_code code) {
  switch (code) {
    case packed_code::int4:
      return "int4";
    case packed_code::mxfp4:
      return "mxfp4";
    case packed_code::fp8:
      return "fp8";
    case packed_code::int8:
      return "int8";
  }
  return "";
}

std::string device_name(packed_code code) {
  return fmt::format("fftune::packed_code::{}", code_name(code));
}

double e2m1_value(int code) {
  constexpr double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 128) != 0 ? -magnitude : magnitude;
}

double code_value(packed_code code, int bits, int zero) {
  switch (code) {
    case packed_code::int4:
      return bits - zero;
    case packed_code::mxfp4:
      return e2m1_value(bits);
    case packed_code::fp8:
      return e4m3_value(bits);
    case packed_code::int8:
      return bits < 128 ? bits : bits - 256;
  }
  return 0;
}

double e8m0_value(int byte) {
  return byte == 255 ? std::nan("") : std::ldexp(1.0, byte - 127);
}

std::string packed_contradiction(const Problem& problem, std::string_view name, std::int64_t k) {
  const PackedFormat format = packed_format(problem);
  if (problem.has("zeros", "yes") && !problem.has("weights", "int4"))
    return "zeros is of integers of 4 bits: give weights=int4 too";
  if (!format.packed || format.code == packed_code::mxfp4) {
    if (problem.options.contains("group") && !problem.has("group", "128"))
      return "group is of weights with scales of groups: give weights=int4, fp8 or int8 too";
    if (format.packed && k % format.group != 0)
      return fmt::format("groups of {} do not divide {}={}: mxfp4 has no others", format.group,
                         name, k);
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
  const double scale = deviation / code_deviation(weight.format);
  TensorSpec codes{std::string(weight.codes),
                   DType::u8,
                   {packed_all_parts(n, k, weight.format.code), packed_part_bytes},
                   Role::input};
  codes.draw = [=, code = weight.format.code](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); i += 8) {
      const std::uint64_t bits = mix(seed + golden * (i + 1));
      for (std::size_t j = 0; j < 8; ++j) values[i + j] = static_cast<double>(bits >> 8 * j & 255);
    }
    std::array<std::uint8_t, sizeof(Header)> header;
    write_packed_header(header.data(), code, n, k);
    std::fill_n(values.begin(), packed_part_bytes, 0.0);
    std::copy(header.begin(), header.end(), values.begin());
  };
  if (weight.format.code == packed_code::mxfp4)
    return {codes, e8m0_scales(weight.scales, {tiles, groups, packed_rows}, std::log2(scale))};
  std::vector<TensorSpec> tensors{codes,
                                  {std::string(weight.scales),
                                   weight.format.scale_type(weight.dtype),
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
  stage.expanded_weights = static_cast<int>(weights.size());
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
        const auto [byte, shift] =
            packed_place_of(static_cast<std::int64_t>(row), i, k, weight.format.code);
        const int bits =
            static_cast<int>(codes[byte]) >> shift & ((1 << packed_bits(weight.format.code)) - 1);
        const std::int64_t place =
            packed_scale_place(static_cast<std::int64_t>(row), i / group, groups);
        dense[row * width + static_cast<std::size_t>(i)] =
            code_value(weight.format.code, bits,
                       zeros != nullptr ? static_cast<int>(zeros[place]) : 8) *
            (weight.format.code == packed_code::mxfp4 ? e8m0_value(static_cast<int>(scales[place]))
                                                      : scales[place]);
      }
    });
    tensors[std::string(weight.dense)] = std::move(dense);
  }
}

std::string packed_header_error(const void* header, packed_code code, std::int64_t n,
                                std::int64_t k) {
  Header given;
  std::memcpy(given.data(), header, sizeof(given));
  if (given == header_of(code, n, k)) return "";
  for (const packed_code other : packed_codes)
    if (other != code && given[0] == packed_magic(other))
      return fmt::format("the weight is packed as {}, not {}: give weights={}", code_name(other),
                         code_name(code), code_name(other));
  if (given[0] != packed_magic(code))
    return "these bytes are no packed weight: pack it with pack-weight first";
  if (given[1] != packed_version)
    return fmt::format(
        "the weight is packed in layout {}, and this library reads {}: pack it again", given[1],
        packed_version);
  return fmt::format("the packed weight is [{}, {}], not [{}, {}]", given[2], given[3], n, k);
}

void write_packed_header(void* header, packed_code code, std::int64_t n, std::int64_t k) {
  const Header values = header_of(code, n, k);
  std::memcpy(header, values.data(), sizeof(values));
}

}  // namespace fftune
