// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"

namespace fftune::bias_gelu {
namespace {

ColumnWork work(const Problem& problem) {
  const bool backward = problem.pass == "bwd";
  return {problem.size("m"), problem.size("h"), problem.dtype,
          backward || saves_input(problem) ? 3 : 2, backward};
}

ColumnKernel kernel(const Problem& problem) {
  const TensorPlaces at(bias_gelu_op().tensors(problem));
  const bool saves = saves_input(problem);
  const std::string types =
      fmt::format("{}, {}, {}, {}", element_type(problem.dtype), element_type(bias_dtype(problem)),
                  activation_type(parse_activation(problem.option("act"))), saves);
  if (problem.pass == "fwd")
    return {.types = types,
            .arguments = {tensor_of(at, "x"), tensor_of(at, "bias"), tensor_of(at, "y"),
                          tensor_or_null(at, "input")}};
  ColumnKernel kernel{
      .types = types,
      .arguments = {tensor_of(at, saves ? "input" : "x"), tensor_or_null(at, "bias"),
                    tensor_of(at, "dy"), tensor_of(at, "dx")}};
  if (is_frozen(problem)) return kernel;
  kernel.sum_name = "backward_columns_bias";
  kernel.sum_dtype = bias_dtype(problem);
  kernel.sum = tensor_of(at, "dbias");
  return kernel;
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const auto families = column_families(
      "bias_gelu", {work, kernel}, "columns stay with a thread, which sums dbias on the way");
  return addresses_of(families);
}

}  // namespace fftune::bias_gelu
