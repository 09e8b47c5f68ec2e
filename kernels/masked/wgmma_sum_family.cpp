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

constexpr std::int64_t table_bytes = row_table_bytes(256);  // of the tokens of four k tiles

/// The device as the engine's space may see it: without the shared memory of the tables.
DeviceFacts without_tables(DeviceFacts facts) {
  facts.shared_bytes_per_block -= table_bytes;
  return facts;
}

/// Whether a kernel before copies the tokens into the order of the mask.
bool sorts_first(const Problem& problem, const Config& config) {
  return scatters(problem) && config.at("pre_permute") == 1;
}

/// How many warps of a block gather, where tokens are scattered.
int gatherers(const Problem& problem, const Config& config) {
  return scatters(problem) ? static_cast<int>(config.at("gather_warps")) : 2;
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
    Space space = wgmma_space(halved(shape_of(problem)), without_tables(facts));
    // Under a mask of long runs nearly all tokens are copied from where they are.
    if (!scatters(problem)) return space;
    space
        .parameter("pre_permute",
                   "1: a kernel in front permutes the rows into the order of the groups; 0: blocks "
                   "gather those that are scattered",
                   {0, 1})
        .parameter("gather_warps",
                   "gather warps of a block: 2 of the producer warpgroup, or 4, which are a "
                   "warpgroup of their own",
                   {2, 4})
        .constraint(
            "sorted tokens are not gathered",
            [](const Config& c) { return c.at("pre_permute") == 0 || c.at("gather_warps") == 2; },
            {"pre_permute", "gather_warps"})
        .constraint(
            "four warpgroups start with the 128 registers a thread that no wgmma of 256 columns "
            "fits, and two of them multiply with 200, which hold 128 accumulators",
            [](const Config& c) {
              const WgmmaTile tile(c, true);
              return c.at("gather_warps") == 2 ||
                     (tile.consumers == 2 && tile.sums(1) <= 128 && tile.bn <= 192);
            },
            {"bm", "bn", "schedule", "mma_warpgroups", "gather_warps"});
    return space;
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
    const bool sorts = sorts_first(problem, config);
    const auto copy = [&](bool sorted, std::size_t place, std::int64_t columns) -> Pointer {
      if (sorted || !sorts) return TensorArgument{place};
      program.scratch.push_back(
          {static_cast<std::size_t>(work.shape.k * columns) * dtype_bytes(problem.dtype), false});
      return ScratchArgument{program.scratch.size() - 1};
    };
    const Pointer a = copy(work.sorted_a, work.a.front(), work.shape.m);
    const Pointer b = copy(work.sorted_b, work.b, work.shape.n);
    if (sorts) append_sort(program, problem, facts, work, a, b);
    program.kernels.push_back(
        {"masked/token_sum_sm90.cu",
         fmt::format("fftune::{}<{}, fftune::linear_epilogue<false, {}>, {}, {}, {}, {}>",
                     work.a.size() == 2 ? "token_sums_sm90" : "token_sum_sm90",
                     element_type(problem.dtype), adds, work.sorted_a || sorts,
                     work.sorted_b || sorts, gatherers(problem, config),
                     wgmma_template_arguments(config, 1, 1, true))});
    const GemmShape shape = shape_of(problem, config);
    KernelLaunch launch = wgmma_geometry(program, shape, facts, config, true);
    launch.shared_bytes += static_cast<std::uint32_t>(table_bytes);
    if (gatherers(problem, config) == 4) launch.block.x += 128;
    const WgmmaMaps maps(shape, config, problem.dtype, problem.dtype);
    launch.arguments = {maps.a(a)};
    if (work.a.size() == 2) launch.arguments.emplace_back(maps.a(TensorArgument{work.a.back()}));
    launch.arguments.emplace_back(maps.b(b));
    for (const auto* matrices : {&work.c, adds ? &work.addends : &work.c})
      for (const auto& own : *matrices)
        for (const std::size_t place : own)
          launch.arguments.emplace_back(maps.c(TensorArgument{place}));
    append_places(launch.arguments, {work.mask, work.a.front(), work.b}, 3);
    wgmma_append_sizes(launch, config, {work.shape.m, work.shape.n, work.shape.k});
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"masked/sort_rows.cu", "masked/token_sum_sm90.cu"};
  }

 private:
  GemmShape shape_of(const Problem& problem) const {
    GemmShape shape = sum_of(stage(), problem).shape;
    shape.one_owner = true;
    return shape;
  }

  /// The same by blocks that share k: those have a tile of either expert.
  GemmShape shape_of(const Problem& problem, const Config& config) const {
    GemmShape shape = shape_of(problem);
    if (config.at("split_k") > 1) shape.results /= 2;
    return shape;
  }

  /// As wgmma_cost(). Blocks that share k, and a multiprocessor with a tile of either expert, add
  /// up all tokens; one with a single tile those of one expert, and the expert with more tokens
  /// decides.
  double cost(const Problem& problem, const DeviceFacts& facts, const Config& config) const {
    const StageSum work = sum_of(stage(), problem);
    GemmShape shape = shape_of(problem, config);
    const bool gathers = scatters(problem) && !sorts_first(problem, config);
    shape.a_gathered = gathers && !work.sorted_a;
    shape.b_gathered = gathers && !work.sorted_b;
    shape.gatherers = gatherers(problem, config);
    const WgmmaTile tile(config);
    double share = 0.5;
    if (tile.split_k > 1) {
      share = 1;
    } else if (tile.tiles(shape) <= facts.multiprocessors) {
      if (const auto pattern = parse_pattern(problem.option("mask")))
        share = std::max(pattern->share, 1 - pattern->share);
    }
    shape.k = std::max<std::int64_t>(1, std::llround(static_cast<double>(shape.k) * share));
    return wgmma_cost(shape, facts, config) +
           (sorts_first(problem, config) ? sort_cycles(work, facts) : 0);
  }

  /// Of the kernel that copies what is not in the order of the mask, beside its launch.
  static double sort_cycles(const StageSum& work, const DeviceFacts& facts) {
    constexpr double start_cycles = 4000;
    const double columns =
        double((work.sorted_a ? 0 : work.shape.m) + (work.sorted_b ? 0 : work.shape.n));
    const double bytes = 2 * 2 * columns * static_cast<double>(work.shape.k);
    const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
    const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
    return start_cycles + bytes / (0.9 * bandwidth / clock);
  }

  static void append_sort(Program& program, const Problem& problem, const DeviceFacts& facts,
                          const StageSum& work, const Pointer& a, const Pointer& b) {
    constexpr std::int64_t warps = 8, blocks = 4;  // of a block; of a multiprocessor
    program.kernels.push_back({"masked/sort_rows.cu", "fftune::sort_rows"});
    KernelLaunch launch;
    launch.block.x = warps * 32;
    launch.grid.x = static_cast<std::uint32_t>(std::min(
        ceil_div(work.shape.k, warps), blocks * std::max<std::int64_t>(facts.multiprocessors, 1)));
    launch.programmatic = true;
    launch.arguments = {TensorArgument{work.mask}};
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(problem.dtype));
    std::size_t copied = 0;
    const auto add = [&](std::size_t from, const Pointer& to, std::int64_t columns) {
      launch.arguments.insert(
          launch.arguments.end(),
          {TensorArgument{from}, argument_of(to), static_cast<std::int32_t>(columns * bytes / 16)});
      ++copied;
    };
    if (!work.sorted_a) add(work.a.front(), a, work.shape.m);
    if (!work.sorted_b) add(work.b, b, work.shape.n);
    for (; copied < 2; ++copied)
      launch.arguments.insert(launch.arguments.end(),
                              {std::int64_t{0}, std::int64_t{0}, std::int32_t{0}});
    launch.arguments.emplace_back(static_cast<std::int32_t>(work.shape.k));
    program.steps.emplace_back(std::move(launch));
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
