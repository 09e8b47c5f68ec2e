#include "kernels/ffn/decode_family.hpp"

#include <variant>

#include <fmt/format.h>

#include "kernels/gemm/decode.hpp"

namespace fftune::ffn {

std::optional<std::string> DecodeFamily::refusal(const Problem& problem,
                                                 const DeviceFacts& facts) const {
  const std::int64_t tokens = gemm_of(stage_, problem).m;
  if (tokens > decode_max_tokens)
    return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                       tokens, decode_max_tokens);
  return refuse_tensor_cores(problem, facts, stage_);
}

Space DecodeFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return decode_space(gemm_of(stage_, problem), facts);
}

Config DecodeFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return decode_default(gemm_of(stage_, problem), facts);
}

Program DecodeFamily::program(const Problem& problem, const DeviceFacts& facts,
                              const Config& config) const {
  Program program;
  program.kernels.push_back(
      kernel_source(stage_, std::string(name_), std::string(name_), problem,
                    decode_template_arguments(gemm_of(stage_, problem), config)));
  decode_launch(program, gemm_of(stage_, problem), facts, config, tensor_arguments(stage_, problem),
                size_arguments(problem));
  std::get<KernelLaunch>(program.steps.back()).programmatic =
      may_start_early(stage_, problem, facts);
  return program;
}

std::vector<std::string> DecodeFamily::sources() const {
  return {"ffn/" + std::string(name_) + ".cu"};
}

}  // namespace fftune::ffn
