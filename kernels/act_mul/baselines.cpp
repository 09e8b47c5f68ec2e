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
  const TensorPlaces at(act_mul_op().tensors(problem));
  const TensorArgument activated{at.count()};
  const TensorArgument product{at.count() + 1};
  const auto tensor = [&](const char* part) { return tensor_of(at, tensor_with(problem, part)); };
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
  append("baseline_activate", {tensor("gate"), activated});
  if (problem.pass == "fwd") {
    baseline.summary = "a plain kernel each for the activation and for the product";
    append("baseline_multiply", {activated, tensor("up"), tensor("out")});
    return {baseline};
  }
  baseline.summary = "a plain kernel each for act(gate), dup, dout * up and dgate";
  baseline.extra.push_back({"product", problem.dtype, {m, h}, Role::intermediate, 1});
  append("baseline_up_gradient", {activated, tensor("dout"), tensor("dup")});
  append("baseline_multiply", {tensor("dout"), tensor("up"), product});
  append("baseline_gate_gradient", {tensor("gate"), product, tensor("dgate")});
  return {baseline};
}

}  // namespace fftune::act_mul
