// indexer: its fields, tensors, stages and test data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/saturated.hpp"
#include "kernels/attention/test_data.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/indexer/indexer.hpp"

namespace fftune::indexer {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_sequences = 65535, most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_heads = 256, most_dim = 512, most_top = std::int64_t{1} << 16;

// Sizes that are left out (SizeField::when_absent).
std::int64_t keys_of_block(const Problem& problem) {
  return size_or(problem, "page", size_or(problem, "kv", 0));
}
std::optional<std::int64_t> usual_block(const Problem& problem) {
  return saturated_product(keys_of_block(problem), size_or(problem, "dim", 0));
}
std::optional<std::int64_t> usual_scales(const Problem& problem) {
  if (!problem.has("k-format", "e4m3")) return std::nullopt;
  return keys_of_block(problem);
}

/// Rows of `width` elements of all pages, or sequences, `block` elements apart.
TensorSpec blocks_of(const Layer& layer, const char* name, DType dtype, std::int64_t width,
                     std::int64_t block, double scale) {
  const std::int64_t keys = layer.keys_of_block();
  TensorSpec spec{name, dtype, {layer.blocks(), keys}, Role::input, scale};
  if (width > 0) spec.shape.push_back(width);
  const std::int64_t own = keys * std::max<std::int64_t>(width, 1);
  if (block != own) spec.shape = {layer.blocks(), block};
  spec.behind = block - own;
  return spec;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.page == 0 && problem.sizes.contains("pages"))
    return "pages without page: the keys are contiguous";
  if (!layer.e4m3 && problem.sizes.contains("scale-block"))
    return "scale-block without k-format=e4m3: only e4m3 has scales";
  const std::int64_t keys = layer.keys_of_block();
  if (layer.k_block < keys * layer.dim)
    return fmt::format("k-block={} is less than the {} elements of {} keys", layer.k_block,
                       keys * layer.dim, keys);
  if (layer.e4m3 && layer.scale_block < keys)
    return fmt::format("scale-block={} is less than the scales of {} keys", layer.scale_block,
                       keys);
  return "";
}

std::vector<KnownModel> models() {
  return {{"deepseek-v3.2", {{"heads", 64}, {"dim", 128}}},
          {"glm-5", {{"heads", 32}, {"dim", 128}}}};
}

OpFacts facts() {
  return {
      .name = "indexer",
      .summary =
          "choice of keys of sparse attention: the best of sum_h weights_h relu(q_h k) for "
          "each query",
      .passes = {"fwd"},
      .sizes = {token_count("b", "sequences", {1, 16, 64}, {1, 8}, most_sequences, 16),
                attention::queries_size(most_tokens),
                attention::keys_size(most_tokens, 8192),
                {.name = "heads", .help = "indexer heads", .max = most_heads, .example = 64},
                {.name = "dim", .help = "features of a head", .max = most_dim, .example = 128},
                rare_size("top", "keys that are chosen for a query; 2048 if left out", most_top,
                          1024, usually(usual_top)),
                attention::page_size("keys of a page", most_tokens),
                attention::pages_size(most_tokens),
                neutral(rare_size("k-block",
                                  "elements of k from a page, or a sequence, to the next; those "
                                  "of its keys if left out",
                                  most_stride, 1 << 20, usual_block)),
                neutral(rare_size(
                    "scale-block",
                    "scales from a page, or a sequence, to the next; those of its keys if left "
                    "out",
                    most_stride, 1 << 20, usual_scales))},
      .options = {attention::lengths_option(),
                  rare_option(
                      "k-format",
                      "element type of k: that of q, or e4m3 with an f32 scale for each key",
                      {"same", "e4m3"})},
      .token_size = "b",
      .rows_are_alike = false,
      .known_models = models,
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction};
}

class Indexer final : public DescribedOp {
 public:
  using DescribedOp::DescribedOp;

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    // Scores are of order one.
    const double scale = 1 / std::sqrt(static_cast<double>(layer.dim)),
                 weight = 1 / std::sqrt(static_cast<double>(layer.heads));
    std::vector<TensorSpec> tensors{
        {"q", layer.dtype, {layer.b, layer.s, layer.heads, layer.dim}, Role::input, scale},
        {"weights", DType::f32, {layer.b, layer.s, layer.heads}, Role::input, weight}};
    // Well above the subnormals of e4m3, and below its largest number.
    constexpr double deviation = 16;
    tensors.push_back(blocks_of(layer, "k", layer.dtype_of_keys(), layer.dim, layer.k_block,
                                layer.e4m3 ? deviation : 1));
    if (layer.e4m3) {
      tensors.push_back(
          blocks_of(layer, "k_scale", DType::f32, 0, layer.scale_block, 0.1 / deviation));
      tensors.back().mean = 1 / deviation;
    }
    if (layer.page > 0) {
      tensors.push_back({"pages", DType::i32, {layer.b, layer.pages_of_sequence()}, Role::input});
      tensors.back().draw = [count = layer.pages](std::uint64_t seed, std::span<double> values) {
        attention::draw_pages(seed, count, values);
      };
    }
    if (layer.lengths) {
      tensors.push_back({"lengths", DType::i32, {layer.b}, Role::input});
      tensors.back().draw = [most = layer.usual_kv()](std::uint64_t, std::span<double> values) {
        attention::draw_lengths(most, values);
      };
    }
    TensorSpec ids{"ids", DType::i32, {layer.b, layer.s, layer.top}, Role::output};
    ids.choice = {
        "scores", {}, [](std::span<double>, const std::vector<double>&, double) { return 1.0; }};
    tensors.push_back(std::move(ids));
    tensors.push_back({"scores", DType::f32, {layer.b, layer.s, layer.kv}, Role::intermediate, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    double pairs = 0;
    for (std::int64_t i = 0; i < layer.s; ++i)
      pairs += static_cast<double>(layer.visible(i, layer.kv));
    pairs *= static_cast<double>(layer.b);
    StageSpec scores, choose;
    scores.name = stage_scores, choose.name = stage_choose;
    const auto add = [](StageSpec& stage, const TensorSpec& tensor, bool written) {
      (written ? stage.outputs : stage.inputs).push_back(tensor.name);
      stage.bytes += static_cast<double>(tensor.bytes());
    };
    for (const TensorSpec& tensor : tensors(problem)) {
      const bool is_ids = tensor.name == "ids", is_scores = tensor.name == "scores";
      if (!is_ids) add(scores, tensor, is_scores);
      if (is_ids || is_scores || tensor.name == "lengths") add(choose, tensor, is_ids);
    }
    scores.flops =
        pairs * static_cast<double>(layer.heads) * static_cast<double>(2 * layer.dim + 2);
    scores.reduction_length = layer.heads * layer.dim;
    choose.flops = pairs;
    return {scores, choose};
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    (stage == 0 ? reference_scores : reference_choice)(problem, tensors, parallel);
  }
};

}  // namespace

Layer layer_of(const Problem& problem) {
  Layer layer(problem);
  layer.heads = problem.size("heads");
  layer.dim = problem.size("dim");
  layer.top = size_or(problem, "top", usual_top);
  layer.k_block = size_or(problem, "k-block", layer.keys_of_block() * layer.dim);
  layer.scale_block = size_or(problem, "scale-block", layer.keys_of_block());
  layer.e4m3 = problem.has("k-format", "e4m3");
  layer.dtype = problem.dtype;
  return layer;
}

}  // namespace fftune::indexer

const fftune::Op& fftune::indexer_op() {
  static const indexer::Indexer op(indexer::facts());
  return op;
}
