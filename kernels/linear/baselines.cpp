// Calls that a user would make without fftune: the vendor's products, and kernels for the
// additions.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/gemm/library_gemm.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Form form = form_of(problem);
  // A library call adds a bias and a residual to y in ways of its own: the plain product alone.
  if (!form.backward && (product_gemm(problem).epilogue.adds() || form.wide)) return {};
  // Its scales are those of whole tensors.
  if (quantises(problem)) return {};
  const TensorPlaces places(linear_op().tensors(problem));
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = facts.kind == DeviceKind::cpu ? "products of OpenBLAS, all on all threads"
                                                   : "products of cuBLASLt";
  Program& program = baseline.program;
  program.host_tensors = places.count();
  if (packed_format(problem).packed) {
    for (const Family* family : families())
      if (family->stages() == std::vector<std::string>{stage_expand} &&
          family->device_kind() == facts.kind)
        program = family->program(problem, facts, {});
    baseline.summary += " with the weights expanded each time";
  }
  for (const GemmStage& stage : gemm_stages(problem))
    append_library_gemms(program, stage.gemm(problem), places);
  if (form.backward && form.bias) {
    const Family& sums = facts.kind == DeviceKind::cpu ? cpu_d_bias_family() : d_bias_family();
    Program more = sums.program(problem, facts, {});
    program.kernels = std::move(more.kernels);
    program.scratch = std::move(more.scratch);
    std::move(more.steps.begin(), more.steps.end(), std::back_inserter(program.steps));
  }
  return {baseline};
}

}  // namespace fftune::linear
