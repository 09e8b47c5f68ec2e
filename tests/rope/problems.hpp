// Problems of rope for tests.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "kernels/rope/rope.hpp"
#include "support/fuzz.hpp"

namespace fftune::test {

Problem rope_problem(DeviceKind kind, const std::string& pass, DType dtype,
                     std::map<std::string, std::int64_t> sizes,
                     std::map<std::string, std::string> options = {});

/// The sizes of a view of q or k, whose `counts` outer and inner tokens and heads lie in any order,
/// with gaps now and then.
void draw_view(Draw& draw, std::map<std::string, std::int64_t>& sizes, const std::string& name,
               std::array<std::int64_t, 3> counts, std::int64_t dim);

/// A problem with every field drawn; q and k are often parts of a packed row, or other views.
Problem random_rope(DeviceKind kind, Draw& draw, std::int64_t most_elements);

}  // namespace fftune::test
