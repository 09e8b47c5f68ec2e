// The CUDA family of mla-rope: a block for each token.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/mla_rope/mla_rope.hpp"

namespace fftune::mla_rope {
namespace {

constexpr const char* kernel_file = "mla_rope/rows.cu";

Space space(const Problem&, const DeviceFacts&) {
  return Space().parameter("warps", "warps of a block, which has a token", {2, 4, 8, 16});
}

/// A few tokens need many warps each to fill the device.
Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const bool few = problem.size("m") <= 2 * facts.multiprocessors;
  return {{"warps", few ? std::int64_t{8} : std::int64_t{4}}};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(mla_rope_op().tensors(problem));
  constexpr std::string_view rotations[] = {"none", "halves", "interleaved"};
  Turns turns = turns_of(problem);
  turns.frequencies.resize(static_cast<std::size_t>(layer.pairs()) + 1);
  const int warps = config.get("warps");
  std::vector<Argument> arguments;
  for (const char* name : {"q", "kv", "norm", "positions", "angles", "slots", "cache", "q_rope"})
    arguments.push_back(tensor_or_null(places, name));
  arguments.emplace_back(ArrayArgument{std::move(turns.frequencies)});
  arguments.emplace_back(static_cast<std::int32_t>(layer.positions));
  arguments.emplace_back(turns.scale);
  arguments.emplace_back(static_cast<std::int32_t>(layer.heads));
  arguments.emplace_back(static_cast<std::int32_t>(layer.cache_rows));
  arguments.emplace_back(static_cast<float>(layer.epsilon));
  return pdl_program(
      facts, kernel_file,
      fmt::format("mla_rope<{}, {}>", element_type(layer.dtype),
                  StructText("mla_rope_config", "nope", layer.nope, "rope", layer.rope, "rank",
                             layer.rank, "rotation",
                             fmt::format("fftune::head_rotation::{}",
                                         rotations[static_cast<std::size_t>(layer.rotation)]),
                             "to_halves", layer.to_halves, "warps", warps)),
      {static_cast<std::uint32_t>(layer.m)}, static_cast<std::uint32_t>(32 * warps),
      std::move(arguments));
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const StageFamily family({.name = "mla_rope_rows",
                                   .summary = "a token a block",
                                   .sources = {kernel_file},
                                   .is_fallback = true,
                                   .search = {space, default_config},
                                   .program = program});
  return {&family};
}

}  // namespace fftune::mla_rope
