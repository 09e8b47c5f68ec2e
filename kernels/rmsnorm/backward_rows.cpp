// Both gradients in one pass over x and dy, rows in registers; then the sum of the blocks' dw.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/rmsnorm/cuda_layer.hpp"
#include "kernels/rmsnorm/families.hpp"
#include "kernels/rmsnorm/row_space.hpp"

namespace fftune::rmsnorm {
namespace {

constexpr std::int64_t other_registers = 32;  // addresses, sums, one vector of each as floats
constexpr std::int64_t static_shared_bytes = 48 * 1024;  // what a block has without opting in
constexpr std::int64_t row_sum_bytes = 1024;

/// x, dy and, with a residual, dsum as they are read, of the next row too if it is fetched ahead;
/// and, in fp32, dw and the weights that stay.
std::int64_t registers_needed(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer, config);
  const std::int64_t elements = vectors_of_thread(layer, config) * count;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  return raw_registers(elements, element_bytes, count) * (layer.adds ? 3 : 2) *
             (config.at("prefetch") + 1) +
         elements * (config.at("keep") + 1) + other_registers;
}

/// Of the sums of dw by which the groups of a block meet.
std::int64_t shared_bytes(const Layer& layer, const Config& config) {
  if (config.at("groups") == 1) return row_sum_bytes;
  return block_threads(config) * vectors_of_thread(layer, config) *
             elements_of_vector(layer, config) * static_cast<std::int64_t>(sizeof(float)) +
         row_sum_bytes;
}

/// Clusters to launch; each adds one row to the partial sums of dw.
std::int64_t row_blocks(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t sets = quotient_up(layer.m, config.at("groups"));
  return std::min(sets, std::max<std::int64_t>(
                            1, config.at("waves") * facts.multiprocessors / config.at("cluster")));
}

class BackwardRows final : public Family {
 public:
  std::string_view name() const override { return "backward_rows"; }
  std::string_view summary() const override {
    return "rows in registers, x and dy read once, dw summed on the way";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_backward}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    return refuse_rows(*this, problem, "bwd", facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Layer layer = layer_of(problem);
    Space space;
    add_row_parameters(space, layer, facts);
    space
        .parameter("waves", "blocks for each SM, which go on to further rows",
                   {1, 2, 3, 4, 6, 8, 12})
        .parameter("keep", "1: weights stay in registers from row to row; 0: each row loads them",
                   {0, 1})
        .parameter("prefetch",
                   "1: the next row is loaded before the sums of this one; 0: after them", {0, 1})
        .parameter("l2_prefetch_rows",
                   "how many rows of the block ahead L2 prefetches a row; 0: no prefetch",
                   {0, 1, 2, 4})
        .constraint("threads of all blocks keep in registers what is theirs of a row and of dw",
                    [layer, facts](const Config& c) {
                      return registers_needed(layer, c) <=
                             registers_of_thread(facts, c.at("waves") * block_threads(c));
                    },
                    {"vector", "group", "groups", "cluster", "waves", "keep", "prefetch"})
        .constraint("the L2 prefetch takes rows of whole 16 bytes, and runs ahead of the loads",
                    [layer, facts](const Config& c) {
                      const auto element_bytes =
                          static_cast<std::int64_t>(dtype_bytes(layer.dtype));
                      return c.at("l2_prefetch_rows") == 0 ||
                             (c.at("l2_prefetch_rows") > c.at("prefetch") &&
                              can_prefetch_l2(facts, widest_vector(layer.d * element_bytes)));
                    },
                    {"prefetch", "l2_prefetch_rows"})
        .constraint(
            "the groups' sums of dw meet in 48 KB of shared memory",
            [layer](const Config& c) { return shared_bytes(layer, c) <= static_shared_bytes; },
            {"vector", "group", "groups", "cluster"})
        .constraint("no more than 2048 threads of an SM run at once: more blocks only add sums",
                    [](const Config& c) {
                      return c.at("waves") == 1 || c.at("waves") * block_threads(c) <= 2048;
                    },
                    {"group", "groups", "waves"})
        .constraint("there are rows enough for that many blocks",
                    [layer, facts](const Config& c) {
                      return c.at("waves") == 1 ||
                             (c.at("waves") - 1) * facts.multiprocessors * c.at("groups") <
                                 layer.m * c.at("cluster");
                    },
                    {"groups", "cluster", "waves"});
    return space;
  }

  // Two vectors a thread: all that a row needs again stays in its registers, and the next row is on
  // its way to them; the one after that is prefetched to L2. Blocks of 512 threads, as few of them
  // leave few sums of dw to add up, and as many as an SM has registers for.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    Config config = default_rows(layer_of(problem), facts, 2, 2);
    for (const char* name : {"keep", "prefetch", "l2_prefetch_rows"}) config.set(name, 0);
    config.set("waves", 1);
    const Space space = this->space(problem, facts);
    const auto set_if_feasible = [&](const char* name, std::int64_t value) {
      Config other = config;
      other.set(name, value);
      if (space.violations(other).empty()) config = other;
    };
    set_if_feasible("keep", 1);
    set_if_feasible("prefetch", 1);
    set_if_feasible("l2_prefetch_rows", 2);
    if (block_threads(config) <= 256) set_if_feasible("groups", 2 * config.at("groups"));
    for (const std::int64_t waves : {2, 3, 4, 6, 8}) set_if_feasible("waves", waves);
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t blocks = row_blocks(layer, facts, config);
    Program program;
    program.scratch = {{static_cast<std::size_t>(blocks * layer.d) * sizeof(float), false}};
    program.kernels.push_back(
        {"rmsnorm/backward_rows.cu",
         fmt::format("fftune::backward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                     template_arguments(layer), config.at("vector"),
                     vectors_of_thread(layer, config), config.at("group"), config.at("groups"),
                     config.at("cluster"), config.at("keep") != 0, config.at("prefetch") != 0,
                     config.at("l2_prefetch_rows"), config.at("evict_first") != 0,
                     config.at("waves"))});
    KernelLaunch launch;
    launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
    launch.grid.x = static_cast<std::uint32_t>(blocks * config.at("cluster"));
    launch.block.x = static_cast<std::uint32_t>(block_threads(config));
    launch.programmatic = facts.compute_capability >= 90;
    launch.arguments = backward_arguments(layer, ScratchArgument{0});
    program.steps.emplace_back(std::move(launch));
    append_column_sum(program, facts, "rmsnorm/backward_rows.cu", "backward_rows_weight",
                      layer.weight_dtype, ScratchArgument{0}, TensorArgument{places_of(layer).dw},
                      blocks, layer.d);
    return program;
  }

  std::vector<std::string> sources() const override { return {"rmsnorm/backward_rows.cu"}; }
};

}  // namespace

const Family& backward_rows_family() {
  static const BackwardRows family;
  return family;
}

}  // namespace fftune::rmsnorm
