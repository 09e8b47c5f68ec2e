#include <fmt/format.h>

#include <utility>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune {

std::optional<std::string> FallbackProduct::refusal(const Problem& problem,
                                                    const DeviceFacts& facts) const {
  return refuse_stage(stage(), problem, facts, DeviceKind::cuda);
}

Program FallbackProduct::program(const Problem& problem, const DeviceFacts&, const Config&) const {
  constexpr std::int64_t tile = 64;  // of fallback_gemm, as are its 256 threads
  const Product work = product(problem);
  const GemmShape& shape = work.shape;
  Program program;
  program.kernels.push_back(
      {"gemm/product_fallback.cu",
       fmt::format("fftune::product_fallback<{}, {}, {}>", element_type(work.dtype),
                   epilogue_type(work), operands_type(work))});
  KernelLaunch launch;
  launch.grid.x =
      static_cast<std::uint32_t>(ceil_div(shape.m, tile) * ceil_div(shape.n, tile) * shape.results);
  launch.block.x = 256;
  launch.arguments = pointer_arguments(work);
  for (const std::int64_t size : {shape.m, shape.n, shape.k})
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  program.steps.emplace_back(std::move(launch));
  return program;
}

std::vector<std::string> FallbackProduct::sources() const {
  return {"gemm/product_fallback.cu"};
}

}  // namespace fftune
