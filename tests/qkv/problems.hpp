// Problems of qkv for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "kernels/qkv/qkv.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

Problem qkv_problem(DeviceKind kind, DType dtype, std::map<std::string, std::int64_t> sizes,
                    std::map<std::string, std::string> options = {});

/// A problem with every field drawn; heads are often such as a tile can have whole.
Problem random_qkv(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
