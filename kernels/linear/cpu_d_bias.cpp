// The gradient of a linear layer's bias on the CPU: blocks of columns on all threads.
#include <algorithm>
#include <cstddef>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const std::int64_t m = problem.size("m"), n = problem.size("n");
  const TensorPlaces places(linear_op().tensors(problem));
  const std::size_t dy = places.at("dy"), before = places.at("dbias_before"),
                    dbias = places.at("dbias");
  return host_program(places.count(), [=, dtype = problem.dtype](const HostCall& call) {
    constexpr std::int64_t columns = 256;
    const auto place = [&](std::size_t tensor, std::int64_t element) {
      return static_cast<std::byte*>(call.tensors[tensor]) +
             static_cast<std::size_t>(element) * dtype_bytes(dtype);
    };
    call.parallel.run(static_cast<int>(ceil_div(n, columns)), call.parallel.max_threads(),
                      [&](int task) {
                        const std::int64_t first = task * columns;
                        const auto count = static_cast<std::size_t>(std::min(columns, n - first));
                        float sum[columns] = {}, row[columns];
                        if (before != absent) decode(dtype, place(before, first), {sum, count});
                        for (std::int64_t i = 0; i < m; ++i) {
                          decode(dtype, place(dy, i * n + first), {row, count});
                          for (std::size_t j = 0; j < count; ++j) sum[j] += row[j];
                        }
                        encode(dtype, {sum, count}, place(dbias, first));
                      });
  });
}

}  // namespace

const Family& cpu_d_bias_family() {
  static const StageFamily family =
      cpu_fallback({.name = "cpu_d_bias",
                    .summary = "column sums of dy, by blocks of columns",
                    .stage = stage_d_bias,
                    .pass = "bwd",
                    .needs = {"bias", "yes"},
                    .sources = {"linear/cpu_d_bias.cpp"},
                    .program = program});
  return family;
}

}  // namespace fftune::linear
