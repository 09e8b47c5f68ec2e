// Rows in registers: each is read once, by lanes of a warp, by a block, or for rmsnorm by a cluster
// of blocks; rmsnorm backward with the sum of the blocks' dw.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

RowShape shape_of(const Problem& problem) {
  return layer_of(problem).rows();
}

/// Adds the parameters of both passes, with the constraints on them alone.
void add_parameters(Space& space, const Layer& layer, const DeviceFacts& facts) {
  add_row_parameters(space, layer.rows(),
                     {.group = {4, 8, 16, 32, 64, 128, 256, 512, 1024},
                      .groups = {1, 2, 4, 8, 16, 32, 64},
                      .clusters = true,
                      .wide_alone = true},
                     facts);
  space.constraint("a thread has at most 256 bytes of a row: more do not fit in its registers",
                   [shape = layer.rows()](const Config& c) {
                     return vectors_of_thread(shape, c) * c.at("vector") <= 256;
                   },
                   {"vector", "group", "cluster"});
}

/// Values for those parameters, with about `vectors` vectors a thread: a row that is wider than 512
/// threads' accesses of 16 bytes, `most_vectors` (at least 2) for each, is spread over a cluster
/// where there are clusters.
Config default_rows(const Layer& layer, const DeviceFacts& facts, std::int64_t vectors,
                    std::int64_t most_vectors) {
  const RowShape shape = layer.rows();
  std::int64_t cluster = 1;
  if (facts.compute_capability >= 90)
    while (cluster < 8 && shape.bytes() > 512 * 16 * most_vectors * cluster) cluster *= 2;
  Config config =
      fftune::default_rows(shape, {.vectors = vectors, .least_group = 4, .cluster = cluster});
  config.set("cluster", cluster);
  config.set("evict_first", 0);
  return config;
}

constexpr std::int64_t forward_other_registers = 40;  // addresses, sums, one vector as floats
constexpr std::int64_t weights_at_hand = 4;    // vectors, where they are fetched for every row
constexpr std::int64_t wide_row_bytes = 8192;  // from where on a thread has 4 vectors by default

/// Registers of a thread for the row's bytes as they are read, and for the weights.
std::int64_t forward_registers(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer.rows(), config);
  const std::int64_t vectors = vectors_of_thread(layer.rows(), config);
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  const auto weight_bytes = static_cast<std::int64_t>(dtype_bytes(layer.weight_dtype));
  const std::int64_t row = raw_registers(vectors * count, element_bytes, count);
  const std::int64_t weights = config.at("keep") ? vectors : std::min(vectors, weights_at_hand);
  return row * (config.at("unroll") + (layer.adds ? 1 : 0)) +
         raw_registers(weights * count, weight_bytes, count) + forward_other_registers;
}

/// Blocks to launch: one for every set of rows, or as many as `waves` for each SM.
std::int64_t forward_blocks(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t sets = quotient_up(layer.m, config.at("groups") * config.at("unroll"));
  const std::int64_t waves = config.at("waves");
  if (waves == 0) return sets;
  return std::min(sets,
                  std::max<std::int64_t>(1, waves * facts.multiprocessors / config.at("cluster")));
}

/// Alignment of the rows and the weights in bytes, 16 at most.
std::int64_t row_alignment(const Layer& layer) {
  const auto bytes = [&](DType dtype) {
    return layer.d * static_cast<std::int64_t>(dtype_bytes(dtype));
  };
  return std::min(widest_vector(bytes(layer.dtype)), widest_vector(bytes(layer.weight_dtype)));
}

/// Threads of all blocks.
std::int64_t all_threads(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  return forward_blocks(layer, facts, config) * config.at("cluster") * block_threads(config);
}

/// Vectors of a thread by default: many rows, blocks of 256 threads with 2 each, or 4 of wide rows.
std::int64_t usual_vectors(const Layer& layer) {
  return layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype)) <= wide_row_bytes ? 2 : 4;
}

/// The threads that share a row, and the elements of each, are in one order for all numbers of
/// rows: those of many.
void keep_order(Space& space, const Layer& layer, const DeviceFacts& facts) {
  const Config usual = default_rows(layer, facts, usual_vectors(layer), 4);
  for (const char* name : {"vector", "group", "cluster"})
    space.constraint(
        "batch-invariant: a row's sum has one order for all numbers of rows",
        [name, value = usual.at(name)](const Config& c) { return c.at(name) == value; }, {name});
}

Space forward_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_parameters(space, layer, facts);
  space.parameter("unroll", "rows that a group has in flight", {1, 2, 4})
      .parameter("keep", "1: weights stay in registers from row to row; 0: each row loads them",
                 {0, 1})
      .parameter("waves", "blocks for each SM, which go on to further rows; 0: one block a set",
                 {0, 2, 4, 8, 16});
  add_l2_prefetch(space, facts, can_prefetch_l2(facts, row_alignment(layer)),
                  [layer, facts](const Config& c) { return all_threads(layer, facts, c); },
                  {"group", "groups", "cluster", "unroll", "waves"});
  space
      .constraint("a thread's part of the rows and weights must fit in registers",
                  [layer, facts](const Config& c) {
                    return forward_registers(layer, c) <=
                           registers_of_thread(facts, block_threads(c));
                  },
                  {"vector", "group", "groups", "cluster", "unroll", "keep"})
      .constraint(
          "a vector needs two elements or more, since quantised elements are stored in pairs",
          [layer](const Config& c) {
            return !layer.quantises() || elements_of_vector(layer.rows(), c) >= 2;
          },
          {"vector"})
      .constraint("unroll above 1 pays while a thread has at most 8 vectors in flight",
                  [layer](const Config& c) {
                    return c.at("unroll") == 1 ||
                           c.at("unroll") * vectors_of_thread(layer.rows(), c) <= 8;
                  },
                  {"vector", "group", "cluster", "unroll"})
      .constraint("the rows in flight of a block are at most those of the tensor",
                  [layer](const Config& c) {
                    return c.at("unroll") == 1 || c.at("groups") * c.at("unroll") <= layer.m;
                  },
                  {"groups", "unroll"})
      .constraint(
          "keep=0 is for threads with more than 4 vectors of weights: fewer stay in registers "
          "anyway",
          [layer](const Config& c) {
            return c.at("keep") == 1 || vectors_of_thread(layer.rows(), c) > weights_at_hand;
          },
          {"vector", "group", "cluster", "keep"})
      .constraint("waves above 0 needs more rows than the blocks of one wave take",
                  [layer, facts](const Config& c) {
                    return c.at("waves") == 0 ||
                           c.at("waves") * facts.multiprocessors * c.at("groups") * c.at("unroll") <
                               layer.m * c.at("cluster");
                  },
                  {"groups", "cluster", "unroll", "waves"});
  if (layer.batch_invariant) keep_order(space, layer, facts);
  return space;
}

// Blocks that start and end on their own keep the memory busy between them, so no block goes on.
// Many rows: blocks of 256 threads with 2 vectors each, or 4 of wide rows; more bytes in flight
// than those only make the memory slower. Few rows: one vector a thread, the shortest time for
// each row, and what they read is on its way before the kernel's turn.
Config forward_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const bool few = layer.m <= 2 * facts.multiprocessors && !layer.batch_invariant;
  const std::int64_t vectors = few ? 1 : usual_vectors(layer);
  Config config = default_rows(layer, facts, vectors, 4);
  config.set("unroll", 1);
  config.set("keep", vectors_of_thread(layer.rows(), config) <= weights_at_hand ? 1 : 0);
  config.set("waves", 0);
  const bool l2_prefetch = can_prefetch_l2(facts, row_alignment(layer)) &&
                           all_resident(facts, all_threads(layer, facts, config));
  config.set("l2_prefetch", l2_prefetch ? 1 : 0);
  return config;
}

Program forward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  Program program;
  append_row_kernel(
      program, facts, "norm/forward_rows.cu",
      fmt::format("forward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                  template_arguments(layer), element_type(layer.out_dtype), layer.adds_after,
                  config.at("vector"), vectors_of_thread(layer.rows(), config), config.at("group"),
                  config.at("groups"), config.at("unroll"), config.at("cluster"),
                  config.at("keep") != 0, config.at("evict_first") != 0,
                  config.at("l2_prefetch") != 0),
      forward_blocks(layer, facts, config), config, forward_arguments(layer));
  return program;
}

constexpr std::int64_t backward_other_registers =
    32;  // addresses, sums, one vector of each as floats
constexpr std::int64_t static_shared_bytes = 48 * 1024;  // what a block has without opting in
constexpr std::int64_t row_sum_bytes = 1024;

/// x, dy and, with a residual, dsum as they are read, of the next row too if it is fetched ahead;
/// and, in fp32, dw and the weights that stay.
std::int64_t backward_registers(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer.rows(), config);
  const std::int64_t elements = vectors_of_thread(layer.rows(), config) * count;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  return raw_registers(elements, element_bytes, count) * (layer.adds ? 3 : 2) *
             (config.at("prefetch") + 1) +
         elements * (config.at("keep") + 1) + backward_other_registers;
}

/// Shared memory of the sums of dw through which the groups of a block are reduced.
std::int64_t shared_bytes(const Layer& layer, const Config& config) {
  if (config.at("groups") == 1) return row_sum_bytes;
  return block_threads(config) * vectors_of_thread(layer.rows(), config) *
             elements_of_vector(layer.rows(), config) * static_cast<std::int64_t>(sizeof(float)) +
         row_sum_bytes;
}

/// Clusters to launch; each adds one row to the partial sums of dw.
std::int64_t backward_blocks(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t sets = quotient_up(layer.m, config.at("groups"));
  return std::min(sets, std::max<std::int64_t>(
                            1, config.at("waves") * facts.multiprocessors / config.at("cluster")));
}

Space backward_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_parameters(space, layer, facts);
  space
      .parameter("waves", "blocks for each SM, which go on to further rows", {1, 2, 3, 4, 6, 8, 12})
      .parameter("keep", "1: weights stay in registers from row to row; 0: each row loads them",
                 {0, 1})
      .when_absent(0)
      .parameter("prefetch", "1: the next row is loaded before the sums of this one; 0: after them",
                 {0, 1})
      .parameter("l2_prefetch_rows",
                 "rows of the block by which L2 prefetch runs ahead; 0: no prefetch", {0, 1, 2, 4})
      .when_absent(0)
      .constraint(
          "the threads of an SM's blocks must hold their parts of a row and of dw in registers",
          [layer, facts](const Config& c) {
            return backward_registers(layer, c) <=
                   registers_of_thread(facts, c.at("waves") * block_threads(c));
          },
          {"vector", "group", "groups", "cluster", "waves", "keep", "prefetch"})
      .constraint("the L2 prefetch needs rows of whole 16 bytes, and must run ahead of the loads",
                  [layer, facts](const Config& c) {
                    const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
                    return c.at("l2_prefetch_rows") == 0 ||
                           (c.at("l2_prefetch_rows") > c.at("prefetch") &&
                            can_prefetch_l2(facts, widest_vector(layer.d * element_bytes)));
                  },
                  {"prefetch", "l2_prefetch_rows"})
      .constraint(
          "the groups' sums of dw must fit in 48 KB of shared memory",
          [layer](const Config& c) { return shared_bytes(layer, c) <= static_shared_bytes; },
          {"vector", "group", "groups", "cluster"});
  limit_waves(space);
  space.constraint("every block needs a row",
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
Config backward_default(const Problem& problem, const DeviceFacts& facts) {
  Config config = default_rows(layer_of(problem), facts, 2, 2);
  config.set("waves", 1);
  for (const char* name : {"keep", "prefetch", "l2_prefetch_rows"}) config.set(name, 0);
  const Space space = backward_space(problem, facts);
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

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const std::int64_t blocks = backward_blocks(layer, facts, config);
  Program program;
  program.scratch = {{static_cast<std::size_t>(blocks * layer.d) * sizeof(float), false}};
  append_row_kernel(
      program, facts, "norm/backward_rows.cu",
      fmt::format("backward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                  template_arguments(layer), config.at("vector"),
                  vectors_of_thread(layer.rows(), config), config.at("group"), config.at("groups"),
                  config.at("cluster"), config.at("keep") != 0, config.at("prefetch") != 0,
                  config.at("l2_prefetch_rows"), config.at("evict_first") != 0, config.at("waves")),
      blocks, config, backward_arguments(layer, ScratchArgument{0}));
  if (layer.frozen) return program;
  append_column_sum(program, facts, "norm/backward_rows.cu", "backward_rows_weight",
                    layer.weight_dtype, ScratchArgument{0}, tensor_of(places_of(layer), "dw"),
                    blocks, layer.d);
  return program;
}

// layernorm's rows, each read once by the threads of a block that share it.

constexpr const char* centred_file = "norm/centred_forward.cu";
constexpr std::int64_t most_centred_groups = 16;

/// Bytes of the rows that an SM has in flight, with a block for each row. As compiled by ptxas.
std::int64_t centred_bytes_in_flight(const RowShape& shape, const Config& config) {
  constexpr std::int64_t registers = 65536, granule = 8;  // of an SM, and of a thread
  const std::int64_t elements =
      vectors_of_thread(shape, config) * elements_of_vector(shape, config);
  const std::int64_t of_thread = quotient_up(24 + elements * 5 / 4, granule) * granule;
  const std::int64_t threads = config.at("group");
  return std::min(2048 / threads, registers / (threads * of_thread)) * shape.bytes();
}

/// The most threads for a wide row with which an SM has what memory delivers in its latency in
/// flight, or else those with the most. A row waits twice, for its mean and its variance: a block
/// of 1,024 threads that an SM has to itself leaves memory idle meanwhile.
std::int64_t centred_group(const RowShape& shape, Config config) {
  constexpr std::int64_t wanted_bytes = 40 * 1024, most_elements = 64;
  std::int64_t best = config.at("group"), most = 0;
  for (const std::int64_t group : {1024, 512, 256, 128}) {
    config.set("group", group);
    if (vectors_of_thread(shape, config) * elements_of_vector(shape, config) > most_elements) break;
    const std::int64_t bytes = centred_bytes_in_flight(shape, config);
    if (bytes <= most) continue;
    best = group, most = bytes;
    if (bytes >= wanted_bytes) break;
  }
  return best;
}

Space centred_space(const Problem& problem, const DeviceFacts& facts) {
  const RowShape shape = shape_of(problem);
  Space space;
  add_row_parameters(
      space, shape,
      {.group = {8, 16, 32, 64, 128, 256, 512, 1024}, .groups = {1, 2, 4, 8, most_centred_groups}},
      facts);
  space.constraint("a thread has at most 64 elements of a row in registers, in float",
                   [shape](const Config& c) {
                     return vectors_of_thread(shape, c) * elements_of_vector(shape, c) <= 64;
                   },
                   {"vector", "group"});
  return space;
}

/// The widest accesses, about one a thread where there are few rows, and two where there are
/// many; of many wide rows as an SM has enough of them in flight.
Config centred_default(const Problem& problem, const DeviceFacts& facts) {
  const RowShape shape = shape_of(problem);
  const bool few = shape.rows <= 2 * facts.multiprocessors;
  Config config = default_rows(shape, {.vectors = few ? 1 : 2, .most_group = 1024});
  config.set("groups", std::min<std::int64_t>(config.at("groups"), most_centred_groups));
  if (!few && shape.bytes() > wide_row_bytes) config.set("group", centred_group(shape, config));
  return config;
}

Program centred_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  Program program;
  append_row_kernel(program, facts, centred_file,
                    fmt::format("layernorm_rows<{}, {}, {}, {}, {}>", template_arguments(layer),
                                config.at("vector"), vectors_of_thread(layer.rows(), config),
                                config.at("group"), config.at("groups")),
                    quotient_up(layer.m, config.at("groups")), config, forward_arguments(layer));
  return program;
}

}  // namespace

std::vector<const Family*> row_families() {
  static const RowFamily forward({.name = "forward_rows",
                                  .summary = "rows in registers of a group of threads, read once",
                                  .pass = "fwd",
                                  .sources = {"norm/forward_rows.cu"},
                                  .search = {forward_space, forward_default},
                                  .program = forward_program},
                                 shape_of);
  static const RowFamily backward(
      {.name = "backward_rows",
       .summary = "rows in registers, x and dy read once, dw summed on the way",
       .pass = "bwd",
       .sources = {"norm/backward_rows.cu"},
       .search = {backward_space, backward_default},
       .program = backward_program},
      shape_of);
  return {&forward, &backward};
}

std::vector<const Family*> centred_row_families() {
  static const RowFamily forward({.name = "forward_rows",
                                  .summary = "rows in registers of a group of threads, read once",
                                  .pass = "fwd",
                                  .sources = {centred_file},
                                  .search = {centred_space, centred_default},
                                  .program = centred_program},
                                 shape_of);
  return {&forward};
}

}  // namespace fftune::norm
