// Problems of moe-ffn for its tests.
#pragma once

#include <string>
#include <utility>

#include "kernels/moe/moe.hpp"
#include "registry/op.hpp"

namespace fftune::test {

struct MoeSizes {
  std::int64_t m, d, h, experts, choices, shared = 0;
};

inline Problem moe_problem(const MoeSizes& sizes, DType dtype, DeviceKind kind,
                           std::map<std::string, std::string> options = {},
                           std::string pass = "fwd") {
  Problem problem{"moe-ffn",
                  std::move(pass),
                  dtype,
                  {{"m", sizes.m},
                   {"d", sizes.d},
                   {"h", sizes.h},
                   {"experts", sizes.experts},
                   {"top-k", sizes.choices}},
                  std::move(options)};
  if (sizes.shared > 0) problem.sizes["shared"] = sizes.shared;
  return canonical(moe_ffn_op(), problem, kind);
}

}  // namespace fftune::test
