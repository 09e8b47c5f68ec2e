#include "kernels/masked/cuda_stage.hpp"

#include <fmt/format.h>

#include "core/pattern.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_refusal.hpp"
#include "kernels/common/device_types.hpp"

namespace fftune::masked {
namespace {

/// The policy for what becomes of the sums, in gemm/epilogue.cuh.
std::string epilogue_type(const StageProduct& work, const Problem& problem) {
  if (work.gradient)
    return fmt::format("fftune::gated_gradient<{}, {}>",
                       activation_type(parse_activation(problem.option("act"))),
                       work.c.size() == 3);
  if (work.shape.products == 1) return "fftune::linear_epilogue<false, false>";
  const std::string& act = problem.option("act");
  return fmt::format("fftune::{}<fftune::{}>",
                     work.c.size() == 3 ? "saving_epilogue" : "gated_epilogue",
                     act == "gelu-tanh" ? "gelu_tanh" : act);
}

}  // namespace

std::string template_arguments(const StageProduct& work, const Problem& problem) {
  return fmt::format("{}, {}, {}, {}", element_type(problem.dtype), epilogue_type(work, problem),
                     work.sorted_a, work.sorted_c);
}

void append_places(std::vector<Argument>& arguments, const std::vector<std::size_t>& places,
                   std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i < places.size())
      arguments.emplace_back(TensorArgument{places[i]});
    else
      arguments.emplace_back(std::int64_t{0});
  }
}

std::vector<Argument> pointer_arguments(const StageProduct& work) {
  std::vector<Argument> arguments;
  append_places(arguments, work.a, 2);
  append_places(arguments, {work.mask}, 1);
  for (const auto& weights : work.b) append_places(arguments, weights, 2);
  append_places(arguments, work.c, 3);
  if (work.gradient)
    append_places(arguments, {work.gradient->gate, work.gradient->up}, 2);
  else
    append_places(arguments, {}, 2);
  return arguments;
}

std::vector<Argument> pointer_arguments(const StageSum& work) {
  std::vector<Argument> arguments;
  append_places(arguments, work.a, 2);
  append_places(arguments, {work.b}, 1);
  for (const auto& own : work.addends) append_places(arguments, own, 2);
  for (const auto& own : work.c) append_places(arguments, own, 2);
  return arguments;
}

bool scatters(const Problem& problem) {
  const auto pattern = parse_pattern(problem.option("mask"));
  return pattern && pattern->share > 0 && pattern->share < 1 &&
         (pattern->kind == Pattern::Kind::even || pattern->kind == Pattern::Kind::random);
}

GemmShape halved(GemmShape shape) {
  shape.k = ceil_div(shape.k, 2);
  return shape;
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

std::optional<std::string> refuse_mma_sync(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = refuse_halves(problem, facts)) return refusal;
  // As ffn's: wgmma has twice the rate, and up to 64 tokens the memory decides.
  constexpr std::int64_t most_tokens_beside_wgmma = 64;
  if (facts.compute_capability == 90 && problem.size("m") > most_tokens_beside_wgmma)
    return fmt::format(
        "with more than {} tokens mma.sync has half the rate of wgmma on compute capability 9.0",
        most_tokens_beside_wgmma);
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
