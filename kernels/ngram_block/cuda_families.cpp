// Rows by blocks or clusters of blocks; the fallback is the same kernel without either choice, and
// where rows share prefixes the kernel of groups.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {
namespace {

constexpr const char* file = "ngram_block/rows.cu";

/// The widest access to which every row is aligned.
std::int64_t widest(const Rows& rows) {
  return widest_access(rows, rows.len);
}

/// Of all blocks.
std::int64_t all_threads(const Rows& rows, const Config& config) {
  return rows.b * config.at("cluster") * config.at("threads");
}

class BlockRows final : public Family {
 public:
  BlockRows(std::string_view name, std::string_view summary, bool fallback)
      : name_(name), summary_(summary), fallback_(fallback) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return fallback_; }
  std::vector<std::string> stages() const override { return {stage}; }
  std::vector<std::string> sources() const override {
    if (fallback_) return {file, "ngram_block/groups.cu"};
    return {file};
  }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (!fallback_ && problem.sizes.contains("prefix"))
      return fmt::format("prefix={}: rows that share prefixes are another family's",
                         problem.size("prefix"));
    return refuse_cuda(problem, "fwd", facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    if (fallback_) return {};
    const Rows rows = rows_of(problem);
    Space space;
    space.parameter("threads", "threads of a block", {64, 128, 256, 512, 1024})
        .parameter("cluster", "blocks that share a row", {1, 2, 4, 8})
        .parameter("vector", "bytes of ids of an access", {4, 8, 16});
    add_l2_prefetch(space, facts, can_prefetch_l2(facts, widest(rows)),
                    [rows](const Config& c) { return all_threads(rows, c); },
                    {"threads", "cluster"});
    space
        .constraint("an access is at least one id, and rows are aligned to it",
                    [least = id_bytes(rows), most = widest(rows)](const Config& c) {
                      return c.at("vector") >= least && c.at("vector") <= most;
                    },
                    {"vector"})
        .constraint("clusters need compute capability 9.0",
                    [capability = facts.compute_capability](const Config& c) {
                      return c.at("cluster") == 1 || capability >= 90;
                    },
                    {"cluster"})
        .constraint("every thread has ids of its row, but in the smallest block",
                    [rows](const Config& c) {
                      const std::int64_t threads = c.at("threads") * c.at("cluster");
                      return threads == 64 ||
                             threads * (c.at("vector") / id_bytes(rows)) < 2 * rows.len;
                    },
                    {"threads", "cluster", "vector"});
    return space;
  }

  // One access a thread, of as many ids as it can have: a trip to memory is most of the time. Long
  // rows are for as many SMs as there are.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    if (fallback_) return {};
    const Rows rows = rows_of(problem);
    const std::int64_t vector = widest(rows), count = vector / id_bytes(rows);
    std::int64_t threads = 64;
    while (threads < 1024 && 2 * threads * count <= rows.len) threads *= 2;
    std::int64_t cluster = 1;
    if (facts.compute_capability >= 90)
      while (cluster < 8 && rows.len >= 16384 * cluster && rows.b * cluster < facts.multiprocessors)
        cluster *= 2;
    Config config{{"threads", threads}, {"cluster", cluster}, {"vector", vector}};
    const bool l2_prefetch =
        can_prefetch_l2(facts, vector) && all_resident(facts, all_threads(rows, config));
    config.set("l2_prefetch", l2_prefetch ? 1 : 0);
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& given) const override {
    constexpr std::int64_t most_clusters = std::int64_t{1} << 20;
    const Rows rows = rows_of(problem);
    if (rows.prefix > 0)
      return groups_program(
          problem, facts,
          {{"threads", 256}, {"cluster", 1}, {"tile", 1}, {"vector", id_bytes(rows)}});
    const Places at = places_of(problem);
    const Config config = fallback_ ? Config{{"threads", 256},
                                             {"cluster", 1},
                                             {"vector", id_bytes(rows)},
                                             {"l2_prefetch", 0}}
                                    : given;
    const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
    Program program;
    program.kernels.push_back(
        {file,
         fmt::format("fftune::block_rows<{}, {}, {}, {}, {}, {}, {}, {}>", element_type(rows.dtype),
                     integer_type(rows.ids), rows.own_lengths, rows.own_n, config.at("threads"),
                     config.at("cluster"), config.at("vector"), config.at("l2_prefetch") != 0)});
    KernelLaunch launch;
    launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
    launch.grid.x =
        static_cast<std::uint32_t>(std::min(rows.b, most_clusters) * config.at("cluster"));
    launch.block.x = static_cast<std::uint32_t>(config.at("threads"));
    launch.programmatic = facts.compute_capability >= 90;
    launch.arguments = {tensor_or_null(at.ids),
                        tensor_or_null(at.logits),
                        tensor_or_null(at.lengths),
                        tensor_or_null(at.n),
                        tensor_or_null(at.invalid),
                        rows.b,
                        small(rows.len),
                        small(rows.vocab),
                        small(rows.n),
                        rows.padding};
    program.steps.emplace_back(std::move(launch));
    return program;
  }

 private:
  std::string_view name_;
  std::string_view summary_;
  bool fallback_;
};

}  // namespace

const Family& rows_family() {
  static const BlockRows family("rows", "a row by one block, or by a cluster of blocks", false);
  return family;
}
const Family& fallback_family() {
  static const BlockRows family("fallback", "a row by one block, id by id: the fallback", true);
  return family;
}

}  // namespace fftune::ngram_block
