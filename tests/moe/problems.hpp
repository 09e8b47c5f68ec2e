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

Problem moe_problem(const MoeSizes& sizes, DType dtype, DeviceKind kind,
                    std::map<std::string, std::string> options = {}, std::string pass = "fwd");

}  // namespace fftune::test
