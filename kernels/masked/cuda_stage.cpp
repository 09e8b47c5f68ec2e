#include "kernels/masked/cuda_stage.hpp"

#include <fmt/format.h>

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
    arguments.push_back(weights.size() == 2 ? Argument{TensorArgument{weights[1]}}
                                            : Argument{std::int64_t{0}});
  }
  arguments.emplace_back(TensorArgument{work.c});
  return arguments;
}

std::optional<std::string> refuse_cuda(const DeviceFacts& facts) {
  if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
  if (facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0 for bf16: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

std::optional<std::string> refuse_halves(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = refuse_cuda(facts)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("it multiplies bf16 and fp16, not {}", dtype_name(problem.dtype));
  for (const auto& [name, size] : problem.sizes)
    if (name != "m" && size % 8 != 0)
      return fmt::format("rows of {}={} are not 16-byte aligned: {} must be a multiple of 8", name,
                         size, name);
  return std::nullopt;
}

}  // namespace fftune::masked
