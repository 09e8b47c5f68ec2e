// Rows in vectors on all threads; the backward pass by parts of the rows, each with its own sums.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::bias_gelu {
namespace {

/// The bias as an array of float: itself if it is of float, else converted in scratch memory, or
/// zeros where x contains it.
struct FloatBias {
  std::size_t place = absent;
  DType dtype = DType::f32;
  std::size_t count = 0;

  bool is_float() const { return place != absent && dtype == DType::f32; }
  Scratch scratch() const { return {is_float() ? 0 : count * sizeof(float), false}; }
  const float* get(const HostCall& call, std::byte* scratch) const {
    if (is_float()) return static_cast<const float*>(call.tensors[place]);
    const std::span<float> values(reinterpret_cast<float*>(scratch), count);
    if (place == absent)
      std::fill(values.begin(), values.end(), 0.0f);
    else
      decode(dtype, call.tensors[place], values);
    return values.data();
  }
};

RowWork work_of(const Problem& problem) {
  return {.rows = problem.size("m"),
          .row_bytes = problem.size("h") * static_cast<std::int64_t>(dtype_bytes(problem.dtype)),
          .sums = problem.pass == "bwd"};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const TensorPlaces at(bias_gelu_op().tensors(problem));
  const auto h = static_cast<std::size_t>(problem.size("h"));
  const FloatBias bias{at.at("bias"), bias_dtype(problem), h};
  const RowKernels& kernels = row_kernels(facts.arch, problem.dtype);
  const auto activation = parse_activation(problem.option("act"));
  const RowWork work = work_of(problem);
  const auto row_of = [bytes = work.row_bytes](const HostCall& call, std::size_t place,
                                               std::int64_t row) {
    return static_cast<std::byte*>(call.tensors[place]) + row * bytes;
  };
  Program program;
  program.host_tensors = at.count();
  program.scratch = {bias.scratch()};
  if (problem.pass == "fwd") {
    const RowTasks tasks(work, config);
    program.steps.emplace_back(HostFunction([=, &kernels, x = at.at("x"), y = at.at("y"),
                                             input = at.at("input")](const HostCall& call) {
      const float* const values = bias.get(call, call.scratch[0]);
      tasks.run(call.parallel, kernels.fence, [&](std::int64_t row) {
        const auto write = [&](Activation act, std::size_t place) {
          kernels.bias_act(act, row_of(call, x, row), values, row_of(call, place, row), h,
                           tasks.nontemporal);
        };
        write(activation, y);
        if (input != absent) write(Activation::none, input);
      });
    }));
    return program;
  }
  const RowParts parts(work, config);
  program.scratch.push_back(parts.scratch(problem.size("h")));
  program.scratch.push_back({is_frozen(problem) ? h * sizeof(float) : 0, false});
  program.steps.emplace_back(
      HostFunction([=, &kernels, x = at.at(saves_input(problem) ? "input" : "x"), dy = at.at("dy"),
                    dx = at.at("dx"), dbias = at.at("dbias")](const HostCall& call) {
        const float* const values = bias.get(call, call.scratch[0]);
        parts.run(call, kernels.fence, call.scratch[1], static_cast<std::int64_t>(h), bias.dtype,
                  dbias == absent ? call.scratch[2] : call.tensors[dbias],
                  [&](std::int64_t row, float* sums) {
                    kernels.bias_act_gradient(activation, row_of(call, x, row), values,
                                              row_of(call, dy, row), row_of(call, dx, row), sums,
                                              bias.dtype == DType::f32, h, parts.nontemporal);
                  });
      }));
  return program;
}

}  // namespace

std::vector<const Family*> cpu_families() {
  const std::vector<std::string> sources{"bias_gelu/cpu_families.cpp", activation_source,
                                         row_kernel_sources[0], row_kernel_sources[1]};
  static const CpuRowFamily forward({.name = "cpu_forward",
                                     .summary = "blocks of rows in vectors, on all threads",
                                     .pass = "fwd",
                                     .sources = sources,
                                     .program = program},
                                    work_of);
  static const CpuRowFamily backward(
      {.name = "cpu_backward",
       .summary = "parts of the rows in vectors, then the sum of their dbias",
       .pass = "bwd",
       .sources = sources,
       .program = program},
      work_of);
  return {&forward, &backward};
}

}  // namespace fftune::bias_gelu
