// The simt engine: the fallback, which has no parameters and refuses nothing.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/simt/config.cuh"

namespace fftune {
namespace {

std::optional<std::string> can_implement(const GemmChain&, const DeviceFacts&) {
  return std::nullopt;
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts&, const Config&) {
  for (const GemmProblem& gemm : chain) {
    gemm_form form = form_of(gemm);
    form.b_depends = false;  // it waits for all of the launches before it
    program.kernels.push_back(
        {"gemm/simt/gemm.cu", fmt::format("fftune::simt_gemm<{}>", template_argument(form))});
    KernelLaunch launch;
    launch.kernel = program.kernels.size() - 1;
    launch.grid.x =
        static_cast<std::uint32_t>(work_tiles(gemm, simt_config::bm, simt_config::bn(form)));
    launch.block.x = simt_config::threads;
    launch.parameters = gemm_parameters(gemm, places);
    launch.parameters->fields.push_back({offsetof(gemm_params, group_m), std::int32_t{1}});
    program.steps.emplace_back(std::move(launch));
  }
}

}  // namespace

const Engine& simt_engine() {
  static const Engine engine{.name = "simt",
                             .is_fallback = true,
                             .can_implement = can_implement,
                             .append = append,
                             .sources = {"gemm/simt/gemm.cu"}};
  return engine;
}

}  // namespace fftune
