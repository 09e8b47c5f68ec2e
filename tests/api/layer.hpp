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
inline library::Context cpu_context() {
  return library::Context(-1);
}

inline std::string ffn_json(std::size_t m, std::size_t d, std::size_t h,
                            const std::string& more = "") {
  return "{\"op\":\"ffn\",\"m\":" + std::to_string(m) + ",\"d\":" + std::to_string(d) +
         ",\"h\":" + std::to_string(h) + more + "}";
}

struct Layer {
  Layer(std::size_t tokens, std::size_t width, std::size_t intermediate)
      : m(tokens),
        d(width),
        h(intermediate),
        x(m * d),
        w_gate(h * d),
        w_up(h * d),
        w_down(d * h),
        y(m * d, -1) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::size_t fan_in) {
      for (auto& value : values) value = normal(random) / std::sqrt(static_cast<float>(fan_in));
    };
    fill(x, 1);
    fill(w_gate, d);
    fill(w_up, d);
    fill(w_down, h);
  }

  std::vector<void*> buffers() {
    return {x.data(), w_gate.data(), w_up.data(), w_down.data(), y.data()};
  }

  /// y with silu, by plain loops in float64.
  std::vector<double> expected() const {
    std::vector<double> out(m * d);
    std::vector<double> hidden(h);
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < h; ++j) {
        double gate = 0;
        double up = 0;
        for (std::size_t k = 0; k < d; ++k) {
          gate += double{x[i * d + k]} * w_gate[j * d + k];
          up += double{x[i * d + k]} * w_up[j * d + k];
        }
        hidden[j] = gate / (1 + std::exp(-gate)) * up;
      }
      for (std::size_t k = 0; k < d; ++k)
        for (std::size_t j = 0; j < h; ++j) out[i * d + k] += hidden[j] * w_down[k * h + j];
    }
    return out;
  }

  std::size_t m, d, h;
  std::vector<float> x, w_gate, w_up, w_down, y;
};

/// norm(out - expected) / norm(expected); 1e9 for what is no number.
inline double relative_error(const std::vector<float>& out, const std::vector<double>& expected) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return std::isfinite(error) ? std::sqrt(error / norm) : 1e9;
}

/// A workspace for a plan on the host, aligned as it must be.
class HostWorkspace {
 public:
  explicit HostWorkspace(const library::Plan& plan) : memory_(plan.workspace_bytes() + 256) {}
  void* data() {
    void* start = memory_.data();
    std::size_t room = memory_.size();
    return std::align(256, memory_.size() - 256, start, room);
  }

 private:
  std::vector<std::byte> memory_;
};

inline bool last_error_says(const std::string& words) {
  const std::string said = fftune_last_error();
  UNSCOPED_INFO("said: " << said);
  return said.find(words) != std::string::npos && said.find('\n') == std::string::npos;
}

}  // namespace fftune::test
