#include "kernels/rmsnorm/row_space.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/cuda_kernel.hpp"

namespace fftune::rmsnorm {
namespace {

constexpr std::int64_t most_block_threads = 1024;
/// A block pulls a row of this size from memory about as fast as an SM can; only wider ones gain by
/// more SMs.
constexpr std::int64_t row_bytes_of_block = 16384;

std::int64_t element_bytes(const Layer& layer) {
  return static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

std::int64_t row_vectors(const Layer& layer, std::int64_t vector) {
  return layer.d * element_bytes(layer) / vector;
}

}  // namespace

std::optional<std::string> refuse_rows(const Family& family, const Problem& problem,
                                       std::string_view pass, const DeviceFacts& facts) {
  if (auto refusal = refuse_cuda(problem, pass, facts)) return refusal;
  const Config config = family.default_config(problem, facts);
  if (family.space(problem, facts).violations(config).empty()) return std::nullopt;
  return fmt::format("rows of d={} in {} do not suit a block's registers and accesses",
                     problem.size("d"), dtype_name(problem.dtype));
}

std::int64_t elements_of_vector(const Layer& layer, const Config& config) {
  return config.at("vector") / element_bytes(layer);
}

std::int64_t vectors_of_thread(const Layer& layer, const Config& config) {
  return quotient_up(row_vectors(layer, config.at("vector")),
                     config.at("group") * config.at("cluster"));
}

std::int64_t block_threads(const Config& config) {
  return config.at("group") * config.at("groups");
}

void add_row_parameters(Space& space, const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t row_bytes = layer.d * element_bytes(layer);
  const std::int64_t widest = widest_vector(row_bytes);
  space.parameter("vector", "bytes of an access", {2, 4, 8, 16})
      .parameter("group", "threads of a block that share a row",
                 {4, 8, 16, 32, 64, 128, 256, 512, 1024})
      .parameter("groups", "rows of a block side by side", {1, 2, 4, 8, 16, 32, 64})
      .parameter("cluster", "blocks that share a row", {1, 2, 4, 8})
      .parameter("evict_first", "1: accesses use the L2 policy evict_first; 0: evict_normal",
                 {0, 1})
      .constraint("an access is at least one element, and rows are aligned to it",
                  [widest, least = element_bytes(layer)](const Config& c) {
                    return c.at("vector") >= least && c.at("vector") <= widest;
                  },
                  {"vector"})
      .constraint("accesses narrower than half of what alignment allows only add instructions",
                  [widest](const Config& c) { return 2 * c.at("vector") >= widest; }, {"vector"})
      .constraint("a block has 64 to 1024 threads",
                  [](const Config& c) {
                    return block_threads(c) >= 64 && block_threads(c) <= most_block_threads;
                  },
                  {"group", "groups"})
      .constraint(
          "blocks of one row each have no other rows' threads: they synchronise for it alone",
          [](const Config& c) { return c.at("group") <= 256 || c.at("groups") == 1; },
          {"group", "groups"})
      .constraint("no more rows side by side than there are",
                  [layer](const Config& c) {
                    return block_threads(c) == 64 || c.at("groups") < 2 * layer.m;
                  },
                  {"group", "groups"})
      .constraint("at most half of a row's threads have nothing to do",
                  [layer](const Config& c) {
                    const std::int64_t threads = c.at("group") * c.at("cluster");
                    return threads <= 4 || threads < 2 * row_vectors(layer, c.at("vector"));
                  },
                  {"vector", "group", "cluster"})
      .constraint(
          "a thread has at most 256 bytes of a row: more do not fit in its registers",
          [layer](const Config& c) { return vectors_of_thread(layer, c) * c.at("vector") <= 256; },
          {"vector", "group", "cluster"})
      .constraint("clusters need compute capability 9.0",
                  [capability = facts.compute_capability](const Config& c) {
                    return c.at("cluster") == 1 || capability >= 90;
                  },
                  {"cluster"})
      .constraint("a row on several SMs has at least 8 KB, and whole blocks, for each",
                  [row_bytes](const Config& c) {
                    return c.at("cluster") == 1 ||
                           (c.at("groups") == 1 && c.at("group") >= 128 &&
                            2 * row_bytes >= c.at("cluster") * row_bytes_of_block);
                  },
                  {"group", "groups", "cluster"});
}

Config default_rows(const Layer& layer, const DeviceFacts& facts, std::int64_t vectors,
                    std::int64_t most_vectors) {
  const std::int64_t row_bytes = layer.d * element_bytes(layer);
  const std::int64_t vector = widest_vector(row_bytes);
  const std::int64_t row = row_vectors(layer, vector);
  std::int64_t cluster = 1;
  if (facts.compute_capability >= 90)
    while (cluster < 8 && row_bytes > 512 * 16 * most_vectors * cluster) cluster *= 2;
  const std::int64_t group = std::clamp<std::int64_t>(
      power_of_two(quotient_up(row, vectors * cluster)), cluster > 1 ? 128 : 4, 512);
  const std::int64_t wanted = std::max<std::int64_t>(1, 256 / group);
  const std::int64_t groups =
      std::max<std::int64_t>(quotient_up(64, group), std::min(wanted, power_of_two(layer.m)));
  return {{"vector", vector},
          {"group", group},
          {"groups", cluster > 1 ? 1 : groups},
          {"cluster", cluster},
          {"evict_first", 0}};
}

}  // namespace fftune::rmsnorm
