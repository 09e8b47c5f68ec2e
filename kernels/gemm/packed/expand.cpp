// The host side of expand.cu.
#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/packed/packed.hpp"

namespace fftune {
namespace {

constexpr const char* file = "gemm/packed/expand.cu";
constexpr std::int64_t warps = 4;  // expand_warps

Program expand(const ExpandStage& stage, const Problem& problem, const DeviceFacts& facts) {
  const TensorPlaces places(stage.op().tensors(problem));
  Program program;
  for (const PackedWeight& weight : stage.operands(problem)) {
    const std::int64_t blocks = packed_tiles(weight.n) * packed_k_blocks(weight.k);
    append_pdl_kernel(
        program, facts, file,
        fmt::format("expand_weight<{}, {}>", element_type(weight.dtype),
                    device_name(weight.format.code)),
        {static_cast<std::uint32_t>(quotient_up(blocks, warps))}, 32 * warps,
        {tensor_of(places, weight.codes), tensor_of(places, weight.scales),
         tensor_or_null(places, weight.zeros), tensor_of(places, weight.dense), weight.n, weight.k,
         weight.format.group == 0 ? weight.k : weight.format.group});
  }
  return program;
}

}  // namespace

ExpandFamily expand_family(const ExpandStage& stage) {
  return {stage,        "packed weights to dense ones, for products of many tokens",
          file,         DeviceKind::cuda,
          refuse_dense, expand};
}

}  // namespace fftune
