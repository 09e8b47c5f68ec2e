// The family of the wgmma engine's sums over each expert's tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/pattern.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

/// wgmma_token_sum::more_bytes: 8 to align, row_groups::shared_words, two row_tables of 64 tokens,
/// and their barriers.
constexpr std::int64_t table_bytes = 8 + 4 * (1024 + 4 + 32) + 2 * 4 * (64 + 4) + 4 * 8;

/// The device as the engine's space may see it: without the shared memory of the tables.
DeviceFacts without_tables(DeviceFacts facts) {
  facts.shared_bytes_per_block -= table_bytes;
  return facts;
}

class WgmmaSumFamily final : public StageFamily {
 public:
  using StageFamily::StageFamily;

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage(), problem)) return refusal;
    return refuse_wgmma(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const GemmShape shape = sum_of(stage(), problem).shape;
    return wgmma_space(halved(shape), without_tables(facts));
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return wgmma_cheapest(space(problem, facts),
                          [&](const Config& config) { return cost(problem, facts, config); });
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts.clock_hz <= 0) return std::nullopt;
    return cost(problem, facts, config) / facts.clock_hz;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const StageSum work = sum_of(stage(), problem);
    const bool adds = !work.addends[0].empty();
    Program program;
    program.kernels.push_back(
        {"masked/token_sum_sm90.cu",
         fmt::format("fftune::{}<{}, fftune::linear_epilogue<false, {}>, {}, {}, {}>",
                     work.a.size() == 2 ? "token_sums_sm90" : "token_sum_sm90",
                     element_type(problem.dtype), adds, work.sorted_a, work.sorted_b,
                     wgmma_template_arguments(config, 1))});
    KernelLaunch launch = wgmma_geometry(program, work.shape, facts, config, true);
    launch.shared_bytes += static_cast<std::uint32_t>(table_bytes);
    const WgmmaMaps maps(work.shape, config, problem.dtype, problem.dtype);
    for (const std::size_t place : work.a)
      launch.arguments.emplace_back(maps.a(TensorArgument{place}));
    launch.arguments.emplace_back(maps.b(TensorArgument{work.b}));
    for (const auto* matrices : {&work.c, adds ? &work.addends : &work.c})
      for (const auto& own : *matrices)
        for (const std::size_t place : own)
          launch.arguments.emplace_back(maps.c(TensorArgument{place}));
    append_places(launch.arguments, {work.mask, work.a.front(), work.b}, 3);
    wgmma_append_sizes(launch, config, {work.shape.m, work.shape.n, work.shape.k});
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/token_sum_sm90.cu"}; }

 private:
  /// As wgmma_cost(). A multiprocessor with a tile of either expert adds up all tokens; one with a
  /// single tile those of one expert, and the expert with more tokens decides.
  double cost(const Problem& problem, const DeviceFacts& facts, const Config& config) const {
    const StageSum work = sum_of(stage(), problem);
    GemmShape shape = work.shape;
    shape.a_gathered = !work.sorted_a && scatters(problem);
    shape.b_gathered = !work.sorted_b && scatters(problem);
    const WgmmaTile tile(config);
    double share = 0.5;
    if (tile.tiles(shape) * tile.split_k <= facts.multiprocessors)
      if (const auto pattern = parse_pattern(problem.option("mask")))
        share = std::max(pattern->share, 1 - pattern->share);
    shape.k = std::max<std::int64_t>(1, std::llround(static_cast<double>(shape.k) * share));
    return wgmma_cost(shape, facts, config);
  }
};

}  // namespace

std::vector<const Family*> linear_sm90_sum_families() {
  static const WgmmaSumFamily dw(
      Stage::dw, "dw_sm90",
      "wgmma over each expert's tokens, dy and x read as their transposes; both dw in one launch");
  return {&dw};
}
std::vector<const Family*> ffn_sm90_sum_families() {
  static const WgmmaSumFamily d_gate_up(
      Stage::d_gate_up, "d_gate_up_sm90",
      "wgmma over each expert's tokens, both products of x of both experts in one launch"),
      d_down(Stage::d_down, "d_down_sm90",
             "wgmma over each expert's tokens, dy and hidden read as their transposes");
  return {&d_gate_up, &d_down};
}

}  // namespace fftune::masked
