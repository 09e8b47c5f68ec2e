#include "kernels/masked/baseline_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/shape.hpp"
#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/cuda_stage.hpp"

namespace fftune::masked {

KernelLaunch rows_launch(const Program& program, DType dtype, std::int64_t rows,
                         std::int64_t columns) {
  constexpr std::int64_t threads = 256;
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(columns, elements * threads));
  launch.grid.y = static_cast<std::uint32_t>(std::min<std::int64_t>(rows, 65535));
  launch.block.x = threads;
  return launch;
}

void append_select(Program& program, const Problem& problem, const DeviceFacts& facts,
                   std::size_t mask, std::optional<std::size_t> first,
                   std::optional<std::size_t> second, std::size_t out, std::int64_t columns) {
  const std::int64_t m = problem.size("m");
  if (facts.kind == DeviceKind::cuda) {
    program.kernels.push_back({"masked/select_rows.cu", fmt::format("fftune::select_rows<{}>",
                                                                    element_type(problem.dtype))});
    KernelLaunch launch = rows_launch(program, problem.dtype, m, columns);
    append_places(launch.arguments, {mask}, 1);
    for (const auto& place : {first, second})
      append_places(launch.arguments, place ? std::vector{*place} : std::vector<std::size_t>{}, 1);
    append_places(launch.arguments, {out}, 1);
    for (const std::int64_t size : {m, columns}) launch.arguments.emplace_back(size);
    program.steps.emplace_back(std::move(launch));
    return;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * dtype_bytes(problem.dtype);
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    call.parallel.run(static_cast<int>(m), call.parallel.max_threads(), [&](int row) {
      const bool marked = static_cast<const std::uint8_t*>(call.tensors[mask])[row] != 0;
      const std::size_t at = static_cast<std::size_t>(row) * row_bytes;
      std::byte* const to = static_cast<std::byte*>(call.tensors[out]) + at;
      const auto& from = marked ? first : second;
      if (from)
        std::copy_n(static_cast<const std::byte*>(call.tensors[*from]) + at, row_bytes, to);
      else
        std::fill_n(to, row_bytes, std::byte{0});
    });
  }));
}

void append_restore(Program& program, const Problem& problem, const DeviceFacts& facts,
                    std::size_t mask, std::size_t sorted, std::size_t out, std::int64_t columns) {
  const std::int64_t m = problem.size("m");
  if (facts.kind == DeviceKind::cuda) {
    program.kernels.push_back({"masked/select_rows.cu", fmt::format("fftune::restore_rows<{}>",
                                                                    element_type(problem.dtype))});
    KernelLaunch launch;
    launch.kernel = program.kernels.size() - 1;
    launch.grid.x = static_cast<std::uint32_t>(
        std::min<std::int64_t>(m, 8 * std::max(facts.multiprocessors, 1)));
    launch.block.x = 256;
    append_places(launch.arguments, {mask, sorted, out}, 3);
    launch.arguments.emplace_back(static_cast<std::int32_t>(m));
    launch.arguments.emplace_back(columns);
    program.steps.emplace_back(std::move(launch));
    return;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * dtype_bytes(problem.dtype);
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(m));
    group(static_cast<const std::uint8_t*>(call.tensors[mask]), m, order.data());
    for (std::size_t row = 0; row < order.size(); ++row)
      std::copy_n(static_cast<const std::byte*>(call.tensors[sorted]) + row * row_bytes, row_bytes,
                  static_cast<std::byte*>(call.tensors[out]) +
                      static_cast<std::size_t>(order[row]) * row_bytes);
  }));
}

}  // namespace fftune::masked
