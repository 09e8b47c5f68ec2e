// The family of the mma.sync engine over grouped rows, for every stage.
#include <fmt/format.h>

#include <utility>

#include "kernels/gemm/mma_sync.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

/// mma_sync_grouped_gemm::table_words in bytes.
std::int64_t table_bytes(std::int64_t bm) {
  constexpr std::int64_t group_words = 1024 + 4 + 30;
  return ceil_div(group_words + 2 * bm, 32) * 128;
}

/// The device as the engine's space may see it: without the shared memory of the largest table.
DeviceFacts without_table(DeviceFacts facts) {
  facts.shared_bytes_per_block -= table_bytes(256);
  return facts;
}

class MmaSyncFamily final : public StageFamily {
 public:
  using StageFamily::StageFamily;

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage(), problem)) return refusal;
    return refuse_mma_sync(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return mma_sync_space(product_of(stage(), problem).shape, without_table(facts));
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return mma_sync_default(product_of(stage(), problem).shape, without_table(facts));
  }

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts.clock_hz <= 0) return std::nullopt;
    return mma_sync_cost(product_of(stage(), problem).shape, facts, config) / facts.clock_hz;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const StageProduct work = product_of(stage(), problem);
    Program program;
    program.kernels.push_back(
        {"masked/grouped_sm80.cu",
         fmt::format("fftune::grouped_sm80<{}, {}, {}, {}>", template_arguments(work, problem),
                     work.shape.b_transposed, work.shape.terms,
                     mma_sync_template_arguments(config))});
    // Each expert's last tile may be a part: there may be a row of tiles more.
    GemmShape tiled = work.shape;
    tiled.m += config.at("bm");
    mma_sync_launch(program, tiled, facts, config, pointer_arguments(work),
                    {work.shape.m, work.shape.n, work.shape.k});
    auto& launch = std::get<KernelLaunch>(program.steps.back());
    launch.shared_bytes += static_cast<std::uint32_t>(table_bytes(config.at("bm")));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/grouped_sm80.cu"}; }
};

}  // namespace

std::vector<const Family*> linear_sm80_families() {
  static const MmaSyncFamily linear(Stage::linear, "linear_sm80",
                                    "y in tiles of one expert's tokens, with mma.sync"),
      dx(Stage::dx, "dx_sm80",
         "dx in tiles of one expert's tokens, weights read as their transposes by ldmatrix.trans");
  return {&linear, &dx};
}
std::vector<const Family*> ffn_sm80_families() {
  static const MmaSyncFamily gate_up(
      Stage::gate_up, "gate_up_sm80",
      "hidden in tiles of one expert's tokens, x read once for both products, with mma.sync"),
      down(Stage::down, "down_sm80", "y from tiles of one expert's hidden, with mma.sync"),
      d_hidden(Stage::d_hidden, "d_hidden_sm80",
               "dy w_down in tiles of one expert's tokens by mma.sync, the gradients of gate and "
               "up from it"),
      d_x(Stage::d_x, "d_x_sm80",
          "mma.sync over tiles of one expert's tokens, both products in one accumulator");
  return {&gate_up, &down, &d_hidden, &d_x};
}

}  // namespace fftune::masked
