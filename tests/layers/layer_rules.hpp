// The rules that keep the layers apart; docs/architecture.md says why.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune::testing {

/// The rules that the file breaks, one line each: "lib/core/a.cpp: includes ...". `path` is
/// relative to the root of the sources.
std::vector<std::string> broken_rules(const std::string& path, std::string_view source);

}  // namespace fftune::testing
