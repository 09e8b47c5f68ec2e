// Rows in registers: each is read once, by lanes of a warp, by a block, or by a cluster of blocks;
// backward with the sum of the blocks' dw. And the fallbacks, with a block for each row.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/stage_family.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {
namespace {

std::string convention_type(Convention convention) {
  switch (convention) {
    case Convention::llama:
      return "fftune::llama_norm";
    case Convention::gemma:
      return "fftune::gemma_norm";
    case Convention::t5:
      break;
  }
  return "fftune::t5_norm";
}

/// "fftune::bf16, float, fftune::llama_norm, true, false": what every kernel's template arguments
/// begin with. The booleans are whether a residual is added and whether rstd is saved.
std::string template_arguments(const Layer& layer) {
  return fmt::format("{}, {}, {}, {}, {}", element_type(layer.dtype),
                     element_type(layer.weight_dtype), convention_type(layer.convention),
                     layer.adds, layer.saves);
}

/// The arguments of every forward kernel, in order, and of the backward kernels that write dx to
/// `third`: partial sums, or reciprocal deviations.
std::vector<Argument> forward_arguments(const Layer& layer) {
  const TensorPlaces at = places_of(layer);
  return {tensor_of(at, "x"),
          tensor_or_null(at, "residual"),
          tensor_of(at, "w"),
          tensor_of(at, "y"),
          tensor_or_null(at, "sum"),
          tensor_or_null(at, "rstd"),
          tensor_or_null(at, "scale"),
          std::int64_t{layer.m},
          static_cast<std::int32_t>(layer.d),
          layer.eps};
}

std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third) {
  const TensorPlaces at = places_of(layer);
  return {tensor_of(at, "x"),
          tensor_of(at, "w"),
          tensor_of(at, "dy"),
          tensor_or_null(at, "dsum"),
          tensor_or_null(at, "rstd"),
          tensor_of(at, "dx"),
          third,
          std::int64_t{layer.m},
          static_cast<std::int32_t>(layer.d),
          layer.eps};
}

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

/// Why rows in registers cannot serve a pass, one line: no CUDA kernel can, or the default of
/// `family` is not in its space.
std::optional<std::string> refuse_rows(const Family& family, const Problem& problem,
                                       std::string_view pass, const DeviceFacts& facts) {
  if (auto refusal = refuse_cuda(problem, pass, facts)) return refusal;
  const Config config = family.default_config(problem, facts);
  if (family.space(problem, facts).violations(config).empty()) return std::nullopt;
  return fmt::format("rows of d={} in {} do not suit a block's registers and accesses",
                     problem.size("d"), dtype_name(problem.dtype));
}

/// Elements of x that one access moves.
std::int64_t elements_of_vector(const Layer& layer, const Config& config) {
  return config.at("vector") / element_bytes(layer);
}

/// Vectors of a row that each of its threads has.
std::int64_t vectors_of_thread(const Layer& layer, const Config& config) {
  return quotient_up(row_vectors(layer, config.at("vector")),
                     config.at("group") * config.at("cluster"));
}

std::int64_t block_threads(const Config& config) {
  return config.at("group") * config.at("groups");
}

/// Adds vector, group, groups, cluster and streams, with what constrains them alone.
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

/// Values for those parameters: the widest vectors, about `vectors` of them a thread, and 256
/// threads a block or what a row takes; a row that is wider than 512 threads' accesses of 16 bytes,
/// `most_vectors` (at least 2) for each, is spread over a cluster where there are clusters.
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

constexpr std::int64_t forward_other_registers = 40;  // addresses, sums, one vector as floats
constexpr std::int64_t weights_at_hand = 4;    // vectors, where they are fetched for every row
constexpr std::int64_t wide_row_bytes = 8192;  // from where on a thread has 4 vectors by default

/// Registers of a thread for the row's bytes as they are read, and for the weights.
std::int64_t forward_registers(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer, config);
  const std::int64_t vectors = vectors_of_thread(layer, config);
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

/// What rows and the weights are aligned to, in bytes, 16 at most.
std::int64_t row_alignment(const Layer& layer) {
  const auto bytes = [&](DType dtype) {
    return layer.d * static_cast<std::int64_t>(dtype_bytes(dtype));
  };
  return std::min(widest_vector(bytes(layer.dtype)), widest_vector(bytes(layer.weight_dtype)));
}

/// Of all blocks.
std::int64_t all_threads(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  return forward_blocks(layer, facts, config) * config.at("cluster") * block_threads(config);
}

class ForwardRows final : public StageFamily {
 public:
  ForwardRows()
      : StageFamily({.name = "forward_rows",
                     .summary = "rows in registers of a group of threads, read once",
                     .stage = stage_forward,
                     .pass = "fwd",
                     .sources = {"rmsnorm/forward_rows.cu"}}) {}

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
                      return forward_registers(layer, c) <=
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
    auto& launch = append_kernel(
        program, "rmsnorm/forward_rows.cu",
        fmt::format("forward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                    template_arguments(layer), element_type(layer.out_dtype), layer.adds_after,
                    config.at("vector"), vectors_of_thread(layer, config), config.at("group"),
                    config.at("groups"), config.at("unroll"), config.at("cluster"),
                    config.at("keep") != 0, config.at("evict_first") != 0,
                    config.at("l2_prefetch") != 0),
        {static_cast<std::uint32_t>(forward_blocks(layer, facts, config) * config.at("cluster"))},
        static_cast<std::uint32_t>(block_threads(config)), forward_arguments(layer));
    launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }
};

constexpr std::int64_t backward_other_registers =
    32;  // addresses, sums, one vector of each as floats
constexpr std::int64_t static_shared_bytes = 48 * 1024;  // what a block has without opting in
constexpr std::int64_t row_sum_bytes = 1024;

/// x, dy and, with a residual, dsum as they are read, of the next row too if it is fetched ahead;
/// and, in fp32, dw and the weights that stay.
std::int64_t backward_registers(const Layer& layer, const Config& config) {
  const std::int64_t count = elements_of_vector(layer, config);
  const std::int64_t elements = vectors_of_thread(layer, config) * count;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  return raw_registers(elements, element_bytes, count) * (layer.adds ? 3 : 2) *
             (config.at("prefetch") + 1) +
         elements * (config.at("keep") + 1) + backward_other_registers;
}

/// Of the sums of dw by which the groups of a block meet.
std::int64_t shared_bytes(const Layer& layer, const Config& config) {
  if (config.at("groups") == 1) return row_sum_bytes;
  return block_threads(config) * vectors_of_thread(layer, config) *
             elements_of_vector(layer, config) * static_cast<std::int64_t>(sizeof(float)) +
         row_sum_bytes;
}

/// Clusters to launch; each adds one row to the partial sums of dw.
std::int64_t backward_blocks(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  const std::int64_t sets = quotient_up(layer.m, config.at("groups"));
  return std::min(sets, std::max<std::int64_t>(
                            1, config.at("waves") * facts.multiprocessors / config.at("cluster")));
}

class BackwardRows final : public StageFamily {
 public:
  BackwardRows()
      : StageFamily({.name = "backward_rows",
                     .summary = "rows in registers, x and dy read once, dw summed on the way",
                     .stage = stage_backward,
                     .pass = "bwd",
                     .sources = {"rmsnorm/backward_rows.cu"}}) {}

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
                      return backward_registers(layer, c) <=
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
    const std::int64_t blocks = backward_blocks(layer, facts, config);
    Program program;
    program.scratch = {{static_cast<std::size_t>(blocks * layer.d) * sizeof(float), false}};
    auto& launch =
        append_kernel(program, "rmsnorm/backward_rows.cu",
                      fmt::format("backward_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                                  template_arguments(layer), config.at("vector"),
                                  vectors_of_thread(layer, config), config.at("group"),
                                  config.at("groups"), config.at("cluster"), config.at("keep") != 0,
                                  config.at("prefetch") != 0, config.at("l2_prefetch_rows"),
                                  config.at("evict_first") != 0, config.at("waves")),
                      {static_cast<std::uint32_t>(blocks * config.at("cluster"))},
                      static_cast<std::uint32_t>(block_threads(config)),
                      backward_arguments(layer, ScratchArgument{0}));
    launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
    launch.programmatic = facts.compute_capability >= 90;
    append_column_sum(program, facts, "rmsnorm/backward_rows.cu", "backward_rows_weight",
                      layer.weight_dtype, ScratchArgument{0}, tensor_of(places_of(layer), "dw"),
                      blocks, layer.d);
    return program;
  }
};

constexpr std::uint32_t fallback_threads = 256;  // but of the last sum
constexpr const char* backward_file = "rmsnorm/backward_fallback.cu";

Program forward_program(const Layer& layer) {
  Program program;
  append_kernel(program, "rmsnorm/forward_fallback.cu",
                fmt::format("forward_fallback<{}, {}, {}>", template_arguments(layer),
                            element_type(layer.out_dtype), layer.adds_after),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads, forward_arguments(layer));
  return program;
}

/// Of either pass: plain loops, a block for each row.
class Fallback final : public StageFamily {
 public:
  explicit Fallback(bool backward)
      : StageFamily({.name = backward ? "backward_fallback" : "forward_fallback",
                     .summary = "plain loops for any width and alignment: the fallback",
                     .stage = backward ? stage_backward : stage_forward,
                     .pass = backward ? "bwd" : "fwd",
                     .sources = {backward ? backward_file : "rmsnorm/forward_fallback.cu"},
                     .is_fallback = true}),
        backward_(backward) {}

  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const Layer layer = layer_of(problem);
    return backward_ ? backward_fallback_program(layer, facts) : forward_program(layer);
  }

 private:
  bool backward_;
};

}  // namespace

Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts) {
  // Chunks of rows enough for four blocks an SM, and few enough for their sum to be little work.
  const std::int64_t column_blocks = quotient_up(layer.d, fallback_threads);
  const std::int64_t wanted = quotient_up(4 * facts.multiprocessors, column_blocks);
  const std::int64_t chunk = quotient_up(layer.m, std::min(wanted, layer.m));
  const std::int64_t chunks = quotient_up(layer.m, chunk);
  const auto floats = [](std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(float);
  };
  const TensorPlaces at = places_of(layer);

  Program program;
  program.scratch = {{floats(layer.m), false}, {floats(chunks * layer.d), false}};
  append_kernel(program, backward_file,
                fmt::format("backward_fallback<{}>", template_arguments(layer)),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads,
                backward_arguments(layer, ScratchArgument{0}));
  append_kernel(program, backward_file,
                fmt::format("backward_fallback_columns<{}>", element_type(layer.dtype)),
                {static_cast<std::uint32_t>(column_blocks), static_cast<std::uint32_t>(chunks), 1},
                fallback_threads,
                {tensor_of(at, "x"), tensor_of(at, "dy"), ScratchArgument{0}, ScratchArgument{1},
                 layer.m, static_cast<std::int32_t>(layer.d), chunk});
  append_column_sum(program, facts, backward_file, "backward_fallback_weight", layer.weight_dtype,
                    ScratchArgument{1}, tensor_of(at, "dw"), chunks, layer.d);
  return program;
}

std::vector<const Family*> cuda_families() {
  static const ForwardRows forward_rows;
  static const BackwardRows backward_rows;
  static const Fallback forward_fallback(false), backward_fallback(true);
  return {&forward_rows, &backward_rows, &forward_fallback, &backward_fallback};
}

}  // namespace fftune::rmsnorm
