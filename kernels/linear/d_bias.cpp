// The gradient of a linear layer's bias: column sums.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

constexpr const char* file = "linear/d_bias.cu";

/// Rows that one sum of the first step covers: enough parts to fill a device, few enough that
/// the second step is short.
std::int64_t rows_of_part(std::int64_t rows) {
  return std::max<std::int64_t>(64, ceil_div(rows, 64));
}

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const std::int64_t m = problem.size("m"), n = problem.size("n");
  const TensorPlaces places(linear_op().tensors(problem));
  const std::int64_t rows = rows_of_part(m), parts = ceil_div(m, rows);
  const std::string type = element_type(problem.dtype);
  Program program;
  program.scratch = {{static_cast<std::size_t>(parts * n) * sizeof(float), false}};
  append_kernel(program, file, fmt::format("d_bias_partial<{}>", type),
                {static_cast<std::uint32_t>(ceil_div(n, 32)), static_cast<std::uint32_t>(parts), 1},
                512, {tensor_of(places, "dy"), ScratchArgument{0}, m, n, rows});
  append_kernel(program, file, fmt::format("d_bias_total<{}>", type),
                {static_cast<std::uint32_t>(ceil_div(n, 256))}, 256,
                {ScratchArgument{0}, tensor_or_null(places.at("dbias_before")),
                 tensor_of(places, "dbias"), static_cast<std::int32_t>(parts), n});
  return program;
}

}  // namespace

const Family& d_bias_family() {
  static const StageFamily family({.name = "d_bias",
                                   .summary = "column sums of dy in two steps",
                                   .stage = stage_d_bias,
                                   .pass = "bwd",
                                   .needs = {"bias", "yes"},
                                   .sources = {file},
                                   .is_fallback = true,
                                   .program = program});
  return family;
}

}  // namespace fftune::linear
