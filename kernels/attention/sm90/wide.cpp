// The forward engine of sm_90a for heads of more than 256 features, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/attention/copy_heads.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/attention/sm90/forward.hpp"
#include "kernels/attention/sm90/params.cuh"
#include "kernels/attention/sm90/tile_search.hpp"
#include "kernels/common/cuda_kernel.hpp"

namespace fftune::attention {
namespace {

/// A configuration: the kernel's template argument, and its run-time argument.
struct WideTile : attention_sm90_config {
  std::int64_t heads_of_keys;  // heads of q that share a head of k and v
  std::int64_t group = 1;

  explicit WideTile(const Layer& layer) : heads_of_keys(layer.group()) {
    mma_warpgroups = 2;
    bn = 64;
  }
  WideTile(const Layer& layer, const Config& config) : WideTile(layer) {
    stages = config.get("stages");
    ordered = config.at("ordered") != 0;
    pack(config.at("pack_heads"));
    divide(config.at("chunk"));
    group = config.at("group");
  }
  void divide(std::int64_t keys) {
    chunk = static_cast<int>(keys);
    divided = keys > 0;
  }
  void pack(std::int64_t value) { packed_heads = value != 0 ? static_cast<int>(heads_of_keys) : 1; }
};

/// Cycles of the launch. Both MMA warpgroups compute all scores, and the blocks of 64 queries read
/// keys and values from L2.
double wide_cycles(const Layer& layer, const DeviceFacts& facts, const attention_form& form,
                   const WideTile& config) {
  const attention_sm90_plan plan = attention_wide_plan_of(form, config);
  double seen = keys_seen(layer, plan.bm);
  constexpr double flops_of_cycle = 4096, l2_bytes_of_cycle = 34;  // of an SM
  const double pairs = 64.0 * config.bn;
  const double mma =
      pairs * 2 * (2 * plan.score_steps * 16 + 2 * plan.out_columns) / flops_of_cycle;
  const int stages_of_block = 2 * plan.slabs / plan.stage_slabs;
  const double copies = static_cast<double>(stages_of_block * plan.kv_bytes) / l2_bytes_of_cycle;
  // A block's keys and the values before it are in use together. Warpgroups in turn wait for the
  // stages of each other: 1,385 us instead of 1,310, causal, 2 x 4,096 tokens, on an H200.
  const double waits = config.stages > stages_of_block ? 0 : 400;
  const double of_block = std::max(mma + 300, copies) + waits + (config.ordered ? 200 : 0);
  auto tiles = static_cast<double>(quotient_up(usual_queries(layer), plan.bm) * layer.b *
                                   layer.heads / config.packed_heads);
  double sums = 0;
  if (config.divided) {
    tiles *= std::ceil(seen / config.chunk);
    seen = std::min(seen, static_cast<double>(config.chunk));
    constexpr double of_sums = 4000, bytes_of_sums = 12;  // of a cycle
    sums = of_sums + static_cast<double>(bytes_of_chunks(layer, config.chunk)) / bytes_of_sums /
                         static_cast<double>(facts.multiprocessors);
  }
  const double share = tiles / static_cast<double>(facts.multiprocessors);
  const bool evens_out = layer.mask == Mask::causal;
  const double rounds = std::max(1.0, evens_out ? share + 0.4 : std::ceil(share));
  constexpr double of_tile = 5000, of_launch = 6000;
  const double distance = std::abs(std::log2(static_cast<double>(config.group) /
                                             static_cast<double>(usual_group(layer, facts))));
  return packing_factor(layer, config) * (1 + 0.001 * distance) * rounds *
             (seen / config.bn * of_block + of_tile) +
         of_launch + copy_cycles(layer, facts) + sums;
}

using WideTiles = TypedSpace<WideTile>;

struct WideModel {
  static constexpr std::string_view name = "attention_wide_sm90";
  static WideTiles tiles(const Layer& layer, const DeviceFacts& facts);
  static WideTile tile(const Layer& layer, const Config& config) { return {layer, config}; }
  static constexpr auto cycles = wide_cycles;
};
using WideSearch = TileSearch<WideModel>;

WideTiles WideModel::tiles(const Layer& layer, const DeviceFacts& facts) {
  const attention_form form = form_of(layer);
  WideTiles space{WideTile(layer)};
  space
      .parameter("stages", "parts of 64 keys, or values, and 128 columns in shared memory",
                 WideTiles::to<&WideTile::stages>, {6, 8, 10})
      .parameter("ordered",
                 "1: MMA warpgroups issue their MMAs in turn, one's softmax beside the other's "
                 "MMAs; 0: as they come",
                 WideTiles::to<&WideTile::ordered>, {0, 1})
      .parameter("pack_heads",
                 "1: a tile has the queries of all heads that share keys; 0: those of one head",
                 [](WideTile& tile, std::int64_t value) { tile.pack(value); }, {0, 1})
      .parameter(
          "chunk",
          "keys of a work item, whose sums a second kernel adds up; 0: a CTA has all keys of "
          "its queries",
          [](WideTile& tile, std::int64_t value) { tile.divide(value); },
          layer.batch_invariant ? std::vector<std::int64_t>{0}
                                : std::vector<std::int64_t>{0, 128, 256, 512, 1024})
      .parameter("group", "heads of k and v whose tiles are scheduled together",
                 WideTiles::to<&WideTile::group>, {1, 2, 4, 8, 16, 32, 64, 128});
  const bool may_divide = layer.layout == Layout::bshd && !layer.masked() &&
                          query_tiles(layer, 64, layer.group()) <= 2 * facts.multiprocessors;
  space.constraint(
      "keys are divided where tiles are few, of sequences of one length and without a packed mask; "
      "the sums of all chunks are at most 256 MiB",
      {"chunk"}, [may_divide, layer](const WideTile& t) {
        return !t.divided || (may_divide && t.chunk < layer.kv &&
                              bytes_of_chunks(layer, t.chunk) <= most_bytes_of_chunks);
      });
  space.constraint(
      "heads together are twice those whose keys and values fit in L2 at most", {"group"},
      [usual = usual_group(layer, facts)](const WideTile& t) { return t.group <= 2 * usual; });
  space.constraint(
      "heads of a tile are 2 to 64 that share keys, in rows of whole heads, without a packed mask",
      {"pack_heads"}, [may_pack = may_pack_heads(layer)](const WideTile& t) {
        return t.packed_heads == 1 || may_pack;
      });
  space.constraint("the parts of a block of keys, and of one of values, are in shared memory",
                   {"stages", "pack_heads"}, [form, facts](const WideTile& t) {
                     const attention_sm90_plan plan = attention_wide_plan_of(form, t);
                     return t.stages >= 2 * plan.slabs / plan.stage_slabs &&
                            fits_shared_memory(facts, plan.shared_bytes, 1);
                   });
  return space;
}

Program wide_sm90_program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const Layer layer = layer_of(problem);
  const WideTile config(layer, values);
  return forward_program(problem, facts, "attention_wide_sm90", config,
                         attention_wide_plan_of(form_of(layer), config), config.group);
}

}  // namespace

std::optional<std::string> refuse_wide_sm90(const Layer& layer, const DeviceFacts& facts) {
  if (layer.dim <= most_narrow_dim)
    return fmt::format("heads of dim={} fit in the registers of one MMA warpgroup", layer.dim);
  if (auto reason = refuse_other_values(layer)) return reason;
  return refuse_tma(layer, facts);
}

constinit const Engine sm90_wide_engine{
    .name = WideModel::name,
    .summary = "TMA and wgmma, two MMA warpgroups with halves of a wide head's output",
    .can_implement = refuse_wide_sm90,
    .search = WideSearch::side,
    .program = wide_sm90_program,
    .batch_invariant = true,
    .sources = {forward_source, copy_heads_source}};

}  // namespace fftune::attention
