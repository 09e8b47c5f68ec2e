#include "kernels/scale/scale.hpp"

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/test_data.hpp"

namespace fftune::scale {
namespace {

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const std::vector<std::int64_t> shape{problem.size("m"), problem.size("h")};
  const bool in_place = is_in_place(problem);
  const Factors kind = factors_of(problem);
  const std::int64_t factors = kind == Factors::one    ? 1
                               : kind == Factors::rows ? problem.size("m")
                                                       : problem.size("factors");
  std::vector<TensorSpec> tensors{
      {"x", problem.dtype, shape, in_place ? Role::updated : Role::input, 1},
      {"factor", DType::f32, {factors}, Role::input, 1}};
  if (kind == Factors::ids) {
    TensorSpec ids{"ids", DType::i32, shape};
    ids.draw = whole_numbers(0, factors - 1);
    tensors.push_back(std::move(ids));
  }
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
  const auto& factor = tensors.at("factor");
  const Factors kind = factors_of(problem);
  const auto* const ids = kind == Factors::ids ? &tensors.at("ids") : nullptr;
  const auto h = static_cast<std::size_t>(problem.size("h"));
  parallel.run(static_cast<int>(problem.size("m")), parallel.max_threads(), [&](int row) {
    for (std::size_t i = 0; i < h; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * h + i;
      const double id = kind == Factors::one    ? 0
                        : kind == Factors::rows ? static_cast<double>(row)
                                                : (*ids)[at];
      const bool exists = id >= 0 && id < static_cast<double>(factor.size());
      y[at] = (exists ? factor[static_cast<std::size_t>(id)] : 0) * x[at];
    }
  });
}

std::string contradiction(const Problem& problem) {
  const bool by_ids = factors_of(problem) == Factors::ids;
  if (by_ids == problem.sizes.contains("factors")) return "";
  return by_ids ? "factor=ids without factors: give their number" : "factors are of factor=ids";
}

OpFacts facts() {
  return {
      .name = "scale",
      .summary = "x = factor * x in place, where a factor of 1 moves nothing; or another tensor",
      .passes = {"fwd"},
      .sizes = {row_tokens(),
                {.name = "h", .help = "elements of a row", .example = 4096},
                rare_size("factors", "factor=ids: how many there are", 1 << 20, 128)},
      .options = {rare_option("in-place", "whether the result takes the place of x", {"yes", "no"}),
                  rare_option("factor",
                              "one factor; one for each row; or for each element that of its id",
                              {"one", "rows", "ids"})},
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

bool is_in_place(const Problem& problem) {
  return !problem.has("in-place", "no");
}

Factors factors_of(const Problem& problem) {
  return problem.has("factor", "ids")    ? Factors::ids
         : problem.has("factor", "rows") ? Factors::rows
                                         : Factors::one;
}

}  // namespace fftune::scale

const fftune::Op& fftune::scale_op() {
  static const DescribedOp op(scale::facts());
  return op;
}
