#include "kernels/common/row_space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"

namespace fftune {
namespace {

constexpr std::int64_t most_block_threads = 1024;

/// Blocks that share a row.
std::int64_t cluster_of(const Config& config) {
  return config.contains("cluster") ? config.at("cluster") : 1;
}

}  // namespace

std::int64_t elements_of_vector(const RowShape& shape, const Config& config) {
  return config.at("vector") / shape.element_bytes();
}

std::int64_t vectors_of_thread(const RowShape& shape, const Config& config) {
  return quotient_up(shape.vectors(config.at("vector")), config.at("group") * cluster_of(config));
}

std::int64_t block_threads(const Config& config) {
  return config.at("group") * config.at("groups");
}

void add_row_parameters(Space& space, const RowShape& shape, const RowKernelLimits& limits,
                        const DeviceFacts& facts) {
  std::vector<std::string> sharing{"vector", "group"};
  add_wide_vector(space, shape.element_bytes(), widest_vector(shape.bytes()))
      .parameter("group", "threads of a block that share a row", limits.group)
      .parameter("groups", "rows of a block side by side", limits.groups);
  if (limits.clusters) {
    sharing.emplace_back("cluster");
    space.parameter("cluster", "blocks that share a row", {1, 2, 4, 8})
        .parameter("evict_first", "1: accesses use the L2 policy evict_first; 0: evict_normal",
                   {0, 1});
  }
  space
      .constraint("a block has 64 to 1024 threads",
                  [](const Config& c) {
                    return block_threads(c) >= 64 && block_threads(c) <= most_block_threads;
                  },
                  {"group", "groups"})
      .constraint("more than half of a block's rows would be padding",
                  [shape](const Config& c) {
                    return block_threads(c) == 64 || c.at("groups") < 2 * shape.rows;
                  },
                  {"group", "groups"})
      .constraint(
          "at most half of a row's threads may be idle",
          [shape, least = limits.group.front()](const Config& c) {
            const std::int64_t threads = c.at("group") * cluster_of(c);
            return threads <= least || threads < 2 * shape.vectors(c.at("vector"));
          },
          sharing);
  if (limits.clusters)
    space
        .constraint("clusters need compute capability 9.0",
                    [capability = facts.compute_capability](const Config& c) {
                      return c.at("cluster") == 1 || capability >= 90;
                    },
                    {"cluster"})
        .constraint(
            "a cluster needs one row for each block, 128 threads or more, and 8 KB of the row for "
            "each block",
            [shape](const Config& c) {
              return c.at("cluster") == 1 || (c.at("groups") == 1 && c.at("group") >= 128 &&
                                              shape.bytes() >= 8192 * c.at("cluster"));
            },
            {"group", "groups", "cluster"});
  if (limits.wide_alone)
    space.constraint(
        "more than 256 threads for a row need groups=1, so that the block synchronises for one row "
        "alone",
        [](const Config& c) { return c.at("group") <= 256 || c.at("groups") == 1; },
        {"group", "groups"});
}

void limit_waves(Space& space) {
  space.constraint("an SM has at most 2048 resident threads: more blocks only add partial sums",
                   [](const Config& c) {
                     return c.at("waves") == 1 || c.at("waves") * block_threads(c) <= 2048;
                   },
                   {"group", "groups", "waves"});
}

Config default_rows(const RowShape& shape, const RowDefaults& defaults) {
  const std::int64_t vector = widest_vector(shape.bytes());
  const std::int64_t accesses = shape.vectors(vector);
  const std::int64_t group = std::clamp(
      power_of_two(quotient_up(accesses, defaults.vectors * defaults.cluster)),
      defaults.cluster > 1 ? std::int64_t{128} : defaults.least_group, defaults.most_group);
  const std::int64_t wanted = std::max<std::int64_t>(1, 256 / group);
  const std::int64_t groups =
      std::max(quotient_up(64, group), std::min(wanted, power_of_two(shape.rows)));
  return {{"vector", vector}, {"group", group}, {"groups", defaults.cluster > 1 ? 1 : groups}};
}

void append_row_kernel(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& expression, std::int64_t sets, const Config& config,
                       std::vector<Argument> arguments) {
  const std::int64_t cluster = cluster_of(config);
  auto& launch = append_pdl_kernel(
      program, facts, file, expression, {static_cast<std::uint32_t>(sets * cluster)},
      static_cast<std::uint32_t>(block_threads(config)), std::move(arguments));
  launch.cluster.x = static_cast<std::uint32_t>(cluster);
}

std::optional<std::string> RowFamily::refusal(const Problem& problem,
                                              const DeviceFacts& facts) const {
  if (auto refusal = StageFamily::refusal(problem, facts)) return refusal;
  if (space(problem, facts).violations(default_config(problem, facts)).empty()) return std::nullopt;
  return fmt::format("rows of {} elements in {} do not suit a block's registers and accesses",
                     shape_(problem).elements, dtype_name(problem.dtype));
}

}  // namespace fftune
