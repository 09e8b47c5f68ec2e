// The family of the wgmma engine over grouped rows, for every stage.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

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

/// What wgmma_grouped_gemm keeps in shared memory beside the engine's layout: 8 bytes to align,
/// row_groups::shared_words, the rows of each warpgroup's tile, the table of grouped_tiles.
std::int64_t table_bytes(std::int64_t m, const WgmmaTile& t) {
  constexpr std::int64_t group_words = 1024 + 1 + 32 + 1;
  return 8 + 4 * (group_words + (t.consumers + 1) * t.bm + 1 + 2 * most_tiles(m, t));
}

/// The device as the engine's space may see it: without the shared memory of the largest tables.
DeviceFacts without_tables(DeviceFacts facts, std::int64_t m) {
  facts.shared_bytes_per_block -= table_bytes(m, WgmmaTile({{"bm", 256},
                                                            {"bn", 0},
                                                            {"schedule", 0},
                                                            {"consumers", 3},
                                                            {"cluster_m", 1},
                                                            {"cluster_n", 1},
                                                            {"split_k", 1},
                                                            {"stages", 0},
                                                            {"output_boxes", 0},
                                                            {"group_m", 0}})) +
                                  8 * ceil_div(m, 64);
  return facts;
}

/// The product as the engine's space and cost may see it. Each expert's last tile is a part: with
/// many tokens there are half a tile of rows more in the mean, which may start another wave.
GemmShape in_tiles(GemmShape shape) {
  constexpr std::int64_t half_a_tile = 64;
  if (shape.m >= 512) shape.m += half_a_tile;
  return shape;
}

class WgmmaFamily final : public Family {
 public:
  /// `name` and `summary` are string literals.
  WgmmaFamily(Stage stage, std::string_view name, std::string_view summary)
      : stage_(stage), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_name(stage_)}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_pass(stage_, problem)) return refusal;
    return refuse_wgmma(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const StageProduct work = product_of(stage_, problem);
    Space space = wgmma_space(in_tiles(work.shape), without_tables(facts, work.shape.m));
    if (!work.sorted_a)
      space.constraint("tokens are gathered by the block that needs them: none is shared",
                       [](const Config& config) { return config.at("cluster_n") == 1; },
                       {"cluster_n"});
    return space;
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return wgmma_cheapest(space(problem, facts), in_tiles(product_of(stage_, problem).shape),
                          facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const StageProduct work = product_of(stage_, problem);
    const WgmmaTile tile(config);
    const char* const form = work.shape.products == 2  ? ""
                             : work.shape.b_transposed ? "true, "
                                                       : "false, ";
    Program program;
    program.kernels.push_back(
        {"masked/grouped_sm90.cu",
         fmt::format("fftune::{}<{}, {}{}>",
                     work.shape.products == 2 ? "grouped_pair_sm90" : "grouped_sm90",
                     template_arguments(stage_, problem), form,
                     wgmma_template_arguments(config, work.shape.products))});
    WgmmaOperands operands;
    operands.dtype = operands.c_dtype = problem.dtype;
    operands.a = TensorArgument{work.a};
    for (const auto& weights : work.b)
      for (const std::size_t place : weights) operands.b.emplace_back(TensorArgument{place});
    operands.c = {TensorArgument{work.c}};
    operands.scales = {TensorArgument{work.mask}, TensorArgument{work.a}, TensorArgument{work.c}};
    // The second stage of a plan may start early, as it fetches its weights first; the first waits
    // for whatever ran before it, and so for the mask.
    wgmma_launch(program, work.shape, facts, config, operands,
                 {work.shape.m, work.shape.n, work.shape.k}, stage_ == Stage::down);
    auto& launch = std::get<KernelLaunch>(program.steps.back());
    launch.shared_bytes += static_cast<std::uint32_t>(table_bytes(work.shape.m, tile));
    const std::int64_t clusters = most_tiles(work.shape.m, tile) / tile.cluster_m *
                                  ceil_div(work.shape.n, std::int64_t{tile.bn} * tile.cluster_n);
    const std::int64_t resident = std::max(facts.multiprocessors / tile.cluster_blocks(), 1);
    launch.grid.x = static_cast<std::uint32_t>(
        (tile.split_k > 1 ? clusters : std::min(clusters, resident)) * tile.cluster_blocks());
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/grouped_sm90.cu"}; }

 private:
  Stage stage_;
  std::string_view name_;
  std::string_view summary_;
};

}  // namespace

const Family& linear_sm90_family() {
  static const WgmmaFamily family(Stage::linear, "linear_sm90",
                                  "y in tiles of one expert's tokens, with TMA and wgmma");
  return family;
}
const Family& dx_sm90_family() {
  static const WgmmaFamily family(
      Stage::dx, "dx_sm90",
      "dx in tiles of one expert's tokens, with TMA and wgmma, weights read as their transposes");
  return family;
}
const Family& gate_up_sm90_family() {
  static const WgmmaFamily family(
      Stage::gate_up, "gate_up_sm90",
      "hidden in tiles of one expert's tokens, x read once for both products, with TMA and wgmma");
  return family;
}
const Family& down_sm90_family() {
  static const WgmmaFamily family(Stage::down, "down_sm90",
                                  "y from tiles of one expert's hidden, with TMA and wgmma");
  return family;
}

}  // namespace fftune::masked
