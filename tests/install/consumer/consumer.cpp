// Runs a small gated feed-forward layer on the CPU and compares it with plain loops; reads a tensor
// of a safetensors file.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fftune/fftune.hpp>
#include <fstream>
#include <string>
#include <vector>

int main() {
  constexpr int m = 5, d = 24, h = 40;
  std::vector<float> x(m * d), gate(h * d), up(h * d), down(d * h), y(m * d), expected(m * d);
  int seed = 1;
  for (auto* tensor : {&x, &gate, &up, &down})
    for (float& value : *tensor)
      value = static_cast<float>((seed = seed * 75 % 65537) % 2001 - 1000) / 5000;

  for (int i = 0; i < m; ++i)
    for (int j = 0; j < h; ++j) {
      double g = 0, u = 0;
      for (int k = 0; k < d; ++k) {
        g += x[i * d + k] * gate[j * d + k];
        u += x[i * d + k] * up[j * d + k];
      }
      for (int k = 0; k < d; ++k)
        expected[i * d + k] += static_cast<float>(g / (1 + std::exp(-g)) * u * down[k * h + j]);
    }

  const fftune::library::Context context(-1);
  const auto plan = context.plan(R"({"op":"ffn","dtype":"f32","m":5,"d":24,"h":40})");
  std::vector<char> workspace(plan.workspace_bytes() + 256);
  void* const aligned =
      workspace.data() + 256 - reinterpret_cast<std::size_t>(workspace.data()) % 256;
  plan.run({x.data(), gate.data(), up.data(), down.data(), y.data()}, aligned);

  for (int i = 0; i < m * d; ++i)
    if (!(std::abs(y[i] - expected[i]) <= 1e-6f)) return std::printf("y[%d] is wrong\n", i), 1;

  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::uint64_t length = header.size();
  std::ofstream("w.safetensors", std::ios::binary)
      .write(reinterpret_cast<const char*>(&length), sizeof length)
      .write(header.data(), static_cast<std::streamsize>(length))
      .write(reinterpret_cast<const char*>(x.data()), 2 * sizeof x[0]);
  const fftune::library::SavedModel model("w.safetensors");
  float read[2] = {};
  model.read("w", "f32", 0, 2, read);
  if (read[0] != x[0] || read[1] != x[1]) return std::printf("w is wrong\n"), 1;
  std::printf("%s: y is right\n", fftune_version());
}
