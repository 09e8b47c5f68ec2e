// Points in the order of their distance from another; only few of them are looked at.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

namespace fftune {

/// A k-d tree whose points have a distance of the caller's own. That distance is at least the sum
/// of the absolute differences of the coordinates, which is what bounds it for a whole box.
class NearestPoints {
 public:
  using Point = std::vector<double>;
  /// Distance of the point with this index from the one that the walk began at.
  using Distance = std::function<double(std::size_t index)>;
  struct Near {
    std::size_t index = 0;
    double distance = 0;
  };
  class Walk;

  /// All with the same number of coordinates, which are finite.
  explicit NearestPoints(std::vector<Point> points);

 private:
  struct Node {
    Point low, high;              // the box of its points
    std::size_t begin, end;       // in order_
    std::size_t left = 0, right;  // of nodes_; 0: a leaf, whose points are compared one by one
  };

  std::size_t build(std::size_t begin, std::size_t end);

  std::vector<Point> points_;
  std::vector<std::size_t> order_;
  std::vector<Node> nodes_;
};

/// From the nearest to the farthest; equally near points by their index. The points outlive it.
class NearestPoints::Walk {
 public:
  Walk(const NearestPoints& points, Point from, Distance distance);

  std::optional<Near> next();

 private:
  struct Item {
    double distance;  // of a box: what its points have at least
    bool is_point;
    std::size_t index;
  };
  struct Later {
    bool operator()(const Item& a, const Item& b) const;
  };

  void add_box(std::size_t node);

  const NearestPoints& points_;
  Point from_;
  Distance distance_;
  std::priority_queue<Item, std::vector<Item>, Later> items_;
};

}  // namespace fftune
