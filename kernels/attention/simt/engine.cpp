// The fallbacks of both passes, host side: they have no parameters and refuse nothing.
#include <cstddef>
#include <string>

#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/simt/config.cuh"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::attention {
namespace {

constexpr const char* forward_file = "attention/simt/forward.cu";
constexpr const char* backward_file = "attention/simt/backward.cu";

/// A warp for each row of each head.
Dim3 grid_of(std::int64_t rows, std::int64_t heads) {
  return {static_cast<std::uint32_t>(quotient_up(rows * heads, attention_simt_config::warps)), 1,
          1};
}

Program forward_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  Program program;
  Launch launch = forward_launch(program, problem, facts);
  const Layer& layer = launch.layer();
  launch.append(forward_file, kernel_of(layer, "attention_simt_forward"),
                grid_of(layer.q_tokens(), layer.heads), attention_simt_config::threads);
  return program;
}

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  Program program;
  Launch launch = backward_launch(program, problem, facts);
  const Layer& layer = launch.layer();
  launch.append(backward_file, kernel_of(layer, "attention_simt_dq"),
                grid_of(layer.q_tokens(), layer.heads), attention_simt_config::threads);
  launch.append(backward_file, kernel_of(layer, "attention_simt_dkv"),
                grid_of(layer.kv_tokens(), layer.kv_heads), attention_simt_config::threads);
  append_d_sinks(launch);
  return program;
}

constexpr const char* summary = "a warp for each query, or key: the fallback";

}  // namespace

constinit const Engine simt_engine{.name = "attention_simt",
                                   .summary = summary,
                                   .is_fallback = true,
                                   .program = forward_program,
                                   .batch_invariant = true,
                                   .sources = {forward_file}};

constinit const Engine simt_backward_engine{.name = "attention_bwd_simt",
                                            .summary = summary,
                                            .backward = true,
                                            .is_fallback = true,
                                            .program = backward_program,
                                            .sources = {backward_file}};

}  // namespace fftune::attention
