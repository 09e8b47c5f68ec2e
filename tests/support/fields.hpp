// The fields of a problem, as tests write them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fftune::test {

using Sizes = std::map<std::string, std::int64_t>;
using Options = std::map<std::string, std::string>;

}  // namespace fftune::test
