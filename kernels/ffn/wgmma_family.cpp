#include "kernels/ffn/wgmma_family.hpp"

#include <fmt/format.h>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/wgmma.hpp"

namespace fftune::ffn {
namespace {

WgmmaOperands operands_of(CudaStage stage, const Problem& problem) {
  const Places at = places_of(problem);
  WgmmaOperands operands;
  operands.dtype = problem.dtype;
  operands.c_dtype = stage == CudaStage::gate_up ? problem.dtype : wide_dtype(problem);
  operands.sums_dtype = wide_dtype(problem);
  operands.scales = scale_arguments(stage, problem);
  if (stage == CudaStage::gate_up) {
    operands.a = TensorArgument{at.gate_up_x};
    operands.b = {TensorArgument{at.w_gate}, TensorArgument{at.w_up}};
    operands.c = {TensorArgument{at.hidden}};
    if (form_of(problem).saves)
      operands.c.insert(operands.c.end(), {TensorArgument{at.gate}, TensorArgument{at.up}});
  } else {
    operands.a = TensorArgument{at.hidden};
    operands.b = {TensorArgument{at.w_down}};
    operands.c = {TensorArgument{at.y}};
    const Form form = form_of(problem);
    if (form.bias) operands.bias = TensorArgument{at.b_down};
    if (form.residual) operands.residual = TensorArgument{at.residual};
  }
  return operands;
}

Fp8Scales scales_of(CudaStage stage, const Problem& problem) {
  const bool blocks = has_block_scales(problem);
  return {.blocks = blocks, .output_blocks = blocks && stage == CudaStage::gate_up};
}

/// What the form adds to the name of the stage's kernel.
std::string kernel_name(CudaStage stage, const Problem& problem) {
  const Form form = form_of(problem);
  const std::string elements = is_quantised(problem) ? fp8_suffix(problem) : "";
  if (stage == CudaStage::gate_up)
    return (form.saves ? "gate_up_saving" : "gate_up") + elements + "_sm90";
  return (form.adds() ? "down_adding" : "down") + elements + "_sm90";
}

}  // namespace

std::optional<std::string> WgmmaFamily::refusal(const Problem& problem,
                                                const DeviceFacts& facts) const {
  if (auto refusal = is_quantised(problem) ? refuse_cuda(problem, facts, stage())
                                           : refuse_tensor_cores(problem, facts, stage()))
    return refusal;
  if (auto refusal = refuse_rows(problem)) return refusal;
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

Space WgmmaFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return is_quantised(problem)
             ? wgmma_fp8_space(gemm_of(stage(), problem), facts, scales_of(stage(), problem))
             : wgmma_space(gemm_of(stage(), problem), facts);
}

Config WgmmaFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return is_quantised(problem)
             ? wgmma_fp8_default(gemm_of(stage(), problem), facts, scales_of(stage(), problem))
             : wgmma_default(gemm_of(stage(), problem), facts);
}

std::optional<double> WgmmaFamily::estimate(const Problem& problem, const DeviceFacts& facts,
                                            const Config& config) const {
  if (facts.clock_hz <= 0) return std::nullopt;
  const auto cost = is_quantised(problem) ? wgmma_fp8_cost : wgmma_cost;
  return cost(gemm_of(stage(), problem), facts, config) / facts.clock_hz;
}

Program WgmmaFamily::program(const Problem& problem, const DeviceFacts& facts,
                             const Config& config) const {
  const GemmShape shape = gemm_of(stage(), problem);
  Program program;
  program.kernels.push_back(kernel_source(stage(), std::string(name()),
                                          kernel_name(stage(), problem), problem,
                                          wgmma_template_arguments(config, shape.products)));
  wgmma_launch(program, shape, facts, config, operands_of(stage(), problem),
               size_arguments(problem), may_start_early(stage(), problem, facts));
  return program;
}

std::vector<std::string> WgmmaFamily::sources() const {
  return {"ffn/" + std::string(name()) + ".cu"};
}

}  // namespace fftune::ffn
