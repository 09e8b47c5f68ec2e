// Blocks of rows on all threads. A row is computed in f32, in place where that is its type.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/common/cpu_task.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/masked_softmax/masked_softmax.hpp"

namespace fftune::masked_softmax {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

class Rows {
 public:
  Rows(const Problem& problem, const DeviceFacts& facts)
      : layer_(layer_of(problem)),
        at_(places_of(problem)),
        converter_{&vector_kernels(facts.arch)},
        vector_(&vector_kernels(facts.arch)) {}

  const Layer& layer() const { return layer_; }
  const Places& places() const { return at_; }

  /// `room`: two rows of floats.
  void compute(const HostCall& call, std::int64_t row, float* room) const {
    if (layer_.backward)
      backward(call, row, room, room + layer_.n);
    else
      forward(call, row, room);
  }

 private:
  std::byte* row_of(const HostCall& call, std::size_t tensor, std::int64_t row) const {
    return static_cast<std::byte*>(call.tensors[tensor]) +
           row * layer_.n * static_cast<std::int64_t>(dtype_bytes(layer_.dtype));
  }

  void forward(const HostCall& call, std::int64_t row, float* values) const {
    const std::int64_t columns = layer_.columns(row);
    converter_.load(layer_.dtype, row_of(call, at_.x, row), values, columns);
    for (std::int64_t j = 0; j < columns; ++j) values[j] *= layer_.scale;
    if (at_.mask != absent) {
      const auto* const mask = static_cast<const std::uint8_t*>(call.tensors[at_.mask]) +
                               layer_.mask_row(row) * layer_.n;
      for (std::int64_t j = 0; j < columns; ++j)
        if (mask[j] == 0) values[j] = lowest;
    }
    const auto count = static_cast<std::size_t>(columns);
    const float most = vector_->largest(values, count);
    const float sum = vector_->exponentials(values, most == lowest ? 0 : most, count);
    std::fill(values + columns, values + layer_.n, 0.0f);
    const float factor = sum == 0 ? 0 : 1 / sum;
    for (std::int64_t j = 0; j < layer_.n; ++j) values[j] *= factor;
    converter_.store(layer_.dtype, values, row_of(call, at_.y, row), layer_.n);
  }

  void backward(const HostCall& call, std::int64_t row, float* y, float* dy) const {
    const std::int64_t columns = layer_.columns(row);
    converter_.load(layer_.dtype, row_of(call, at_.y, row), y, columns);
    converter_.load(layer_.dtype, row_of(call, at_.dy, row), dy, columns);
    float sum = 0;
    if (columns > 0) vector_->dot(y, 0, dy, 0, static_cast<std::size_t>(columns), 1, 1, &sum);
    for (std::int64_t j = 0; j < columns; ++j) dy[j] = layer_.scale * y[j] * (dy[j] - sum);
    std::fill(dy + columns, dy + layer_.n, 0.0f);
    converter_.store(layer_.dtype, dy, row_of(call, at_.dx, row), layer_.n);
  }

  Layer layer_;
  Places at_;
  gemm_cpu::Converter converter_;
  const VectorKernels* vector_;
};

RowWork work(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return {.rows = layer.rows(),
          .row_bytes = layer.n * static_cast<std::int64_t>(dtype_bytes(layer.dtype)),
          .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Rows rows(problem, facts);
  const std::int64_t rows_of_task = config.at("rows");
  const int threads = config.get("threads");
  const std::int64_t count = rows.layer().rows();
  return gemm_cpu::worker_program(
      rows.places().count, {.count = threads, .floats = 2 * rows.layer().n, .call_blas = false},
      [tasks = (count + rows_of_task - 1) / rows_of_task](const HostCall&) { return tasks; },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        const std::int64_t end = std::min(count, (task + 1) * rows_of_task);
        for (std::int64_t row = task * rows_of_task; row < end; ++row)
          rows.compute(call, row, memory);
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const auto families =
      cpu_row_families({"cpu_forward", "cpu_backward"}, "blocks of rows, on all threads",
                       {"masked_softmax/cpu_families.cpp", vector_kernel_source}, {work, program});
  return addresses_of(families);
}

}  // namespace fftune::masked_softmax
