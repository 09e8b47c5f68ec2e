#include "kernels/ffn/cuda_stage.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// The device type of that name in common/float16.cuh.
std::string element_type(DType dtype) {
  return dtype == DType::f32 ? "float" : fmt::format("fftune::{}", dtype_name(dtype));
}

/// The device type of that name in common/activation.cuh.
std::string activation_type(const std::string& act) {
  return act == "gelu-tanh" ? "fftune::gelu_tanh" : "fftune::" + act;
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

std::vector<Argument> tensor_arguments(CudaStage stage) {
  if (stage == CudaStage::gate_up)
    return {TensorArgument{tensor::x}, TensorArgument{tensor::w_gate}, TensorArgument{tensor::w_up},
            TensorArgument{tensor::hidden}};
  return {TensorArgument{tensor::hidden}, TensorArgument{tensor::w_down},
          TensorArgument{tensor::y}};
}

std::vector<std::int64_t> size_arguments(const Problem& problem) {
  const Shape shape = shape_of(problem);
  return {shape.m, shape.d, shape.h};
}

KernelSource kernel_source(CudaStage stage, const std::string& name, const Problem& problem,
                           const std::string& rest) {
  std::string arguments = element_type(problem.dtype);
  if (stage == CudaStage::gate_up) arguments += ", " + activation_type(problem.option("act"));
  if (!rest.empty()) arguments += ", " + rest;
  return {fmt::format("ffn/{}.cu", name), fmt::format("fftune::{}<{}>", name, arguments)};
}

bool may_start_early(CudaStage stage, const DeviceFacts& facts) {
  return stage == CudaStage::down && facts.compute_capability >= 90;
}

std::optional<std::string> refuse_cuda(const Problem& problem, const DeviceFacts& facts) {
  if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
  if (problem.pass != "fwd")
    return fmt::format("the kernel computes the pass fwd, not {}", problem.pass);
  if (facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0 for bf16: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

std::optional<std::string> refuse_tensor_cores(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = refuse_cuda(problem, facts)) return refusal;
  if (problem.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
  const Shape shape = shape_of(problem);
  for (const auto& [name, size] : {std::pair{"d", shape.d}, std::pair{"h", shape.h}})
    if (size % 8 != 0)
      return fmt::format("rows of {}={} are not 16-byte aligned: {} must be a multiple of 8", name,
                         size, name);
  return std::nullopt;
}

}  // namespace fftune::ffn
