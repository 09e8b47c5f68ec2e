// head-linear on the CPU: tasks of a head and some of its features, by OpenBLAS.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/blas.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/head_linear/head_linear.hpp"

namespace fftune::head_linear {
namespace {

/// The tensors of a call. Buffers of a worker, in floats: x [m, k], w_h of `columns` features, and
/// y [m, columns].
struct Host {
  Layer layer;
  std::size_t x, w, y, count;
  gemm_cpu::Converter converter;

  Host(const Problem& problem, const DeviceFacts& facts)
      : layer(layer_of(problem)), converter{&vector_kernels(facts.arch)} {
    const TensorPlaces places(head_linear_op().tensors(problem));
    x = places.at("x"), w = places.at("w"), y = places.at("y"), count = places.count();
  }

  std::int64_t worker_floats(std::int64_t columns) const {
    return layer.m * (layer.k + columns) + layer.k * columns;
  }
  const std::byte* at(const HostCall& call, std::size_t tensor, std::int64_t element) const {
    return static_cast<const std::byte*>(call.tensors[tensor]) +
           element * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  }
  /// `rows` rows of `columns` elements each, in place if they are f32, else copied.
  MatrixView rows_of(const HostCall& call, std::size_t tensor, std::int64_t first,
                     std::int64_t stride, std::int64_t rows, std::int64_t columns,
                     float* room) const {
    if (layer.dtype == DType::f32)
      return {reinterpret_cast<const float*>(at(call, tensor, first)), stride};
    for (std::int64_t i = 0; i < rows; ++i)
      converter.load(layer.dtype, at(call, tensor, first + i * stride), room + i * columns,
                     columns);
    return {room, columns};
  }

  /// Features [first, first + columns) of a head, of all tokens.
  void multiply(const HostCall& call, std::int64_t head, std::int64_t first, std::int64_t columns,
                float* room) const {
    float* const w_room = room + layer.m * layer.k;
    float* const sums = w_room + layer.k * columns;
    const MatrixView a =
        rows_of(call, x, head * layer.x_head, layer.heads * layer.x_head, layer.m, layer.k, room);
    MatrixView b = layer.inputs_as_rows ? rows_of(call, w, layer.place(head) + first, layer.n,
                                                  layer.k, columns, w_room)
                                        : rows_of(call, w, layer.place(head) + first * layer.k,
                                                  layer.k, columns, layer.k, w_room);
    b.transposed = layer.inputs_as_rows;
    sgemm(layer.m, columns, layer.k, a, b, 0, sums, columns);
    for (std::int64_t i = 0; i < layer.m; ++i)
      converter.store(
          layer.dtype, sums + i * columns,
          const_cast<std::byte*>(at(call, y, (i * layer.heads + head) * layer.n + first)), columns);
  }
};

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return Space()
      .parameter("columns", "features of a head that a task computes",
                 gemm_cpu::up_to(layer.n, {32, 64, 128, 256, 512}))
      .parameter("threads", "threads, each with products of its own", thread_counts(facts));
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const std::int64_t threads = gemm_cpu::worthwhile_threads(
      head_linear_op().stages(problem).front().flops, thread_counts(facts));
  // Wide tasks, as long as each thread has one.
  const Space all = space(problem, facts);
  std::int64_t columns = all.parameters()[0].numbers().front();
  for (const std::int64_t value : all.parameters()[0].numbers())
    if (layer.heads * ((layer.n + value - 1) / value) >= threads) columns = value;
  return {{"columns", columns}, {"threads", threads}};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Host host(problem, facts);
  const std::int64_t columns = std::min<std::int64_t>(config.at("columns"), host.layer.n);
  const std::int64_t parts = (host.layer.n + columns - 1) / columns;
  const int threads = config.get("threads");
  return gemm_cpu::worker_program(
      host.count, {.count = threads, .floats = host.worker_floats(columns)},
      [tasks = host.layer.heads * parts](const HostCall&) { return tasks; },
      [=](const HostCall& call, float* memory, std::int64_t task) {
        const std::int64_t first = task % parts * columns;
        host.multiply(call, task / parts, first, std::min(columns, host.layer.n - first), memory);
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const StageFamily family =
      cpu_fallback({.name = "cpu_head_linear",
                    .summary = "heads in blocks of features, by OpenBLAS",
                    .sources = {"head_linear/cpu_families.cpp"},
                    .search = {space, default_config},
                    .program = program});
  return {&family};
}

}  // namespace fftune::head_linear
