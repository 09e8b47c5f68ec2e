// The stages of masked-linear, by the places of its tensors.
#include "kernels/masked/masked.hpp"

namespace fftune::masked {

LinearPlaces linear_places(const Problem& problem) {
  LinearPlaces places;
  std::size_t count = 0;
  const auto next = [&](std::size_t& place) { place = count++; };
  const bool backward = problem.pass == "bwd";
  if (backward) next(places.dy);
  next(places.x);
  next(places.mask);
  for (std::size_t& place : places.w) next(place);
  if (!backward) {
    next(places.y);
    return places;
  }
  if (accumulates(problem))
    for (std::size_t& place : places.dw_before) next(place);
  next(places.dx);
  for (std::size_t& place : places.dw) next(place);
  return places;
}

StageProduct linear_product(Stage stage, const Problem& problem) {
  const LinearPlaces at = linear_places(problem);
  const std::int64_t m = problem.size("m"), n = problem.size("n"), k = problem.size("k");
  StageProduct product;
  product.mask = at.mask;
  product.b = {{{at.w[0]}, {at.w[1]}}};
  if (stage == Stage::linear) {
    product.shape = {.m = m, .n = n, .k = k};
    product.a = {at.x};
    product.c = {at.y};
  } else {
    product.shape = {.m = m, .n = k, .k = n, .b_transposed = true};
    product.a = {at.dy};
    product.c = {at.dx};
  }
  return product;
}

StageSum linear_sum(const Problem& problem) {
  const LinearPlaces at = linear_places(problem);
  StageSum sum;
  sum.shape = {.m = problem.size("n"),
               .n = problem.size("k"),
               .k = problem.size("m"),
               .a_transposed = true,
               .b_transposed = true,
               .results = 2};
  sum.a = {at.dy};
  sum.b = at.x;
  sum.mask = at.mask;
  sum.c = {{{at.dw[0]}, {at.dw[1]}}};
  if (accumulates(problem)) sum.addends = {{{at.dw_before[0]}, {at.dw_before[1]}}};
  return sum;
}

}  // namespace fftune::masked
