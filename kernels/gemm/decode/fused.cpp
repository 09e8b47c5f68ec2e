// The fused decode engine, of a gated GEMM and the GEMM of its result: can_implement, its
// space, which configuration to use untuned, and how its kernel is launched.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/gemm/decode/fused_config.cuh"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"

namespace fftune {
namespace {

/// The chain's extents, by the names of a feed-forward network: d features, h hidden ones.
struct Extents {
  std::int64_t m, d, h;

  explicit Extents(const GemmChain& chain) : m(chain[0].m), d(chain[0].k), h(chain[0].n) {}
};

std::int64_t blocks_of(const Extents& extents, std::int64_t rows) {
  return ceil_div(extents.h, rows);
}

fused_decode_config config_of(const GemmChain& chain, const Config& config) {
  const Extents extents(chain);
  const std::int64_t rows = config.at("rows"), warps = config.at("warps");
  const std::int64_t blocks = blocks_of(extents, rows);  // those of y fit into as many
  return {.tokens = decode_tokens(chain[0]),
          .rows = static_cast<int>(rows),
          .out_rows = static_cast<int>(8 * ceil_div(extents.d, 8 * blocks)),
          .warps = static_cast<int>(warps),
          .steps = static_cast<int>(ceil_div(extents.d, 32 * warps)),
          .out_steps = static_cast<int>(ceil_div(extents.h, 32 * warps)),
          .poll_first = config.at("poll_first") == 1,
          .late_down = config.at("late_down") == 1};
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  const Extents extents(chain);
  const std::int64_t processors = facts.multiprocessors;
  return Space()
      .parameter("rows", "hidden features of a block", {8, 16, 24, 32, 48, 64})
      .parameter("warps", "warps of a block, which split k", {4, 8, 16})
      .parameter("poll_first",
                 "1: wait for one word of the intermediate before asking for the rest", {0, 1})
      .parameter("late_down", "1: ask for the weights of down when half of the others have come",
                 {0, 1})
      .constraint(
          fmt::format("all blocks must be resident at once, one on each of {} SMs", processors),
          [=](const Config& c) { return blocks_of(extents, c.at("rows")) <= processors; }, {"rows"})
      .constraint("weights and accumulators must leave a thread 56 of its registers",
                  [=](const Config& c) {
                    const fused_decode_config fused = config_of(chain, c);
                    return fused.registers() + 56 <= most_registers(fused.threads());
                  },
                  {"rows", "warps", "poll_first", "late_down"})
      .constraint(fmt::format("the warps' accumulators must fit in the {} bytes of shared memory "
                              "that a block can have",
                              facts.shared_bytes_per_block),
                  [=, limit = facts.shared_bytes_per_block](const Config& c) {
                    return config_of(chain, c).shared_bytes() + 64 <= limit;
                  },
                  {"rows", "warps", "poll_first", "late_down"})
      .constraint(
          "half of a block's warps or more would have no part of k",
          [=](const Config& c) { return c.at("warps") == 4 || extents.d > 16 * c.at("warps"); },
          {"warps"});
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts& facts) {
  if (chain.size() != 2) return "it computes a chain of two GEMMs";
  const GemmProblem &gate_up = chain[0], &down = chain[1];
  for (const GemmProblem& gemm : chain)
    if (auto reason = no_decode(gemm)) return reason;
  if (gate_up.epilogue.kind != EpilogueKind::gated || gate_up.epilogue.stores_preactivations() ||
      down.epilogue.kind != EpilogueKind::linear || down.epilogue.adds() ||
      down.c_dtype != down.dtype)
    return "it keeps gate and up in registers, and adds nothing to y: the plain form alone";
  for (const GemmProblem& gemm : chain)
    if (auto reason = misaligned_rows(gemm)) return reason;
  // Each block reads the whole intermediate, 4 bytes an element with its flags; up to this number
  // of bytes it does so in the time of a launch.
  constexpr double least_worth_sharing = 48 * 1024;
  const Extents extents(chain);
  const double intermediate = 4.0 * static_cast<double>(extents.m) * static_cast<double>(extents.h);
  const double weights = 6.0 * static_cast<double>(extents.d) * static_cast<double>(extents.h) /
                         std::max(facts.multiprocessors, 1);
  if (intermediate > std::max(weights, least_worth_sharing))
    return fmt::format(
        "every block would read {:.0f} bytes of the intermediate and only {:.0f} "
        "of weights: two launches take less",
        intermediate, weights);
  if (space(chain, facts).feasible().empty())
    return fmt::format("the weights of d={} and h={} do not fit in the registers of {} SMs",
                       extents.d, extents.h, facts.multiprocessors);
  return std::nullopt;
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  // As many blocks as there are SMs to load, and as many warps to wait for memory.
  return least_cost(space(chain, facts), "fused_decode", [](const Config& c) {
    return std::tuple(c.at("rows"), -c.at("late_down"), -c.at("warps"), c.at("poll_first"));
  });
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const Extents extents(chain);
  const fused_decode_config fused = config_of(chain, config);
  const std::size_t workspace = program.scratch.size();
  program.scratch.push_back({static_cast<std::size_t>(256 + extents.m * extents.h * 4), false});
  // The intermediate is in the workspace.
  GemmProblem gate_up = chain[0], down = chain[1];
  gate_up.c.clear();
  down.a.clear();
  using Params = fused_decode_params;
  ParameterStruct parameters{sizeof(Params), {}};
  ParameterFields<Params> fields(parameters);
  set_gemm(fields.inside(&Params::gate_up), gate_up, places);
  set_gemm(fields.inside(&Params::down), down, places);
  fields.set(&Params::workspace, ScratchArgument{workspace});
  KernelLaunch& launch = append_gemm(
      program, "gemm/decode/fused.cu",
      fmt::format("fused_decode_gemm<{}, {}>", template_argument(form_of(chain[0])),
                  StructText("fused_decode_config", "tokens", fused.tokens, "rows", fused.rows,
                             "out_rows", fused.out_rows, "warps", fused.warps, "steps", fused.steps,
                             "out_steps", fused.out_steps, "poll_first", fused.poll_first,
                             "late_down", fused.late_down)),
      blocks_of(extents, fused.rows), fused.threads(), std::move(parameters));
  launch.shared_bytes = static_cast<std::uint32_t>(fused.shared_bytes());
  launch.cooperative = true;
  launch.programmatic = chain[0].follows && facts.compute_capability >= 90;
}

}  // namespace

constinit const Engine fused_decode_engine{.name = "fused_decode",
                                           .can_implement = can_implement,
                                           .search = {space, default_config},
                                           .append = append,
                                           .sources = {"gemm/decode/fused.cu"}};

}  // namespace fftune
