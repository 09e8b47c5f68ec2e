// Rows by blocks or clusters of blocks; the fallback is the same kernel without either choice, and
// where rows share prefixes the kernel of groups.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/stage_family.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {
namespace {

constexpr const char* file = "ngram_block/rows.cu";
constexpr const char* groups_file = "ngram_block/groups.cu";

std::int64_t id_bytes(const Rows& rows) {
  return static_cast<std::int64_t>(dtype_bytes(rows.ids));
}

/// The widest access, in bytes, to which rows of `ids` ids are aligned.
std::int64_t widest_access(const Rows& rows, std::int64_t ids) {
  return widest_vector(ids * id_bytes(rows));
}

/// The widest access to which every row is aligned.
std::int64_t widest(const Rows& rows) {
  return widest_access(rows, rows.len);
}

/// Threads of all blocks.
std::int64_t all_threads(const Rows& rows, const Config& config) {
  return rows.b * config.at("cluster") * config.at("threads");
}

constexpr std::int64_t other_registers = 48;  // addresses, runs of ids, what was found

/// Sets of rows that look at a prefix together.
std::int64_t units(const Rows& rows, std::int64_t tile) {
  return rows.groups() * quotient_up(std::min(rows.beams, rows.b), tile);
}

/// The last ids of the rows, and four accesses of ids.
std::int64_t registers_needed(const Rows& rows, const Config& config) {
  return config.at("tile") * id_bytes(rows) / 4 + 4 * config.at("vector") / 4 + other_registers;
}

/// The accesses that a block, or a cluster of blocks, makes together: `ids` ids that are called
/// `name`.
Space accesses(const Rows& rows, std::int64_t ids, const char* name, const DeviceFacts& facts) {
  const std::int64_t most = widest_access(rows, ids);
  return Space()
      .parameter("threads", "threads of a block", {64, 128, 256, 512, 1024})
      .parameter("cluster", fmt::format("blocks that share a {}", name), {1, 2, 4, 8})
      .parameter("vector", "bytes of ids of an access", {4, 8, 16})
      .when_absent(most)
      .constraint(fmt::format("an access is at least one id, and each {} is aligned to it", name),
                  [least = id_bytes(rows), most](const Config& c) {
                    return c.at("vector") >= least && c.at("vector") <= most;
                  },
                  {"vector"})
      .constraint("clusters need compute capability 9.0",
                  [capability = facts.compute_capability](const Config& c) {
                    return c.at("cluster") == 1 || capability >= 90;
                  },
                  {"cluster"})
      .constraint(fmt::format("more than half of the threads of a {} would be idle, in more than "
                              "the smallest block",
                              name),
                  [rows, ids](const Config& c) {
                    const std::int64_t threads = c.at("threads") * c.at("cluster");
                    return threads == 64 || threads * (c.at("vector") / id_bytes(rows)) < 2 * ids;
                  },
                  {"threads", "cluster", "vector"});
}

/// A launch of clusters that go through `units` of work: rows, or sets of rows that share a prefix.
Program launch_of(const Config& config, const DeviceFacts& facts, const char* source,
                  const std::string& expression, std::int64_t units,
                  std::vector<Argument> arguments) {
  constexpr std::int64_t most_clusters = std::int64_t{1} << 20;
  const std::int64_t cluster = config.at("cluster");
  Program program;
  auto& launch =
      append_pdl_kernel(program, facts, source, expression,
                        {static_cast<std::uint32_t>(std::min(units, most_clusters) * cluster)},
                        static_cast<std::uint32_t>(config.at("threads")), std::move(arguments));
  launch.cluster.x = static_cast<std::uint32_t>(cluster);
  return program;
}

std::int32_t small(std::int64_t value) {
  return static_cast<std::int32_t>(value);
}

/// The program of the family `groups`.
Program groups_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Rows rows = rows_of(problem);
  const TensorPlaces at(ngram_block_op().tensors(problem));
  return launch_of(
      config, facts, groups_file,
      fmt::format("block_groups<{}, {}, {}, {}, {}, {}, {}, {}, {}>", element_type(rows.dtype),
                  integer_type(rows.ids), rows.own_lengths, rows.own_n, config.at("threads"),
                  config.at("cluster"), config.at("tile"), config.at("vector"),
                  widest_access(rows, rows.len)),
      units(rows, config.at("tile")),
      {tensor_or_null(at, "ids"), tensor_or_null(at, "prefix"), tensor_or_null(at, "logits"),
       tensor_or_null(at, "lengths"), tensor_or_null(at, "prefix_lengths"), tensor_or_null(at, "n"),
       tensor_or_null(at, "invalid"), rows.b, small(std::min(rows.beams, rows.b)), small(rows.len),
       small(rows.prefix), small(rows.vocab), small(rows.n), rows.padding});
}

class BlockGroups final : public StageFamily {
 public:
  BlockGroups()
      : StageFamily({.name = "groups",
                     .summary = "rows that share a prefix by one block, or by a cluster of blocks",
                     .stage = stage,
                     .sources = {groups_file}}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (!problem.sizes.contains("prefix")) return "no prefix: its rows are another family's";
    return StageFamily::refusal(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Rows rows = rows_of(problem);
    return accesses(rows, rows.prefix, "prefix", facts)
        .parameter("tile", "rows that look at an id when it is read", {1, 2, 4, 8, 16})
        .constraint("accesses narrower than half of what alignment allows only add instructions",
                    [most = widest_access(rows, rows.prefix)](const Config& c) {
                      return 2 * c.at("vector") >= most;
                    },
                    {"vector"})
        .constraint(
            "more than half of a tile's rows would be padding",
            [rows](const Config& c) { return c.at("tile") == 1 || c.at("tile") < 2 * rows.beams; },
            {"tile"})
        .constraint("last ids and accesses in flight must fit in a thread's registers",
                    [rows, facts](const Config& c) {
                      return registers_needed(rows, c) <=
                             registers_of_thread(facts, c.at("threads"));
                    },
                    {"threads", "tile", "vector"});
  }

  // Rows share accesses to ids as long as there are units for all SMs; ids that further units read
  // again come from L2. Clusters only where there are too few units even so. A block has as many
  // threads as have all accesses in flight at once, up to 512, because each thread also compares
  // every id.
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

class BlockRows final : public StageFamily {
 public:
  BlockRows(std::string_view name, std::string_view summary, bool fallback)
      : StageFamily({.name = name,
                     .summary = summary,
                     .stage = stage,
                     .sources = fallback ? std::vector<std::string>{file, groups_file}
                                         : std::vector<std::string>{file},
                     .is_fallback = fallback}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (!is_fallback() && problem.sizes.contains("prefix"))
      return fmt::format("prefix={}: rows that share prefixes are another family's",
                         problem.size("prefix"));
    return StageFamily::refusal(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    if (is_fallback()) return {};
    const Rows rows = rows_of(problem);
    Space space = accesses(rows, rows.len, "row", facts);
    add_l2_prefetch(space, facts, can_prefetch_l2(facts, widest(rows)),
                    [rows](const Config& c) { return all_threads(rows, c); },
                    {"threads", "cluster"});
    return space;
  }

  // One access a thread, of as many ids as it can have: a trip to memory is most of the time. Long
  // rows are for as many SMs as there are.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    if (is_fallback()) return {};
    const Rows rows = rows_of(problem);
    const auto threads_of = [&](std::int64_t vector) {
      std::int64_t threads = 64;
      while (threads < 1024 && 2 * threads * vector <= rows.len * id_bytes(rows)) threads *= 2;
      return threads;
    };
    // Where all threads run at once, a row takes as long as one thread does: 512 of them with an id
    // each take 2.1 us on an H100 for 256 rows of 512 ids, and 128 with four each 2.9.
    std::int64_t vector = widest(rows);
    while (vector > id_bytes(rows) && threads_of(vector / 2) <= 512 &&
           all_resident(facts, rows.b * threads_of(vector / 2)))
      vector /= 2;
    const std::int64_t threads = threads_of(vector);
    std::int64_t cluster = 1;
    if (facts.compute_capability >= 90)
      while (cluster < 8 && rows.len >= 16384 * cluster && rows.b * cluster < facts.multiprocessors)
        cluster *= 2;
    Config config{{"threads", threads}, {"cluster", cluster}, {"vector", vector}};
    const bool l2_prefetch =
        can_prefetch_l2(facts, widest(rows)) && all_resident(facts, all_threads(rows, config));
    config.set("l2_prefetch", l2_prefetch ? 1 : 0);
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& given) const override {
    const Rows rows = rows_of(problem);
    if (rows.prefix > 0)
      return groups_program(
          problem, facts,
          {{"threads", 256}, {"cluster", 1}, {"tile", 1}, {"vector", id_bytes(rows)}});
    const TensorPlaces at(ngram_block_op().tensors(problem));
    const Config config = is_fallback() ? Config{{"threads", 256},
                                                 {"cluster", 1},
                                                 {"vector", id_bytes(rows)},
                                                 {"l2_prefetch", 0}}
                                        : given;
    return launch_of(
        config, facts, file,
        fmt::format("block_rows<{}, {}, {}, {}, {}, {}, {}, {}>", element_type(rows.dtype),
                    integer_type(rows.ids), rows.own_lengths, rows.own_n, config.at("threads"),
                    config.at("cluster"), config.at("vector"), config.at("l2_prefetch") != 0),
        rows.b,
        {tensor_or_null(at, "ids"), tensor_or_null(at, "logits"), tensor_or_null(at, "lengths"),
         tensor_or_null(at, "n"), tensor_or_null(at, "invalid"), rows.b, small(rows.len),
         small(rows.vocab), small(rows.n), rows.padding});
  }
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static const BlockRows rows("rows", "a row by one block, or by a cluster of blocks", false);
  static const BlockGroups groups;
  static const BlockRows fallback("fallback", "a row by one block, id by id: the fallback", true);
  return {&rows, &groups, &fallback};
}

}  // namespace fftune::ngram_block
