#include "core/nearest.hpp"

#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("the nearest word is a slip of the keys away, or cut short") {
  const std::vector<std::string> words{"halving", "random", "exhaustive"};
  CHECK(nearest("halvin", words) == "halving");
  CHECK(nearest("ramdon", words) == "random");
  CHECK(nearest("exh", words) == "exhaustive");
  CHECK(nearest("HALVING", words) == "halving");
  CHECK(nearest("sm_90", {"sm_80", "sm_90a"}) == "sm_90a");
  CHECK(nearest("best", words).empty());
  CHECK(nearest("", words).empty());
}
