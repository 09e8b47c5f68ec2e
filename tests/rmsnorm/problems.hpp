// Problems of rmsnorm for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/rmsnorm/rmsnorm.hpp"
#include "support/verify_variants.hpp"

namespace fftune::test {

inline Problem rmsnorm_problem(DeviceKind kind, const std::string& pass, DType dtype,
                               std::int64_t m, std::int64_t d,
                               std::map<std::string, std::string> options = {}) {
  return canonical(rmsnorm_op(), {"rmsnorm", pass, dtype, {{"m", m}, {"d", d}}, std::move(options)},
                   kind);
}

/// A problem with every field drawn; small ones are likely, and so are widths that are aligned.
template <typename Random>
Problem random_rmsnorm(DeviceKind kind, Random& random, std::int64_t most_elements) {
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  const auto pick = [&](const std::vector<std::string>& words) {
    return words[static_cast<std::size_t>(below(std::ssize(words)))];
  };
  std::int64_t d = 1 + below(std::int64_t{1} << (1 + below(16)));
  if (below(2)) d = (d + 7) / 8 * 8;
  d = std::min({d, rmsnorm::most_features, most_elements});
  const std::int64_t m = std::min(1 + below(std::int64_t{1} << (1 + below(8))),
                                  std::max<std::int64_t>(1, most_elements / d));
  const auto dtypes = rmsnorm_op().dtypes(kind);
  return rmsnorm_problem(kind, pick({"fwd", "bwd"}),
                         dtypes[static_cast<std::size_t>(below(std::ssize(dtypes)))], m, d,
                         {{"convention", pick({"llama", "gemma", "t5"})},
                          {"residual", pick({"no", "yes"})},
                          {"save", pick({"nothing", "rstd"})},
                          {"weights", pick({"same", "f32"})},
                          {"eps", pick({"1e-6", "1e-5", "0.1"})}});
}

}  // namespace fftune::test
