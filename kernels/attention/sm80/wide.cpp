// The forward engine of mma.sync for heads of more than 256 features, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm80/wide_config.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"

namespace fftune::attention {
namespace {

constexpr const char* wide_file = "attention/sm80/wide.cu";
constexpr std::string_view wide_name = "attention_wide_sm80";

attention_wide_sm80_config wide_config(const Config& config) {
  return {.row_groups = config.get("row_groups"), .bn = config.get("bn")};
}

bool wide_fits(const Layer& layer, const DeviceFacts& facts,
               const attention_wide_sm80_config& config) {
  return fits_shared_memory(facts, attention_wide_sm80_plan_of(form_of(layer), config).shared_bytes,
                            1);
}

/// Keys of a block, which decide the order of a row's sums: one number if that is to be fixed.
std::vector<std::int64_t> wide_blocks(const Layer& layer, const DeviceFacts& facts) {
  if (!layer.batch_invariant) return {16, 32};
  return {wide_fits(layer, facts, {.row_groups = 1, .bn = 32}) ? 32 : 16};
}

Space wide_space(const Layer& layer, const DeviceFacts& facts) {
  return Space()
      .parameter("row_groups", "groups of four warps, with 32 queries each", {1, 2})
      .parameter("bn", "keys of a block", wide_blocks(layer, facts))
      .constraint("more than half of a tile would be padding",
                  [s = layer.s](const Config& c) { return c.at("row_groups") == 1 || s > 32; },
                  {"row_groups"})
      .constraint(
          "queries, keys, values and sums of scores fit in shared memory",
          [layer, facts](const Config& c) { return wide_fits(layer, facts, wide_config(c)); },
          {"row_groups", "bn"});
}

std::optional<std::string> wide_can_implement(const Layer& layer, const DeviceFacts& facts) {
  if (auto reason = refuse_other_values(layer)) return reason;
  if (auto reason = refuse_e4m3(layer)) return reason;
  if (layer.dim <= most_narrow_dim)
    return fmt::format("heads of dim={} fit in the registers of one warp", layer.dim);
  if (layer.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
  if (layer.masked()) return "blocks of keys are narrower than the tiles of a mask";
  if (auto reason = misaligned_rows(layer)) return reason;
  if (auto reason = refuse_beside_sm90(layer, facts)) return reason;
  if (wide_space(layer, facts).feasible().empty()) return no_tiles(layer, facts);
  return std::nullopt;
}

// The most queries and keys that fit, but fewer queries a CTA where there are few tiles.
Config wide_default(const Layer& layer, const DeviceFacts& facts) {
  return least_cost(wide_space(layer, facts), wide_name, [&](const Config& c) {
    const std::int64_t bm = 32 * c.at("row_groups");
    const double waves =
        static_cast<double>(query_tiles(layer, bm)) / static_cast<double>(facts.multiprocessors);
    const double idle = waves < 1 ? 1 / waves : std::ceil(waves) / waves;
    return std::tuple(std::round(4 * std::max(1.0, idle / 1.5)), -c.at("row_groups"), -c.at("bn"));
  });
}

Program wide_program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const attention_wide_sm80_config config = wide_config(values);
  Program program;
  Launch launch(program, problem, facts, sizeof(attention_params));
  const Layer& layer = launch.layer();
  const attention_form form = form_of(layer);
  launch.set_group(heads_in_l2(layer, facts));
  launch.append(wide_file,
                fmt::format("attention_wide_sm80<{}, {}>", template_argument(form),
                            StructText("attention_wide_sm80_config", "row_groups",
                                       config.row_groups, "bn", config.bn)),
                {static_cast<std::uint32_t>(query_tiles(layer, config.bm())), 1, 1},
                config.threads(), attention_wide_sm80_plan_of(form, config).shared_bytes);
  return program;
}

}  // namespace

constinit const Engine sm80_wide_engine{
    .name = wide_name,
    .summary = "cp.async and mma.sync, four warps with quarters of a wide head's features",
    .can_implement = wide_can_implement,
    .search = {wide_space, wide_default},
    .program = wide_program,
    .batch_invariant = true,
    .sources = {wide_file}};

}  // namespace fftune::attention
