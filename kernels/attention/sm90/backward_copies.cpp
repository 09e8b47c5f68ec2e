// The backward engine of sm_90a with copies of keys and values: a CTA of it has a block of keys of
// a head and all queries that read it, one head after the other. Where that leaves SMs idle, each
// copy of a head serves a share of its heads of queries, and another launch adds up the copies'
// gradients. These are rounded to the op's dtype first.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/attention/copy_heads.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "registry/part_family.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm90/backward_copies.cu";
constexpr std::int64_t most_copies = 16;
constexpr std::int64_t vector_elements = 8;  // of 16 bytes

/// Copies of a head that serve as many heads of queries each.
std::vector<std::int64_t> copy_choices(const Layer& layer) {
  std::vector<std::int64_t> choices;
  for (std::int64_t copies = 2; copies <= std::min(layer.group(), most_copies); ++copies)
    if (layer.group() % copies == 0) choices.push_back(copies);
  return choices;
}

/// The layer with copies: k, v and their gradients lie one head after the other.
Layer copied(const Layer& layer, std::int64_t copies) {
  Layer own = layer;
  own.kv_heads *= copies;
  own.kv_head = own.v_head = layer.dim;
  own.k_row = own.v_row = own.kv_heads * layer.dim;
  return own;
}

std::optional<std::string> can_implement(const Layer& layer, const DeviceFacts& facts) {
  // Rows of k and v may have any stride: the copies' do not.
  if (auto reason = refuse_sm90(copied(layer, 1), facts)) return reason;
  if (copy_choices(layer).empty())
    return fmt::format("{} heads of queries read a head of keys: no number of 2 to {} divides them",
                       layer.group(), most_copies);
  for (const std::int64_t elements : {layer.dim, layer.kv_head, layer.k_row, layer.v_row})
    if (elements % vector_elements != 0)
      return fmt::format("heads are copied by 16 bytes: {} elements are no multiple of {}",
                         elements, vector_elements);
  return std::nullopt;
}

const SearchSide<Layer>& of_copies() {
  return sm90_backward_engine.search;
}

/// The configuration of the engine that computes the copies' layer.
Config inner_config(const Config& config) {
  Config own;
  for (const auto& [name, value] : config.entries())
    if (name != "copies") own.set(name, value);
  return own;
}

Space space(const Layer& layer, const DeviceFacts& facts) {
  const std::vector<std::int64_t> choices = copy_choices(layer);
  Space space = of_copies().space(copied(layer, choices.back()), facts);
  space.parameter("copies",
                  "copies of each head of k and v, of which each serves a share of its "
                  "heads of queries",
                  choices);
  return space;
}

/// Seconds of the launches that copy and add up.
double seconds_around(const Layer& layer, const DeviceFacts& facts, std::int64_t copies) {
  constexpr double of_launch = 3000, bytes_of_cycle = 13;  // of an SM
  const double bytes = 2.0 * 2.0 * static_cast<double>(layer.kv_tokens() * layer.kv_heads) *
                       static_cast<double>(layer.dim * (1 + copies));
  const double cycles =
      2 * (of_launch + bytes / bytes_of_cycle / static_cast<double>(facts.multiprocessors));
  return cycles / facts.clock_hz;
}

std::optional<double> estimate(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t copies = config.at("copies");
  const auto inner = of_copies().estimate(copied(layer, copies), facts, inner_config(config));
  if (!inner) return std::nullopt;
  return *inner + seconds_around(layer, facts, copies);
}

Config default_config(const Layer& layer, const DeviceFacts& facts) {
  std::optional<std::pair<double, Config>> best;
  for (const std::int64_t copies : copy_choices(layer)) {
    Config config = of_copies().default_config(copied(layer, copies), facts);
    config.set("copies", copies);
    const double seconds = estimate(layer, facts, config).value_or(0);
    if (!best || seconds < best->first) best = {seconds, std::move(config)};
  }
  return std::move(best.value().second);
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const Places at = places_of(problem);
  const std::int64_t copies = config.at("copies"), heads = layer.kv_tokens() * layer.kv_heads;
  Program program;
  const auto scratch = [&] {
    program.scratch.push_back({static_cast<std::size_t>(2 * heads * copies * layer.dim), false});
    return ScratchArgument{program.scratch.size() - 1};
  };
  const ScratchArgument k = scratch(), v = scratch(), dk = scratch(), dv = scratch();
  const auto vectors = [](std::int64_t elements) {
    return static_cast<std::int32_t>(elements / vector_elements);
  };
  constexpr std::int64_t threads = 256;
  const std::int64_t most_blocks = 4 * std::max(facts.multiprocessors, 1);
  const Dim3 grid{static_cast<std::uint32_t>(std::min(
                      quotient_up(heads * layer.dim / vector_elements, threads), most_blocks)),
                  2, 1};
  const auto append = [&](const std::string& expression, std::vector<Argument> arguments) {
    append_pdl_kernel(program, facts, file, expression, grid, threads, std::move(arguments));
  };
  append(fmt::format("attention_backward_copy_heads<{}>", copies),
         {TensorArgument{at.k}, TensorArgument{at.v}, k, v, layer.kv_tokens(),
          static_cast<std::int32_t>(layer.kv_heads), vectors(layer.dim), vectors(layer.k_row),
          vectors(layer.v_row), vectors(layer.kv_head)});

  Problem inner = problem;
  inner.sizes["kv-heads"] = layer.kv_heads * copies;
  for (const char* size : {"k-row", "v-row", "kv-head"}) inner.sizes.erase(size);
  const std::size_t tensors = attention_op().tensors(problem).size();
  std::vector<Pointer> places;
  for (std::size_t i = 0; i < tensors; ++i) places.emplace_back(TensorArgument{i});
  places.at(at.k) = k, places.at(at.v) = v, places.at(at.dk) = dk, places.at(at.dv) = dv;
  append_moved(program, sm90_backward_engine.program(inner, facts, inner_config(config)), places,
               tensors);

  append(fmt::format("attention_backward_sum_copies<{}, {}>", element_type(layer.dtype), copies),
         {dk, dv, TensorArgument{at.dk}, TensorArgument{at.dv}, heads,
          static_cast<std::int32_t>(layer.dim)});
  return program;
}

}  // namespace

constinit const Engine sm90_backward_copies_engine{
    .name = "attention_bwd_sm90_copies",
    .summary = "TMA and wgmma, copies of keys and values for shares of the heads of queries",
    .backward = true,
    .can_implement = can_implement,
    .search = {space, default_config, estimate},
    .program = program,
    .sources = {file, "attention/sm90/backward.cu", copy_heads_source}};

}  // namespace fftune::attention
