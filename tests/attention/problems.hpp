// Problems of attention for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/attention/attention.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

Problem attention_problem(DeviceKind kind, const std::string& pass, DType dtype,
                          std::map<std::string, std::int64_t> sizes,
                          std::map<std::string, std::string> options = {});

/// Adds to the options and sizes what one of the forms beside the plain one has.
void draw_form(Draw& draw, bool backward, std::int64_t heads, std::int64_t dim,
               std::map<std::string, std::int64_t>& sizes,
               std::map<std::string, std::string>& options);

/// A problem with every field drawn.
Problem random_attention(DeviceKind kind, Draw& draw, std::int64_t most_elements);
/// The same with values of another number of features than keys.
Problem random_attention_of_values(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
