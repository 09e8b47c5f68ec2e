#include "kernels/masked/masked.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune::masked {

std::string stage_name(Stage stage) {
  switch (stage) {
    case Stage::linear:
      return "linear";
    case Stage::dx:
      return "dx";
    case Stage::dw:
      return "dw";
    case Stage::gate_up:
      return "gate_up";
    case Stage::down:
      return "down";
  }
  throw Error(ErrorKind::internal, "stage_name: a value outside the enumeration");
}

std::optional<std::string> refuse_pass(Stage stage, const Problem& problem) {
  const std::string pass = stage == Stage::dx || stage == Stage::dw ? "bwd" : "fwd";
  if (problem.pass == pass) return std::nullopt;
  return fmt::format("it computes the pass {}, not {}", pass, problem.pass);
}

bool accumulates(const Problem& problem) {
  return problem.has("accumulate", "yes");
}

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

StageProduct product_of(Stage stage, const Problem& problem) {
  const std::int64_t m = problem.size("m");
  StageProduct product;
  product.mask = 1;
  switch (stage) {
    case Stage::linear: {
      const LinearPlaces at = linear_places(problem);
      product.shape = {m, problem.size("n"), problem.size("k")};
      product.a = at.x;
      product.b = {{{at.w[0]}, {at.w[1]}}};
      product.c = at.y;
      break;
    }
    case Stage::dx: {
      const LinearPlaces at = linear_places(problem);
      product.shape = {
          .m = m, .n = problem.size("k"), .k = problem.size("n"), .b_transposed = true};
      product.a = at.dy;
      product.mask = at.mask;
      product.b = {{{at.w[0]}, {at.w[1]}}};
      product.c = at.dx;
      break;
    }
    case Stage::dw:
      throw Error(ErrorKind::internal, "dw is no product of grouped rows");
    case Stage::gate_up:  // x, mask, three weights of each expert, y, hidden
      product.shape = {m, problem.size("h"), problem.size("d"), 2};
      product.b = {{{2, 3}, {5, 6}}};
      product.c = 9;
      product.sorted_c = true;
      break;
    case Stage::down:
      product.shape = {m, problem.size("d"), problem.size("h"), 1};
      product.a = 9;
      product.b = {{{4}, {7}}};
      product.c = 8;
      product.sorted_a = true;
      break;
  }
  return product;
}

StageSum sum_of(Stage stage, const Problem& problem) {
  if (stage != Stage::dw) throw Error(ErrorKind::internal, "sum_of: no sum over tokens");
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

OptionField mask_option() {
  return {.name = "mask",
          .help = "what the masks look like: of test data, and to choose a preset by",
          .choices = {"block:0.33"},
          .pattern = true};
}

OptionField accumulate_option() {
  return {.name = "accumulate",
          .help =
              "whether the gradients of the weights are added to others, which may be the "
              "same buffers",
          .choices = {"no", "yes"},
          .rare = true,
          .pass = "bwd"};
}

TensorSpec mask_tensor(const Problem& problem) {
  TensorSpec mask{"mask", DType::u8, {problem.size("m")}, Role::input};
  mask.pattern = problem.option("mask");
  return mask;
}

}  // namespace fftune::masked
