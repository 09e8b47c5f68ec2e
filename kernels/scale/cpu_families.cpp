// Rows in blocks on all threads.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "kernels/common/cpu_task.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/scale/scale.hpp"

namespace fftune::scale {
namespace {

RowWork work_of(const Problem& problem) {
  return {.rows = problem.size("m"),
          .row_bytes = problem.size("h") * static_cast<std::int64_t>(dtype_bytes(problem.dtype)),
          .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts&, const Config& config) {
  const RowWork work = work_of(problem);
  const RowTasks tasks(work, config);
  const TensorPlaces places(scale_op().tensors(problem));
  const std::size_t ids = places.at("ids"), result = is_in_place(problem) ? 0 : places.at("y");
  const std::int64_t factors = factors_of(problem) == Factors::ids ? problem.size("factors") : 0;
  return host_program(places.count(), [=, kind = factors_of(problem),
                                       h = static_cast<std::size_t>(problem.size("h")),
                                       dtype = problem.dtype](const HostCall& call) {
    const auto* const factor = static_cast<const float*>(call.tensors[1]);
    if (kind == Factors::one && *factor == 1 && result == 0) return;
    tasks.run(call.parallel, nullptr, [&, row = std::vector<float>(h)](std::int64_t index) mutable {
      const auto* const x = static_cast<const std::byte*>(call.tensors[0]) + index * work.row_bytes;
      decode(dtype, x, std::span<float>(row));
      const float own = kind == Factors::ids ? 1 : factor[kind == Factors::rows ? index : 0];
      for (float& value : row) value *= own;
      if (kind == Factors::ids) {
        const auto* const id =
            static_cast<const std::int32_t*>(call.tensors[ids]) + index * std::ssize(row);
        for (std::size_t i = 0; i < h; ++i)
          row[i] *= id[i] >= 0 && id[i] < factors ? factor[id[i]] : 0;
      }
      encode(dtype, std::span<const float>(row),
             static_cast<std::byte*>(call.tensors[result]) + index * work.row_bytes);
    });
  });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily family({.name = "cpu_rows",
                                    .summary = "blocks of rows on all threads",
                                    .sources = {"scale/cpu_families.cpp"},
                                    .program = program},
                                   work_of);
  return {&family};
}

}  // namespace fftune::scale
