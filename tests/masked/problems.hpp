// Problems of the masked ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "registry/op.hpp"
#include "support/fields.hpp"

namespace fftune::test {

/// `sizes` are those beside the number of tokens, in the op's order.
inline Problem masked_problem(const Op& op, DeviceKind kind, DType dtype, std::int64_t m,
                              const std::vector<std::int64_t>& sizes, const std::string& mask,
                              const std::string& pass = "fwd", Options options = {}) {
  options["mask"] = mask;
  Problem problem{std::string(op.name()), pass, dtype, {{"m", m}}, std::move(options)};
  std::size_t next = 0;
  for (const auto& size : op.sizes())
    if (size.name != op.token_size()) problem.sizes[size.name] = sizes.at(next++);
  return canonical(op, problem, kind);
}

}  // namespace fftune::test
