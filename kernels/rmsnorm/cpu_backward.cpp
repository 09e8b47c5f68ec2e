// The backward pass on the CPU: each thread goes through its own rows and adds up their dw, then
// the threads' sums are added up, column by column. Which rows make a part is fixed, and so are the
// bits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/rmsnorm/cpu_layer.hpp"
#include "kernels/rmsnorm/families.hpp"

namespace fftune::rmsnorm {
namespace {

/// The rows of a part: dx, and dw [d] of them alone.
void differentiate(const Layer& layer, const RowKernels& kernels, const HostCall& call,
                   const float* factors, std::int64_t first, std::int64_t last, float* dw,
                   bool streams) {
  const Places at = places_of(layer);
  const auto d = static_cast<std::size_t>(layer.d);
  const auto tensor = [&](std::size_t place) {
    return place == absent ? nullptr : call.tensors[place];
  };
  const auto* const rstd = static_cast<const float*>(tensor(at.rstd));
  std::fill_n(dw, d, 0.0f);
  for (std::int64_t row = first; row < last; ++row) {
    const void* const x = row_of(layer, tensor(at.x), row);
    const void* const dy = row_of(layer, tensor(at.dy), row);
    const void* const dsum = row_of(layer, tensor(at.dsum), row);
    void* const dx = row_of(layer, tensor(at.dx), row);
    float sums[2];
    kernels.products(x, dy, factors, d, sums);
    const float r = rstd ? rstd[row] : reciprocal_deviation(layer, sums[1]);
    kernels.norm_gradient(x, dy, dsum, factors, r, sums[0] * r / static_cast<float>(layer.d), dx,
                          dw, d, streams);
    if (layer.d > 1 || rstd) continue;
    // Of one element, g·r·(1 − x̂²) is g·r·eps·r²: the difference would keep no digit of it.
    float gradient = 0;
    float other = 0;
    decode(layer.dtype, dy, {&gradient, 1});
    if (dsum) decode(layer.dtype, dsum, {&other, 1});
    const float slope = factors[0] * gradient * r * (layer.eps * r * r) + other;
    encode(layer.dtype, std::span<const float>(&slope, 1), dx);
  }
  if (streams) kernels.fence();
}

class CpuBackward final : public Family {
 public:
  std::string_view name() const override { return "cpu_backward"; }
  std::string_view summary() const override {
    return "a part of the rows for each thread, in vectors, then the sum of their dw";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_backward}; }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (!layer_of(problem).backward) return "it computes the pass bwd, not fwd";
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return row_part_space(problem.size("m"), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return default_row_part(problem.size("m"), row_bytes(layer_of(problem)), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t parts = config.at("threads") * config.at("parts");
    const int threads = config.get("threads");
    const bool streams = config.at("nontemporal") != 0;
    const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
    Program program;
    program.host_tensors = places_of(layer).count;
    program.scratch = {{factor_bytes(layer), false},
                       {static_cast<std::size_t>(parts * layer.d) * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([=, &kernels](const HostCall& call) {
      const Places at = places_of(layer);
      const float* const factors =
          factors_of(layer, call.tensors[at.w], reinterpret_cast<float*>(call.scratch[0]));
      auto* const partial = reinterpret_cast<float*>(call.scratch[1]);
      call.parallel.run(static_cast<int>(parts), threads, [&](int part) {
        differentiate(layer, kernels, call, factors, first_row_of_part(layer.m, parts, part),
                      first_row_of_part(layer.m, parts, part + 1), partial + part * layer.d,
                      streams);
      });
      add_parts(call.parallel, threads, partial, parts, layer.d, layer.weight_dtype,
                call.tensors[at.dw]);
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"rmsnorm/cpu_backward.cpp", row_kernel_sources[0], row_kernel_sources[1]};
  }
};

}  // namespace

const Family& cpu_backward_family() {
  static const CpuBackward family;
  return family;
}

}  // namespace fftune::rmsnorm
