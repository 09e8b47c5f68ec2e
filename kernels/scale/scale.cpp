#include "kernels/scale/scale.hpp"

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"

namespace fftune::scale {
namespace {

OpFacts facts() {
  return {.name = "scale",
          .summary = "x = factor * x in place; a factor of 1 moves nothing",
          .passes = {"fwd"},
          .sizes = {row_tokens(), {.name = "h", .help = "elements of a row", .example = 4096}},
          .families = {cuda_families, cpu_families}};
}

class Scale final : public DescribedOp {
 public:
  Scale() : DescribedOp(facts()) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return {{"x", problem.dtype, {problem.size("m"), problem.size("h")}, Role::updated, 1},
            {"factor", DType::f32, {1}, Role::input, 1}};
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage = whole_stage(stage_of_pass(problem.pass), tensors(problem));
    stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("h"));
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    auto& x = tensors.at("x");
    const double factor = tensors.at("factor")[0];
    const auto h = static_cast<std::size_t>(problem.size("h"));
    parallel.run(static_cast<int>(problem.size("m")), parallel.max_threads(), [&](int row) {
      for (std::size_t i = 0; i < h; ++i) x[static_cast<std::size_t>(row) * h + i] *= factor;
    });
  }
};

}  // namespace
}  // namespace fftune::scale

const fftune::Op& fftune::scale_op() {
  static const scale::Scale op;
  return op;
}
