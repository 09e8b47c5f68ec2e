// The family of the wgmma engine over grouped rows, for every stage.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/pattern.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

/// Tiles of rows, at most: each expert's last one may be a part, and fills its cluster.
std::int64_t most_tiles(std::int64_t m, const WgmmaTile& t) {
  return (ceil_div(m, std::int64_t{t.bm} * t.cluster_m) + 1) * t.cluster_m;
}

/// What follows the engine's shared memory: tables of rows, and the barriers of those that are kept
/// (wgmma_turns.cuh).
std::int64_t more_bytes(std::int64_t bm) {
  return row_table_bytes(bm) + 16;
}

/// The device as the engine's space may see it: without the shared memory of the largest tables.
DeviceFacts without_tables(DeviceFacts facts) {
  facts.shared_bytes_per_block -= more_bytes(256);
  return facts;
}

/// Whether a block may have several tiles of the same gathered rows in turn.
bool takes_turns(const Problem& problem, const StageProduct& work) {
  return scatters(problem) && !work.sorted_a && !work.gradient;
}
int turns_of(const Config& config) {
  return config.contains("a_reuse") ? config.get("a_reuse") : 1;
}

void add_turns(Space& space, const GemmShape& shape) {
  space.parameter("a_reuse",
                  "tiles along n that a block computes for the same gathered rows: A is "
                  "gathered for the first one and copied for the others",
                  {1, 2, 4, 8});
  space.constraint("blocks take turns by themselves, with all consumers at one tile",
                   [](const Config& config) {
                     const WgmmaTile t(config);
                     return turns_of(config) == 1 || (t.cluster_blocks() == 1 && !t.ping_pong());
                   },
                   {"schedule", "cluster_m", "cluster_n", "split_k", "a_reuse"});
  space.constraint("there are no more tiles of the same tokens than the features have",
                   [n = shape.n](const Config& config) {
                     return turns_of(config) <= ceil_div(n, config.at("bn"));
                   },
                   {"bn", "a_reuse"});
}

/// The product as the engine's space and its cost may see it: its tokens in groups as large as
/// those of a mask of the problem's pattern.
GemmShape in_groups(const Problem& problem, const StageProduct& work) {
  GemmShape shape = work.shape;
  shape.grouped = true;
  if (const auto pattern = parse_pattern(problem.option("mask")))
    shape.marked = std::llround(static_cast<double>(shape.m) * pattern->share);
  shape.a_gathered = !work.sorted_a && scatters(problem);
  return shape;
}

/// The same in as many turns as a configuration has.
GemmShape in_turns(GemmShape shape, const Config& config) {
  shape.turns = turns_of(config);
  return shape;
}

/// The kernel of grouped_sm90.cu for the product's form.
std::string kernel_name(const StageProduct& work) {
  if (work.gradient) return "grouped_gradient_sm90";
  if (work.shape.terms == 2) return "grouped_terms_sm90";
  if (work.shape.products == 1) return "grouped_sm90";
  return work.c.size() == 3 ? "grouped_pair_saving_sm90" : "grouped_pair_sm90";
}

/// Whether that kernel has forms in which blocks take turns.
bool has_kept(const StageProduct& work) {
  return !work.gradient && work.shape.terms == 1;
}

/// The kernel's arguments up to the sizes, in its order: maps, then addresses.
std::vector<Argument> arguments_of(const StageProduct& work, const WgmmaMaps& maps,
                                   const TensorMapArgument& kept) {
  std::vector<Argument> arguments;
  for (const std::size_t place : work.a) arguments.emplace_back(maps.a(TensorArgument{place}));
  if (has_kept(work)) arguments.emplace_back(kept);
  for (const auto& weights : work.b)
    for (const std::size_t place : weights) arguments.emplace_back(maps.b(TensorArgument{place}));
  std::vector<std::size_t> c = work.c;
  if (work.gradient) {
    for (const std::size_t place : {work.gradient->gate, work.gradient->up})
      arguments.emplace_back(maps.c(TensorArgument{place}));
    if (c.size() == 2) c.push_back(c.back());  // there is no hidden to store
  }
  for (const std::size_t place : c) arguments.emplace_back(maps.c(TensorArgument{place}));
  append_places(arguments, {work.mask, work.a.front()}, 2);
  append_places(arguments, c, c.size());
  return arguments;
}

class WgmmaFamily final : public StageFamily {
 public:
  using StageFamily::StageFamily;

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage(), problem)) return refusal;
    return refuse_wgmma(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const StageProduct work = product_of(stage(), problem);
    Space space = wgmma_space(in_groups(problem, work), without_tables(facts));
    if (!work.sorted_a)
      space.constraint("tokens are gathered by the block that needs them: none is shared",
                       [](const Config& config) { return config.at("cluster_n") == 1; },
                       {"cluster_n"});
    if (takes_turns(problem, work)) add_turns(space, work.shape);
    return space;
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const GemmShape shape = in_groups(problem, product_of(stage(), problem));
    return wgmma_cheapest(space(problem, facts), [&](const Config& config) {
      return wgmma_cost(in_turns(shape, config), facts, config);
    });
  }

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts.clock_hz <= 0) return std::nullopt;
    const GemmShape shape = in_groups(problem, product_of(stage(), problem));
    return wgmma_cost(in_turns(shape, config), facts, config) / facts.clock_hz;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const StageProduct work = product_of(stage(), problem);
    const GemmShape shape = in_turns(work.shape, config);
    const WgmmaTile tile(config);
    Program program;
    program.kernels.push_back(
        {"masked/grouped_sm90.cu",
         fmt::format("fftune::{}<{}, {}, {}{}>", kernel_name(work),
                     template_arguments(work, problem), shape.b_transposed,
                     wgmma_template_arguments(config, shape.products, shape.box_buffers),
                     has_kept(work) ? fmt::format(", {}", shape.turns) : "")});
    Pointer kept = TensorArgument{work.a.front()};
    const std::int64_t kept_rows = most_tiles(shape.m, tile) * tile.bm;
    if (shape.turns > 1) {
      program.scratch.push_back(
          {static_cast<std::size_t>(kept_rows * shape.k) * dtype_bytes(problem.dtype), false});
      kept = ScratchArgument{program.scratch.size() - 1};
    }
    // The first stage of a plan waits for whatever ran before it, and so for the mask; the others
    // may start early, as they fetch their weights first.
    const bool follows = stages_of(problem).front() != stage();
    KernelLaunch launch = wgmma_geometry(program, shape, facts, config, follows);
    const WgmmaMaps maps(shape, config, problem.dtype, problem.dtype);
    TensorMapArgument kept_map = maps.a(kept);
    if (shape.turns > 1) kept_map.rows = kept_rows;
    launch.arguments = arguments_of(work, maps, kept_map);
    wgmma_append_sizes(launch, config, {shape.m, shape.n, shape.k});
    launch.shared_bytes += static_cast<std::uint32_t>(more_bytes(tile.bm));
    const std::int64_t clusters =
        most_tiles(shape.m, tile) / tile.cluster_m * tile.column_runs(shape);
    const std::int64_t resident = std::max(facts.multiprocessors / tile.cluster_blocks(), 1);
    launch.grid.x = static_cast<std::uint32_t>(
        (tile.split_k > 1 ? clusters : std::min(clusters, resident)) * tile.cluster_blocks());
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/grouped_sm90.cu"}; }
};

}  // namespace

std::vector<const Family*> linear_sm90_families() {
  static const WgmmaFamily linear(Stage::linear, "linear_sm90",
                                  "y in tiles of one expert's tokens, with TMA and wgmma"),
      dx(Stage::dx, "dx_sm90",
         "dx in tiles of one expert's tokens, weights read as their transposes by wgmma");
  return {&linear, &dx};
}
std::vector<const Family*> ffn_sm90_families() {
  static const WgmmaFamily gate_up(
      Stage::gate_up, "gate_up_sm90",
      "hidden in tiles of one expert's tokens, x read once for both products, with TMA and wgmma"),
      down(Stage::down, "down_sm90", "y from tiles of one expert's hidden, with TMA and wgmma"),
      d_hidden(Stage::d_hidden, "d_hidden_sm90",
               "dy w_down in tiles of one expert's tokens by wgmma, the gradients of gate and up "
               "from it"),
      d_x(Stage::d_x, "d_x_sm90",
          "wgmma over tiles of one expert's tokens, both products in one accumulator");
  return {&gate_up, &down, &d_hidden, &d_x};
}

}  // namespace fftune::masked
