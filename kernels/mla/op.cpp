// mla: its fields, tensors and test data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "core/saturated.hpp"
#include "kernels/attention/test_data.hpp"
#include "kernels/mla/mla.hpp"

namespace fftune::mla {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_heads = 1024;
constexpr std::int64_t most_queries = 65536;
constexpr std::int64_t most_lists = std::int64_t{1} << 24;

// Sizes that are left out (SizeField::when_absent).
std::int64_t width_of(const Problem& problem) {
  return size_or(problem, "rank", 0) + size_or(problem, "rope", 0);
}
std::optional<std::int64_t> usual_row(const Problem& problem) {
  return width_of(problem);
}
std::optional<std::int64_t> usual_block(const Problem& problem) {
  const std::int64_t keys = size_or(problem, "page", size_or(problem, "kv", 0));
  return saturated_product(keys, size_or(problem, "kv-row", width_of(problem)));
}

/// Lists of keys in ascending order, the last one sometimes none, and -1 behind them where there
/// are fewer keys than entries.
void draw_chosen(const Layer& layer, std::uint64_t seed, std::span<double> values) {
  std::mt19937_64 random(seed);
  const auto top = static_cast<std::size_t>(layer.top);
  for (std::size_t first = 0; first < values.size(); first += top) {
    const auto list = values.subspan(first, top);
    // A key of each of as many equal parts of all keys as there are entries.
    const std::int64_t count = std::min(layer.top, layer.usual_kv());
    std::fill(list.begin(), list.end(), -1.0);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t begin = layer.usual_kv() * i / count,
                         end = layer.usual_kv() * (i + 1) / count;
      list[static_cast<std::size_t>(i)] = static_cast<double>(
          begin + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end - begin)));
    }
  }
}

TensorSpec cache_of(const Layer& layer) {
  const std::int64_t keys = layer.keys_of_block();
  TensorSpec spec{"cache", layer.dtype, {layer.blocks(), keys, layer.row}, Role::input, 1};
  if (layer.block != keys * layer.row) spec.shape = {layer.blocks(), layer.block};
  spec.behind = layer.block - (keys - 1) * layer.row - layer.width();
  return spec;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  std::vector<TensorSpec> tensors;
  const auto add = [&](TensorSpec spec) -> TensorSpec& {
    return tensors.emplace_back(std::move(spec));
  };
  const auto rows = [&](const char* name, Role role, std::int64_t features) -> TensorSpec& {
    return add({name, layer.dtype, {layer.b, layer.s, layer.heads, features}, role, 1});
  };
  rows("q_latent", Role::input, layer.rank);
  if (layer.rope > 0) rows("q_rope", Role::input, layer.rope);
  add(cache_of(layer));
  if (layer.page > 0)
    add({"pages", DType::i32, {layer.b, layer.pages_of_sequence()}}).draw =
        [count = layer.pages](std::uint64_t seed, std::span<double> values) {
          attention::draw_pages(seed, count, values);
        };
  if (layer.top > 0)
    add({"chosen", DType::i32, {layer.b, layer.s, layer.top}}).draw =
        [layer](std::uint64_t seed, std::span<double> values) { draw_chosen(layer, seed, values); };
  if (layer.lengths)
    add({"lengths", DType::i32, {layer.b}}).draw = [most = layer.usual_kv()](
                                                       std::uint64_t, std::span<double> values) {
      attention::draw_lengths(most, values);
    };
  // Rows are averages over as many keys as there are for them. Few features may all cancel: a
  // token's heads count together then, or all rows.
  const std::int64_t row = layer.heads * layer.rank;
  rows("out", Role::output, layer.rank).alike = layer.rank > 4 ? layer.rank : row >= 8 ? row : 0;
  if (layer.lse) add({"lse", DType::f32, {layer.b, layer.heads, layer.s}, Role::output, 1});
  return tensors;
}

void complete(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  // Only features are read, of the keys that sequences have at most, or that lists have.
  std::int64_t keys = layer.b * layer.usual_kv();
  if (layer.top > 0) keys = std::min(keys, saturated_product(layer.b * layer.s, layer.top));
  const double read =
      static_cast<double>(std::min(layer.blocks() * layer.keys_of_block(), keys) * layer.width());
  stage.bytes -= (static_cast<double>(layer.blocks() * layer.block) - read) *
                 static_cast<double>(dtype_bytes(layer.dtype));
  double pairs = 0;
  for (std::int64_t i = 0; i < layer.s; ++i) {
    const std::int64_t visible = layer.visible(i * layer.heads, layer.usual_kv());
    pairs += static_cast<double>(layer.top > 0 ? std::min(layer.top, visible) : visible);
  }
  pairs *= static_cast<double>(layer.b * layer.heads);
  stage.reduction_length = layer.width() + (layer.top > 0 ? layer.top : layer.kv);
  // Weights for the tensor cores. Those of heads of few features have no second moment: one may
  // outweigh all others.
  stage.inner_roundings = layer.dtype == DType::f32 ? 0 : 1;
  stage.inner_values = layer.width() <= 4 ? 1 : pairs;
  stage.flops = 2 * pairs * static_cast<double>(layer.width() + layer.rank);
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.page == 0 && problem.sizes.contains("pages"))
    return "pages without page: the cache is contiguous";
  if (layer.top > 0 && layer.b * layer.s > most_lists)
    return fmt::format("b={} and s={} exceed {} lists", layer.b, layer.s, most_lists);
  if (layer.row < layer.width())
    return fmt::format("kv-row={} is less than rank + rope = {}", layer.row, layer.width());
  const std::int64_t least = (layer.keys_of_block() - 1) * layer.row + layer.width();
  if (layer.block < least)
    return fmt::format("kv-block={} is less than the {} elements of {} keys", layer.block, least,
                       layer.keys_of_block());
  return "";
}

std::vector<KnownModel> models() {
  const auto model = [](const char* name, std::int64_t heads, std::int64_t rank,
                        const char* scale) {
    return KnownModel{name, {{"heads", heads}, {"rank", rank}, {"rope", 64}}, {{"scale", scale}}};
  };
  // Sparse attention.
  const auto sparse = [&](const char* name, std::int64_t heads, const char* scale) {
    KnownModel made = model(name, heads, 512, scale);
    made.sizes["top"] = 2048;
    return made;
  };
  return {model("deepseek-v2-lite", 16, 512, "0.11472"), model("deepseek-v3", 128, 512, "0.13523"),
          sparse("deepseek-v3.2", 128, "0.13523"),       model("kimi-k2", 64, 512, "0.13086"),
          model("glm-4.7-flash", 20, 512, "0.0625"),     sparse("glm-5", 64, "0.0625"),
          model("mistral-small-4", 32, 256, "0.19497")};
}

OpFacts facts() {
  return {
      .name = "mla",
      .summary =
          "latent attention over a cache: out = softmax(scale * [q_latent, q_rope] cache^T) latent",
      .passes = {"fwd"},
      .sizes = {token_count("b", "sequences", {1, 16, 64, 128}, {1, 8}, 65536, 16),
                attention::queries_size(most_queries),
                attention::keys_size(most_tokens, 4096),
                {.name = "heads", .help = "heads of queries", .max = most_heads, .example = 16},
                {.name = "rank",
                 .help = "latent features of a row of the cache, its key and value",
                 .max = most_rank,
                 .example = 512},
                rare_size("rope", "rotated features behind them; none if left out", most_rope, 64),
                attention::page_size("keys of a page of the cache", most_tokens),
                attention::pages_size(most_tokens),
                rare_size("kv-row",
                          "elements of the cache from a key to the next; rank + rope if left out",
                          most_stride, 640, usual_row),
                neutral(rare_size(
                    "kv-block",
                    "elements of the cache from a page, or a sequence, to the next; those of its "
                    "rows if left out",
                    most_stride, 1 << 20, usual_block)),
                rare_size("top",
                          "keys of a list that each query has: it sees no others, and entries that "
                          "are no key, such as -1, count as none; no lists if left out",
                          most_tokens, 2048)},
      .options = {attention::lengths_option(),
                  rare_option("lse", "whether the log of the sum of exponentials is written",
                              {"no", "yes"}),
                  rare_number("scale", "factor of the scores; 0: 1 / sqrt(rank + rope)", "0",
                              {0, 1e6})},
      .token_size = "b",
      .rows_are_alike = false,
      .sharded_sizes = {"heads"},
      .known_models = models,
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete, .reference = reference}};
}

}  // namespace

Layer divided_layer_of(const Problem& problem) {
  Layer layer = layer_of(problem);
  if (layer.top == 0) return layer;
  layer.b *= layer.s;
  layer.s = 1;
  layer.kv = layer.top;
  return layer;
}

Layer layer_of(const Problem& problem) {
  Layer layer(problem);
  layer.heads = problem.size("heads");
  layer.rank = problem.size("rank");
  layer.rope = size_or(problem, "rope", 0);
  layer.row = size_or(problem, "kv-row", layer.width());
  layer.block = size_or(problem, "kv-block", layer.keys_of_block() * layer.row);
  layer.top = size_or(problem, "top", 0);
  layer.lse = problem.has("lse", "yes");
  layer.scale = static_cast<float>(number_or_default(mla_op(), problem, "scale"));
  if (layer.scale == 0)
    layer.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(layer.width())));
  layer.dtype = problem.dtype;
  return layer;
}

}  // namespace fftune::mla

const fftune::Op& fftune::mla_op() {
  static const DescribedOp op(mla::facts());
  return op;
}
