#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>

#include "kernels/masked_softmax/masked_softmax.hpp"

namespace fftune::masked_softmax {
namespace {

/// Half of the pairs, and in every seventh row none.
void draw_mask(std::uint64_t seed, std::int64_t n, std::span<double> values) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t bits = random();
    const bool row_has_none = i / static_cast<std::size_t>(n) % 7 == 6;
    values[i] = row_has_none || (bits & 1) == 0 ? 0 : static_cast<double>(1 + (bits >> 1) % 255);
  }
}

/// Neighbours of one row, at most 1024, that divide it; 0: none that are worth it.
std::int64_t alike_in_row(std::int64_t n) {
  for (std::int64_t count = std::min<std::int64_t>(n, 1024); count >= 32; --count)
    if (n % count == 0) return count;
  return n < 32 ? n : 0;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  const auto matrix = [&](const char* name, Role role) {
    TensorSpec spec{name, layer.dtype, {layer.b, layer.heads, layer.s, layer.n}, role, 1};
    // Rows that are allowed few columns have larger weights.
    if (role == Role::output) spec.alike = alike_in_row(layer.n);
    return spec;
  };
  if (layer.backward) {
    TensorSpec y = matrix("y", Role::input);
    y.mean = y.scale = 1 / static_cast<double>(layer.n);
    y.kept = true;
    return {y, matrix("dy", Role::input), matrix("dx", Role::output)};
  }
  std::vector<TensorSpec> tensors{matrix("x", Role::input)};
  tensors.front().scale = layer.scale > 0 ? 1 / double{layer.scale} : 1;
  if (layer.mask == Mask::boolean) {
    tensors.push_back(
        {"mask", DType::u8, {layer.b, layer.mask_of_head ? layer.heads : 1, layer.s, layer.n}});
    tensors.back().draw = [n = layer.n](std::uint64_t seed, std::span<double> values) {
      draw_mask(seed, n, values);
    };
  }
  tensors.push_back(matrix("y", Role::output));
  return tensors;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.mask_of_head && layer.mask != Mask::boolean)
    return "mask-heads=each without mask=bool: there is no mask in memory";
  return "";
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  stage.reduction_length = layer.n;
  stage.flops = 4 * static_cast<double>(layer.rows()) * static_cast<double>(layer.n);
}

OpFacts facts() {
  return {
      .name = "masked-softmax",
      .summary = "y = softmax(scale * x) over the last axis, of the columns that a mask allows",
      .sizes = {token_count("s", "rows of a matrix: queries", {512, 2048}, {512},
                            std::int64_t{1} << 24, 2048),
                {.name = "b", .help = "sequences", .max = 65536, .example = 4},
                {.name = "heads", .help = "matrices of a sequence", .max = 65536, .example = 32},
                rare_size("n", "columns: keys; s if left out", std::int64_t{1} << 24, 2048,
                          same_as("s"))},
      .options =
          {{.name = "mask",
            .help = "columns that a row may see: all, those up to its position, or by bytes",
            .choices = {"none", "causal", "bool"},
            .pass = "fwd"},
           {.name = "mask",
            .help = "columns that a row saw: all, or those up to its position; where another mask "
                    "allowed none y is 0",
            .choices = {"none", "causal"},
            .pass = "bwd"},
           rare_option("mask-heads", "masks of a sequence: one, or each head's own",
                       {"one", "each"}, "fwd"),
           rare_number("scale", "factor of the scores", "1", {0, 1e6})},
      .token_size = "s",
      .rows_are_alike = false,
      .families = {cuda_families, cpu_families},
      .baselines = baselines,
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer =
      sizes_of<Layer>(problem, {{"b", &Layer::b}, {"heads", &Layer::heads}, {"s", &Layer::s}});
  layer.n = problem.sizes.contains("n") ? problem.size("n") : layer.s;
  layer.mask = problem.has("mask", "causal") ? Mask::causal
               : problem.has("mask", "bool") ? Mask::boolean
                                             : Mask::none;
  layer.mask_of_head = problem.has("mask-heads", "each");
  layer.backward = problem.pass == "bwd";
  if (problem.options.contains("scale")) layer.scale = static_cast<float>(problem.number("scale"));
  layer.dtype = problem.dtype;
  return layer;
}

Places places_of(const Problem& problem) {
  const TensorPlaces tensors(tensors_of(problem));
  return {.x = tensors.at("x"),
          .mask = tensors.at("mask"),
          .y = tensors.at("y"),
          .dy = tensors.at("dy"),
          .dx = tensors.at("dx"),
          .count = tensors.count()};
}

}  // namespace fftune::masked_softmax

const fftune::Op& fftune::masked_softmax_op() {
  static const DescribedOp op(masked_softmax::facts());
  return op;
}
