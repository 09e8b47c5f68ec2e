// How near the wgmma engine's cost model comes to the fastest of what was timed on an H200.
#include <string>

#include "landscapes/landscape.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Whether the engine's cost model ranks it.
bool is_of_the_engine(const Variant& variant) {
  return variant.family == "gate_up_sm90" || variant.family == "down_sm90";
}

}  // namespace

TEST_CASE("what the cost model prefers is within 9% of the fastest, and within 2% in the mean") {
  std::size_t landscapes = 0;
  double slower = 0;  // in all
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           FFTUNE_SOURCE_DIR "/docs/measurements/landscapes")) {
    if (!entry.is_regular_file()) continue;
    for (const auto& landscape : read_landscapes(entry.path(), builtin_catalog(), h200())) {
      double best = std::numeric_limits<double>::infinity(), chosen = best, least = best;
      for (std::size_t i = 0; i < landscape.variants.size(); ++i) {
        if (!is_of_the_engine(landscape.variants[i])) continue;
        best = std::min(best, landscape.us[i]);
        if (landscape.estimates[i] >= least) continue;
        least = landscape.estimates[i];
        chosen = landscape.us[i];
      }
      if (best == std::numeric_limits<double>::infinity()) continue;
      ++landscapes;
      INFO(landscape.problem.text() << ": " << landscape.stages);
      CHECK(chosen <= 1.09 * best);
      slower += chosen / best - 1;
    }
  }
  CHECK(landscapes >= 50);
  CHECK(slower <= 0.02 * static_cast<double>(landscapes));
}
