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
  empty.parameter("bm", "rows", std::vector<std::int64_t>());
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

TEST_CASE("a parameter of words has one configuration for each") {
  Space space;
  space.parameter("schedule", "order of work", {"cooperative", "pingpong"})
      .parameter("order", "of tiles", std::vector<std::string>{"rows"})
      .parameter("bm", "rows", {64, 128})
      .parameter("split_k", "parts", {0})
      .constraint(
          "pingpong needs bm=64",
          [](const Config& c) { return c.word("schedule") != "pingpong" || c.at("bm") == 64; },
          {"schedule", "bm"});
  REQUIRE(space.size() == 4);
  std::vector<std::string> all;
  for (const auto& config : space.feasible()) all.push_back(config.text());
  REQUIRE(all == std::vector<std::string>{"schedule=cooperative,order=rows,bm=64,split_k=0",
                                          "schedule=cooperative,order=rows,bm=128,split_k=0",
                                          "schedule=pingpong,order=rows,bm=64,split_k=0"});
  std::size_t visited = 0;
  space.for_each([&](const Config& config) { visited += !config.word("schedule").empty(); });
  REQUIRE(visited == 4);
}

TEST_CASE("a word that is not listed, or a number in its place, is named with the choices") {
  Space space;
  space.parameter("schedule", "order of work", {"cooperative", "pingpong"})
      .parameter("bm", "rows", {64, 128});
  REQUIRE(space.violations({{"schedule", "swap_ab"}, {"bm", 64}}) ==
          std::vector<std::string>{"schedule=swap_ab is not one of cooperative, pingpong"});
  REQUIRE(space.violations({{"schedule", 1}, {"bm", 64}}) ==
          std::vector<std::string>{"schedule=1 is not one of cooperative, pingpong"});
  REQUIRE(space.violations({{"schedule", "pingpong"}, {"bm", "large"}}) ==
          std::vector<std::string>{"bm=large is not one of 64, 128"});
  REQUIRE(space.violations({{"schedule", "pingpong"}, {"bm", 128}}).empty());
}

TEST_CASE("a predicate may read a word that it does not depend on before the word is chosen") {
  Space space;
  space.parameter("bm", "rows", {64, 128})
      .parameter("schedule", "order of work", {"cooperative", "pingpong"})
      .constraint("small tiles",
                  [](const Config& c) { return !c.word("schedule").empty() && c.at("bm") == 64; },
                  {"bm"});
  REQUIRE(space.feasible().size() == 2);
}

TEST_CASE("a parameter that was added later is completed in the order of the space") {
  Space space;
  space.parameter("bm", "rows", {16, 32})
      .parameter("stages", "buffers", {2, 3})
      .when_absent(2)
      .parameter("group", "tiles", {1, 4})
      .when_absent_by([] { return ParameterValue(4); });
  CHECK(space.completed({{"bm", 16}}) == Config{{"bm", 16}, {"stages", 2}, {"group", 4}});
  CHECK(space.completed({{"group", 1}, {"bm", 16}}) ==
        Config{{"bm", 16}, {"stages", 2}, {"group", 1}});
  const Config whole{{"bm", 16}, {"stages", 3}, {"group", 1}};
  CHECK(space.completed(whole) == whole);
  CHECK(space.completed({{"group", 1}, {"stages", 3}, {"bm", 16}}) == whole);
  // Any other that is missing is left for violations() to name, as are those that are unknown.
  const Config without_bm{{"stages", 3}};
  CHECK(space.completed(without_bm) == without_bm);
  CHECK(space.violations(space.completed({{"bm", 16}, {"bn", 8}})) ==
        std::vector<std::string>{"there is no parameter 'bn'"});
}
