// The simt engine: the fallback, which has no parameters and refuses nothing.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/simt/config.cuh"

namespace fftune {
namespace {

std::optional<std::string> can_implement(const GemmChain&, const DeviceFacts&) {
  return std::nullopt;
}

/// Seconds of the launches. A block takes one K block after the other, each as long as memory and
/// two barriers; blocks that share an SM wait for its shared memory and multiply-adds. An H200
/// timed 20 products in bf16 and f32: the estimates are 0.7 to 1.3 times as long, for 128 tokens
/// 0.6.
std::optional<double> estimate(const GemmChain& chain, const DeviceFacts& facts, const Config&) {
  if (facts.multiprocessors == 0 || facts.clock_hz == 0) return std::nullopt;
  constexpr double start = 3e-6, latency_clocks = 3700, clocks_of_half = 2600;
  double seconds = 0;
  for (const GemmProblem& gemm : chain) {
    const gemm_form form = form_of(gemm);
    const int columns = simt_config::bn(form);
    const std::int64_t blocks = work_tiles(gemm, simt_config::bm, columns);
    const auto each = static_cast<double>(ceil_div(blocks, std::int64_t{facts.multiprocessors}));
    const auto k_blocks = static_cast<double>(ceil_div(gemm.k * gemm.k_pairs(), simt_config::bk));
    const double halves = std::ceil(columns / double{simt_config::half_columns});
    const double clocks = std::max(latency_clocks, each * gemm.b_operands() * clocks_of_half);
    seconds += start + k_blocks * halves * clocks / facts.clock_hz;
  }
  return seconds;
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts&, const Config&) {
  for (const GemmProblem& gemm : chain) {
    gemm_form form = form_of(gemm);
    form.b_depends = false;  // it waits for all of the launches before it
    ParameterStruct parameters =
        plain_parameters(gemm, places, append_sines(program, gemm, places), sizeof(plain_params));
    ParameterFields<gemm_params>(parameters).set(&gemm_params::group_m, 1);
    append_gemm(program, "gemm/simt/gemm.cu", fmt::format("simt_gemm<{}>", template_argument(form)),
                work_tiles(gemm, simt_config::bm, simt_config::bn(form)), simt_config::threads,
                std::move(parameters));
  }
}

}  // namespace

constinit const Engine simt_engine{.name = "simt",
                                   .is_fallback = true,
                                   .can_implement = can_implement,
                                   .search = {.estimate = estimate},
                                   .append = append,
                                   .batch_invariant = true,
                                   .sources = {"gemm/simt/gemm.cu", "gemm/head_sines.cu"}};

}  // namespace fftune
