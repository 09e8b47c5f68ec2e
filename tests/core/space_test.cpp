#include "core/space.hpp"

#include "support/catch.hpp"

using namespace fftune;

namespace {

Space small_space() {
  Space space;
  space.parameter("bm", "rows", {16, 32, 64})
      .parameter("stages", "buffers", {2, 3})
      .constraint("bm * stages must fit in 96",
                  [](const Config& c) { return c.at("bm") * c.at("stages") <= 96; });
  return space;
}

}  // namespace

TEST_CASE("the feasible configurations are those that hold every constraint") {
  const Space space = small_space();
  REQUIRE(space.size() == 6);
  const auto feasible = space.feasible();
  REQUIRE(feasible.size() == 4);
  REQUIRE(feasible.front().text() == "bm=16,stages=2");
  REQUIRE(feasible.back().text() == "bm=32,stages=3");
  for (const auto& config : feasible) REQUIRE(space.violations(config).empty());
}

TEST_CASE("a violation says why") {
  const Space space = small_space();
  REQUIRE(space.violations({{"bm", 64}, {"stages", 2}}) ==
          std::vector<std::string>{"bm * stages must fit in 96"});
  REQUIRE(space.violations({{"bm", 48}, {"stages", 2}}) ==
          std::vector<std::string>{"bm=48 is not one of 16, 32, 64"});
  REQUIRE(space.violations({{"bm", 16}}) ==
          std::vector<std::string>{"parameter 'stages' is missing"});
  REQUIRE(space.violations({{"bm", 16}, {"stages", 2}, {"bn", 8}}) ==
          std::vector<std::string>{"there is no parameter 'bn'"});
}

TEST_CASE("a space without parameters has one configuration, one with an empty axis none") {
  REQUIRE(Space().feasible().size() == 1);
  Space empty;
  empty.parameter("bm", "rows", {});
  REQUIRE(empty.feasible().empty());
}

TEST_CASE("naming what a constraint reads changes the speed alone") {
  Space named;
  Space plain;
  for (Space* space : {&named, &plain})
    space->parameter("a", "", {1, 2, 3, 4})
        .parameter("b", "", {1, 2, 3})
        .parameter("c", "", {5, 6});
  const auto odd = [](const Config& c) { return (c.at("a") + c.at("b")) % 2 == 1; };
  const auto small = [](const Config& c) { return c.at("a") * c.at("c") < 18; };
  named.constraint("odd", odd, {"a", "b"}).constraint("small", small, {"c", "a"});
  plain.constraint("odd", odd).constraint("small", small);
  REQUIRE(named.feasible() == plain.feasible());
  REQUIRE(named.feasible().size() == 7);
}
