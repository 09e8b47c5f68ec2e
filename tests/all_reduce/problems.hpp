// Problems of all-reduce for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/all_reduce/all_reduce.hpp"
#include "layer/problems.hpp"
#include "support/fuzz.hpp"
#include "support/op_reference.hpp"

namespace fftune::test {

inline Problem all_reduce_problem(DeviceKind kind, DType dtype, std::int64_t ranks, std::int64_t m,
                                  std::int64_t d, std::map<std::string, std::string> options = {}) {
  return canonical(
      all_reduce_op(),
      {"all-reduce", "fwd", dtype, {{"m", m}, {"d", d}, {"ranks", ranks}}, std::move(options)},
      kind);
}

/// A rank's slice of a layer.
inline Problem small_layer(DeviceKind kind, DType dtype, std::int64_t ranks,
                           const std::string& link) {
  return layer_problem(kind, dtype,
                       {{"batch", 2},
                        {"cache", 24},
                        {"d", 64},
                        {"h", 48},
                        {"heads", 2},
                        {"kv-heads", 1},
                        {"dim", 16},
                        {"ranks", ranks}},
                       {{"link", link}});
}

/// A problem of a rank that is alone, with every other field drawn.
inline Problem random_all_reduce(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, d] = draw.matrix(most_elements, 65536);
  std::map<std::string, std::string> options{{"norm", draw.of({"none", "llama", "gemma", "t5"})},
                                             {"residual", draw.of({"no", "yes"})},
                                             {"eps", draw.of({"1e-6", "1e-5", "0.1"})}};
  if (options["norm"] != "none") options["output"] = draw.of({"same", "fp8", "fp8-static"});
  return all_reduce_problem(kind, draw.of(all_reduce_op().dtypes(kind)),
                            draw.of(std::vector<std::int64_t>{1, 2, 3, 4, 8}), m, d,
                            std::move(options));
}

}  // namespace fftune::test
