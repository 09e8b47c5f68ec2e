#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/hash.hpp"
#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/pack_weight/pack_weight.hpp"

namespace fftune::pack_weight {
namespace {

/// The plain side, with `role`.
std::vector<TensorSpec> plain_tensors(const PackedWeight& weight, const PlainNames& names,
                                      Role role) {
  const std::int64_t n = weight.n, k = weight.k, groups = weight.format.groups(k);
  TensorSpec codes{names.codes, DType::u8, {n, plain_width(weight)}, role};
  codes.draw = [](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(mix(seed + golden * (i + 1)) >> 56);
  };
  std::vector<TensorSpec> tensors{
      codes, {names.scale, weight.format.scale_type(weight.dtype), {n, groups}, role, 0.25, 1}};
  if (tensors[1].dtype == DType::u8) {
    tensors[1] = {names.scale, DType::u8, {n, groups}, role};
    tensors[1].draw = codes.draw;
  }
  if (packed_scales_rows(weight.format.code))
    tensors.push_back({names.row_scale, DType::f32, {n}, role, 0.25, 1});
  if (weight.zeros.empty()) return tensors;
  TensorSpec zeros{names.zero, DType::u8, {n, groups}, role};
  zeros.draw = [](std::uint64_t seed, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(mix(seed + golden * (i + 1)) >> 60);
  };
  tensors.push_back(zeros);
  return tensors;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> options{
      rare_option("direction", "pack: to the order of kernels; unpack: back", {"pack", "unpack"})};
  for (OptionField& option : packed_options()) {
    option.pass.clear();
    if (option.name == "weights") {
      option.help =
          "format of the weights: integers (int4, int8), e4m3 (fp8), e2m1 with e8m0 scales of 32 "
          "(mxfp4) or e4m3 scales of 16 (nvfp4)";
      std::erase(option.choices, "dense");
      option.rare = false;
    }
    options.push_back(std::move(option));
  }
  return options;
}

OpFacts facts() {
  return {.name = "pack-weight",
          .summary =
              "codes of 4 or 8 bits with scales, in the order in which kernels read them, and back",
          .passes = {"fwd"},
          .sizes = {token_count("n", "output features", {4096}, {1024}, SizeField().max, 2048),
                    {.name = "k", .help = "input features"}},
          .options = option_fields(),
          .token_size = "n",
          .rows_are_alike = false};
}

class PackWeight final : public DescribedOp {
 public:
  PackWeight() : DescribedOp(facts()) {}

  std::vector<DType> dtypes(DeviceKind kind) const override {
    if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16, DType::fp16};
    return {DType::bf16, DType::fp16, DType::f32};
  }
  std::string contradiction(const Problem& problem) const override {
    return packed_contradiction(problem, "k", problem.size("k"));
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const PackedWeight weight = weight_of(problem);
    const bool back = unpacks(problem);
    auto inputs =
        back ? packed_tensors(weight, 1) : plain_tensors(weight, plain_names(problem), Role::input);
    auto outputs = back ? plain_tensors(weight, plain_names(problem), Role::output)
                        : packed_tensors(weight, 1);
    for (TensorSpec& output : outputs) {
      output.role = Role::output;
      output.draw = {};
      inputs.push_back(std::move(output));
    }
    return inputs;
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    return {whole_stage(stage_pack, tensors(problem))};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override;

  std::vector<const Family*> families() const override { return {&cuda_family(), &cpu_family()}; }
};

void PackWeight::reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                           Parallel& parallel) const {
  const PackedWeight weight = weight_of(problem);
  const bool back = unpacks(problem);
  for (const TensorSpec& tensor : this->tensors(problem))
    if (tensor.role == Role::output)
      tensors[tensor.name] =
          large_vector<double>(static_cast<std::size_t>(tensor.elements()), parallel);
  const std::int64_t n = weight.n, k = weight.k, width = plain_width(weight);
  const packed_code code = weight.format.code;
  const int bits = packed_bits(code), in_byte = 8 / bits;
  const std::int64_t groups = weight.format.groups(k);
  const PlainNames names = plain_names(problem);
  auto& codes = tensors[names.codes];
  auto& packed = tensors["w"];
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t i = 0; i < k; ++i) {
      const packed_place place = packed_place_of(row, i, k, code);
      auto& plain = codes[static_cast<std::size_t>(row * width + i / in_byte)];
      const double unit = i % in_byte == 0 ? 1 : 16;
      if (back)
        plain += packed_code_at(packed, place, code) * unit;
      else
        add_packed_code(packed, place, code, static_cast<int>(plain / unit) % (1 << bits));
    }
  const auto move = [&](const char* plain_name, const char* packed_name) {
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t group = 0; group < groups; ++group) {
        double& plain = tensors[plain_name][static_cast<std::size_t>(row * groups + group)];
        double& other =
            tensors[packed_name]
                   [static_cast<std::size_t>(packed_scale_place(row, group, groups, code))];
        (back ? plain : other) = back ? other : plain;
      }
  };
  move(names.scale, "w_scale");
  if (!weight.zeros.empty()) move(names.zero, "w_zero");
  if (packed_scales_rows(code)) {
    auto& row_scales = tensors[names.row_scale];
    const std::span<double> scales(tensors["w_scale"]);
    for (std::int64_t row = 0; row < n; ++row) {
      const auto bytes =
          scales.subspan(static_cast<std::size_t>(packed_row_scale_place(row, groups)));
      double& plain = row_scales[static_cast<std::size_t>(row)];
      if (back)
        plain = float_of(bytes, 0);
      else
        put_float(bytes, 0, static_cast<float>(plain));
    }
  }
  if (back) return;
  const std::uint32_t header[] = {packed_magic(weight.format.code), packed_version,
                                  static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(k)};
  for (std::size_t i = 0; i < sizeof(header); ++i)
    packed[i] = static_cast<double>(header[i / 4] >> i % 4 * 8 & 255);
}

}  // namespace

std::int64_t plain_width(const PackedWeight& weight) {
  return (weight.k * packed_bits(weight.format.code) + 7) / 8;
}

bool unpacks(const Problem& problem) {
  return problem.has("direction", "unpack");
}

PlainNames plain_names(const Problem& problem) {
  if (unpacks(problem))
    return {"unpacked", "unpacked_scale", "unpacked_zero", "unpacked_row_scale"};
  return {"codes", "scale", "zero", "row_scale"};
}

PackedWeight weight_of(const Problem& problem) {
  return packed_weight(problem,
                       {"w", "w_scale", "w_zero", "", problem.size("n"), problem.size("k")});
}

}  // namespace fftune::pack_weight

const fftune::Op& fftune::pack_weight_op() {
  static const pack_weight::PackWeight op;
  return op;
}
