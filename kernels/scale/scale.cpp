#include "kernels/scale/scale.hpp"

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"

namespace fftune::scale {
namespace {

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  return {{"x", problem.dtype, {problem.size("m"), problem.size("h")}, Role::updated, 1},
          {"factor", DType::f32, {1}, Role::input, 1}};
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("h"));
}

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  auto& x = tensors.at("x");
  const double factor = tensors.at("factor")[0];
  const auto h = static_cast<std::size_t>(problem.size("h"));
  parallel.run(static_cast<int>(problem.size("m")), parallel.max_threads(), [&](int row) {
    for (std::size_t i = 0; i < h; ++i) x[static_cast<std::size_t>(row) * h + i] *= factor;
  });
}

OpFacts facts() {
  return {.name = "scale",
          .summary = "x = factor * x in place; a factor of 1 moves nothing",
          .passes = {"fwd"},
          .sizes = {row_tokens(), {.name = "h", .help = "elements of a row", .example = 4096}},
          .families = {cuda_families, cpu_families},
          .tensors = tensors_of,
          .stage = complete_stage,
          .reference = reference};
}

}  // namespace
}  // namespace fftune::scale

const fftune::Op& fftune::scale_op() {
  static const DescribedOp op(scale::facts());
  return op;
}
