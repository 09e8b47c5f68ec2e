#include "kernels/masked/cuda_stage.hpp"

#include <fmt/format.h>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/common/device_types.hpp"

namespace fftune::masked {
namespace {

/// The policy of that name in gemm/epilogue.cuh.
std::string epilogue_type(Stage stage, const Problem& problem) {
  if (stage != Stage::gate_up) return "fftune::linear_epilogue<false, false>";
  const std::string& act = problem.option("act");
  return fmt::format("fftune::gated_epilogue<fftune::{}>", act == "gelu-tanh" ? "gelu_tanh" : act);
}

}  // namespace

std::string template_arguments(Stage stage, const Problem& problem) {
  const StageProduct product = product_of(stage, problem);
  return fmt::format("{}, {}, {}, {}", element_type(problem.dtype), epilogue_type(stage, problem),
                     product.sorted_a, product.sorted_c);
}

std::vector<Argument> pointer_arguments(const StageProduct& work) {
  std::vector<Argument> arguments{TensorArgument{work.a}, TensorArgument{work.mask}};
  for (const auto& weights : work.b) {
    arguments.emplace_back(TensorArgument{weights[0]});
    if (weights.size() == 2) {
      arguments.emplace_back(TensorArgument{weights[1]});
    } else {
      arguments.emplace_back(std::int64_t{0});
    }
  }
  arguments.emplace_back(TensorArgument{work.c});
  return arguments;
}

std::optional<std::string> refuse_halves(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = refuse_cuda(problem, problem.pass, facts)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("it multiplies bf16 and fp16, not {}", dtype_name(problem.dtype));
  for (const auto& [name, size] : problem.sizes)
    if (name != "m" && size % 8 != 0)
      return fmt::format("rows of {}={} are not 16-byte aligned: {} must be a multiple of 8", name,
                         size, name);
  return std::nullopt;
}

std::optional<std::string> refuse_wgmma(const Problem& problem, const DeviceFacts& facts) {
  constexpr std::int64_t most_tokens = std::int64_t{1} << 19;
  if (auto refusal = refuse_halves(problem, facts)) return refusal;
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (problem.size("m") > most_tokens)
    return fmt::format("m={}: its table of tiles holds {} tokens", problem.size("m"), most_tokens);
  return std::nullopt;
}

}  // namespace fftune::masked
