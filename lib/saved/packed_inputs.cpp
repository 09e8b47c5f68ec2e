#include "saved/packed_inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "core/error.hpp"
#include "device/parallel.hpp"
#include "registry/family.hpp"

namespace fftune {
namespace {

constexpr std::size_t part_bytes = 512;  // the second extent of packed codes

bool has_groups_of_its_own(const CodeFormat& format) {
  return format.weights == "mxfp4" || format.weights == "nvfp4";
}

/// A problem of pack-weight with the tensors that it reads and writes.
class Packing {
 public:
  Packing(const Op& pack_weight, const CodedMatrix& matrix, std::int64_t group, DType dtype)
      : op_(pack_weight) {
    Problem problem;
    problem.op = op_.name();
    problem.pass = "fwd";
    problem.dtype = dtype;
    problem.sizes = {{"n", matrix.n}, {"k", matrix.k}};
    problem.options = {{"weights", matrix.format.weights}};
    if (!has_groups_of_its_own(matrix.format))
      problem.options["group"] = group == 0 ? "row" : fmt::format("{}", group);
    if (matrix.format.weights == "int4") problem.options["zeros"] = "yes";
    problem_ = canonical(op_, std::move(problem), DeviceKind::cpu);
    specs_ = op_.tensors(problem_);
  }

  /// Null if there is none.
  const TensorSpec* find(std::string_view name) const {
    const auto spec = std::find_if(specs_.begin(), specs_.end(),
                                   [&](const TensorSpec& each) { return each.name == name; });
    return spec == specs_.end() ? nullptr : &*spec;
  }
  std::span<std::byte> bytes(std::string_view name) {
    return data_.at(static_cast<std::size_t>(find(name) - specs_.data()));
  }
  void allocate() {
    for (const TensorSpec& spec : specs_) data_.emplace_back(spec.bytes());
  }
  void run(Parallel& parallel) {
    for (const Family* family : op_.families()) {
      if (family->device_kind() != DeviceKind::cpu) continue;
      std::vector<void*> addresses;
      for (auto& each : data_) addresses.push_back(each.data());
      const DeviceFacts facts;  // of a CPU
      const Program program =
          family->program(problem_, facts, family->default_config(problem_, facts));
      for (const Step& step : program.steps)
        std::get<HostFunction>(step)({addresses.data(), {}, parallel});
      return;
    }
  }

 private:
  const Op& op_;
  Problem problem_;
  std::vector<TensorSpec> specs_;
  std::vector<std::vector<std::byte>> data_;
};

constexpr const char* name_of(PackedPart part) {
  return part == PackedPart::codes ? "w" : part == PackedPart::scales ? "w_scale" : "w_zero";
}

/// The packing with those of the matrix' groups that give a tensor like `spec`.
std::optional<Packing> packing_like(const Op& pack_weight, const CodedMatrix& matrix,
                                    PackedPart part, const TensorSpec& spec) {
  const bool has_own_type = part == PackedPart::scales && spec.dtype != DType::u8;
  for (const std::int64_t group : matrix.format.groups) {
    Packing packing(pack_weight, matrix, group, has_own_type ? spec.dtype : DType::bf16);
    const TensorSpec* const result = packing.find(name_of(part));
    if (result != nullptr && result->shape == spec.shape && result->dtype == spec.dtype)
      return packing;
  }
  return {};
}

}  // namespace

std::optional<PackedName> packed_name(const TensorSpec& spec) {
  const auto without = [&](std::string_view suffix) {
    return spec.name.substr(0, spec.name.size() - suffix.size());
  };
  if (spec.shape.size() == 3 && spec.name.ends_with("_scale"))
    return PackedName{without("_scale"), PackedPart::scales};
  if (spec.dtype != DType::u8) return {};
  if (spec.shape.size() == 3 && spec.name.ends_with("_zero"))
    return PackedName{without("_zero"), PackedPart::zeros};
  if (spec.shape.size() == 2 && spec.shape[1] == part_bytes)
    return PackedName{spec.name, PackedPart::codes};
  return {};
}

CodeFormat common_format(const std::vector<CodeFormat>& formats) {
  CodeFormat common = formats.front();
  for (const CodeFormat& format : formats) {
    if (common.unfit.empty()) common.unfit = format.unfit;
    if (common.unfit.empty() && format.weights != common.weights)
      common.unfit = fmt::format("some are {}, and some are {}", common.weights, format.weights);
    common.zeros |= format.zeros;
    std::erase_if(common.groups, [&](std::int64_t group) {
      return std::find(format.groups.begin(), format.groups.end(), group) == format.groups.end();
    });
  }
  if (common.unfit.empty() && common.groups.empty())
    common.unfit = "they have no size of groups in common";
  return common;
}

std::vector<std::pair<std::string, std::string>> option_words(const CodeFormat& format) {
  std::vector<std::pair<std::string, std::string>> words{{"weights", format.weights}};
  if (has_groups_of_its_own(format)) return words;
  const std::int64_t group = format.groups.front();
  words.emplace_back("group", group == 0 ? "row" : fmt::format("{}", group));
  if (format.zeros) words.emplace_back("zeros", "yes");
  return words;
}

bool fits(const Op& pack_weight, const CodedMatrix& matrix, PackedPart part,
          const TensorSpec& spec) {
  return packing_like(pack_weight, matrix, part, spec).has_value();
}

void pack(const Op& pack_weight, const CodedMatrix& matrix, PackedPart part, const TensorSpec& spec,
          std::span<std::byte> out, Parallel& parallel) {
  auto packing = packing_like(pack_weight, matrix, part, spec);
  packing->allocate();
  const auto n = static_cast<std::size_t>(matrix.n), k = static_cast<std::size_t>(matrix.k);
  const auto codes = packing->bytes("codes"), scale = packing->bytes("scale");
  const std::size_t width = codes.size() / n;
  const auto groups = static_cast<std::size_t>(packing->find("scale")->shape[1]);
  const std::size_t group = (k + groups - 1) / groups;
  const DType scale_type = packing->find("scale")->dtype;
  for_each_row(n, k, parallel, [&](std::size_t row) {
    std::vector<Code> own(k);
    matrix.read(static_cast<std::int64_t>(row), own);
    if (part == PackedPart::codes) {
      for (std::size_t i = 0; i < k; ++i)
        codes[row * width + (width < k ? i / 2 : i)] |=
            static_cast<std::byte>(own[i].bits << (width < k ? i % 2 * 4 : 0));
      return;
    }
    std::vector<double> scales;
    for (std::size_t i = 0; i < k; i += group) scales.push_back(own[i].scale);
    encode(scale_type, std::span<const double>(scales),
           scale.data() + row * groups * dtype_bytes(scale_type));
    if (packing->find("row_scale") != nullptr)
      encode(DType::f32, std::span<const double>(&own[0].row_scale, 1),
             packing->bytes("row_scale").data() + row * dtype_bytes(DType::f32));
    if (part == PackedPart::zeros)
      for (std::size_t i = 0; i < groups; ++i)
        packing->bytes("zero")[row * groups + i] = static_cast<std::byte>(own[i * group].zero);
  });
  packing->run(parallel);
  std::memcpy(out.data(), packing->bytes(name_of(part)).data(), out.size());
}

}  // namespace fftune
