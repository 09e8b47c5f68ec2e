// Rows to e4m3 with a scale for each `length` elements, on the CPU.
#include <algorithm>
#include <span>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/quantise/quantise.hpp"

namespace fftune {
namespace {

Program quantise(const QuantiseStage& stage, const Problem& problem, const DeviceFacts&) {
  const TensorPlaces places(stage.op().tensors(problem));
  const QuantisedRows own = stage.operands(problem);
  const std::size_t from = places.at(own.from), elements = places.at(own.elements),
                    scales = places.at(own.scales);
  return host_program(places.count(), [=](const HostCall& call) {
    const auto k = static_cast<std::size_t>(own.k), length = static_cast<std::size_t>(own.length());
    const auto* const x = static_cast<const std::byte*>(call.tensors[from]);
    auto* const codes = static_cast<std::byte*>(call.tensors[elements]);
    auto* scale = static_cast<float*>(call.tensors[scales]);
    const auto of_row = static_cast<std::size_t>(own.scales_of_row());
    for_each_row(static_cast<std::size_t>(own.rows), k, call.parallel, [&](std::size_t row) {
      std::vector<float> values(k);
      decode(own.dtype, x + row * k * dtype_bytes(own.dtype), std::span<float>(values));
      for (std::size_t i = 0; i < of_row; ++i) {
        const auto part = std::span(values).subspan(i * length, std::min(length, k - i * length));
        const float largest = largest_magnitude(std::span<const float>(part));
        const float by = largest <= 0x1p-100f ? 1 : largest / 448;
        for (float& value : part) value /= by;
        scale[row * of_row + i] = by;
      }
      encode(DType::fp8, std::span<const float>(values), codes + row * k);
    });
  });
}

}  // namespace

QuantiseFamily cpu_quantise_family(const QuantiseStage& stage) {
  return {stage,           quantise_summary,   "gemm/quantise/cpu_rows.cpp",
          DeviceKind::cpu, refuse_unquantised, quantise};
}

}  // namespace fftune
