// Rows in registers: each is read once, by lanes of a warp, by a block, or by a cluster of blocks.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/rmsnorm/cuda_layer.hpp"
#include "kernels/rmsnorm/families.hpp"
#include "kernels/rmsnorm/row_space.hpp"

namespace fftune::rmsnorm {
namespace {

constexpr std::int64_t other_registers = 40;   // addresses, sums, one vector as floats
constexpr std::int64_t weights_at_hand = 4;    // vectors, where they are fetched for every row
constexpr std::int64_t wide_row_bytes = 8192;  // from where on a thread has 4 vectors by default

/// Registers of a thread for the row's bytes as they are read, and for the weights.
std::int64_t registers_needed(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer, config);
  const std::int64_t vectors = vectors_of_thread(layer, config);
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  const auto weight_bytes = static_cast<std::int64_t>(dtype_bytes(layer.weight_dtype));
  const std::int64_t row = raw_registers(vectors * count, element_bytes, count);
  const std::int64_t weights = config.at("keep") ? vectors : std::min(vectors, weights_at_hand);
  return row * (config.at("unroll") + (layer.adds ? 1 : 0)) +
         raw_registers(weights * count, weight_bytes, count) + other_registers;
}

/// Blocks to launch: one for every set of rows, or as many as `waves` for each SM.
std::int64_t row_blocks(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t sets = quotient_up(layer.m, config.at("groups") * config.at("unroll"));
  const std::int64_t waves = config.at("waves");
  if (waves == 0) return sets;
  return std::min(sets,
                  std::max<std::int64_t>(1, waves * facts.multiprocessors / config.at("cluster")));
}

/// What rows and the weights are aligned to, in bytes, 16 at most.
std::int64_t row_alignment(const Layer& layer) {
  const auto bytes = [&](DType dtype) {
    return layer.d * static_cast<std::int64_t>(dtype_bytes(dtype));
  };
  return std::min(widest_vector(bytes(layer.dtype)), widest_vector(bytes(layer.weight_dtype)));
}

/// Of all blocks.
std::int64_t all_threads(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  return row_blocks(layer, facts, config) * config.at("cluster") * block_threads(config);
}

class ForwardRows final : public Family {
 public:
  std::string_view name() const override { return "forward_rows"; }
  std::string_view summary() const override {
    return "rows in registers of a group of threads, read once";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_forward}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    return refuse_rows(*this, problem, "fwd", facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Layer layer = layer_of(problem);
    Space space;
    add_row_parameters(space, layer, facts);
    space.parameter("unroll", "rows that a group has in flight", {1, 2, 4})
        .parameter("keep", "1: weights stay in registers from row to row; 0: each row loads them",
                   {0, 1})
        .parameter("waves", "blocks for each SM, which go on to further rows; 0: one block a set",
                   {0, 2, 4, 8, 16});
    add_l2_prefetch(space, facts, can_prefetch_l2(facts, row_alignment(layer)),
                    [layer, facts](const Config& c) { return all_threads(layer, facts, c); },
                    {"group", "groups", "cluster", "unroll", "waves"});
    space
        .constraint("a thread keeps its part of the rows and weights in registers",
                    [layer, facts](const Config& c) {
                      return registers_needed(layer, c) <=
                             registers_of_thread(facts, block_threads(c));
                    },
                    {"vector", "group", "groups", "cluster", "unroll", "keep"})
        .constraint("what is quantised is stored by two bytes at least",
                    [layer](const Config& c) {
                      return !layer.quantises() || elements_of_vector(layer, c) >= 2;
                    },
                    {"vector"})
        .constraint("several rows in flight pay while a thread has at most 8 vectors of them",
                    [layer](const Config& c) {
                      return c.at("unroll") == 1 ||
                             c.at("unroll") * vectors_of_thread(layer, c) <= 8;
                    },
                    {"vector", "group", "cluster", "unroll"})
        .constraint("no more rows in flight in a block than there are",
                    [layer](const Config& c) {
                      return c.at("unroll") == 1 || c.at("groups") * c.at("unroll") <= layer.m;
                    },
                    {"groups", "unroll"})
        .constraint("a block that has one set of rows keeps its weights anyway if they fit",
                    [layer](const Config& c) {
                      return c.at("keep") == 1 || vectors_of_thread(layer, c) > weights_at_hand;
                    },
                    {"vector", "group", "cluster", "keep"})
        .constraint("there are rows enough for blocks to go on to",
                    [layer, facts](const Config& c) {
                      return c.at("waves") == 0 || c.at("waves") * facts.multiprocessors *
                                                           c.at("groups") * c.at("unroll") <
                                                       layer.m * c.at("cluster");
                    },
                    {"groups", "cluster", "unroll", "waves"});
    return space;
  }

  // Blocks that start and end on their own keep the memory busy between them, so no block goes on.
  // Many rows: blocks of 256 threads with 2 vectors each, or 4 of wide rows; more bytes in flight
  // than those only make the memory slower. Few rows: one vector a thread, the shortest time for
  // each row, and what they read is on its way before the kernel's turn.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t row_bytes = layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
    const std::int64_t vectors = layer.m <= 2 * facts.multiprocessors ? 1
                                 : row_bytes <= wide_row_bytes        ? 2
                                                                      : 4;
    Config config = default_rows(layer, facts, vectors, 4);
    config.set("unroll", 1);
    config.set("keep", vectors_of_thread(layer, config) <= weights_at_hand ? 1 : 0);
    config.set("waves", 0);
    const bool l2_prefetch = can_prefetch_l2(facts, row_alignment(layer)) &&
                             all_resident(facts, all_threads(layer, facts, config));
    config.set("l2_prefetch", l2_prefetch ? 1 : 0);
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    Program program;
    program.kernels.push_back(
        {"rmsnorm/forward_rows.cu",
         fmt::format("fftune::forward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                     template_arguments(layer), element_type(layer.out_dtype), config.at("vector"),
                     vectors_of_thread(layer, config), config.at("group"), config.at("groups"),
                     config.at("unroll"), config.at("cluster"), config.at("keep") != 0,
                     config.at("evict_first") != 0, config.at("l2_prefetch") != 0)});
    KernelLaunch launch;
    launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
    launch.grid.x =
        static_cast<std::uint32_t>(row_blocks(layer, facts, config) * config.at("cluster"));
    launch.block.x = static_cast<std::uint32_t>(block_threads(config));
    launch.programmatic = facts.compute_capability >= 90;
    launch.arguments = forward_arguments(layer);
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"rmsnorm/forward_rows.cu"}; }
};

}  // namespace

const Family& forward_rows_family() {
  static const ForwardRows family;
  return family;
}

}  // namespace fftune::rmsnorm
