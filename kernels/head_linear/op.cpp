// head-linear: its fields and tensors.
#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>

#include "kernels/head_linear/head_linear.hpp"

namespace fftune::head_linear {
namespace {

constexpr std::int64_t most_heads = 1024;
constexpr std::int64_t most_stride = 1 << 24;

std::optional<std::int64_t> usual_rows(const Problem& problem) {
  const std::int64_t own =
      size_or(problem, "w-skip", 0) + size_or(problem, problem.has("layout", "kn") ? "k" : "n", 0);
  return own;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  std::vector<TensorSpec> tensors{
      {"x", layer.dtype, {layer.m, layer.heads, layer.x_head}, Role::input, 1},
      {"w",
       layer.dtype,
       {layer.heads, layer.w_rows, layer.columns()},
       Role::input,
       1 / std::sqrt(static_cast<double>(layer.k))},
      {"y", layer.dtype, {layer.m, layer.heads, layer.n}, Role::output, 1}};
  tensors[0].behind = layer.x_head - layer.k;
  tensors[1].behind = (layer.w_rows - layer.w_skip - layer.rows()) * layer.columns();
  return tensors;
}

void complete(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  const auto unread = static_cast<double>(layer.heads) *
                      static_cast<double>(layer.m * (layer.x_head - layer.k) +
                                          (layer.w_rows - layer.rows()) * layer.columns());
  stage.bytes -= unread * static_cast<double>(dtype_bytes(layer.dtype));
  stage.flops =
      2 * static_cast<double>(layer.m * layer.heads) * static_cast<double>(layer.n * layer.k);
  stage.reduction_length = layer.k;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.x_head < layer.k)
    return fmt::format("x-head={} is less than k={}", layer.x_head, layer.k);
  if (layer.w_rows < layer.w_skip + layer.rows())
    return fmt::format(
        "w-rows={} is less than the {} rows of a product{}", layer.w_rows, layer.rows(),
        layer.w_skip > 0 ? fmt::format(" and the {} before them", layer.w_skip) : "");
  return "";
}

OpFacts facts() {
  return {
      .name = "head-linear",
      .summary = "a product for each head: y[h] = x[h] w[h]^T, as around latent attention",
      .passes = {"fwd"},
      .sizes = {product_tokens(),
                {.name = "heads", .help = "heads", .max = most_heads, .example = 16},
                {.name = "n", .help = "features of a head of y", .max = most_features},
                {.name = "k", .help = "features of a head of x", .max = most_features},
                rare_size("x-head",
                          "elements from a head of x to the next, of which the first k are read; k "
                          "if left out",
                          most_stride, 192, same_as("k")),
                rare_size("w-rows",
                          "rows of a head in w; those of a product, and those before them, if left "
                          "out",
                          most_stride, 256, usual_rows),
                rare_size("w-skip",
                          "rows of a head in w before those of the product; none if left "
                          "out",
                          most_stride, 128)},
      .options = {{"layout", "a head's weight: [n, k], or its transpose [k, n]", {"nk", "kn"}}},
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete, .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(
      problem, {{"m", &Layer::m}, {"heads", &Layer::heads}, {"n", &Layer::n}, {"k", &Layer::k}});
  layer.inputs_as_rows = problem.has("layout", "kn");
  layer.x_head = size_or(problem, "x-head", layer.k);
  layer.w_skip = size_or(problem, "w-skip", 0);
  layer.w_rows = size_or(problem, "w-rows", layer.w_skip + layer.rows());
  layer.dtype = problem.dtype;
  return layer;
}

}  // namespace fftune::head_linear

const fftune::Op& fftune::head_linear_op() {
  static const DescribedOp op(head_linear::facts());
  return op;
}
