// Rows that share prefixes: of a group several rows at once, by a block or a cluster of blocks.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {
namespace {

constexpr const char* file = "ngram_block/groups.cu";
constexpr std::int64_t other_registers = 48;  // addresses, runs of ids, what was found

/// Sets of rows that look at a prefix together.
std::int64_t units(const Rows& rows, std::int64_t tile) {
  return rows.groups() * quotient_up(std::min(rows.beams, rows.b), tile);
}

/// The last ids of the rows, and four accesses of ids.
std::int64_t registers_needed(const Rows& rows, const Config& config) {
  return config.at("tile") * id_bytes(rows) / 4 + 4 * config.at("vector") / 4 + other_registers;
}

class BlockGroups final : public Family {
 public:
  std::string_view name() const override { return "groups"; }
  std::string_view summary() const override {
    return "rows that share a prefix by one block, or by a cluster of blocks";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage}; }
  std::vector<std::string> sources() const override { return {file}; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (!problem.sizes.contains("prefix")) return "no prefix: its rows are another family's";
    return refuse_cuda(problem, "fwd", facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Rows rows = rows_of(problem);
    return Space()
        .parameter("threads", "threads of a block", {64, 128, 256, 512, 1024})
        .parameter("cluster", "blocks that share a prefix", {1, 2, 4, 8})
        .parameter("tile", "rows that look at an id when it is read", {1, 2, 4, 8, 16})
        .parameter("vector", "bytes of ids of an access to a prefix", {4, 8, 16})
        .constraint(
            "an access is at least one id, and prefixes are aligned to it",
            [least = id_bytes(rows), most = widest_access(rows, rows.prefix)](const Config& c) {
              return c.at("vector") >= least && c.at("vector") <= most;
            },
            {"vector"})
        .constraint("accesses narrower than half of what alignment allows only add instructions",
                    [most = widest_access(rows, rows.prefix)](const Config& c) {
                      return 2 * c.at("vector") >= most;
                    },
                    {"vector"})
        .constraint("clusters need compute capability 9.0",
                    [capability = facts.compute_capability](const Config& c) {
                      return c.at("cluster") == 1 || capability >= 90;
                    },
                    {"cluster"})
        .constraint(
            "a group has more than half as many rows",
            [rows](const Config& c) { return c.at("tile") == 1 || c.at("tile") < 2 * rows.beams; },
            {"tile"})
        .constraint("every thread has ids of its prefix, but in the smallest block",
                    [rows](const Config& c) {
                      const std::int64_t threads = c.at("threads") * c.at("cluster");
                      return threads == 64 ||
                             threads * (c.at("vector") / id_bytes(rows)) < 2 * rows.prefix;
                    },
                    {"threads", "cluster", "vector"})
        .constraint("last ids and accesses in flight fit in a thread's registers",
                    [rows, facts](const Config& c) {
                      return registers_needed(rows, c) <=
                             registers_of_thread(facts, c.at("threads"));
                    },
                    {"threads", "tile", "vector"});
  }

  // Rows look at an id together while there are units for all SMs; what further units read again
  // comes from L2. Clusters only where there are too few units even so. Of threads a block has
  // those whose accesses are all in flight at once, up to 512, as each also compares every id.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Rows rows = rows_of(problem);
    const std::int64_t vector = widest_access(rows, rows.prefix);
    const std::int64_t count = vector / id_bytes(rows);
    std::int64_t tile = std::min<std::int64_t>(16, power_of_two(rows.beams));
    while (tile > 1 && units(rows, tile / 2) <= facts.multiprocessors) tile /= 2;
    std::int64_t cluster = 1;
    if (facts.compute_capability >= 90)
      while (cluster < 8 && rows.prefix >= 4096 * cluster &&
             2 * units(rows, tile) * cluster <= facts.multiprocessors)
        cluster *= 2;
    std::int64_t threads = 64;
    while (threads < 512 && 2 * threads * cluster * count <= rows.prefix) threads *= 2;
    return {{"threads", threads}, {"cluster", cluster}, {"tile", tile}, {"vector", vector}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    return groups_program(problem, facts, config);
  }
};

}  // namespace

std::int64_t id_bytes(const Rows& rows) {
  return static_cast<std::int64_t>(dtype_bytes(rows.ids));
}

std::int64_t widest_access(const Rows& rows, std::int64_t ids) {
  return widest_vector(ids * id_bytes(rows));
}

Program groups_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  constexpr std::int64_t most_clusters = std::int64_t{1} << 20;
  const Rows rows = rows_of(problem);
  const Places at = places_of(problem);
  const std::int64_t tile = config.at("tile"), cluster = config.at("cluster");
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  Program program;
  program.kernels.push_back(
      {file, fmt::format("fftune::block_groups<{}, {}, {}, {}, {}, {}, {}, {}, {}>",
                         element_type(rows.dtype), integer_type(rows.ids), rows.own_lengths,
                         rows.own_n, config.at("threads"), cluster, tile, config.at("vector"),
                         widest_access(rows, rows.len))});
  KernelLaunch launch;
  launch.cluster.x = static_cast<std::uint32_t>(cluster);
  launch.grid.x = static_cast<std::uint32_t>(std::min(units(rows, tile), most_clusters) * cluster);
  launch.block.x = static_cast<std::uint32_t>(config.at("threads"));
  launch.programmatic = facts.compute_capability >= 90;
  launch.arguments = {tensor_or_null(at.ids),
                      tensor_or_null(at.prefix),
                      tensor_or_null(at.logits),
                      tensor_or_null(at.lengths),
                      tensor_or_null(at.prefix_lengths),
                      tensor_or_null(at.n),
                      tensor_or_null(at.invalid),
                      rows.b,
                      small(std::min(rows.beams, rows.b)),
                      small(rows.len),
                      small(rows.prefix),
                      small(rows.vocab),
                      small(rows.n),
                      rows.padding};
  program.steps.emplace_back(std::move(launch));
  return program;
}

const Family& groups_family() {
  static const BlockGroups family;
  return family;
}

}  // namespace fftune::ngram_block
