// How near the cost models of experts in fp8, and of the decode kernels, come to the fastest of
// what was timed on an H100.
#include <cmath>
#include <filesystem>
#include <limits>

#include "landscapes/landscape.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE(
    "what the cost models prefer on an H100 is within 10% of the fastest, and 2% in the mean") {
  const auto h100 = facts_of_architecture("sm_90a");
  int landscapes = 0;
  double slower = 0;  // in all
  for (const char* name : {"moe-ffn-fp8.txt", "moe-ffn-one-token.txt"}) {
    const auto file = std::filesystem::path(FFTUNE_SOURCE_DIR "/tests/data/landscapes-h100") / name;
    for (const Landscape& landscape : read_landscapes(file, builtin_catalog(), h100)) {
      INFO(landscape.problem.text() << ": " << landscape.stages);
      // Those that were dropped, as their kernels spill registers, have no time.
      std::size_t preferred = 0;
      double least = std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < landscape.us.size(); ++i)
        if (std::isfinite(landscape.us[i]) && landscape.estimates[i] < least) {
          least = landscape.estimates[i];
          preferred = i;
        }
      CHECK(landscape.us[preferred] <= 1.1 * landscape.best());
      slower += landscape.us[preferred] / landscape.best() - 1;
      ++landscapes;
    }
  }
  REQUIRE(landscapes >= 20);
  CHECK(slower <= 0.02 * landscapes);
}
