// The ops by what they are for, in the order of --help.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune::tool {

/// The headings of --help, in order.
std::vector<std::string> op_purposes();
/// The heading of an op; the last one for an op that no other one has.
std::string purpose_of(std::string_view op);

}  // namespace fftune::tool
