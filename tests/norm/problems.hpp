// Problems of rmsnorm and layernorm for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/norm/norm.hpp"
#include "support/fuzz.hpp"
#include "support/op_reference.hpp"

namespace fftune::test {

Problem rmsnorm_problem(DeviceKind kind, const std::string& pass, DType dtype, std::int64_t m,
                        std::int64_t d, std::map<std::string, std::string> options = {});

/// A problem with every field drawn.
Problem random_rmsnorm(DeviceKind kind, Draw& draw, std::int64_t most_elements);

Problem layernorm_problem(DeviceKind kind, const std::string& pass, DType dtype, std::int64_t m,
                          std::int64_t d, std::map<std::string, std::string> options = {});

/// A problem with every field drawn.
Problem random_layernorm(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
