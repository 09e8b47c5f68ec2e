// The forward pass on the CPU: a row is summed, and read again from the cache.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/rmsnorm/cpu_layer.hpp"
#include "kernels/rmsnorm/families.hpp"

namespace fftune::rmsnorm {
namespace {

/// q and the scale of a row of which r is known: once for its largest, and once for its quotients.
float quantise_row(const Layer& layer, const std::byte* x, const float* factors, float r,
                   std::byte* q) {
  constexpr std::int64_t part = 1024;
  const auto for_each_part = [&](const auto& body) {
    float values[part];
    for (std::int64_t first = 0; first < layer.d; first += part) {
      const std::span<float> piece(values,
                                   static_cast<std::size_t>(std::min(part, layer.d - first)));
      decode(layer.dtype, x + static_cast<std::size_t>(first) * dtype_bytes(layer.dtype), piece);
      for (std::size_t i = 0; i < piece.size(); ++i)
        piece[i] *= r * factors[static_cast<std::size_t>(first) + i];
      body(first, piece);
    }
  };
  float largest = 0;
  for_each_part([&](std::int64_t, std::span<float> piece) {
    for (const float value : piece) largest = std::max(largest, std::abs(value));
  });
  const float limit = layer.out_dtype == DType::fp8 ? 448 : 127;
  const float scale = largest > std::ldexp(1.0f, -100) ? largest / limit : 1;
  for_each_part([&](std::int64_t first, std::span<float> piece) {
    for (float& value : piece) value /= scale;
    encode(layer.out_dtype, std::span<const float>(piece), q + first);
  });
  return scale;
}

class CpuForward final : public Family {
 public:
  std::string_view name() const override { return "cpu_forward"; }
  std::string_view summary() const override { return "blocks of rows in vectors, on all threads"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_forward}; }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (layer_of(problem).backward) return "it computes the pass fwd, not bwd";
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return row_task_space(problem.size("m"), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return default_row_task(problem.size("m"), row_bytes(layer_of(problem)), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t rows = config.at("rows");
    const int threads = config.get("threads");
    const bool streams = config.at("nontemporal") != 0;
    const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
    Program program;
    program.host_tensors = places_of(layer).count;
    program.scratch = {{factor_bytes(layer), false}};
    program.steps.emplace_back(HostFunction([=, &kernels](const HostCall& call) {
      const Places at = places_of(layer);
      const auto d = static_cast<std::size_t>(layer.d);
      const auto tensor = [&](std::size_t place) {
        return place == absent ? nullptr : call.tensors[place];
      };
      void* const x = tensor(at.x);
      void* const residual = tensor(at.residual);
      void* const sum = tensor(at.sum);
      auto* const rstd = static_cast<float*>(tensor(at.rstd));
      const float* const factors =
          factors_of(layer, tensor(at.w), reinterpret_cast<float*>(call.scratch[0]));
      const auto tasks = static_cast<int>((layer.m + rows - 1) / rows);
      call.parallel.run(tasks, threads, [&](int task) {
        for (std::int64_t row = task * rows; row < std::min(layer.m, (task + 1) * rows); ++row) {
          const void* values = row_of(layer, x, row);
          float squares = 0;
          if (layer.adds) {
            void* const total = row_of(layer, sum, row);
            squares = kernels.add(values, row_of(layer, residual, row), total, d);
            values = total;
          } else {
            squares = kernels.squares(values, d);
          }
          const float r = reciprocal_deviation(layer, squares);
          if (rstd) rstd[row] = r;
          if (layer.quantises()) {
            auto* const q = static_cast<std::byte*>(call.tensors[at.y]) + row * layer.d;
            static_cast<float*>(call.tensors[at.scale])[row] =
                quantise_row(layer, static_cast<const std::byte*>(values), factors, r, q);
            continue;
          }
          kernels.normalise(values, factors, r, layer.convention == Convention::llama,
                            row_of(layer, tensor(at.y), row), d, streams);
        }
        if (streams) kernels.fence();
      });
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"rmsnorm/cpu_forward.cpp", row_kernel_sources[0], row_kernel_sources[1]};
  }
};

}  // namespace

const Family& cpu_forward_family() {
  static const CpuForward family;
  return family;
}

}  // namespace fftune::rmsnorm
