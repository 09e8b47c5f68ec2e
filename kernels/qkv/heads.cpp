// The CUDA family of the stage heads: norms, RoPE and caches of heads that the product has
// written to memory.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::qkv {
namespace {

constexpr const char* kernel_file = "qkv/heads.cu";

std::string_view norm_name(const Layer& layer) {
  constexpr std::string_view names[] = {"none", "head", "rows", "centred"};
  return names[static_cast<std::size_t>(layer.norm)];
}

std::string_view raw_name(const Layer& layer) {
  return layer.grouped ? "grouped" : layer.joined() ? "joined" : layer.gates ? "gated" : "apart";
}

Space space(const Problem&, const DeviceFacts&) {
  return Space().parameter("warps", "warps of a block, each with a head at a time", {2, 4, 8, 16});
}

/// A few tokens need a warp for every head; many fill the device with small blocks.
Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const bool few = problem.size("m") <= 2 * facts.multiprocessors;
  return {{"warps", few ? std::int64_t{16} : std::int64_t{4}}};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(qkv_op().tensors(problem));
  constexpr std::string_view rotations[] = {"none", "halves", "interleaved"};
  const std::int64_t rotary = layer.rotates() ? layer.rotary : 0;
  Turns turns = turns_of(problem);
  turns.frequencies.resize(static_cast<std::size_t>(rotary / 2) + 1);
  std::vector<Argument> arguments;
  const auto add = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) arguments.push_back(tensor_or_null(places, name));
  };
  if (layer.joined())
    add({"qkv_raw", "", ""});
  else
    add({"q_raw", "k_raw", "v_raw"});
  add({"q"});
  if (layer.cache)
    add({"k_cache", "v_cache"});
  else
    add({"k", "v"});
  add({"q_norm", "k_norm", "q_norm_bias", "k_norm_bias", "slots", "positions", "angles"});
  arguments.emplace_back(ArrayArgument{std::move(turns.frequencies)});
  arguments.emplace_back(static_cast<std::int32_t>(layer.positions));
  arguments.emplace_back(turns.scale);
  for (const std::int64_t size : {layer.heads, layer.kv_heads, layer.cache_rows, layer.cache_head})
    arguments.emplace_back(static_cast<std::int32_t>(size));
  for (const double number : {layer.epsilon, layer.norm_offset})
    arguments.emplace_back(static_cast<float>(number));
  const bool e4m3 = layer.cache_format.e4m3;
  if (e4m3 || layer.gates) add({"k_scale", "v_scale"});
  if (layer.gates) add({"gates"});
  const int warps = config.get("warps");
  return pdl_program(
      facts, kernel_file,
      fmt::format(
          "finish_heads{}<{}, {}>",
          layer.gates ? "_gated"
          : e4m3      ? "_e4m3"
                      : "",
          element_type(layer.dtype),
          StructText("heads_config", "dim", layer.dim, "rotary", rotary, "rotation",
                     fmt::format("fftune::head_rotation::{}",
                                 rotations[static_cast<std::size_t>(layer.rotation)]),
                     "norm", fmt::format("fftune::head_norm::{}", norm_name(layer)), "norm_last",
                     layer.norm_last, "raw", fmt::format("fftune::raw_heads::{}", raw_name(layer)),
                     "caches", layer.cache, "wide_slots", layer.wide_slots, "warps", warps)
              .flags("e4m3", e4m3, "scale_of_head", layer.cache_format.scale_of_head, "v_norm",
                     layer.v_norm)),
      {static_cast<std::uint32_t>(layer.m),
       layer.gates ? 4u : static_cast<std::uint32_t>(layer.parts())},
      static_cast<std::uint32_t>(32 * warps), std::move(arguments));
}

}  // namespace

std::optional<std::string> refuse_finished_heads(const Problem& problem, const DeviceFacts&) {
  if (layer_of(problem).in_two_stages()) return std::nullopt;
  return "the product's epilogue finishes the heads";
}

const Family& heads_family() {
  static const StageFamily family(
      {.name = "heads_rows",
       .summary = "a token's heads of q, of k or of v a block, a head a warp",
       .stage = stage_heads,
       .sources = {kernel_file},
       .is_fallback = true,
       .refusal = refuse_finished_heads,
       .search = {space, default_config},
       .program = program});
  return family;
}

}  // namespace fftune::qkv
