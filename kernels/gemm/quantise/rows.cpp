// The host side of rows.cu.
#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/quantise/quantise.hpp"

namespace fftune {
namespace {

constexpr const char* file = "gemm/quantise/rows.cu";
constexpr std::int64_t vector = 8;  // quantise_vector

/// Threads that have the elements of a scale: a vector each, if there are not too many.
std::int64_t threads_for(std::int64_t elements) {
  std::int64_t threads = 16;
  while (threads < 1024 && threads * vector < elements) threads *= 2;
  return threads;
}

Program quantise(const QuantiseStage& stage, const Problem& problem, const DeviceFacts& facts) {
  const TensorPlaces places(stage.op().tensors(problem));
  const QuantisedRows own = stage.operands(problem);
  const std::int64_t group = threads_for(own.length());
  const std::int64_t groups = group < 128 ? 128 / group : 1;
  return pdl_program(
      facts, file,
      fmt::format("quantise_rows<{}, {}, {}, {}>", element_type(own.dtype), group, groups,
                  own.k % vector == 0),
      {static_cast<std::uint32_t>(quotient_up(own.rows * own.scales_of_row(), groups))},
      static_cast<std::uint32_t>(group * groups),
      {tensor_of(places, own.from), tensor_of(places, own.elements), tensor_of(places, own.scales),
       own.rows, own.k, own.length()});
}

}  // namespace

QuantiseFamily quantise_family(const QuantiseStage& stage) {
  return {stage, quantise_summary, file, DeviceKind::cuda, refuse_unquantised, quantise};
}

}  // namespace fftune
