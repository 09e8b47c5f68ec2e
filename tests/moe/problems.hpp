// Problems of moe-ffn for its tests.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "kernels/moe/moe.hpp"
#include "registry/op.hpp"

namespace fftune::test {

struct MoeSizes {
  std::int64_t m, d, h, experts, choices, shared = 0;
};

Problem moe_problem(const MoeSizes& sizes, DType dtype, DeviceKind kind,
                    std::map<std::string, std::string> options = {}, std::string pass = "fwd");

/// Verifies all families of experts on the CPU in these forms.
void verify_experts(const std::vector<std::map<std::string, std::string>>& forms,
                    std::initializer_list<MoeSizes> all_sizes);

}  // namespace fftune::test
