// The CUDA families of indexer: scores by mma.sync, and the fallback; both choose alike.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/element.hpp"
#include "kernels/indexer/families.hpp"
#include "kernels/indexer/indexer.hpp"
#include "kernels/indexer/params.cuh"

namespace fftune::indexer {
namespace {

constexpr const char *scores_file = "indexer/scores.cu", *choose_file = "indexer/choose.cu";
constexpr std::int64_t most_blocks = 65535;                    // of the grid's y and z
constexpr std::int64_t static_bytes = std::int64_t{10} << 10;  // of the choice, and the driver's

indexer_form form_of(const Layer& layer) {
  return {.type = element_of(layer.dtype),
          .heads = static_cast<int>(layer.heads),
          .dim = static_cast<int>(layer.dim),
          .lengths = layer.lengths,
          .e4m3 = layer.e4m3,
          .paged = layer.page > 0};
}

std::string template_argument(const indexer_form& form) {
  return StructText("indexer_form", "type", element_text(form.type), "heads", form.heads, "dim",
                    form.dim)
      .flags("lengths", form.lengths, "e4m3", form.e4m3, "paged", form.paged);
}

ParameterStruct parameters_of(const Problem& problem, const Layer& layer) {
  using Params = indexer_params;
  const TensorPlaces places(indexer_op().tensors(problem));
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(places, &Params::q, "q", &Params::weights, "weights", &Params::k, "k",
                     &Params::k_scale, "k_scale", &Params::pages, "pages", &Params::lengths,
                     "lengths", &Params::scores, "scores", &Params::ids, "ids");
  fields.set(&Params::batch, layer.b, &Params::queries, layer.s, &Params::kv_len, layer.kv,
             &Params::top, layer.top, &Params::k_block, layer.k_block, &Params::scale_block,
             layer.scale_block, &Params::page, layer.page, &Params::page_count, layer.pages);
  return parameters;
}

/// Scores that a CTA can hold in shared memory.
std::int64_t most_held(const DeviceFacts& facts) {
  return (facts.shared_bytes_per_block - static_bytes) / 4;
}

void add_choice(Space& space, const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t most = std::min(layer.kv, most_held(facts));
  std::vector<std::int64_t> held{0};
  for (const std::int64_t value : {4096, 8192, 16384, 24576, 32768, 49152})
    if (value < most) held.push_back(value);
  held.push_back(most);
  space.parameter("choose_threads", "threads that choose the keys of a query", {256, 512, 1024})
      .parameter("held", "scores of a query that shared memory holds while its keys are chosen",
                 held);
}

/// More threads for the few queries of decoding; as many scores as fit.
void add_default_choice(Config& config, const Layer& layer, const DeviceFacts& facts) {
  const bool few = layer.b * layer.s <= 2 * facts.multiprocessors;
  config.set("choose_threads", few || layer.kv > 16384 ? 1024 : 512);
  config.set("held", std::min(layer.kv, most_held(facts)));
}

void append_choice(Program& program, const Layer& layer, const DeviceFacts& facts,
                   const Config& config, ParameterStruct parameters) {
  const std::int64_t held = config.at("held");
  ParameterFields<indexer_params>(parameters).set(&indexer_params::held, held);
  const std::int64_t blocks = std::min<std::int64_t>(layer.b * layer.s, std::int64_t{1} << 30);
  auto& launch = append_pdl_kernel(
      program, facts, choose_file,
      fmt::format("indexer_choose<{}, {}>", layer.lengths, config.at("choose_threads")),
      {static_cast<std::uint32_t>(blocks), 1, 1},
      static_cast<std::uint32_t>(config.at("choose_threads")), {});
  launch.parameters = std::move(parameters);
  launch.shared_bytes = static_cast<std::uint32_t>(held * 4);
}

// --- mma.sync ---

indexer_config config_of(const Config& config) {
  return {.warps = config.get("warps"), .m_tiles = config.get("m_tiles")};
}

std::optional<std::string> refuse_mma(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (layer.dtype == DType::f32) return "mma.sync multiplies bf16 and fp16, not f32";
  if (layer.dim % 8 != 0)
    return fmt::format("dim={} is no multiple of 8: rows are loaded in 16 bytes", layer.dim);
  if (layer.k_block % 8 != 0)
    return fmt::format("k-block={} is no multiple of 8: rows are loaded in 16 bytes",
                       layer.k_block);
  if (layer.dim > 512) return fmt::format("dim={} exceeds 512", layer.dim);
  const indexer_form form = form_of(layer);
  if (indexer_config::shared_bytes(form) > facts.shared_bytes_per_block)
    return fmt::format("two queries of {} heads of {} features exceed the shared memory of a CTA",
                       layer.heads, layer.dim);
  return std::nullopt;
}

std::vector<std::int64_t> query_parts(const Layer& layer) {
  std::vector<std::int64_t> values;
  for (std::int64_t value = 1; value <= 1024; value *= 2) {
    if (quotient_up(layer.s, value) > most_blocks) continue;
    values.push_back(value);
    if (value >= layer.s) break;
  }
  return values;
}

Space mma_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const indexer_form form = form_of(layer);
  Space space;
  space.parameter("warps", "warps of a CTA", {2, 4, 8})
      .parameter("m_tiles", "tiles of 16 keys of a warp", {1, 2})
      .parameter("queries", "queries that a CTA computes for its keys", query_parts(layer))
      .constraint("the keys of a thread must fit in 128 registers",
                  [form](const Config& config) {
                    return indexer_config{.m_tiles = config.get("m_tiles")}.key_registers(form) <=
                           128;
                  },
                  {"m_tiles"});
  add_choice(space, layer, facts);
  return space;
}

Config mma_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const indexer_form form = form_of(layer);
  const std::int64_t sms = facts.multiprocessors;
  const auto ctas = [&](const indexer_config& config, std::int64_t queries) {
    return quotient_up(layer.kv, config.keys()) * layer.b * quotient_up(layer.s, queries);
  };
  // The largest tile of keys that leaves every SM two CTAs: each tile reads all queries.
  indexer_config tile{.warps = 2, .m_tiles = 1};
  for (const indexer_config next : {indexer_config{2, 2}, {4, 2}, {8, 2}})
    if (next.key_registers(form) <= 64 && ctas(next, 1) >= 2 * sms) tile = next;
  std::int64_t queries = 0;
  for (const std::int64_t value : query_parts(layer))
    if (queries == 0 || (value <= 128 && ctas(tile, value) >= 4 * sms)) queries = value;
  Config config{{"warps", tile.warps}, {"m_tiles", tile.m_tiles}, {"queries", queries}};
  add_default_choice(config, layer, facts);
  return config;
}

Program mma_program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const Layer layer = layer_of(problem);
  const indexer_form form = form_of(layer);
  const indexer_config config = config_of(values);
  const std::int64_t queries = values.at("queries");
  ParameterStruct parameters = parameters_of(problem, layer);
  ParameterFields<indexer_params>(parameters).set(&indexer_params::queries_of_cta, queries);
  Program program;
  auto& launch =
      append_pdl_kernel(program, facts, scores_file,
                        fmt::format("indexer_scores<{}, {}>", template_argument(form),
                                    std::string(StructText("indexer_config", "warps", config.warps,
                                                           "m_tiles", config.m_tiles))),
                        {static_cast<std::uint32_t>(quotient_up(layer.kv, config.keys())),
                         static_cast<std::uint32_t>(quotient_up(layer.s, queries)),
                         static_cast<std::uint32_t>(layer.b)},
                        static_cast<std::uint32_t>(config.threads()), {});
  launch.parameters = parameters;
  launch.shared_bytes = static_cast<std::uint32_t>(indexer_config::shared_bytes(form));
  append_choice(program, layer, facts, values, parameters);
  return program;
}

// --- The fallback ---

Space simple_space(const Problem& problem, const DeviceFacts& facts) {
  Space space;
  add_choice(space, layer_of(problem), facts);
  return space;
}

Config simple_default(const Problem& problem, const DeviceFacts& facts) {
  Config config;
  add_default_choice(config, layer_of(problem), facts);
  return config;
}

Program simple_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const ParameterStruct parameters = parameters_of(problem, layer);
  Program program;
  auto& launch =
      append_pdl_kernel(program, facts, scores_file,
                        fmt::format("indexer_simple<{}>", template_argument(form_of(layer))),
                        {static_cast<std::uint32_t>(quotient_up(layer.kv, 128)),
                         static_cast<std::uint32_t>(std::min(layer.b * layer.s, most_blocks)), 1},
                        128, {});
  launch.parameters = parameters;
  append_choice(program, layer, facts, config, parameters);
  return program;
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const std::vector<IndexerFamily> families{
      IndexerFamily({.name = "indexer_mma",
                     .summary = "scores by mma.sync, keys in registers; radix selection",
                     .sources = {scores_file, choose_file},
                     .refusal = refuse_mma,
                     .search = {mma_space, mma_default},
                     .program = mma_program}),
      IndexerFamily({.name = "indexer_simple",
                     .summary = "a thread for each key; radix selection",
                     .sources = {scores_file, choose_file},
                     .is_fallback = true,
                     .search = {simple_space, simple_default},
                     .program = simple_program})};
  return addresses_of(families);
}

}  // namespace fftune::indexer
