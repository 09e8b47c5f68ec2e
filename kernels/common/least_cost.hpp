// The default configuration of families that have a cost, or a rank, for each.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.hpp"
#include "core/space.hpp"
#include "kernels/common/typed_space.hpp"

namespace fftune {

/// The feasible configuration with the least cost(config), a number or a tuple; of equals the first
/// in the space's order. Throws Error(internal) where none is feasible, which the refusal of the
/// family or engine `name` rules out.
template <typename Cost>
Config least_cost(const Space& space, std::string_view name, const Cost& cost) {
  using Value = decltype(cost(std::declval<const Config&>()));
  std::optional<std::pair<Value, Config>> least;
  for (const Config& config : space.feasible()) {
    Value value = cost(config);
    if (!least || value < least->first) least.emplace(std::move(value), config);
  }
  if (!least) throw Error(ErrorKind::internal, "the space of " + std::string(name) + " is empty");
  return std::move(least->second);
}

/// The same of a space of points.
template <class Point, typename Cost>
Config least_cost(const TypedSpace<Point>& space, std::string_view name, const Cost& cost) {
  using Value = decltype(cost(std::declval<const Point&>()));
  std::optional<std::pair<Value, Config>> least;
  space.for_each_feasible([&](const Point& point, const auto& config) {
    Value value = cost(point);
    if (!least || value < least->first) least.emplace(std::move(value), config());
  });
  if (!least) throw Error(ErrorKind::internal, "the space of " + std::string(name) + " is empty");
  return std::move(least->second);
}

}  // namespace fftune
