// A thread works on fixed columns. The fallbacks are the same kernels with accesses of one element.
#include <fmt/format.h>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/column_family.hpp"

namespace fftune::act_mul {
namespace {

ColumnWork work(const Problem& problem) {
  return {problem.size("m"), problem.size("h"), problem.dtype, problem.pass == "bwd" ? 5 : 3,
          false};
}

ColumnKernel kernel(const Problem& problem) {
  const TensorPlaces at(act_mul_op().tensors(problem));
  ColumnKernel kernel{.types = fmt::format("{}, {}, {}", element_type(problem.dtype),
                                           activation_type(parse_activation(problem.option("act"))),
                                           packed(problem)),
                      .arguments = {}};
  const auto parts = problem.pass == "bwd"
                         ? std::vector<const char*>{"gate", "up", "dout", "dgate", "dup"}
                         : std::vector<const char*>{"gate", "up", "out"};
  for (const char* part : parts)
    kernel.arguments.emplace_back(tensor_of(at, tensor_with(problem, part)));
  return kernel;
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const auto families = column_families("act_mul", {work, kernel}, in_flight_summary);
  return addresses_of(families);
}

}  // namespace fftune::act_mul
