#include "store/nearest_points.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace fftune {
namespace {

constexpr std::size_t most_in_leaf = 8;
/// The caller's distance is rounded otherwise than the sum of differences.
constexpr double rounding = 1e-9;

}  // namespace

NearestPoints::NearestPoints(std::vector<Point> points)
    : points_(std::move(points)), order_(points_.size()) {
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  if (!points_.empty()) build(0, points_.size());
}

std::size_t NearestPoints::build(std::size_t begin, std::size_t end) {
  Node node{points_[order_[begin]], points_[order_[begin]], begin, end, 0, 0};
  for (std::size_t i = begin; i < end; ++i)
    for (std::size_t axis = 0; axis < node.low.size(); ++axis) {
      node.low[axis] = std::min(node.low[axis], points_[order_[i]][axis]);
      node.high[axis] = std::max(node.high[axis], points_[order_[i]][axis]);
    }
  std::size_t widest = 0;
  const auto width = [&](std::size_t axis) { return node.high[axis] - node.low[axis]; };
  for (std::size_t axis = 1; axis < node.low.size(); ++axis)
    if (width(axis) > width(widest)) widest = axis;
  const bool splits = end - begin > most_in_leaf && width(widest) > 0;

  const std::size_t place = nodes_.size();
  nodes_.push_back(std::move(node));
  if (!splits) return place;
  const auto first = order_.begin();
  const std::size_t middle = begin + (end - begin) / 2;
  std::nth_element(
      first + static_cast<std::ptrdiff_t>(begin), first + static_cast<std::ptrdiff_t>(middle),
      first + static_cast<std::ptrdiff_t>(end),
      [&](std::size_t a, std::size_t b) { return points_[a][widest] < points_[b][widest]; });
  const std::size_t left = build(begin, middle);
  const std::size_t right = build(middle, end);
  nodes_[place].left = left;
  nodes_[place].right = right;
  return place;
}

bool NearestPoints::Walk::Later::operator()(const Item& a, const Item& b) const {
  // A box first: what is in it may be as near and have a smaller index.
  return std::tie(a.distance, a.is_point, a.index) > std::tie(b.distance, b.is_point, b.index);
}

NearestPoints::Walk::Walk(const NearestPoints& points, Point from, Distance distance)
    : points_(points), from_(std::move(from)), distance_(std::move(distance)) {
  if (!points_.nodes_.empty()) add_box(0);
}

void NearestPoints::Walk::add_box(std::size_t node) {
  const auto& box = points_.nodes_[node];
  double least = 0;
  for (std::size_t axis = 0; axis < from_.size(); ++axis)
    least += std::max({box.low[axis] - from_[axis], from_[axis] - box.high[axis], 0.0});
  items_.push({least - rounding, false, node});
}

std::optional<NearestPoints::Near> NearestPoints::Walk::next() {
  while (!items_.empty()) {
    const Item item = items_.top();
    items_.pop();
    if (item.is_point) return Near{item.index, item.distance};
    const auto& node = points_.nodes_[item.index];
    if (node.left == 0) {
      for (std::size_t i = node.begin; i < node.end; ++i)
        items_.push({distance_(points_.order_[i]), true, points_.order_[i]});
    } else {
      add_box(node.left);
      add_box(node.right);
    }
  }
  return std::nullopt;
}

}  // namespace fftune
