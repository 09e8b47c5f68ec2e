// The decode family, host side: a few queries of each sequence against its long cache.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <tuple>

#include "core/error.hpp"
#include "kernels/attention/decode/config.cuh"
#include "kernels/attention/families.hpp"
#include "kernels/attention/launch.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

constexpr const char* file = "attention/decode/decode.cu";
constexpr std::int64_t most_queries = 16;  // of a sequence

attention_decode_config config_of(const Config& config) {
  return {.warps = config.get("warps"),
          .slice = config.get("slice"),
          .stages = config.get("stages"),
          .m_tiles = config.get("m_tiles"),
          .ctas_per_sm = config.get("ctas_per_sm"),
          .prefetch = config.get("l2_prefetch")};
}

std::string template_argument(const attention_decode_config& config) {
  return fmt::format(
      "fftune::attention_decode_config{{.warps = {}, .slice = {}, .stages = {}, .m_tiles = {}, "
      ".ctas_per_sm = {}, .prefetch = {}}}",
      config.warps, config.slice, config.stages, config.m_tiles, config.ctas_per_sm,
      config.prefetch);
}

bool same_lengths(const Layer& layer) {
  return !layer.lengths;
}

attention_decode_grid grid_of(const Layer& layer, const DeviceFacts& facts,
                              const attention_decode_config& config) {
  const auto small = [](std::int64_t value) { return static_cast<int>(value); };
  // Keys before the window are not read.
  const std::int64_t keys =
      layer.window > 0 ? std::min(layer.kv, layer.window + layer.s) : layer.kv;
  return attention_decode_grid_of(
      config, facts.multiprocessors, small(layer.b), small(layer.kv_heads),
      attention_decode_row_blocks(config, small(layer.group()), small(layer.s)), small(keys),
      same_lengths(layer));
}

class Decode final : public StageFamily {
 public:
  Decode()
      : StageFamily({.name = "attention_decode",
                     .summary = "mma.sync, the keys of all sequences divided among the SMs",
                     .stage = stage_forward,
                     .pass = "fwd",
                     .sources = {file}}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = refuse_cuda(problem, "fwd", facts)) return reason;
    const Layer layer = layer_of(problem);
    if (layer.dtype == DType::f32) return "mma.sync m16n8k16 multiplies bf16 and fp16, not f32";
    if (layer.layout == Layout::thd) return "every sequence has the same number of queries: no thd";
    if (layer.s > most_queries)
      return fmt::format("it takes up to {} queries of a sequence: s={} has other families",
                         most_queries, layer.s);
    if (layer.masked()) return "its keys are a range: no mask in memory";
    if (layer.bias) return "it adds no bias";
    if (auto reason = misaligned_rows(layer)) return reason;
    if (space(problem, facts).violations(default_config(problem, facts)).empty())
      return std::nullopt;
    return fmt::format("rows of dim={} do not fit in the registers and shared memory of {}",
                       layer.dim, facts.name);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override;
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override;
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override;
};

Space Decode::space(const Problem& problem, const DeviceFacts& facts) const {
  const Layer layer = layer_of(problem);
  const attention_form form = form_of(layer);
  const bool can_prefetch =
      facts.compute_capability >= 90 && same_lengths(layer) && layer.page == 0;
  return Space()
      .parameter("warps", "warps of a CTA, each with a slice of the keys", {2, 4, 8})
      .parameter("slice", "keys of a warp in a stage", {16, 32})
      .parameter("stages", "slices of keys, and as many of values, of each warp in shared memory",
                 {2, 3, 4, 6, 8})
      .parameter("m_tiles", "tiles of 16 rows, queries times the heads that share keys, of a CTA",
                 {1, 2})
      .parameter("ctas_per_sm", "CTAs that share an SM", {1, 2, 3, 4})
      .parameter("l2_prefetch",
                 "KiB of a CTA's first keys and values that are prefetched to L2 before "
                 "griddepcontrol.wait",
                 {0, 32, 64, 128, 256})
      .constraint("rows, slices and accumulators fit each other",
                  [form](const Config& c) {
                    return attention_decode_refusal(form, config_of(c)) == nullptr;
                  },
                  {"warps", "slice", "stages", "m_tiles", "ctas_per_sm", "l2_prefetch"})
      .constraint(
          "more than half of the rows would be padding",
          [layer](const Config& c) { return c.at("m_tiles") == 1 || layer.group() * layer.s > 16; },
          {"m_tiles"})
      .constraint(
          "an SM has 65,536 registers, of which a thread needs some 80 and its accumulators",
          [form](const Config& c) {
            const std::int64_t needed = 80 + c.at("m_tiles") * attention_padded_dim(form.dim) / 2;
            return c.at("ctas_per_sm") * c.at("warps") * 32 * needed <= 65536;
          },
          {"warps", "m_tiles", "ctas_per_sm"})
      .constraint("the stages of an SM's CTAs fit in its shared memory",
                  [form, facts](const Config& c) {
                    const auto config = config_of(c);
                    return fits_shared_memory(facts,
                                              attention_decode_plan_of(form, config).shared_bytes,
                                              config.ctas_per_sm);
                  },
                  {"warps", "slice", "stages", "m_tiles", "ctas_per_sm", "l2_prefetch"})
      .constraint(
          "the L2 prefetch needs programmatic dependent launch, contiguous keys, and one "
          "length of all sequences",
          [can_prefetch](const Config& c) { return c.at("l2_prefetch") == 0 || can_prefetch; },
          {"l2_prefetch"});
}

Config Decode::default_config(const Problem& problem, const DeviceFacts& facts) const {
  // Memory delivers at full speed with some 40 KiB of each SM in flight; more stages only take
  // longer to fill. One CTA for each block of rows reads the cache once.
  constexpr std::int64_t wanted_bytes = 64 * 1024;
  const Layer layer = layer_of(problem);
  const attention_form form = form_of(layer);
  const auto feasible = space(problem, facts).feasible();
  if (feasible.empty())
    return {{"warps", 2},   {"slice", 16},      {"stages", 2},
            {"m_tiles", 1}, {"ctas_per_sm", 1}, {"l2_prefetch", 0}};
  return *std::min_element(feasible.begin(), feasible.end(), [&](const auto& a, const auto& b) {
    const auto rank = [&](const Config& c) {
      const auto config = config_of(c);
      const int row_blocks = attention_decode_row_blocks(config, static_cast<int>(layer.group()),
                                                         static_cast<int>(layer.s));
      const std::int64_t in_flight = std::int64_t{config.ctas_per_sm} * config.warps *
                                     (config.stages - 1) * 2 *
                                     attention_decode_plan_of(form, config).slice_bytes;
      return std::tuple(row_blocks, std::max<std::int64_t>(wanted_bytes - in_flight, 0),
                        config.prefetch, config.ctas_per_sm, -config.warps, config.slice,
                        config.stages);
    };
    return rank(a) < rank(b);
  });
}

Program Decode::program(const Problem& problem, const DeviceFacts& facts,
                        const Config& values) const {
  const attention_decode_config config = config_of(values);
  Program program;
  Launch launch(program, problem, facts, sizeof(attention_params));
  const Layer& layer = launch.layer();
  const attention_form form = form_of(layer);
  const attention_decode_grid grid = grid_of(layer, facts, config);
  const bool cuts = !same_lengths(layer) || layer.b % grid.groups != 0;
  launch.set_attention(offsetof(attention_params, partials),
                       launch.scratch(cuts ? grid.partial_bytes(form, config) : 0));
  launch.append(
      file,
      fmt::format("attention_decode<{}, {}>", attention::template_argument(form),
                  template_argument(config)),
      {static_cast<std::uint32_t>(grid.heads), static_cast<std::uint32_t>(grid.groups), 1},
      config.threads(), attention_decode_plan_of(form, config).shared_bytes);
  return program;
}

}  // namespace

const Family& attention_decode_family() {
  static const Decode family;
  return family;
}

}  // namespace fftune::attention
