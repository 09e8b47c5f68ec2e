// The families of the stage own_ids, which a rank with some of the experts has.
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/common/stage_family.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

constexpr const char* own_ids_file = "moe/own_ids.cu";

Program cuda_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const std::int64_t count = shape.m * shape.top_k;
  return pdl_program(
      facts, own_ids_file, "find_own_ids", {static_cast<std::uint32_t>(quotient_up(count, 256))},
      256,
      {tensor_of(places, "ids"), tensor_of(places, "first_expert"), tensor_of(places, "own_ids"),
       static_cast<std::int32_t>(count), static_cast<std::int32_t>(shape.experts)});
}

std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) {
  if (!has_own_experts(problem)) return "it is for own-experts";
  return std::nullopt;
}

}  // namespace

std::vector<const Family*> own_ids_families() {
  const auto family = [](const char* name, DeviceKind kind, const char* source, auto* program) {
    return StageFamily({.name = name,
                        .summary = "each id less that of the rank's first expert",
                        .device_kind = kind,
                        .stage = stage_own_ids,
                        .sources = {source},
                        .is_fallback = true,
                        .refusal = refusal,
                        .program = program});
  };
  static const StageFamily cuda = family("own_ids", DeviceKind::cuda, own_ids_file, cuda_program),
                           cpu = family("cpu_own_ids", DeviceKind::cpu, "moe/cpu_families.cpp",
                                        cpu_own_ids_program);
  return {&cuda, &cpu};
}

}  // namespace fftune::moe
