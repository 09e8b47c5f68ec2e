#include "kernels/ffn/decode_family.hpp"

#include <variant>

#include <fmt/format.h>

#include "kernels/gemm/decode.hpp"

namespace fftune::ffn {

std::optional<std::string> DecodeFamily::refusal(const Problem& problem,
                                                 const DeviceFacts& facts) const {
  const std::int64_t tokens = gemm_of(stage(), problem).m;
  if (tokens > decode_max_tokens)
    return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                       tokens, decode_max_tokens);
  return refuse_tensor_cores(problem, facts, stage());
}

Space DecodeFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return decode_space(gemm_of(stage(), problem), facts);
}

Config DecodeFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return decode_default(gemm_of(stage(), problem), facts);
}

Program DecodeFamily::program(const Problem& problem, const DeviceFacts& facts,
                              const Config& config) const {
  Program program;
  program.kernels.push_back(
      kernel_source(stage(), std::string(name()), std::string(name()), problem,
                    decode_template_arguments(gemm_of(stage(), problem), config)));
  decode_launch(program, gemm_of(stage(), problem), facts, config,
                tensor_arguments(stage(), problem), size_arguments(problem));
  std::get<KernelLaunch>(program.steps.back()).programmatic =
      may_start_early(stage(), problem, facts);
  return program;
}

std::vector<std::string> DecodeFamily::sources() const {
  return {"ffn/" + std::string(name()) + ".cu"};
}

}  // namespace fftune::ffn
