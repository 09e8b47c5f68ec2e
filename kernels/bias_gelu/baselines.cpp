// The baselines: the unfused sequence of kernels, one for each step of the formula.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::bias_gelu {
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (facts.kind == DeviceKind::cpu) return {};
  constexpr const char* file = "bias_gelu/baseline.cu";
  const std::int64_t m = problem.size("m");
  const std::int64_t h = problem.size("h");
  const bool backward = problem.pass == "bwd";
  const std::string type = element_type(problem.dtype);
  const std::string activation = activation_type(parse_activation(problem.option("act")));
  const bool saves = saves_input(problem);
  const TensorPlaces at(bias_gelu_op().tensors(problem));
  const TensorArgument sum{saves ? at.at("input") : at.count()};
  const Dim3 by_element = grid_of_matrix(m, h, 1024);
  Baseline baseline;
  baseline.name = "unfused";
  if (!saves) baseline.extra = {{"sum", problem.dtype, {m, h}, Role::intermediate, 1}};
  Program& program = baseline.program;
  if (!backward || !saves)
    append_kernel(program, file,
                  fmt::format("baseline_add<{}, {}>", type, element_type(bias_dtype(problem))),
                  by_element, 256, {tensor_of(at, "x"), tensor_of(at, "bias"), sum, m, h});
  if (!backward) {
    baseline.summary = "a plain kernel each for x + bias and for the activation";
    append_kernel(program, file, fmt::format("baseline_activate<{}, {}>", type, activation),
                  by_element, 256, {sum, tensor_of(at, "y"), m, h});
    return {baseline};
  }
  baseline.summary = "a plain kernel each for x + bias and for dx, and two for the sum over rows";
  const std::int64_t wanted =
      std::min(m, quotient_up(4 * facts.multiprocessors, quotient_up(h, 256)));
  const std::int64_t chunk = quotient_up(m, wanted);
  const std::int64_t chunks = quotient_up(m, chunk);
  program.scratch = {{static_cast<std::size_t>(chunks * h) * sizeof(float), false}};
  append_kernel(program, file, fmt::format("baseline_slope<{}, {}>", type, activation), by_element,
                256, {sum, tensor_of(at, "dy"), tensor_of(at, "dx"), m, h});
  if (is_frozen(problem)) return {baseline};
  append_kernel(
      program, file, fmt::format("baseline_chunks<{}>", type),
      {static_cast<std::uint32_t>(quotient_up(h, 256)), static_cast<std::uint32_t>(chunks), 1}, 256,
      {tensor_of(at, "dx"), ScratchArgument{0}, m, h, chunk});
  append_kernel(program, file, fmt::format("baseline_sum<{}>", element_type(bias_dtype(problem))),
                {static_cast<std::uint32_t>(quotient_up(h, 32)), 1, 1}, 512,
                {ScratchArgument{0}, tensor_of(at, "dbias"), static_cast<std::int32_t>(chunks), h});
  return {baseline};
}

}  // namespace fftune::bias_gelu
