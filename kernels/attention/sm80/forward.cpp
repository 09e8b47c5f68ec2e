// The forward engine of mma.sync, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm80/config.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm80/forward.cu";
constexpr std::string_view name = "attention_sm80";
constexpr int most_accumulators = 300;  // columns of scores and output, for a tile of 16 rows

attention_sm80_config config_of(const Config& config) {
  return {.warps = config.get("warps"),
          .m_tiles = config.get("m_tiles"),
          .bn = config.get("bn"),
          .stages = config.get("stages"),
          .ctas_per_sm = config.get("ctas_per_sm")};
}

std::string template_argument(const attention_sm80_config& config) {
  return StructText("attention_sm80_config", "warps", config.warps, "m_tiles", config.m_tiles, "bn",
                    config.bn, "stages", config.stages, "ctas_per_sm", config.ctas_per_sm);
}

std::int64_t padded_values(const Layer& layer) {
  return attention_padded_dim(static_cast<int>(layer.v_dim));
}

attention_sm80_plan plan_of(const Layer& layer, const attention_sm80_config& config) {
  return attention_sm80_plan_of(form_of(layer), static_cast<int>(layer.v_dim), config);
}

/// Keys of a block, which decide the order of a row's sums: one number if that is to be fixed.
std::vector<std::int64_t> blocks_of_keys(const Layer& layer) {
  if (!layer.batch_invariant) return {32, 64, 128};
  return {padded_values(layer) + 64 <= most_accumulators ? 64 : 32};
}

Space space(const Layer& layer, const DeviceFacts& facts) {
  const attention_form form = form_of(layer);
  return Space()
      .parameter("warps", "warps of a CTA, each with queries of its own", {1, 2, 4, 8})
      .parameter("m_tiles", "tiles of 16 queries of a warp", {1, 2})
      .parameter("bn", "keys of a block", blocks_of_keys(layer))
      .parameter("stages", "blocks of keys and values in shared memory", {2, 3})
      .parameter("ctas_per_sm", "CTAs that share an SM", {1, 2, 3})
      .constraint("accumulators must fit in registers, and tiles must match those of a packed mask",
                  [layer, form](const Config& c) {
                    return attention_sm80_refusal(form, static_cast<int>(layer.v_dim),
                                                  config_of(c)) == nullptr;
                  },
                  {"warps", "m_tiles", "bn", "stages", "ctas_per_sm"})
      .constraint("a thread's accumulators of scores and output are 150 registers at most",
                  [layer](const Config& c) {
                    return c.at("m_tiles") * (padded_values(layer) + c.at("bn")) <=
                           most_accumulators;
                  },
                  {"m_tiles", "bn"})
      .constraint("more than half of a tile would be padding",
                  [layer, form](const Config& c) {
                    const std::int64_t bm = 16 * c.at("warps") * c.at("m_tiles");
                    const std::int64_t least = form.mask == attention_mask::packed ? 64 : 16;
                    return bm <= least || bm < 2 * layer.s;
                  },
                  {"warps", "m_tiles"})
      .constraint("an SM has 65,536 registers, and a thread needs some 60 and its accumulators",
                  [layer](const Config& c) {
                    const std::int64_t needed =
                        60 + c.at("m_tiles") * (padded_values(layer) + c.at("bn")) / 2;
                    return c.at("ctas_per_sm") * c.at("warps") * 32 * needed <= 65536;
                  },
                  {"warps", "m_tiles", "bn", "ctas_per_sm"})
      .constraint("the stages of an SM's CTAs must fit in its shared memory",
                  [layer, facts](const Config& c) {
                    return fits_shared_memory(facts, plan_of(layer, config_of(c)).shared_bytes,
                                              c.at("ctas_per_sm"));
                  },
                  {"warps", "m_tiles", "bn", "stages", "ctas_per_sm"});
}

std::optional<std::string> can_implement(const Layer& layer, const DeviceFacts& facts) {
  if (layer.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
  if (layer.v_dim > layer.dim)
    return fmt::format("v-dim={} exceeds dim={}: the output takes the place of the queries",
                       layer.v_dim, layer.dim);
  if (layer.v_dim != layer.dim)
    if (auto reason = refuse_e4m3(layer)) return reason;
  if (auto reason = misaligned_rows(layer)) return reason;
  if (auto reason = refuse_beside_sm90(layer, facts)) return reason;
  if (space(layer, facts).feasible().empty()) return no_tiles(layer, facts);
  return std::nullopt;
}

// Four warps, which is a scheduler's worth each, two CTAs of them so that one's softmax runs beside
// the other's products, and 64 keys a block; fewer queries a CTA where there are few tiles.
Config default_config(const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t matrices = layer.b * layer.heads;
  return least_cost(space(layer, facts), name, [&](const Config& c) {
    const std::int64_t bm = 16 * c.at("warps") * c.at("m_tiles");
    const std::int64_t tiles = quotient_up(usual_queries(layer), bm) * matrices;
    const double waves = static_cast<double>(tiles) /
                         static_cast<double>(facts.multiprocessors * c.at("ctas_per_sm"));
    const double idle = waves < 1 ? 1 / waves : std::ceil(waves) / waves;
    return std::tuple(std::round(4 * std::max(1.0, idle / 1.5)), std::abs(bm - 64),
                      std::abs(c.at("bn") - 64), std::abs(c.at("warps") - 4),
                      std::abs(c.at("ctas_per_sm") - 2), c.at("stages"));
  });
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const attention_sm80_config config = config_of(values);
  Program program;
  Launch launch = forward_launch(program, problem, facts);
  const Layer& layer = launch.layer();
  launch.set_group(heads_in_l2(layer, facts));
  launch.append(file, kernel_of(layer, "attention_sm80_forward", template_argument(config)),
                {static_cast<std::uint32_t>(query_tiles(layer, config.bm())), 1, 1},
                config.threads(), plan_of(layer, config).shared_bytes);
  return program;
}

}  // namespace

constinit const Engine sm80_engine{
    .name = name,
    .summary = "cp.async and mma.sync, a tile of queries for each CTA",
    .can_implement = can_implement,
    .search = {space, default_config},
    .program = program,
    .batch_invariant = true,
    .sources = {file}};

}  // namespace fftune::attention
