#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "core/error.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/ffn/cuda_stage.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode.hpp"
#include "kernels/gemm/shape.hpp"
#include "registry/family.hpp"

namespace fftune::ffn {
namespace {

/// What follows from a configuration.
struct Layout {
  std::int64_t tokens = 0;     // of the tensor core's operand: 8 or 16
  std::int64_t rows = 0;       // hidden features of a block
  std::int64_t warps = 0;      // of a block
  std::int64_t blocks = 0;     // that own hidden features; those of y fit into as many
  std::int64_t out_rows = 0;   // features of y of a block
  std::int64_t steps = 0;      // of 32 elements of d a warp
  std::int64_t out_steps = 0;  // and of h

  Layout(const Shape& shape, const Config& config)
      : tokens(shape.m <= 8 ? 8 : 16),
        rows(config.at("rows")),
        warps(config.at("warps")),
        blocks(ceil_div(shape.h, rows)),
        out_rows(8 * ceil_div(shape.d, 8 * blocks)),
        steps(ceil_div(shape.d, 32 * warps)),
        out_steps(ceil_div(shape.h, 32 * warps)) {}

  /// 32-bit registers a thread for its weights and sums, which live together.
  std::int64_t registers() const {
    return 2 * rows / 8 * (steps + 1) * 4 + out_rows / 8 * (out_steps + 1) * 4;
  }
  std::int64_t shared_bytes() const {
    return warps * std::max(2 * rows, out_rows) * tokens * std::int64_t{sizeof(float)};
  }
};

/// Bytes that a block reads from L2 in the time of a launch.
constexpr double least_worth_sharing = 48 * 1024;

/// Registers of a thread when one block has a multiprocessor to itself.
std::int64_t registers_of_thread(std::int64_t warps) {
  return std::min<std::int64_t>(255, 65536 / (32 * warps));
}

class FfnDecode final : public Family {
 public:
  std::string_view name() const override { return "ffn_decode"; }
  std::string_view summary() const override {
    return "both stages in one launch for few tokens, all weights in flight at once";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_gate_up, stage_down}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_tensor_cores(problem, facts)) return refusal;
    if (!form_of(problem).plain())
      return "it keeps gate and up in registers, and adds nothing to y: the plain form alone";
    const Shape shape = shape_of(problem);
    if (shape.m > decode_max_tokens)
      return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                         shape.m, decode_max_tokens);
    // Each block reads the whole intermediate, 4 bytes an element with its tags.
    const double intermediate = 4.0 * static_cast<double>(shape.m) * static_cast<double>(shape.h);
    const double weights = 6.0 * static_cast<double>(shape.d) * static_cast<double>(shape.h) /
                           std::max(facts.multiprocessors, 1);
    if (intermediate > std::max(weights, least_worth_sharing))
      return fmt::format(
          "every block would read {:.0f} bytes of the intermediate and only {:.0f} "
          "of weights: two launches take less",
          intermediate, weights);
    if (space(problem, facts).feasible().empty())
      return fmt::format(
          "the weights of d={} and h={} do not fit in the registers of {} "
          "multiprocessors",
          shape.d, shape.h, facts.multiprocessors);
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Shape shape = shape_of(problem);
    const std::int64_t processors = facts.multiprocessors;
    return Space()
        .parameter("rows", "hidden features of a block", {8, 16, 24, 32, 48, 64})
        .parameter("warps", "warps of a block, which split k", {4, 8, 16})
        .parameter("poll_first", "1: poll one word of the intermediate before loading the rest",
                   {0, 1})
        .parameter("late_down",
                   "1: prefetch the weights of down once half of the others have arrived", {0, 1})
        .constraint(fmt::format("all blocks must be resident at once, one on each of {} "
                                "multiprocessors",
                                processors),
                    [=](const Config& c) { return ceil_div(shape.h, c.at("rows")) <= processors; },
                    {"rows"})
        .constraint("weights and sums must leave a thread 56 of its registers",
                    [=](const Config& c) {
                      const Layout layout(shape, c);
                      return layout.registers() + 56 <= registers_of_thread(layout.warps);
                    },
                    {"rows", "warps"})
        .constraint(fmt::format("the warps' sums must fit in the {} bytes of shared memory that a "
                                "block can have",
                                facts.shared_bytes_per_block),
                    [=, limit = facts.shared_bytes_per_block](const Config& c) {
                      return Layout(shape, c).shared_bytes() + 64 <= limit;
                    },
                    {"rows", "warps"})
        .constraint(
            "half of a block's warps or more would have no part of k",
            [=](const Config& c) { return c.at("warps") == 4 || shape.d > 16 * c.at("warps"); },
            {"warps"});
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    // As many blocks as there are multiprocessors to load, and as many warps to wait for memory.
    const auto feasible = space(problem, facts).feasible();
    if (feasible.empty()) throw Error(ErrorKind::internal, "the space of ffn_decode is empty");
    return *std::min_element(feasible.begin(), feasible.end(), [](const auto& a, const auto& b) {
      const auto rank = [](const Config& c) {
        return std::tuple(c.at("rows"), -c.at("late_down"), -c.at("warps"), c.at("poll_first"));
      };
      return rank(a) < rank(b);
    });
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Shape shape = shape_of(problem);
    const Layout layout(shape, config);
    Program program;
    program.kernels.push_back(
        {"ffn/ffn_decode.cu",
         fmt::format("fftune::ffn_decode<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                     element_type(problem.dtype), activation_type(problem), layout.tokens,
                     layout.rows, layout.out_rows, layout.warps, layout.steps, layout.out_steps,
                     config.at("poll_first") == 1, config.at("late_down") == 1)});
    program.scratch.push_back({static_cast<std::size_t>(256 + shape.m * shape.h * 4), false});
    KernelLaunch launch;
    launch.grid.x = static_cast<std::uint32_t>(layout.blocks);
    launch.block.x = static_cast<std::uint32_t>(layout.warps * 32);
    launch.shared_bytes = static_cast<std::uint32_t>(layout.shared_bytes());
    launch.cooperative = true;
    launch.programmatic = may_start_early(CudaStage::gate_up, problem, facts);
    const Places at = places_of(problem);
    for (const std::size_t tensor : {at.gate_up_x, at.w_gate, at.w_up, at.w_down, at.y})
      launch.arguments.emplace_back(TensorArgument{tensor});
    launch.arguments.emplace_back(ScratchArgument{0});
    for (const std::int64_t size : size_arguments(problem))
      launch.arguments.emplace_back(static_cast<std::int32_t>(size));
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"ffn/ffn_decode.cu"}; }
};

}  // namespace

const Family& ffn_decode_family() {
  static const FfnDecode family;
  return family;
}

}  // namespace fftune::ffn
