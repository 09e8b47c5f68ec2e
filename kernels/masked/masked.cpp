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

StageProduct product_of(Stage stage, const Problem& problem) {
  const std::int64_t m = problem.size("m");
  StageProduct product;
  product.mask = 1;
  switch (stage) {
    case Stage::linear:  // x, mask, w_true, w_false, y
      product.shape = {m, problem.size("n"), problem.size("k"), 1};
      product.b = {{{2}, {3}}};
      product.c = 4;
      break;
    case Stage::dx:
      product.shape = {m, problem.size("k"), problem.size("n"), 1};
      product.a = backward::dy;
      product.mask = backward::mask;
      product.b = {{{backward::w_true}, {backward::w_false}}};
      product.c = backward::dx;
      product.transposed_b = true;
      break;
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

OptionField mask_option() {
  return {.name = "mask",
          .help = "what the masks look like: of test data, and to choose a preset by",
          .choices = {"block:0.33"},
          .pattern = true};
}

TensorSpec mask_tensor(const Problem& problem) {
  TensorSpec mask{"mask", DType::u8, {problem.size("m")}, Role::input};
  mask.pattern = problem.option("mask");
  return mask;
}

}  // namespace fftune::masked
