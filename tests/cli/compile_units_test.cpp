// The programs of `fftune compile`, and that finding them ends when it is asked to.
#include "apps/fftune/compile/compile_units.hpp"

#include <atomic>
#include <ctime>

#include "registry/catalog.hpp"
#include "support/catch.hpp"

using namespace fftune;
using fftune::tool::compile_units;

TEST_CASE("an interrupt ends the enumeration of programs") {
  const Op& op = builtin_catalog().op("act-mul");
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  std::atomic<bool> cancel{false};
  CHECK(!compile_units(op, facts, "", {}, 1, cancel).empty());
  cancel = true;
  CHECK(compile_units(op, facts, "", {}, 1, cancel).empty());
  // All forms of a mixture of experts take seconds.
  const std::clock_t begin = std::clock();
  CHECK(compile_units(builtin_catalog().op("moe-ffn"), facts, "", {}, 0, cancel).empty());
  CHECK(std::clock() - begin < CLOCKS_PER_SEC / 2);
}

TEST_CASE("families of one token, and of two rare options together, have programs") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const std::atomic<bool> cancel{false};
  const auto has_program = [&](const std::string& op, const std::string& family) {
    CAPTURE(op, family);
    CHECK(!compile_units(builtin_catalog().op(op), facts, family, {}, 1, cancel).empty());
  };
  has_program("attention", "attention_decode");
  has_program("layer", "persistent_packed_post_norms");
  has_program("layer", "persistent_packed_ffn");
}
