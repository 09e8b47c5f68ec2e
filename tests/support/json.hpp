// nlohmann/json for tests. Its parser is compiled once: it takes longer than most of them.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace fftune::testing {

/// Throws where the text is no JSON.
nlohmann::json json_of(std::string_view text);

}  // namespace fftune::testing
