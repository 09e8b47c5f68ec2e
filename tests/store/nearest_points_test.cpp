#include "store/nearest_points.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/split_mix.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

double sum_of_differences(const NearestPoints::Point& a, const NearestPoints::Point& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
  return sum;
}

/// `count` points of three small whole coordinates, many of them equal.
std::vector<NearestPoints::Point> some_points(std::size_t count, std::uint64_t range) {
  std::vector<NearestPoints::Point> points;
  for (std::size_t i = 0; i < count; ++i) {
    NearestPoints::Point point;
    for (std::uint64_t axis = 0; axis < 3; ++axis)
      point.push_back(static_cast<double>(mix(3 * i + axis) % range));
    points.push_back(std::move(point));
  }
  return points;
}

}  // namespace

TEST_CASE("a walk takes every point in the order of distance and index, as sorting does") {
  for (const std::size_t count : {0u, 1u, 7u, 300u}) {
    const auto points = some_points(count, 9);
    const NearestPoints tree(points);
    const NearestPoints::Point from{4, -3, 11};
    // A part that no coordinate tells, as of patterns.
    const auto distance = [&](std::size_t i) {
      return sum_of_differences(points[i], from) + (i % 3 == 0 ? 2 : 0);
    };
    std::vector<std::pair<double, std::size_t>> expected, found;
    for (std::size_t i = 0; i < count; ++i) expected.emplace_back(distance(i), i);
    std::sort(expected.begin(), expected.end());
    NearestPoints::Walk walk(tree, from, distance);
    while (const auto near = walk.next()) found.emplace_back(near->distance, near->index);
    CHECK(found == expected);
  }
}

TEST_CASE("equal distances that are rounded in another order are taken by index") {
  std::vector<NearestPoints::Point> points;
  for (const auto& point : some_points(400, 5)) {
    points.emplace_back();
    for (const double value : point) points.back().push_back(0.1 * value);
  }
  const NearestPoints tree(points);
  const NearestPoints::Point from{0.7, -0.3, 1.1};
  const auto backwards = [&](std::size_t i) {
    double sum = 0;
    for (std::size_t axis = from.size(); axis-- > 0;) sum += std::abs(points[i][axis] - from[axis]);
    return sum;
  };
  std::vector<std::pair<double, std::size_t>> expected, found;
  for (std::size_t i = 0; i < points.size(); ++i) expected.emplace_back(backwards(i), i);
  std::sort(expected.begin(), expected.end());
  NearestPoints::Walk walk(tree, from, backwards);
  while (const auto near = walk.next()) found.emplace_back(near->distance, near->index);
  CHECK(found == expected);
}

TEST_CASE("the nearest of thousands of points is found by looking at few") {
  const auto all = some_points(8000, 1 << 20);
  const std::vector<NearestPoints::Point> points(all.begin(), all.begin() + 4000);
  const NearestPoints tree(points);
  std::size_t looked_at = 0;
  for (auto from = all.begin() + 4000; from != all.end(); ++from) {
    NearestPoints::Walk walk(tree, *from, [&](std::size_t i) {
      ++looked_at;
      return sum_of_differences(points[i], *from);
    });
    REQUIRE(walk.next());
  }
  CHECK(looked_at < 4000 * 100);
}

TEST_CASE("points that are all the same are one leaf") {
  const NearestPoints tree(std::vector<NearestPoints::Point>(100, {1, 2}));
  NearestPoints::Walk walk(tree, {0, 0}, [](std::size_t i) { return i == 60 ? 3.0 : 3.5; });
  CHECK(walk.next()->index == 60);
  CHECK(walk.next()->index == 0);
}
