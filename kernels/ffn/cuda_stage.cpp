#include "kernels/ffn/cuda_stage.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_refusal.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// The policy of that name in gemm/epilogue.cuh.
std::string epilogue_type(CudaStage stage, const Problem& problem) {
  const Form form = form_of(problem);
  if (stage == CudaStage::down)
    return fmt::format("fftune::linear_epilogue<{}, {}>", form.bias, form.residual);
  return fmt::format("fftune::{}_epilogue<{}>", form.saves ? "saving" : "gated",
                     activation_type(parse_activation(problem.option("act"))));
}

}  // namespace

std::string stage_name(CudaStage stage) {
  return stage == CudaStage::gate_up ? stage_gate_up : stage_down;
}

GemmShape gemm_of(CudaStage stage, const Problem& problem) {
  const Shape shape = shape_of(problem);
  return stage == CudaStage::gate_up ? GemmShape{shape.m, shape.h, shape.d, 2}
                                     : GemmShape{shape.m, shape.d, shape.h, 1};
}

std::vector<Argument> tensor_arguments(CudaStage stage, const Problem& problem) {
  const Places at = places_of(problem);
  const std::vector<std::size_t> places =
      stage == CudaStage::gate_up
          ? std::vector{at.gate_up_x, at.w_gate, at.w_up, at.hidden, at.gate, at.up}
          : std::vector{at.hidden, at.w_down, at.y, at.b_down, at.residual};
  std::vector<Argument> arguments;
  for (const std::size_t place : places)
    if (place == Places::none)
      arguments.emplace_back(std::int64_t{0});
    else
      arguments.emplace_back(TensorArgument{place});
  return arguments;
}

std::vector<Argument> scale_arguments(CudaStage stage, const Problem& problem) {
  if (!is_quantised(problem)) return {};
  const Places at = places_of(problem);
  if (stage == CudaStage::down)
    return {TensorArgument{at.hidden_scale}, TensorArgument{at.w_down_scale}};
  return {TensorArgument{at.x_scale}, TensorArgument{at.w_gate_scale},
          TensorArgument{at.w_up_scale}, TensorArgument{at.hidden_scale}};
}

std::string fp8_suffix(const Problem& problem) {
  return has_block_scales(problem) ? "_fp8_blocks" : "_fp8";
}

std::vector<std::int64_t> size_arguments(const Problem& problem) {
  const Shape shape = shape_of(problem);
  return {shape.m, shape.d, shape.h};
}

KernelSource kernel_source(CudaStage stage, const std::string& file, const std::string& name,
                           const Problem& problem, const std::string& rest) {
  std::string arguments = element_type(problem.dtype) + ", " + epilogue_type(stage, problem);
  if (!rest.empty()) arguments += ", " + rest;
  return {fmt::format("ffn/{}.cu", file), fmt::format("fftune::{}<{}>", name, arguments)};
}

bool may_start_early(CudaStage stage, const Problem& problem, const DeviceFacts& facts) {
  const bool follows = stage == CudaStage::down || form_of(problem).normalises;
  return follows && facts.compute_capability >= 90;
}

std::optional<std::string> refuse_cuda(const Problem& problem, const DeviceFacts& facts,
                                       std::optional<CudaStage> stage) {
  const bool recomputed = recomputes(problem) && stage == CudaStage::gate_up;
  return fftune::refuse_cuda(problem, recomputed ? problem.pass : "fwd", facts);
}

std::optional<std::string> refuse_tensor_cores(const Problem& problem, const DeviceFacts& facts,
                                               std::optional<CudaStage> stage) {
  if (auto refusal = refuse_cuda(problem, facts, stage)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(problem.dtype));
  return refuse_rows(problem);
}

std::optional<std::string> refuse_rows(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
  for (const auto& [name, size] : {std::pair{"d", shape.d}, std::pair{"h", shape.h}})
    if (size % elements != 0)
      return fmt::format("rows of {}={} are not 16-byte aligned: {} must be a multiple of {}", name,
                         size, name, elements);
  return std::nullopt;
}

}  // namespace fftune::ffn
