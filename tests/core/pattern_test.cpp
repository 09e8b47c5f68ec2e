#include "core/distribution.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

namespace {

std::vector<int> marked(const char* text, std::int64_t rows) {
  std::vector<int> places;
  const auto marks = draw_pattern(parse_pattern(text).value(), rows, 1);
  for (std::size_t row = 0; row < marks.size(); ++row)
    if (marks[row] != 0) places.push_back(static_cast<int>(row));
  return places;
}

}  // namespace

TEST_CASE("patterns are read and written; other text is none") {
  for (const char* text : {"block:0.33", "tail:1", "even:0.5", "random:0.001"})
    CHECK(pattern_text(parse_pattern(text).value()) == text);
  CHECK(pattern_text(parse_pattern("all").value()) == "block:1");
  CHECK(pattern_text(parse_pattern("none").value()) == "block:0");
  CHECK(pattern_text(parse_pattern("even:0.250").value()) == "even:0.25");
  for (const char* text : {"", "block", "block:", "block:x", "block:-0.1", "block:1.1", ":0.5",
                           "Block:0.5", "block:nan", "block:0.5 "})
    CHECK_FALSE(parse_pattern(text));
}

TEST_CASE("each kind marks its share") {
  CHECK(marked("block:0.33", 9) == std::vector<int>{0, 1, 2});
  CHECK(marked("tail:0.33", 9) == std::vector<int>{6, 7, 8});
  CHECK(marked("even:0.5", 6) == std::vector<int>{1, 3, 5});
  CHECK(marked("even:0.25", 8) == std::vector<int>{3, 7});
  CHECK(marked("none", 5).empty());
  CHECK(marked("all", 3) == std::vector<int>{0, 1, 2});
  CHECK(marked("random:0", 1000).empty());
  CHECK(marked("random:1", 1000).size() == 1000);
  const auto random = marked("random:0.2", 10000);
  CHECK(random.size() > 1800);
  CHECK(random.size() < 2200);
  CHECK(random != marked("block:0.2", 10000));
}

TEST_CASE("marks take every value but zero, and are the same each time") {
  const auto marks = draw_pattern({Pattern::Kind::block, 1}, 20000, 3);
  CHECK(std::set<int>(marks.begin(), marks.end()).size() == 255);
  CHECK(marks == draw_pattern({Pattern::Kind::block, 1}, 20000, 3));
  const Pattern random{Pattern::Kind::random, 0.5};
  CHECK(draw_pattern(random, 100, 1) != draw_pattern(random, 100, 2));
}

TEST_CASE("the distance of patterns") {
  const auto distance = [](const char* a, const char* b) {
    return pattern_distance(parse_pattern(a).value(), parse_pattern(b).value());
  };
  CHECK(distance("block:0.5", "block:0.5") == 0);
  CHECK(distance("block:0.25", "block:0.75") == Approx(0.25));
  CHECK(distance("block:0.25", "random:0.25") == Approx(0.5));
  CHECK(distance("none", "all") == Approx(0.5));
  CHECK(distance("all", "random:1") == 0);
  CHECK(distance("random:0.9", "all") < distance("random:0.9", "block:0.9"));
}

TEST_CASE("marked rows come first, each kind in its order") {
  CHECK(sorted_by_mark({0, 7, 0, 1}) == std::vector<std::int64_t>{1, 3, 0, 2});
  CHECK(sorted_by_mark({}).empty());
}
