#include "kernels/common/column_family.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fftune {
namespace {

std::int64_t element_bytes(const ColumnWork& work) {
  return static_cast<std::int64_t>(dtype_bytes(work.dtype));
}

std::int64_t row_vectors(const ColumnWork& work, std::int64_t vector) {
  return work.h * element_bytes(work) / vector;
}

std::int64_t column_block_threads(const Config& config) {
  return config.at("columns") * config.at("rows");
}

std::int64_t column_blocks(const ColumnWork& work, const Config& config) {
  return quotient_up(row_vectors(work, config.at("vector")), config.at("columns"));
}

/// Blocks one below the other: enough for every row, or, where rows are summed, `waves` for each
/// SM.
std::int64_t row_blocks(const ColumnWork& work, const DeviceFacts& facts, const Config& config) {
  const std::int64_t needed = quotient_up(work.m, config.at("rows") * config.at("unroll"));
  if (!work.sums) return needed;
  return std::clamp<std::int64_t>(
      config.at("waves") * facts.multiprocessors / column_blocks(work, config), 1, needed);
}

/// Shared memory in which the rows of a block are added up.
std::int64_t shared_bytes(const ColumnWork& work, const Config& config) {
  return column_block_threads(config) * config.at("vector") / element_bytes(work) * 4;
}

void add_sum_parameters(Space& space, const ColumnWork& work, const DeviceFacts& facts) {
  space.parameter("waves", "blocks for each SM; a block loops over rows", {1, 2, 3, 4, 6, 8, 16})
      .constraint("the sums of a block's rows must fit in 48 KB of shared memory",
                  [work](const Config& c) { return shared_bytes(work, c) <= 48 * 1024; },
                  {"vector", "columns", "rows"})
      .constraint("an SM has at most 2048 resident threads: more blocks only add partial sums",
                  [](const Config& c) {
                    return c.at("waves") == 1 || c.at("waves") * column_block_threads(c) <= 2048;
                  },
                  {"columns", "rows", "waves"})
      .constraint("every block needs rows",
                  [work, facts](const Config& c) {
                    return c.at("waves") == 1 || (c.at("waves") / 2) * facts.multiprocessors *
                                                         c.at("rows") * c.at("unroll") <
                                                     work.m * column_blocks(work, c);
                  },
                  {"vector", "columns", "rows", "unroll", "waves"});
}

/// Large problems: 16 bytes a thread and row for four rows, more bytes in flight than bandwidth
/// times latency at half occupancy. Small ones: fewer rows a thread, because more threads finish
/// sooner. With column sums, blocks are narrow, so that there are fewer partial sums, and twice as
/// large with four rows in flight.
Config defaults(const ColumnWork& work, const DeviceFacts& facts, std::int64_t vector) {
  const std::int64_t columns =
      std::min<std::int64_t>(work.sums ? 64 : 256, power_of_two(row_vectors(work, vector)));
  const std::int64_t threads = work.m * row_vectors(work, vector);
  const std::int64_t most = work.tensors > 3 || (work.sums && vector < 16) ? 2 : 4;
  std::int64_t unroll = 1;
  while (unroll < most &&
         threads / (2 * unroll) >= unroll * 2048 * std::int64_t{facts.multiprocessors})
    unroll *= 2;
  const std::int64_t rows = (work.sums && unroll == 4 ? 512 : 256) / columns;
  Config config{{"vector", vector},
                {"columns", columns},
                {"rows", rows},
                {"unroll", unroll},
                {"evict_first", 0}};
  if (!work.sums) return config;
  // As many blocks as an SM has resident: one more wave would run on a mostly empty GPU. A thread
  // has about 32 registers and 12 for each row in flight.
  config.set("waves", 1);
  const std::int64_t resident =
      facts.registers_per_multiprocessor / ((32 + 12 * unroll) * columns * rows);
  for (const std::int64_t waves : {2, 3, 4})
    if (waves <= resident &&
        waves / 2 * facts.multiprocessors * rows * unroll < work.m * column_blocks(work, config))
      config.set("waves", waves);
  return config;
}

}  // namespace

Space ColumnFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  if (is_fallback()) return {};
  const ColumnWork work = functions_.work(problem);
  Space space;
  add_wide_vector(space, element_bytes(work), widest_vector(work.h * element_bytes(work)))
      .parameter("columns", "threads of a block along a row",
                 {1, 2, 4, 8, 16, 32, 64, 128, 256, 512})
      .parameter("rows", "rows of threads in a block", {1, 2, 4, 8, 16, 32, 64, 128, 256})
      .parameter("unroll", "rows that a thread has in flight", {1, 2, 4, 8})
      .parameter("evict_first", "1: accesses use the L2 policy evict_first; 0: evict_normal",
                 {0, 1})
      .constraint("a block has 64 to 512 threads",
                  [](const Config& c) {
                    return column_block_threads(c) >= 64 && column_block_threads(c) <= 512;
                  },
                  {"columns", "rows"})
      .constraint("at most half of the threads along a row may be idle",
                  [work](const Config& c) {
                    return c.at("columns") < 2 * row_vectors(work, c.at("vector"));
                  },
                  {"vector", "columns"})
      .constraint(
          "a warp's accesses coalesce: at least 32 threads along a row, where it is that long",
          [work](const Config& c) {
            return c.at("columns") >= 32 || 2 * c.at("columns") > row_vectors(work, c.at("vector"));
          },
          {"vector", "columns"})
      .constraint("a thread's loads in flight must fit in 64 registers",
                  [work](const Config& c) {
                    return c.at("unroll") * work.tensors * c.at("vector") / 4 <= 64;
                  },
                  {"vector", "unroll"})
      .constraint("the rows in flight of a block are at most those of the tensor",
                  [work](const Config& c) {
                    return c.at("unroll") == 1 || c.at("rows") * c.at("unroll") <= work.m;
                  },
                  {"rows", "unroll"});
  if (work.sums) add_sum_parameters(space, work, facts);
  return space;
}

Config ColumnFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  if (is_fallback()) return {};
  const ColumnWork work = functions_.work(problem);
  Config config = defaults(work, facts, widest_vector(work.h * element_bytes(work)));
  while (config.at("unroll") > 1 && config.at("rows") * config.at("unroll") > work.m)
    config.set("unroll", config.at("unroll") / 2);
  return config;
}

Program ColumnFamily::program(const Problem& problem, const DeviceFacts& facts,
                              const Config& given) const {
  const ColumnWork work = functions_.work(problem);
  ColumnKernel kernel = functions_.kernel(problem);
  const Config config = is_fallback() ? defaults(work, facts, element_bytes(work)) : given;
  const std::string file = sources().front();
  const std::int64_t across = column_blocks(work, config);
  const std::int64_t down = row_blocks(work, facts, config);
  Program program;
  auto& arguments = kernel.arguments;
  if (work.sums) {
    program.scratch = {{static_cast<std::size_t>(down * work.h) * sizeof(float), false}};
    arguments.emplace_back(ScratchArgument{0});
  }
  arguments.insert(arguments.end(), {work.m, work.h, static_cast<std::int32_t>(across)});
  append_pdl_kernel(
      program, facts, file,
      fmt::format("{}_columns<{}, {}, {}, {}, {}, {}>", stages().front(), kernel.types,
                  config.at("vector"), config.at("columns"), config.at("rows"), config.at("unroll"),
                  config.at("evict_first") != 0),
      {static_cast<std::uint32_t>(across * down)},
      static_cast<std::uint32_t>(column_block_threads(config)), std::move(arguments));
  if (work.sums && !kernel.sum_name.empty())
    append_column_sum(program, facts, file, kernel.sum_name, kernel.sum_dtype, ScratchArgument{0},
                      kernel.sum, down, work.h);
  return program;
}

std::vector<ColumnFamily> column_families(const std::string& folder, ColumnFunctions functions,
                                          std::string_view backward_summary) {
  std::vector<ColumnFamily> families;
  const auto add = [&](std::string_view name, std::string_view summary, std::string_view pass,
                       bool fallback) {
    families.emplace_back(
        StageFamilyFacts{.name = name,
                         .summary = summary,
                         .pass = pass,
                         .sources = {fmt::format("{}/{}_columns.cu", folder, stage_of_pass(pass))},
                         .is_fallback = fallback},
        functions);
  };
  constexpr std::string_view by_element = "element by element: the fallback";
  add("forward_columns", in_flight_summary, "fwd", false);
  add("backward_columns", backward_summary, "bwd", false);
  add("forward_fallback", by_element, "fwd", true);
  add("backward_fallback", by_element, "bwd", true);
  return families;
}

}  // namespace fftune
