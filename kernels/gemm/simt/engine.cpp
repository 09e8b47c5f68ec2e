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
    ParameterStruct parameters = gemm_parameters(gemm, places, sizeof(plain_params));
    if (form.is_qkv())
      qkv_parameters(parameters, gemm, places, offsetof(plain_params, qkv),
                     append_sines(program, gemm, places));
    parameters.fields.push_back({offsetof(gemm_params, group_m), std::int32_t{1}});
    append_gemm(program, "gemm/simt/gemm.cu", fmt::format("simt_gemm<{}>", template_argument(form)),
                work_tiles(gemm, simt_config::bm, simt_config::bn(form)), simt_config::threads,
                std::move(parameters));
  }
}

}  // namespace

constinit const Engine simt_engine{.name = "simt",
                                   .is_fallback = true,
                                   .can_implement = can_implement,
                                   .append = append,
                                   .batch_invariant = true,
                                   .sources = {"gemm/simt/gemm.cu", "gemm/head_sines.cu"}};

}  // namespace fftune
