// The decode engine, host side: a few queries of each sequence against its long cache.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "kernels/attention/decode/config.cuh"
#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/decode/decode.cu";
constexpr std::int64_t most_queries = 16;  // of a sequence
constexpr std::string_view name = "attention_decode";

attention_decode_config config_of(const Config& config) {
  return {.warps = config.get("warps"),
          .slice = config.get("slice"),
          .stages = config.get("stages"),
          .m_tiles = config.get("m_tiles"),
          .ctas_per_sm = config.get("ctas_per_sm"),
          .prefetch = config.get("l2_prefetch")};
}

std::string template_argument(const attention_decode_config& config) {
  return StructText("attention_decode_config", "warps", config.warps, "slice", config.slice,
                    "stages", config.stages, "m_tiles", config.m_tiles, "ctas_per_sm",
                    config.ctas_per_sm, "prefetch", config.prefetch);
}

bool same_lengths(const Layer& layer) {
  return !layer.lengths;
}

/// Keys of a sequence that are read: none before the window.
std::int64_t keys_read(const Layer& layer) {
  return layer.window > 0 ? std::min(layer.kv, layer.window + layer.s) : layer.kv;
}

attention_decode_grid grid_of(const Layer& layer, const DeviceFacts& facts,
                              const attention_decode_config& config) {
  const auto small = [](std::int64_t value) { return static_cast<int>(value); };
  return attention_decode_grid_of(
      config, facts.multiprocessors, small(layer.b), small(layer.kv_heads),
      attention_decode_row_blocks(config, small(layer.group()), small(layer.s)),
      small(keys_read(layer)), same_lengths(layer));
}

/// Whether several groups share a sequence.
bool cuts_sequences(const Layer& layer, const attention_decode_grid& grid) {
  return !same_lengths(layer) || layer.b % grid.groups != 0;
}

/// Whether each group has whole sequences, or each sequence whole groups.
bool divides_evenly(const Layer& layer, std::int64_t groups) {
  return layer.b % groups == 0 || groups % layer.b == 0;
}

/// Round trips to L2 for partial results of the groups that share a sequence. A thread loads those
/// of 8 groups at once, 4 where it has fewer registers (decode.cu).
double round_trips(const Layer& layer, const attention_decode_config& config,
                   const attention_decode_grid& grid) {
  const std::int64_t groups = grid.groups, threads = config.threads();
  const std::int64_t rows = std::min<std::int64_t>(layer.group() * layer.s, config.rows());
  const std::int64_t quads = rows * ceil_div<std::int64_t>(layer.dim, 4);
  const std::int64_t others = ceil_div(groups, layer.b) - (divides_evenly(layer, groups) ? 1 : 0);
  const std::int64_t at_once = threads * config.ctas_per_sm > 256 ? 4 : 8;
  return static_cast<double>(ceil_div(quads, threads) * ceil_div(others, at_once));
}

/// Seconds of a launch: the cache at the speed of the memory, the ends of the sequences of a CTA,
/// and adding up the sequences that several CTAs share. The constants are fitted to the times of
/// 960 variants of 80 problems on an H200 and an H100: what this takes is 1.4% slower than the
/// fastest of a problem in the mean, and 9% at most (tests/landscapes/default_test.cpp).
double seconds(const Layer& layer, const DeviceFacts& facts, const attention_form& form,
               const attention_decode_config& config) {
  const attention_decode_plan plan = attention_decode_plan_of(form, config);
  const attention_decode_grid grid = grid_of(layer, facts, config);
  const std::int64_t keys = keys_read(layer);
  const int row_blocks = attention_decode_row_blocks(config, static_cast<int>(layer.group()),
                                                     static_cast<int>(layer.s));
  const auto bytes =
      static_cast<double>(4 * layer.b * layer.kv_heads * keys * attention_kv_words(form));
  // Memory delivers at full speed with some 64 KiB of each SM in flight, and at a ninth less with
  // half of that. Warps wait for each other's arithmetic if there are few, and several CTAs of an
  // SM read from more places at once.
  const double in_flight =
      2.0 * config.ctas_per_sm * config.warps * (config.stages - 1) * plan.slice_bytes;
  const double halvings = std::log2(8.0 / std::min(8, config.warps * config.ctas_per_sm));
  const double speed = 0.9 * facts.memory_bandwidth *
                       std::pow(std::min(1.0, in_flight / (64 * 1024)), 0.17) /
                       (1 + 0.011 * std::pow(halvings, 3)) / (1 + 0.01 * (config.ctas_per_sm - 1));
  // Another block of rows finds most in L2.
  const double reads = 1 + 0.3 * (row_blocks - 1);
  // The group with most tiles.
  const double tiles = std::ceil(static_cast<double>(keys) / config.tile()) *
                       static_cast<double>(layer.b) / grid.groups;
  const double uneven = std::pow(std::ceil(tiles) / tiles, 1.4);
  const auto ctas = static_cast<double>(facts.multiprocessors * config.ctas_per_sm);
  const double idle = std::max(1.0, 0.95 * ctas / (grid.heads * grid.groups));
  const double stream = reads * bytes / speed * uneven * idle;
  // At the end of a sequence a CTA waits for its warps, and then for the next queries: loads of its
  // keys go on meanwhile, and hide that where it has many. A sequence that is cut ends twice.
  constexpr double end = 1.7e-6, hides = 1.7;
  const double ends = std::max(1.0, static_cast<double>(layer.b) / grid.groups) +
                      (divides_evenly(layer, grid.groups) ? 0 : 0.5);
  const double sequences =
      ends * std::pow(std::pow(stream / ends, hides) + std::pow(end, hides), 1 / hides) +
      4e-9 * tiles;  // the larger tile where nothing else tells
  const double fill = 0.35 * in_flight * facts.multiprocessors / facts.memory_bandwidth;
  // Alone, a launch has nothing to prefetch beneath, and much of its prefetch arrives twice. A
  // search in place finds the gain behind another kernel.
  const double asked_twice = 0.4 * config.prefetch * 1024.0 * ctas / speed;
  // In a layer few warps fall behind the next launches', which begin meanwhile: with 4 instead of 8
  // one token took 65 us instead of 55 in a layer of OLMo-2-1B, and alone hardly longer.
  const double crowded = 1e-6 * halvings;
  return sequences + fill + crowded + 1.9e-6 + 2e-6 * round_trips(layer, config, grid) +
         asked_twice;
}

TypedSpace<attention_decode_config> configs_of(const Layer& layer, const DeviceFacts& facts) {
  using Point = attention_decode_config;
  using Points = TypedSpace<Point>;
  const attention_form form = form_of(layer);
  const std::vector<std::int64_t> slices{16, 32}, e4m3_slices{32, 64};
  // Bulk prefetches are of whole 16 bytes.
  const bool can_prefetch = facts.compute_capability >= 90 && same_lengths(layer) &&
                            layer.page == 0 && attention_kv_words(form) % 8 == 0;
  Points space{Point()};
  space
      .parameter("warps", "warps of a CTA, each with a slice of the keys",
                 Points::to<&Point::warps>, {2, 4, 8})
      .parameter("slice", "keys of a warp in a stage", Points::to<&Point::slice>,
                 form.e4m3 ? e4m3_slices : slices)
      .parameter("stages", "slices of keys, and as many of values, of each warp in shared memory",
                 Points::to<&Point::stages>, {2, 3, 4, 6, 8})
      .parameter("m_tiles", "tiles of 16 rows, queries times the heads that share keys, of a CTA",
                 Points::to<&Point::m_tiles>, {1, 2})
      .parameter("ctas_per_sm", "CTAs that share an SM", Points::to<&Point::ctas_per_sm>,
                 {1, 2, 3, 4})
      .parameter("l2_prefetch",
                 "KiB of a CTA's first keys and values that are prefetched to L2 before "
                 "griddepcontrol.wait",
                 Points::to<&Point::prefetch>, {0, 32, 64, 128, 256})
      .when_absent(0);
  const Points::Names all{"warps", "slice", "stages", "m_tiles", "ctas_per_sm", "l2_prefetch"};
  space.constraint("the rows of queries must fit in a slice, and their accumulators in registers",
                   all,
                   [form](const Point& c) { return attention_decode_refusal(form, c) == nullptr; });
  space.constraint(
      "more than half of the rows would be padding", {"m_tiles"},
      [rows = layer.group() * layer.s](const Point& c) { return c.m_tiles == 1 || rows > 16; });
  space.constraint("an SM has 65,536 registers, and a thread needs some 80 and its accumulators",
                   {"warps", "m_tiles", "ctas_per_sm"}, [form](const Point& c) {
                     const std::int64_t needed =
                         80 + std::int64_t{c.m_tiles} * attention_padded_dim(form.dim) / 2;
                     return c.ctas_per_sm * c.warps * 32 * needed <= 65536;
                   });
  space.constraint("the stages of an SM's CTAs must fit in its shared memory", all,
                   [form, facts](const Point& c) {
                     return fits_shared_memory(
                         facts, attention_decode_plan_of(form, c).shared_bytes, c.ctas_per_sm);
                   });
  space.constraint(
      "the L2 prefetch needs programmatic dependent launch, contiguous keys in rows of whole 16 "
      "bytes, and one length of all sequences",
      {"l2_prefetch"}, [can_prefetch](const Point& c) { return c.prefetch == 0 || can_prefetch; });
  return space;
}

Space space(const Layer& layer, const DeviceFacts& facts) {
  return configs_of(layer, facts).space();
}

std::optional<std::string> can_implement(const Layer& layer, const DeviceFacts& facts) {
  if (layer.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
  if (auto reason = refuse_other_values(layer)) return reason;
  if (layer.layout == Layout::thd) return "every sequence has the same number of queries: no thd";
  if (layer.s > most_queries)
    return fmt::format("it takes up to {} queries of a sequence, not s={}", most_queries, layer.s);
  if (layer.masked()) return "it takes no mask in memory: the visible keys must be a range";
  if (layer.bias) return "it adds no bias";
  if (auto reason = misaligned_rows(layer)) return reason;
  if (!configs_of(layer, facts).is_empty()) return std::nullopt;
  return fmt::format("rows of dim={} do not fit in the registers and shared memory of {}",
                     layer.dim, facts.name);
}

std::optional<double> estimate(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  if (facts.memory_bandwidth <= 0) return std::nullopt;
  return seconds(layer, facts, form_of(layer), config_of(config));
}

Config default_config(const Layer& layer, const DeviceFacts& facts) {
  return least_cost(space(layer, facts), name, [&](const Config& config) {
    return seconds(layer, facts, form_of(layer), config_of(config));
  });
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const attention_decode_config config = config_of(values);
  Program program;
  Launch launch = forward_launch(program, problem, facts);
  const Layer& layer = launch.layer();
  const attention_form form = form_of(layer);
  const attention_decode_grid grid = grid_of(layer, facts, config);
  const bool cuts = cuts_sequences(layer, grid);
  launch.attention().set(&attention_params::partials,
                         launch.scratch(cuts ? grid.partial_bytes(form, config) : 0));
  launch.append(
      file,
      fmt::format("attention_decode{}<{}, {}>", form.e4m3 ? "_e4m3" : "",
                  attention::template_argument(form), template_argument(config)),
      {static_cast<std::uint32_t>(grid.heads), static_cast<std::uint32_t>(grid.groups), 1},
      config.threads(), attention_decode_plan_of(form, config).shared_bytes);
  return program;
}

}  // namespace

constinit const Engine decode_engine{
    .name = name,
    .summary = "mma.sync, the keys of all sequences divided among the SMs",
    .can_implement = can_implement,
    .search = {space, default_config, estimate},
    .program = program,
    .sources = {file}};

}  // namespace fftune::attention
