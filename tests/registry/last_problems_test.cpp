#include "registry/last_problems.hpp"

#include <string>

#include "support/catch.hpp"

using namespace fftune;

namespace {

Problem of_tokens(std::int64_t m) {
  return {"linear", "fwd", DType::f32, {{"m", m}}, {{"bias", "no"}}};
}

}  // namespace

TEST_CASE("a value is made once for each of the problems that were asked for last") {
  OfLastProblems<std::string> values;
  int made = 0;
  const auto of = [&](std::int64_t m) {
    return *values.of(of_tokens(m), [&] { return std::to_string(m + 0 * ++made); });
  };
  // As a plan asks for the whole and for its parts in turn.
  for (int i = 0; i < 3; ++i)
    for (const std::int64_t m : {1, 2, 3, 4}) CHECK(of(m) == std::to_string(m));
  CHECK(made == 4);
  CHECK(of(5) == "5");
  CHECK(of(4) == "4");
  CHECK(made == 5);
  CHECK(of(1) == "1");  // the oldest was given up
  CHECK(made == 6);
}

TEST_CASE("problems that differ in an option alone have values of their own") {
  OfLastProblems<int> values;
  Problem other = of_tokens(1);
  other.options["bias"] = "yes";
  CHECK(*values.of(of_tokens(1), [] { return 1; }) == 1);
  CHECK(*values.of(other, [] { return 2; }) == 2);
  CHECK(*values.of(of_tokens(1), [] { return 3; }) == 1);
}
