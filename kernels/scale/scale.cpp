#include "kernels/scale/scale.hpp"

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"

namespace fftune::scale {
namespace {

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const std::vector<std::int64_t> shape{problem.size("m"), problem.size("h")};
  const bool in_place = is_in_place(problem);
  std::vector<TensorSpec> tensors{
      {"x", problem.dtype, shape, in_place ? Role::updated : Role::input, 1},
      {"factor", DType::f32, {1}, Role::input, 1}};
  if (!in_place) tensors.push_back({"y", problem.dtype, shape, Role::output, 1});
  return tensors;
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("h"));
}

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto& x = tensors.at("x");
  auto& y = tensors[is_in_place(problem) ? "x" : "y"];
  y.resize(x.size());
  const double factor = tensors.at("factor")[0];
  const auto h = static_cast<std::size_t>(problem.size("h"));
  parallel.run(static_cast<int>(problem.size("m")), parallel.max_threads(), [&](int row) {
    for (std::size_t i = 0; i < h; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * h + i;
      y[at] = factor * x[at];
    }
  });
}

OpFacts facts() {
  return {
      .name = "scale",
      .summary = "x = factor * x in place, where a factor of 1 moves nothing; or another tensor",
      .passes = {"fwd"},
      .sizes = {row_tokens(), {.name = "h", .help = "elements of a row", .example = 4096}},
      .options = {rare_option("in-place", "whether the result takes the place of x",
                              {"yes", "no"})},
      .families = {cuda_families, cpu_families},
      .tensors = tensors_of,
      .stage = complete_stage,
      .reference = reference};
}

}  // namespace

bool is_in_place(const Problem& problem) {
  return !problem.has("in-place", "no");
}

}  // namespace fftune::scale

const fftune::Op& fftune::scale_op() {
  static const DescribedOp op(scale::facts());
  return op;
}
