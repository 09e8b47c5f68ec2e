// The backward engine of mma.sync, host side: dq, then dk and dv, which compute the scores again.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/attention/engine.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/attention/sm80/backward_config.cuh"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/sm80/backward.cu";
constexpr std::string_view name = "attention_bwd_sm80";

attention_sm80_backward_config config_of(const Config& config) {
  return {.warps = config.get("warps"),
          .block = config.get("block"),
          .stages = config.get("stages"),
          .ctas_per_sm = config.get("ctas_per_sm")};
}

std::string template_argument(const attention_sm80_backward_config& config) {
  return StructText("attention_sm80_backward_config", "warps", config.warps, "block", config.block,
                    "stages", config.stages, "ctas_per_sm", config.ctas_per_sm);
}

Space space(const Layer& layer, const DeviceFacts& facts) {
  const attention_form form = form_of(layer);
  const auto v_dim = static_cast<int>(layer.v_dim);
  return Space()
      .parameter("warps", "warps of a CTA, of 16 queries for dq, or keys for dk and dv", {2, 4, 8})
      .parameter("block", "keys of a step, or queries", {16, 32, 64})
      .parameter("stages", "blocks in shared memory", {2, 3})
      .parameter("ctas_per_sm", "CTAs that share an SM", {1, 2, 3})
      .constraint("accumulators must fit in registers, and tiles must match those of a packed mask",
                  [form, v_dim](const Config& c) {
                    return attention_sm80_backward_refusal(form, v_dim, config_of(c)) == nullptr;
                  },
                  {"warps", "block", "stages", "ctas_per_sm"})
      .constraint(
          "an SM has 65,536 registers, and a thread needs some 70, its gradients and "
          "scores",
          [form, v_dim](const Config& c) {
            const std::int64_t needed =
                70 + attention_gradient_columns(form, v_dim) / 2 + c.at("block");
            return c.at("ctas_per_sm") * c.at("warps") * 32 * std::min<std::int64_t>(needed, 255) <=
                   65536;
          },
          {"warps", "block", "ctas_per_sm"})
      .constraint("the stages of an SM's CTAs must fit in its shared memory",
                  [form, v_dim, facts](const Config& c) {
                    return fits_shared_memory(
                        facts,
                        attention_sm80_backward_plan_of(form, v_dim, config_of(c)).shared_bytes,
                        c.at("ctas_per_sm"));
                  },
                  {"warps", "block", "stages", "ctas_per_sm"});
}

std::optional<std::string> can_implement(const Layer& layer, const DeviceFacts& facts) {
  if (layer.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
  constexpr std::int64_t most_features = 256;  // of a head whose accumulators a warp can hold
  if (layer.dim > most_features)
    return fmt::format("a warp's accumulators hold heads of up to {} features: dim={}",
                       most_features, layer.dim);
  if (layer.v_dim > layer.dim)
    return fmt::format("v-dim={} exceeds dim={}: dv passes through rows of keys", layer.v_dim,
                       layer.dim);
  if (auto reason = misaligned_rows(layer)) return reason;
  if (auto reason = refuse_beside_sm90(layer, facts)) return reason;
  constexpr std::int64_t most_sequences = 65535;  // the grid's third dimension
  if (layer.b > most_sequences)
    return fmt::format("{} sequences: a grid has {} places for them", layer.b, most_sequences);
  if (space(layer, facts).feasible().empty()) return no_tiles(layer, facts);
  return std::nullopt;
}

// Four warps, two CTAs of them where shared memory and registers allow, so that one computes
// while the other loads.
Config default_config(const Layer& layer, const DeviceFacts& facts) {
  return least_cost(space(layer, facts), name, [](const Config& c) {
    return std::tuple(std::abs(c.at("warps") - 4), std::abs(c.at("block") - 32),
                      std::abs(c.at("ctas_per_sm") - 2), c.at("stages"));
  });
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const attention_sm80_backward_config config = config_of(values);
  Program program;
  Launch launch = backward_launch(program, problem, facts);
  const Layer& layer = launch.layer();
  const attention_sm80_backward_plan plan =
      attention_sm80_backward_plan_of(form_of(layer), static_cast<int>(layer.v_dim), config);
  launch.set_group(heads_in_l2(layer, facts));
  launch.append(file, kernel_of(layer, "attention_sm80_dq", template_argument(config)),
                {static_cast<std::uint32_t>(query_tiles(layer, config.rows())), 1, 1},
                config.threads(), plan.shared_bytes);
  launch.append(file, kernel_of(layer, "attention_sm80_dkv", template_argument(config)),
                {static_cast<std::uint32_t>(quotient_up(layer.kv, config.rows())),
                 static_cast<std::uint32_t>(layer.kv_heads * (plan.splits_dkv ? 2 : 1)),
                 static_cast<std::uint32_t>(layer.b)},
                config.threads(), plan.shared_bytes);
  append_d_sinks(launch);
  return program;
}

}  // namespace

constinit const Engine sm80_backward_engine{
    .name = name,
    .summary = "cp.async and mma.sync, queries for dq, then keys for dk and dv",
    .backward = true,
    .can_implement = can_implement,
    .search = {space, default_config},
    .program = program,
    .sources = {file, d_sinks_file}};

}  // namespace fftune::attention
