// pack-weight: codes of 4 and 8 bits, scales and zero points in the order of kernels (gemm/packed),
// and back. Exact both ways.
//
//   codes u8 [n, ceil(k / 2)]    two neighbouring elements of k in a byte, the first in its low
//   or u8 [n, k]                 with 8 bits
//   bits scale [n, groups]            zero u8 [n, groups], with zeros=yes: 0..15
//
// The other side is w, w_scale and w_zero of layout.cuh. Unpacking gives unpacked, unpacked_scale
// and unpacked_zero in the place of codes, scale and zero.
#pragma once

#include "kernels/gemm/packed/packed.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& pack_weight_op();

namespace pack_weight {

constexpr const char* stage_pack = "pack";

bool unpacks(const Problem& problem);

/// Bytes of a row of plain codes.
std::int64_t plain_width(const PackedWeight& weight);

/// The names of the plain side's tensors.
struct PlainNames {
  const char *codes, *scale, *zero, *row_scale;
};
PlainNames plain_names(const Problem& problem);

/// Its sizes, format and dtype, with the names of the packed tensors.
PackedWeight weight_of(const Problem& problem);

const Family& cuda_family();
const Family& cpu_family();

}  // namespace pack_weight
}  // namespace fftune
