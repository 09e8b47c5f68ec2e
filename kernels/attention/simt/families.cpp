// The fallbacks of both passes, host side: they have no parameters and refuse nothing.
#include <fmt/format.h>

#include <cstddef>
#include <string>

#include "kernels/attention/families.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/simt/config.cuh"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

constexpr const char* forward_file = "attention/simt/forward.cu";
constexpr const char* backward_file = "attention/simt/backward.cu";

/// A warp for each row of each head.
Dim3 grid_of(std::int64_t rows, std::int64_t heads) {
  return {static_cast<std::uint32_t>(quotient_up(rows * heads, attention_simt_config::warps)), 1,
          1};
}

class Simt final : public StageFamily {
 public:
  explicit Simt(bool backward)
      : StageFamily({.name = backward ? "attention_bwd_simt" : "attention_simt",
                     .summary = "a warp for each query, or key: the fallback",
                     .stage = backward ? stage_backward : stage_forward,
                     .pass = backward ? "bwd" : "fwd",
                     .sources = {backward ? backward_file : forward_file},
                     .is_fallback = true}) {}

  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    return problem.pass == "bwd" ? backward_program(problem, facts)
                                 : forward_program(problem, facts);
  }

 private:
  static Program forward_program(const Problem& problem, const DeviceFacts& facts) {
    Program program;
    Launch launch(program, problem, facts, sizeof(attention_params));
    const Layer& layer = launch.layer();
    launch.append(forward_file,
                  fmt::format("attention_simt_forward<{}>", template_argument(form_of(layer))),
                  grid_of(layer.q_tokens(), layer.heads), attention_simt_config::threads);
    return program;
  }

  static Program backward_program(const Problem& problem, const DeviceFacts& facts) {
    Program program;
    Launch launch = backward_launch(program, problem, facts);
    const Layer& layer = launch.layer();
    const std::string form = template_argument(form_of(layer));
    launch.append(backward_file, fmt::format("attention_simt_dq<{}>", form),
                  grid_of(layer.q_tokens(), layer.heads), attention_simt_config::threads);
    launch.append(backward_file, fmt::format("attention_simt_dkv<{}>", form),
                  grid_of(layer.kv_tokens(), layer.kv_heads), attention_simt_config::threads);
    if (layer.sinks)
      launch.append(backward_file, fmt::format("attention_simt_d_sinks<{}>", form),
                    {static_cast<std::uint32_t>(layer.heads), 1, 1},
                    attention_simt_config::threads);
    return program;
  }
};

}  // namespace

const Family& attention_simt_family() {
  static const Simt family(false);
  return family;
}

const Family& attention_bwd_simt_family() {
  static const Simt family(true);
  return family;
}

}  // namespace fftune::attention
