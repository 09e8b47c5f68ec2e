// Rows in vectors on all threads; the backward pass by parts of the rows, each with its own sums.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::bias_gelu {
namespace {

/// The parameters of the loops, read once from a problem.
struct Rows {
  explicit Rows(const Problem& problem, const DeviceFacts& facts)
      : m(problem.size("m")),
        h(problem.size("h")),
        dtype(problem.dtype),
        bias(bias_dtype(problem)),
        saves(saves_input(problem)),
        at(places_of(problem)),
        activation(parse_activation(problem.option("act"))),
        kernels(&row_kernels(facts.arch, problem.dtype)) {}

  std::size_t width() const { return static_cast<std::size_t>(h); }
  std::int64_t bytes() const { return h * static_cast<std::int64_t>(dtype_bytes(dtype)); }
  std::byte* row(void* matrix, std::int64_t index) const {
    return static_cast<std::byte*>(matrix) + index * bytes();
  }
  /// The bias in float: converted into `room` [h] unless it is float already; zeros if x contains
  /// it.
  const float* bias_of(const HostCall& call) const {
    const std::span<float> room(reinterpret_cast<float*>(call.scratch[0]), at_hand() ? 0 : width());
    if (at_hand()) return static_cast<const float*>(call.tensors[at.bias]);
    if (at.bias == absent)
      std::fill(room.begin(), room.end(), 0.0f);
    else
      decode(bias, call.tensors[at.bias], room);
    return room.data();
  }
  bool at_hand() const { return at.bias != absent && bias == DType::f32; }
  Scratch bias_scratch() const { return {at_hand() ? 0 : width() * sizeof(float), false}; }

  std::int64_t m;
  std::int64_t h;
  DType dtype;
  DType bias;
  bool saves;
  Places at;
  Activation activation;
  const RowKernels* kernels;
};

StageFamilyFacts facts_of(std::string_view name, std::string_view summary, bool backward) {
  return {.name = name,
          .summary = summary,
          .device_kind = DeviceKind::cpu,
          .stage = backward ? stage_backward : stage_forward,
          .pass = backward ? "bwd" : "fwd",
          .sources = {"bias_gelu/cpu_families.cpp", activation_source, row_kernel_sources[0],
                      row_kernel_sources[1]},
          .is_fallback = true};
}

class CpuForward final : public StageFamily {
 public:
  CpuForward()
      : StageFamily(facts_of("cpu_forward", "blocks of rows in vectors, on all threads", false)) {}

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return row_task_space(problem.size("m"), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return default_row_task(problem.size("m"), Rows(problem, facts).bytes(), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Rows rows(problem, facts);
    const std::int64_t of_task = config.at("rows");
    const int threads = config.get("threads");
    const bool streams = config.at("nontemporal") != 0;
    Program program;
    program.host_tensors = rows.at.count;
    program.scratch = {rows.bias_scratch()};
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const float* const bias = rows.bias_of(call);
      const auto tasks = static_cast<int>((rows.m + of_task - 1) / of_task);
      call.parallel.run(tasks, threads, [&](int task) {
        const std::int64_t last = std::min(rows.m, (task + 1) * of_task);
        for (std::int64_t row = task * of_task; row < last; ++row) {
          const auto write = [&](Activation activation, std::size_t place) {
            rows.kernels->bias_act(activation, rows.row(call.tensors[rows.at.x], row), bias,
                                   rows.row(call.tensors[place], row), rows.width(), streams);
          };
          write(rows.activation, rows.at.y);
          if (rows.saves) write(Activation::none, rows.at.input);
        }
        if (streams) rows.kernels->fence();
      });
    }));
    return program;
  }
};

class CpuBackward final : public StageFamily {
 public:
  CpuBackward()
      : StageFamily(facts_of("cpu_backward",
                             "parts of the rows in vectors, then the sum of their dbias", true)) {}

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return row_part_space(problem.size("m"), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return default_row_part(problem.size("m"), Rows(problem, facts).bytes(), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Rows rows(problem, facts);
    const std::int64_t parts = config.at("threads") * config.at("parts");
    const int threads = config.get("threads");
    const bool streams = config.at("nontemporal") != 0;
    Program program;
    program.host_tensors = rows.at.count;
    program.scratch = {rows.bias_scratch(),
                       {static_cast<std::size_t>(parts) * rows.width() * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const float* const bias = rows.bias_of(call);
      auto* const partial = reinterpret_cast<float*>(call.scratch[1]);
      const std::size_t x = rows.saves ? rows.at.input : rows.at.x;
      call.parallel.run(static_cast<int>(parts), threads, [&](int part) {
        float* const sums = partial + part * rows.h;
        std::fill_n(sums, rows.width(), 0.0f);
        const std::int64_t last = first_row_of_part(rows.m, parts, part + 1);
        for (std::int64_t row = first_row_of_part(rows.m, parts, part); row < last; ++row)
          rows.kernels->bias_act_gradient(rows.activation, rows.row(call.tensors[x], row), bias,
                                          rows.row(call.tensors[rows.at.dy], row),
                                          rows.row(call.tensors[rows.at.dx], row), sums,
                                          rows.bias == DType::f32, rows.width(), streams);
        if (streams) rows.kernels->fence();
      });
      add_parts(call.parallel, threads, partial, parts, rows.h, rows.bias,
                call.tensors[rows.at.dbias]);
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

}  // namespace fftune::bias_gelu
