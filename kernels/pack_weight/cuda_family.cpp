// The host side of pack_weight.cu.
#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/pack_weight/pack_weight.hpp"

namespace fftune::pack_weight {
namespace {

constexpr const char* file = "pack_weight/pack_weight.cu";
constexpr std::int64_t warps = 8;  // pack_warps

Program program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const TensorPlaces places(pack_weight_op().tensors(problem));
  const PackedWeight weight = weight_of(problem);
  const auto at = [&](const char* name) { return tensor_or_null(places, name); };
  const PlainNames names = plain_names(problem);
  return pdl_program(
      facts, file,
      fmt::format("pack_weight<fftune::u{}, {}, {}>",
                  8 * dtype_bytes(weight.format.scale_type(weight.dtype)), unpacks(problem),
                  device_name(weight.format.code)),
      {static_cast<std::uint32_t>(
          quotient_up(packed_tiles(weight.n) * packed_k_blocks(weight.k), warps))},
      32 * warps,
      {at(names.codes), at(names.scale), at(names.zero), at(names.row_scale), at("w"),
       at("w_scale"), at("w_zero"), weight.n, weight.k, weight.format.groups(weight.k)});
}

}  // namespace

const Family& cuda_family() {
  static const StageFamily family({.name = "pack_weight",
                                   .summary = "a warp has a block of 16 rows and 64 elements of k",
                                   .stage = stage_pack,
                                   .sources = {file},
                                   .is_fallback = true,
                                   .program = program});
  return family;
}

}  // namespace fftune::pack_weight
