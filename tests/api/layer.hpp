// A small gated feed-forward layer: its tensors on the host, and what y should be.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fftune/fftune.hpp"
#include "support/catch.hpp"

namespace fftune::test {

/// The CPU with no presets but the usual ones.
library::Context cpu_context();

std::string ffn_json(std::size_t m, std::size_t d, std::size_t h, const std::string& more = "");

struct Layer {
  Layer(std::size_t tokens, std::size_t width, std::size_t intermediate);

  std::vector<void*> buffers();

  /// y with silu, by plain loops in float64.
  std::vector<double> expected() const;

  std::size_t m, d, h;
  std::vector<float> x, w_gate, w_up, w_down, y;
};

/// norm(out - expected) / norm(expected); 1e9 for what is no number.
double relative_error(const std::vector<float>& out, const std::vector<double>& expected);

/// A workspace for a plan on the host, aligned as it must be.
class HostWorkspace {
 public:
  explicit HostWorkspace(const library::Plan& plan) : memory_(plan.workspace_bytes() + 256) {}
  void* data();

 private:
  std::vector<std::byte> memory_;
};

/// A launch of a plan on the CPU.
template <std::size_t inputs, std::size_t outputs>
fftune_run run_of(const void* const (&in)[inputs], void* const (&out)[outputs],
                  HostWorkspace& workspace, std::int64_t tokens) {
  fftune_run run{};
  run.struct_size = sizeof run;
  run.inputs = in;
  run.input_count = inputs;
  run.outputs = out;
  run.output_count = outputs;
  run.workspace = workspace.data();
  run.tokens = tokens;
  return run;
}

bool last_error_says(const std::string& words);

}  // namespace fftune::test
