#include "support/json.hpp"

namespace fftune::testing {

nlohmann::json parse_json(std::string_view text) {
  return nlohmann::json::parse(text);
}

}  // namespace fftune::testing
