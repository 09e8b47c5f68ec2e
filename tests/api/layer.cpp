#include "api/layer.hpp"

namespace fftune::test {

Layer::Layer(std::size_t tokens, std::size_t width, std::size_t intermediate)
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

std::vector<void*> Layer::buffers() {
  return {x.data(), w_gate.data(), w_up.data(), w_down.data(), y.data()};
}

std::vector<double> Layer::expected() const {
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

void* HostWorkspace::data() {
  void* start = memory_.data();
  std::size_t room = memory_.size();
  return std::align(256, memory_.size() - 256, start, room);
}

library::Context cpu_context() {
  return library::Context(-1);
}

std::string ffn_json(std::size_t m, std::size_t d, std::size_t h, const std::string& more) {
  return "{\"op\":\"ffn\",\"m\":" + std::to_string(m) + ",\"d\":" + std::to_string(d) +
         ",\"h\":" + std::to_string(h) + more + "}";
}

double relative_error(const std::vector<float>& out, const std::vector<double>& expected) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return std::isfinite(error) ? std::sqrt(error / norm) : 1e9;
}

bool last_error_says(const std::string& words) {
  const std::string said = fftune_last_error();
  UNSCOPED_INFO("said: " << said);
  return said.find(words) != std::string::npos && said.find('\n') == std::string::npos;
}

}  // namespace fftune::test
