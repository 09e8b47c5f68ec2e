// The host side of all_argmax.cu.
#include <fmt/format.h>

#include "device/group_layout.hpp"
#include "kernels/all_argmax/all_argmax.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::all_argmax {
namespace {

constexpr const char* file = "all_argmax/all_argmax.cu";

std::optional<std::string> refusal(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = all_reduce::refuse_peers(problem, facts)) return refusal;
  if (form_of(problem).m * 8 > static_cast<std::int64_t>(most_packet_message))
    return fmt::format("m={} rows exceed the {} that packets carry", problem.size("m"),
                       most_packet_message / 8);
  return std::nullopt;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const all_reduce::Form form = form_of(problem);
  const TensorPlaces places(all_argmax_op().tensors(problem));
  const std::string expression = fmt::format("all_argmax<{}>", form.ranks);
  Program program;
  KernelLaunch& launch = append_pdl_kernel(program, facts, file, expression, {1}, 256, {});
  ParameterStruct parameters{.bytes = sizeof(all_reduce_params), .fields = {}};
  using Params = all_reduce_params;
  ParameterFields<Params> fields(parameters);
  all_reduce::set_group(fields, program, form, places.at("group"));
  fields.set_tensors(places, &Params::x, "logit", &Params::residual, "ids", &Params::y,
                     "best_logit", &Params::sum, "best_ids");
  fields.set(&Params::rows, form.m, &Params::d, problem.size("vocab"), &Params::tag,
             all_reduce::tag_of(problem, expression));
  launch.parameters = std::move(parameters);
  return program;
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const StageFamily family({.name = "all_argmax_packets",
                                   .summary = "one block, packets that hold data and epoch",
                                   .sources = {file},
                                   .is_fallback = true,
                                   .refusal = refusal,
                                   .program = program});
  return {&family};
}

}  // namespace fftune::all_argmax
