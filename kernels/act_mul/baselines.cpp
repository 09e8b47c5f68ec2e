// The baselines: the unfused sequence of kernels, one for each step of the formula.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::act_mul {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (facts.kind == DeviceKind::cpu) return {};
  const std::int64_t m = problem.size("m");
  const std::int64_t h = problem.size("h");
  const Places at = places_of(problem);
  const TensorArgument activated{at.count};
  const TensorArgument product{at.count + 1};
  const std::string types =
      fmt::format("<{}, {}, {}>", element_type(problem.dtype),
                  activation_type(parse_activation(problem.option("act"))), packed(problem));
  Baseline baseline;
  baseline.name = "unfused";
  const auto append = [&](const std::string& name, std::vector<Argument> arguments) {
    arguments.insert(arguments.end(), {m, h});
    append_kernel(baseline.program, "act_mul/baseline.cu", name + types, grid_of_matrix(m, h, 1024),
                  256, std::move(arguments));
  };
  baseline.extra = {{"activated", problem.dtype, {m, h}, Role::intermediate, 1}};
  append("baseline_activate", {TensorArgument{at.gate}, activated});
  if (problem.pass == "fwd") {
    baseline.summary = "a plain kernel each for the activation and for the product";
    append("baseline_multiply", {activated, TensorArgument{at.up}, TensorArgument{at.out}});
    return {baseline};
  }
  baseline.summary = "a plain kernel each for act(gate), dup, dout * up and dgate";
  baseline.extra.push_back({"product", problem.dtype, {m, h}, Role::intermediate, 1});
  append("baseline_up_gradient", {activated, TensorArgument{at.dout}, TensorArgument{at.dup}});
  append("baseline_multiply", {TensorArgument{at.dout}, TensorArgument{at.up}, product});
  append("baseline_gate_gradient", {TensorArgument{at.gate}, product, TensorArgument{at.dgate}});
  return {baseline};
}

}  // namespace fftune::act_mul
