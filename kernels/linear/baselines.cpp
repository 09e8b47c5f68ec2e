// What a user would call without fftune: the vendor's products, and kernels for what is added.
#include <algorithm>

#include "kernels/gemm/library_product.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Form form = form_of(problem);
  // A library call adds a bias and a residual to y in ways of its own: the plain product alone.
  if (!form.backward && (form.bias || form.residual)) return {};
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = facts.kind == DeviceKind::cpu ? "products of OpenBLAS, all on all threads"
                                                   : "products of cuBLASLt";
  Program& program = baseline.program;
  program.host_tensors = places_of(problem).count;
  if (!form.backward) {
    append_library_product(program, y_product(problem));
    return {baseline};
  }
  append_library_product(program, dx_product(problem));
  append_library_product(program, dw_product(problem));
  if (form.bias) {
    const Family& sums = facts.kind == DeviceKind::cpu ? cpu_d_bias_family() : d_bias_family();
    Program more = sums.program(problem, facts, {});
    program.kernels = std::move(more.kernels);
    program.scratch = std::move(more.scratch);
    std::move(more.steps.begin(), more.steps.end(), std::back_inserter(program.steps));
  }
  return {baseline};
}

}  // namespace fftune::linear
