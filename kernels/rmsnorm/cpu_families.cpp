// Rows in vectors on the CPU. Forward, a row is summed, and read again from the cache. Backward,
// each thread goes through its own rows and adds up their dw, then the threads' sums are added up,
// column by column. Which rows make a part is fixed, and so are the bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {
namespace {

std::vector<std::string> cpu_sources() {
  return {"rmsnorm/cpu_families.cpp", row_kernel_sources[0], row_kernel_sources[1]};
}

/// A matrix's row.
std::byte* row_of(const Layer& layer, void* matrix, std::int64_t row) {
  if (!matrix) return nullptr;
  const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(layer.d);
  return static_cast<std::byte*>(matrix) + at * dtype_bytes(layer.dtype);
}

std::int64_t row_bytes(const Layer& layer) {
  return layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

/// The bytes of scratch memory that factors_of needs.
std::size_t factor_bytes(const Layer& layer) {
  const bool ready = layer.weight_dtype == DType::f32 && layer.convention != Convention::gemma;
  return ready ? 0 : static_cast<std::size_t>(layer.d) * sizeof(float);
}

/// What w is in the formula, in float: `factors` [d] of scratch memory is filled, or w itself
/// serves.
const float* factors_of(const Layer& layer, const void* w, float* factors) {
  if (factor_bytes(layer) == 0) return static_cast<const float*>(w);
  const std::span<float> values(factors, static_cast<std::size_t>(layer.d));
  decode(layer.weight_dtype, w, values);
  if (layer.convention == Convention::gemma)
    for (float& value : values) value += 1;
  return factors;
}

/// 1 / sqrt(the mean of d squares + eps)
float reciprocal_deviation(const Layer& layer, float squares) {
  return 1 / std::sqrt(squares / static_cast<float>(layer.d) + layer.eps);
}

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

class CpuForward final : public StageFamily {
 public:
  CpuForward()
      : StageFamily({.name = "cpu_forward",
                     .summary = "blocks of rows in vectors, on all threads",
                     .device_kind = DeviceKind::cpu,
                     .stage = stage_forward,
                     .pass = "fwd",
                     .sources = cpu_sources(),
                     .is_fallback = true}) {}

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
    program.host_tensors = places_of(layer).count();
    program.scratch = {{factor_bytes(layer), false}};
    program.steps.emplace_back(HostFunction([=, &kernels](const HostCall& call) {
      const TensorPlaces at = places_of(layer);
      const auto d = static_cast<std::size_t>(layer.d);
      const auto tensor = [&](const char* name) {
        const std::size_t place = at.at(name);
        return place == absent ? nullptr : call.tensors[place];
      };
      void* const x = tensor("x");
      void* const residual = tensor("residual");
      void* const sum = tensor("sum");
      void* const y = tensor("y");
      auto* const scale = static_cast<float*>(tensor("scale"));
      auto* const rstd = static_cast<float*>(tensor("rstd"));
      const float* const factors =
          factors_of(layer, tensor("w"), reinterpret_cast<float*>(call.scratch[0]));
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
            auto* const q = static_cast<std::byte*>(y) + row * layer.d;
            scale[row] = quantise_row(layer, static_cast<const std::byte*>(values), factors, r, q);
            continue;
          }
          kernels.normalise(values, factors, r, layer.convention == Convention::llama,
                            row_of(layer, y, row), d, streams);
        }
        if (streams) kernels.fence();
      });
    }));
    return program;
  }
};

/// The rows of a part: dx, and dw [d] of them alone.
void differentiate(const Layer& layer, const RowKernels& kernels, const HostCall& call,
                   const float* factors, std::int64_t first, std::int64_t last, float* dw,
                   bool streams) {
  const TensorPlaces at = places_of(layer);
  const auto d = static_cast<std::size_t>(layer.d);
  const auto tensor = [&](const char* name) {
    const std::size_t place = at.at(name);
    return place == absent ? nullptr : call.tensors[place];
  };
  void* const xs = tensor("x");
  void* const dys = tensor("dy");
  void* const dsums = tensor("dsum");
  void* const dxs = tensor("dx");
  const auto* const rstd = static_cast<const float*>(tensor("rstd"));
  std::fill_n(dw, d, 0.0f);
  for (std::int64_t row = first; row < last; ++row) {
    const void* const x = row_of(layer, xs, row);
    const void* const dy = row_of(layer, dys, row);
    const void* const dsum = row_of(layer, dsums, row);
    void* const dx = row_of(layer, dxs, row);
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

class CpuBackward final : public StageFamily {
 public:
  CpuBackward()
      : StageFamily(
            {.name = "cpu_backward",
             .summary = "a part of the rows for each thread, in vectors, then the sum of their dw",
             .device_kind = DeviceKind::cpu,
             .stage = stage_backward,
             .pass = "bwd",
             .sources = cpu_sources(),
             .is_fallback = true}) {}

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
    program.host_tensors = places_of(layer).count();
    program.scratch = {{factor_bytes(layer), false},
                       {static_cast<std::size_t>(parts * layer.d) * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([=, &kernels](const HostCall& call) {
      const TensorPlaces at = places_of(layer);
      const float* const factors =
          factors_of(layer, call.tensors[at.at("w")], reinterpret_cast<float*>(call.scratch[0]));
      auto* const partial = reinterpret_cast<float*>(call.scratch[1]);
      call.parallel.run(static_cast<int>(parts), threads, [&](int part) {
        differentiate(layer, kernels, call, factors, first_row_of_part(layer.m, parts, part),
                      first_row_of_part(layer.m, parts, part + 1), partial + part * layer.d,
                      streams);
      });
      add_parts(call.parallel, threads, partial, parts, layer.d, layer.weight_dtype,
                call.tensors[at.at("dw")]);
    }));
    return program;
  }
};

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuForward forward;
  static const CpuBackward backward;
  return {&forward, &backward};
}

}  // namespace fftune::rmsnorm
