// mla-rope: its fields, tensors and test data.
#include "kernels/mla_rope/mla_rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kernels/mla/mla.hpp"

namespace fftune::mla_rope {
namespace {

constexpr std::int64_t most_heads = 1024;
constexpr std::int64_t most_nope = 512;

std::optional<std::int64_t> table_positions(const Problem& problem) {
  if (problem.has("rotation", "none") || problem.options.contains("angles")) return std::nullopt;
  return rope::usual_positions;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  const DType dtype = layer.dtype;
  std::vector<TensorSpec> tensors{
      {"q", dtype, {layer.m, layer.heads, layer.nope + layer.rope}, Role::input, 1},
      {"kv", dtype, {layer.m, layer.width()}, Role::input, 1},
      {"norm", dtype, {layer.rank}, Role::input, 1}};
  if (layer.rotates()) append(tensors, rope::angle_tensors(layer.rotated(), layer.m));
  tensors.push_back({"cache", dtype, {layer.cache_rows, layer.width()}, Role::updated, 1});
  tensors.push_back(rope::slots_tensor(DType::i32, layer.m, layer.cache_rows));
  tensors.push_back({"q_rope", dtype, {layer.m, layer.heads, layer.rope}, Role::output, 1});
  return tensors;
}

void complete(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  // Neither the rest of q nor rows of the cache that nobody writes.
  const auto elements = static_cast<double>(layer.m * layer.heads * layer.nope +
                                            2 * layer.cache_rows * layer.width()) -
                        static_cast<double>(std::min(layer.m, layer.cache_rows) * layer.width());
  stage.bytes -= elements * static_cast<double>(dtype_bytes(layer.dtype));
  stage.flops =
      static_cast<double>(layer.m) *
      static_cast<double>(3 * (layer.heads + 1) * layer.rope * layer.rotates() + 4 * layer.rank);
  stage.reduction_length = layer.rank;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.rotates() && layer.rope % 2 != 0)
    return fmt::format("rope={} is odd: features are rotated in pairs", layer.rope);
  if (layer.to_halves && layer.rotation != Rotation::interleaved)
    return "rope-order=halves is of rotation=interleaved: other pairs are in that order already";
  if (problem.sizes.contains("positions") && !(layer.rotates() && layer.table))
    return "positions are those of a table of angles: there is none";
  return layer.rotates() ? rope::contradiction_of_angles(mla_rope_op(), problem) : "";
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields{
      {"rotation",
       "RoPE of q and of the key: pairs rope/2 apart, neighbours, or none",
       {"halves", "interleaved", "none"}},
      rare_option("rope-order",
                  "neighbours that were rotated: where they were, or the first of each pair before "
                  "the second, as in transformers' DeepSeek-V3",
                  {"same", "halves"}),
      rare_number("eps", "added to the norm's mean square", "1e-06", {0, 1})};
  append(fields, rope::angle_options());
  return fields;
}

OpFacts facts() {
  return {
      .name = "mla-rope",
      .summary =
          "in front of latent attention: RoPE of queries and key, norm of the latent, into a cache",
      .passes = {"fwd"},
      .sizes = {row_tokens(),
                {.name = "heads", .help = "heads of q", .max = most_heads, .example = 16},
                {.name = "nope",
                 .help = "features of a head of q that are not rotated",
                 .max = most_nope,
                 .example = 128},
                {.name = "rope",
                 .help = "features behind them, and of the key",
                 .max = mla::most_rope,
                 .example = 64},
                {.name = "rank", .help = "latent features", .max = mla::most_rank, .example = 512},
                rope::positions_size("4096", table_positions),
                rope::cache_slots_size("the cache", same_as("m"))},
      .options = option_fields(),
      .rows_are_alike = false,
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete, .reference = reference}};
}

}  // namespace

Turns turns_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return layer.rotates() ? rope::turns_of(problem, layer.rotated()) : Turns{};
}

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(problem, {{"m", &Layer::m},
                                         {"heads", &Layer::heads},
                                         {"nope", &Layer::nope},
                                         {"rope", &Layer::rope},
                                         {"rank", &Layer::rank}});
  layer.positions = size_or(problem, "positions", rope::usual_positions);
  layer.cache_rows = size_or(problem, "cache-slots", layer.m);
  layer.epsilon = number_or_default(mla_rope_op(), problem, "eps");
  layer.rotation = problem.has("rotation", "none")          ? Rotation::none
                   : problem.has("rotation", "interleaved") ? Rotation::interleaved
                                                            : Rotation::halves;
  layer.to_halves = problem.has("rope-order", "halves");
  layer.table = !problem.options.contains("angles") || problem.has("angles", "table");
  layer.dtype = problem.dtype;
  return layer;
}

}  // namespace fftune::mla_rope

const fftune::Op& fftune::mla_rope_op() {
  static const DescribedOp op(mla_rope::facts());
  return op;
}
