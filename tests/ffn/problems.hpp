// Problems of ffn for tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ffn/ffn.hpp"
#include "support/fields.hpp"

namespace fftune::test {

inline Problem ffn_problem(DeviceKind kind, DType dtype, std::int64_t m, std::int64_t d,
                           std::int64_t h, Options options = {}, const std::string& pass = "fwd") {
  return canonical(ffn_op(),
                   {"ffn", pass, dtype, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)}, kind);
}

/// The forms of the forward pass.
inline const std::vector<Options> forward_forms{
    {},
    {{"save", "preact"}},
    {{"bias", "down"}},
    {{"residual", "yes"}},
    {{"bias", "down"}, {"residual", "yes"}, {"save", "preact"}}};

}  // namespace fftune::test
