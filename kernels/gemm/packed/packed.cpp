#include "kernels/gemm/packed/packed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <span>

#include "core/hash.hpp"
#include "device/parallel.hpp"
#include "registry/noise_draw.hpp"

namespace fftune {
namespace {

/// A format, and the deviation of its values without scales, over codes and zero points drawn
/// evenly.
struct CodeRow {
  packed_code code;
  const char* name;
  double deviation;
};
constexpr CodeRow code_rows[] = {{packed_code::int4, "int4", 4.61},
                                 {packed_code::mxfp4, "mxfp4", 2.93},
                                 {packed_code::fp8, "fp8", 114},
                                 {packed_code::int8, "int8", 73.9},
                                 {packed_code::nvfp4, "nvfp4", 2.93}};

const CodeRow& row_of(packed_code code) {
  return *std::find_if(std::begin(code_rows), std::end(code_rows),
                       [&](const CodeRow& row) { return row.code == code; });
}

using Header = std::array<std::uint32_t, 4>;

Header header_of(packed_code code, std::int64_t n, std::int64_t k) {
  return {packed_magic(code), packed_version, static_cast<std::uint32_t>(n),
          static_cast<std::uint32_t>(k)};
}

/// The deviation of values before their scales.
double code_deviation(const PackedFormat& format) {
  return format.zeros ? 6.52 : row_of(format.code).deviation;
}

/// The one group of k that a format has; 0: the option `group` says it.
std::int64_t only_group(packed_code code) {
  return code == packed_code::mxfp4 ? 32 : code == packed_code::nvfp4 ? 16 : 0;
}

/// An e8m0 scale near 2^exponent.
TensorSpec e8m0_scales(std::string_view name, std::vector<std::int64_t> shape, double exponent) {
  TensorSpec scales{std::string(name), DType::u8, std::move(shape), Role::input};
  scales.draw = NoiseDraw{
      [middle = std::round(exponent) + 127](std::uint64_t seed, std::span<double> values) {
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = middle - 1 + static_cast<double>(mix(seed + golden * (i + 1)) % 3);
      }};
  return scales;
}

/// A word of a tensor of bytes, which are doubles.
std::uint32_t word_of(std::span<const double> bytes, std::size_t index) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < 4; ++i)
    word |= static_cast<std::uint32_t>(bytes[index * 4 + i]) << 8 * i;
  return word;
}
void put_word(std::span<double> bytes, std::size_t index, std::uint32_t word) {
  for (std::size_t i = 0; i < 4; ++i)
    bytes[index * 4 + i] = static_cast<double>(word >> 8 * i & 255);
}

/// nvfp4: rows' scales of about 2^-6 of `scale`, and groups' of 2^5 to 2^7, which are the bytes of
/// e4m3 from 0x60 on.
TensorSpec nvfp4_scales(std::string_view name, std::vector<std::int64_t> shape, double scale) {
  TensorSpec scales{std::string(name), DType::u8, std::move(shape), Role::input};
  const auto of_tile = static_cast<std::size_t>(scales.shape[1] * scales.shape[2]);
  const auto draw = [=](std::uint64_t seed, std::span<double> values) {
    constexpr std::size_t row_bytes = packed_rows * sizeof(float);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t bits = mix(seed + golden * (i + 1));
      values[i] = static_cast<double>(0x60 + bits % 16);
    }
    for (std::size_t tile = 0; tile < values.size(); tile += of_tile)
      for (std::size_t row = 0; row < packed_rows; ++row) {
        const std::uint64_t bits = mix(seed + golden * (tile + row + 1)) >> 32;
        put_float(
            values.subspan(tile, row_bytes), row,
            static_cast<float>(scale / 64 * (0.75 + 0.5 * static_cast<double>(bits) * 0x1p-32)));
      }
  };
  scales.draw = NoiseDraw{draw, static_cast<std::int64_t>(of_tile)};
  return scales;
}

}  // namespace

void put_float(std::span<double> bytes, std::size_t index, float value) {
  put_word(bytes, index, std::bit_cast<std::uint32_t>(value));
}

float float_of(std::span<const double> bytes, std::size_t index) {
  return std::bit_cast<float>(word_of(bytes, index));
}

namespace {

/// packed_nibbles_of by bytes: each bit has its own place, so a word's nibbles are those of its
/// bytes together. References of experts read hundreds of millions of them.
std::uint32_t nibbles_of(std::uint32_t word, packed_code code) {
  if (!packed_is_e2m1(code)) return packed_nibbles_of(word, code);
  static const auto of_bytes = [] {
    std::array<std::array<std::uint32_t, 256>, 4> table;
    for (std::uint32_t place = 0; place < 4; ++place)
      for (std::uint32_t byte = 0; byte < 256; ++byte)
        table[place][byte] = packed_nibbles_of(byte << 8 * place, packed_code::mxfp4);
    return table;
  }();
  return of_bytes[0][word & 255] | of_bytes[1][word >> 8 & 255] | of_bytes[2][word >> 16 & 255] |
         of_bytes[3][word >> 24];
}

}  // namespace

int packed_code_at(std::span<const double> bytes, const packed_place& place, packed_code code) {
  const auto byte = static_cast<std::size_t>(place.byte);
  const std::uint32_t nibbles = nibbles_of(word_of(bytes, byte / 4), code);
  const int at = static_cast<int>(byte % 4) * 8 + place.shift;
  return static_cast<int>(nibbles >> at & ((1u << packed_bits(code)) - 1));
}

void add_packed_code(std::span<double> bytes, const packed_place& place, packed_code code,
                     int value) {
  const auto byte = static_cast<std::size_t>(place.byte);
  const int at = static_cast<int>(byte % 4) * 8 + place.shift;
  const auto own = packed_word_of(static_cast<std::uint32_t>(value) << at, code);
  put_word(bytes, byte / 4, word_of(bytes, byte / 4) | own);
}

std::vector<OptionField> packed_options() {
  auto formats = packed_format_names();
  formats.insert(formats.begin(), "dense");
  return {
      rare_option(
          "weights",
          "format of the weights: dense, or packed integers (int4, int8), e2m1 (mxfp4, nvfp4) or "
          "e4m3 (fp8) with scales",
          formats, "fwd"),
      rare_option("group",
                  "weights=int4, fp8 or int8: elements of a row of the weight that share a scale",
                  {"128", "64", "32", "row"}, "fwd"),
      rare_option("zeros", "weights=int4: whether each group has a zero point, instead of 8",
                  {"no", "yes"}, "fwd")};
}

std::vector<std::string> packed_format_names() {
  std::vector<std::string> names;
  for (const CodeRow& row : code_rows) names.emplace_back(row.name);
  return names;
}

std::string packed_names() {
  std::string names;
  for (const CodeRow& row : code_rows)
    names += fmt::format("{}{}",
                         &row == code_rows                 ? ""
                         : &row == std::end(code_rows) - 1 ? " or "
                                                           : ", ",
                         row.name);
  return names;
}

PackedFormat packed_format(const Problem& problem) {
  PackedFormat format;
  for (const CodeRow& row : code_rows)
    if (problem.has("weights", row.name)) {
      format.packed = true;
      format.code = row.code;
    }
  if (!format.packed) return format;
  if (const std::int64_t group = only_group(format.code); group != 0) {
    format.group = group;
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

std::optional<std::string> refuse_packed_groups(const GemmProblem& gemm) {
  if (!gemm.groups.any()) return std::nullopt;
  if (gemm.groups.by != Grouping::rows || gemm.groups.offsets.empty() ||
      gemm.b_packing != Packing::separate)
    return "an earlier stage must sort grouped rows, and each weight must be a tensor of its own";
  if (gemm.n % packed_rows != 0)
    return fmt::format(
        "a group begins with a whole tile of {} rows of B: n={} is no multiple of that",
        packed_rows, gemm.n);
  return std::nullopt;
}

std::optional<std::string> refuse_dense(const Problem& problem, const DeviceFacts&) {
  if (packed_format(problem).packed) return std::nullopt;
  return "it is for packed weights: weights=" + packed_names();
}

std::string_view code_name(packed_code code) {
  return row_of(code).name;
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
    case packed_code::nvfp4:
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
  if (!format.packed || only_group(format.code) != 0) {
    if (problem.options.contains("group") && !problem.has("group", "128"))
      return "group is of weights with scales of groups: give weights=int4, fp8 or int8 too";
    if (format.packed && k % format.group != 0)
      return fmt::format("groups of {} do not divide {}={}: {} has no others", format.group, name,
                         k, code_name(format.code));
    return "";
  }
  if (format.group != 0 && k % format.group != 0)
    return fmt::format("groups of {} do not divide {}={}: give group=row or another size",
                       format.group, name, k);
  return "";
}

std::vector<TensorSpec> packed_tensors(const PackedWeight& weight, double deviation) {
  const std::int64_t n = weight.n, k = weight.k;
  const auto shape = weight.format.scale_shape(n, k);
  const double scale = deviation / code_deviation(weight.format);
  TensorSpec codes{std::string(weight.codes),
                   DType::u8,
                   {packed_all_parts(n, k, weight.format.code), packed_part_bytes},
                   Role::input};
  const auto draw = [=, code = weight.format.code](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); i += 8) {
      const std::uint64_t bits = mix(seed + golden * (i + 1));
      for (std::size_t j = 0; j < 8; ++j) values[i + j] = static_cast<double>(bits >> 8 * j & 255);
    }
    std::array<std::uint8_t, sizeof(Header)> header;
    write_packed_header(header.data(), code, n, k);
    std::fill_n(values.begin(), packed_part_bytes, 0.0);
    std::copy(header.begin(), header.end(), values.begin());
  };
  codes.draw = NoiseDraw{draw, packed_part_bytes, packed_part_bytes};
  if (weight.format.code == packed_code::mxfp4)
    return {codes, e8m0_scales(weight.scales, shape, std::log2(scale))};
  if (packed_scales_rows(weight.format.code))
    return {codes, nvfp4_scales(weight.scales, shape, scale)};
  std::vector<TensorSpec> tensors{
      codes,
      {std::string(weight.scales), weight.format.scale_type(weight.dtype), shape, Role::input,
       scale / 4, scale}};
  if (weight.zeros.empty()) return tensors;
  TensorSpec zeros{std::string(weight.zeros), DType::u8, shape, Role::input};
  zeros.draw = NoiseDraw{[](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(mix(seed + golden * (i + 1)) >> 60);
  }};
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
    const auto& codes = tensors.at(std::string(weight.codes));
    const auto& scales = tensors.at(std::string(weight.scales));
    const double* const zeros =
        weight.zeros.empty() ? nullptr : tensors.at(std::string(weight.zeros)).data();
    const std::int64_t k = weight.k, groups = weight.format.groups(k);
    const std::int64_t group = weight.format.group == 0 ? k : weight.format.group;
    const auto width = static_cast<std::size_t>(k);
    auto dense = large_vector<double>(static_cast<std::size_t>(weight.n) * width, parallel);
    for_each_row(static_cast<std::size_t>(weight.n), width, parallel, [&](std::size_t row) {
      const double row_scale =
          packed_scales_rows(weight.format.code)
              ? float_of(std::span(scales).subspan(static_cast<std::size_t>(
                             packed_row_scale_place(static_cast<std::int64_t>(row), groups))),
                         0)
              : 1;
      const packed_code code = weight.format.code;
      double scale = 0;
      int zero = 8;
      for (std::int64_t i = 0; i < k; ++i) {
        if (i % group == 0) {
          const auto place = static_cast<std::size_t>(
              packed_scale_place(static_cast<std::int64_t>(row), i / group, groups, code));
          scale = code == packed_code::mxfp4 ? e8m0_value(static_cast<int>(scales[place]))
                  : packed_scales_rows(code)
                      ? e4m3_value(static_cast<int>(scales[place])) * row_scale
                      : scales[place];
          if (zeros != nullptr) zero = static_cast<int>(zeros[place]);
        }
        const int bits = packed_code_at(
            codes, packed_place_of(static_cast<std::int64_t>(row), i, k, code), code);
        dense[row * width + static_cast<std::size_t>(i)] = code_value(code, bits, zero) * scale;
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
  for (const CodeRow& other : code_rows)
    if (other.code != code && given[0] == packed_magic(other.code))
      return fmt::format("the weight is packed as {}, not {}: give weights={}", other.name,
                         code_name(code), other.name);
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
