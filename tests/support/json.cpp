#include "support/json.hpp"

namespace fftune::testing {

nlohmann::json json_of(std::string_view text) {
  return nlohmann::json::parse(text);
}

}  // namespace fftune::testing
