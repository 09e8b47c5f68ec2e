// Rows on the CPU, in float. Backward, each thread goes through its own rows and adds up their dw
// and db, then the threads' sums are added up, column by column. Which rows make a part is fixed,
// and so are the bits.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/cpu_task.hpp"
#include "kernels/layernorm/layernorm.hpp"

namespace fftune::layernorm {
namespace {

constexpr const char* source = "layernorm/cpu_families.cpp";

void no_fence() {}

std::byte* row_of(const Layer& layer, void* matrix, std::int64_t row) {
  if (!matrix) return nullptr;
  const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(layer.d);
  return static_cast<std::byte*>(matrix) + at * dtype_bytes(layer.dtype);
}

std::int64_t row_bytes(const Layer& layer) {
  return layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

std::vector<float> floats_of(const Layer& layer, const void* vector) {
  std::vector<float> values(static_cast<std::size_t>(layer.d));
  decode(layer.dtype, vector, std::span<float>(values));
  return values;
}

/// Sums of floats in double cost nothing beside reading them, and cancel less.
struct Moments {
  float mean, rstd;

  Moments(const Layer& layer, std::span<const float> row) {
    double sum = 0, squares = 0;
    for (const float value : row) sum += value;
    const double exact = sum / static_cast<double>(layer.d);
    for (const float value : row) squares += (value - exact) * (value - exact);
    mean = static_cast<float>(exact);
    rstd = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(layer.d) + layer.eps));
  }
};

class CpuForward final : public CpuRowFamily {
 public:
  CpuForward()
      : CpuRowFamily({.name = "cpu_forward",
                      .summary = "blocks of rows on all threads",
                      .stage = stage_forward,
                      .pass = "fwd",
                      .sources = {source}}) {}

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const Layer layer = layer_of(problem);
    const RowTasks tasks(work(problem), config);
    const TensorPlaces at = places_of(layer);
    Program program;
    program.host_tensors = at.count();
    program.steps.emplace_back(HostFunction([=, x = at.at("x"), residual = at.at("residual"),
                                             w = at.at("w"), b = at.at("b"), y = at.at("y"),
                                             sum = at.at("sum")](const HostCall& call) {
      const auto weights = floats_of(layer, call.tensors[w]);
      const auto biases = floats_of(layer, call.tensors[b]);
      // Each task copies this, and with it has buffers of its own.
      tasks.run(call.parallel, no_fence,
                [&, row = std::vector<float>(static_cast<std::size_t>(layer.d)),
                 other = std::vector<float>()](std::int64_t index) mutable {
                  decode(layer.dtype, row_of(layer, call.tensors[x], index), std::span<float>(row));
                  if (layer.adds) {
                    other.resize(row.size());
                    decode(layer.dtype, row_of(layer, call.tensors[residual], index),
                           std::span<float>(other));
                    for (std::size_t i = 0; i < row.size(); ++i) row[i] += other[i];
                    std::byte* const to = row_of(layer, call.tensors[sum], index);
                    encode(layer.dtype, std::span<const float>(row), to);
                    decode(layer.dtype, to, std::span<float>(row));  // rounded
                  }
                  const Moments of(layer, row);
                  for (std::size_t i = 0; i < row.size(); ++i)
                    row[i] = (row[i] - of.mean) * of.rstd * weights[i] + biases[i];
                  encode(layer.dtype, std::span<const float>(row),
                         row_of(layer, call.tensors[y], index));
                });
    }));
    return program;
  }

 protected:
  RowWork work(const Problem& problem) const override {
    return {
        .rows = problem.size("m"), .row_bytes = row_bytes(layer_of(problem)), .nontemporal = false};
  }
};

class CpuBackward final : public CpuRowFamily {
 public:
  CpuBackward()
      : CpuRowFamily({.name = "cpu_backward",
                      .summary = "a part of the rows for each thread, then the sums of theirs",
                      .stage = stage_backward,
                      .pass = "bwd",
                      .sources = {source}}) {}

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const Layer layer = layer_of(problem);
    const RowParts parts(work(problem), config);
    const TensorPlaces at = places_of(layer);
    const auto d = static_cast<std::size_t>(layer.d);
    Program program;
    program.host_tensors = at.count();
    program.scratch = {parts.scratch(2 * layer.d), {2 * d * sizeof(float), false}};
    program.steps.emplace_back(
        HostFunction([=, x = at.at("x"), w = at.at("w"), dy = at.at("dy"), dsum = at.at("dsum"),
                      dx = at.at("dx"), dw = at.at("dw"), db = at.at("db")](const HostCall& call) {
          const auto weights = floats_of(layer, call.tensors[w]);
          auto* const sums = reinterpret_cast<float*>(call.scratch[1]);
          parts.run(
              call, no_fence, call.scratch[0], 2 * layer.d, DType::f32, sums,
              [&](std::int64_t index, float* of_part) {
                const auto row = floats_of(layer, row_of(layer, call.tensors[x], index));
                auto slope = floats_of(layer, row_of(layer, call.tensors[dy], index));
                const Moments of(layer, row);
                double sum = 0, product = 0;
                for (std::size_t i = 0; i < d; ++i) {
                  const float normalised = (row[i] - of.mean) * of.rstd;
                  of_part[i] += slope[i] * normalised;
                  of_part[d + i] += slope[i];
                  slope[i] *= weights[i];
                  sum += slope[i];
                  product += double{slope[i]} * normalised;
                }
                const auto mean = static_cast<float>(sum / static_cast<double>(d));
                const auto mean_product = static_cast<float>(product / static_cast<double>(d));
                for (std::size_t i = 0; i < d; ++i) {
                  const float centred = slope[i] - mean;
                  slope[i] =
                      d == 2 ? of.rstd * centred * (layer.eps * of.rstd * of.rstd)
                             : of.rstd * (centred - (row[i] - of.mean) * of.rstd * mean_product);
                }
                if (layer.adds) {
                  const auto more = floats_of(layer, row_of(layer, call.tensors[dsum], index));
                  for (std::size_t i = 0; i < d; ++i) slope[i] += more[i];
                }
                encode(layer.dtype, std::span<const float>(slope),
                       row_of(layer, call.tensors[dx], index));
              });
          encode(layer.dtype, std::span<const float>(sums, d), call.tensors[dw]);
          encode(layer.dtype, std::span<const float>(sums + d, d), call.tensors[db]);
        }));
    return program;
  }

 protected:
  RowWork work(const Problem& problem) const override {
    return {.rows = problem.size("m"), .row_bytes = row_bytes(layer_of(problem)), .sums = true};
  }
};

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuForward forward;
  static const CpuBackward backward;
  return {&forward, &backward};
}

}  // namespace fftune::layernorm
