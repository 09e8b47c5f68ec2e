// Forward, rows in registers, each read once by the threads that share it; and plain loops with a
// block for each row, of either pass.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/layernorm/layernorm.hpp"

namespace fftune::layernorm {
namespace {

constexpr const char* forward_file = "layernorm/forward.cu";
constexpr const char* backward_file = "layernorm/backward.cu";
constexpr std::uint32_t fallback_threads = 256;

std::int64_t element_bytes(const Layer& layer) {
  return static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

/// Vectors of a row that each of its threads has.
std::int64_t vectors_of_thread(const Layer& layer, const Config& config) {
  return quotient_up(layer.d * element_bytes(layer) / config.at("vector"), config.at("group"));
}

/// Elements of a row that a thread has, in float.
std::int64_t floats_of_thread(const Layer& layer, const Config& config) {
  return vectors_of_thread(layer, config) * config.at("vector") / element_bytes(layer);
}

std::vector<Argument> forward_arguments(const Layer& layer) {
  const TensorPlaces at = places_of(layer);
  return {tensor_of(at, "x"),
          tensor_or_null(at, "residual"),
          tensor_of(at, "w"),
          tensor_of(at, "b"),
          tensor_of(at, "y"),
          tensor_or_null(at, "sum"),
          std::int64_t{layer.m},
          static_cast<std::int32_t>(layer.d),
          layer.eps};
}

class ForwardRows final : public StageFamily {
 public:
  ForwardRows()
      : StageFamily({.name = "forward_rows",
                     .summary = "rows in registers of a group of threads, read once",
                     .stage = stage_forward,
                     .pass = "fwd",
                     .sources = {forward_file}}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_cuda(problem, "fwd", facts)) return refusal;
    if (space(problem, facts).violations(default_config(problem, facts)).empty())
      return std::nullopt;
    return fmt::format("rows of d={} in {} do not suit a block's registers and accesses",
                       problem.size("d"), dtype_name(problem.dtype));
  }

  Space space(const Problem& problem, const DeviceFacts&) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t row_bytes = layer.d * element_bytes(layer);
    const std::int64_t widest = widest_vector(row_bytes);
    return Space()
        .parameter("vector", "bytes of an access", {2, 4, 8, 16})
        .parameter("group", "threads of a block that share a row",
                   {8, 16, 32, 64, 128, 256, 512, 1024})
        .parameter("groups", "rows of a block side by side", {1, 2, 4, 8, 16})
        .constraint("an access is at least one element, and rows are aligned to it",
                    [=, least = element_bytes(layer)](const Config& c) {
                      return c.at("vector") >= least && c.at("vector") <= widest;
                    },
                    {"vector"})
        .constraint("accesses narrower than half of what alignment allows only add instructions",
                    [=](const Config& c) { return 2 * c.at("vector") >= widest; }, {"vector"})
        .constraint("a block has 64 to 1024 threads",
                    [](const Config& c) {
                      const std::int64_t threads = c.at("group") * c.at("groups");
                      return threads >= 64 && threads <= 1024;
                    },
                    {"group", "groups"})
        .constraint("no more rows side by side than there are",
                    [layer](const Config& c) {
                      return c.at("group") * c.at("groups") == 64 || c.at("groups") < 2 * layer.m;
                    },
                    {"group", "groups"})
        .constraint("at most half of a row's threads have nothing to do",
                    [=](const Config& c) {
                      return c.at("group") == 8 || c.at("group") < 2 * (row_bytes / c.at("vector"));
                    },
                    {"vector", "group"})
        .constraint("a thread has at most 64 elements of a row in registers, in float",
                    [layer](const Config& c) { return floats_of_thread(layer, c) <= 64; },
                    {"vector", "group"});
  }

  /// The widest accesses, about one a thread where there are few rows and two where there are many.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t row_bytes = layer.d * element_bytes(layer);
    const std::int64_t vector = widest_vector(row_bytes);
    const std::int64_t vectors = layer.m <= 2 * facts.multiprocessors ? 1 : 2;
    const std::int64_t group =
        std::clamp<std::int64_t>(power_of_two(quotient_up(row_bytes / vector, vectors)), 8, 1024);
    const std::int64_t groups =
        std::max(quotient_up(64, group),
                 std::min(std::max<std::int64_t>(1, 256 / group), power_of_two(layer.m)));
    return {{"vector", std::max(vector, element_bytes(layer))},
            {"group", group},
            {"groups", std::min<std::int64_t>(groups, 16)}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    Program program;
    auto& launch = append_kernel(
        program, forward_file,
        fmt::format("layernorm_rows<{}, {}, {}, {}, {}, {}>", element_type(layer.dtype), layer.adds,
                    config.at("vector"), vectors_of_thread(layer, config), config.at("group"),
                    config.at("groups")),
        {static_cast<std::uint32_t>(quotient_up(layer.m, config.at("groups")))},
        static_cast<std::uint32_t>(config.at("group") * config.at("groups")),
        forward_arguments(layer));
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }
};

Program forward_program(const Layer& layer) {
  Program program;
  append_kernel(program, forward_file,
                fmt::format("layernorm_fallback<{}, {}>", element_type(layer.dtype), layer.adds),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads, forward_arguments(layer));
  return program;
}

Program backward_program(const Layer& layer, const DeviceFacts& facts) {
  // Chunks of rows enough for four blocks an SM, and few enough for their sum to be little work.
  const std::int64_t column_blocks = quotient_up(layer.d, fallback_threads);
  const std::int64_t wanted = quotient_up(4 * facts.multiprocessors, column_blocks);
  const std::int64_t chunk = quotient_up(layer.m, std::min(wanted, layer.m));
  const std::int64_t chunks = quotient_up(layer.m, chunk);
  const auto floats = [](std::int64_t count) {
    return Scratch{static_cast<std::size_t>(count) * sizeof(float), false};
  };
  const TensorPlaces at = places_of(layer);
  const std::string type = element_type(layer.dtype);
  const auto d = static_cast<std::int32_t>(layer.d);
  const ScratchArgument moments{0}, of_w{1}, of_b{2};

  Program program;
  program.scratch = {floats(2 * layer.m), floats(chunks * layer.d), floats(chunks * layer.d)};
  append_kernel(program, backward_file, fmt::format("layernorm_backward<{}, {}>", type, layer.adds),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads,
                {tensor_of(at, "x"), tensor_of(at, "w"), tensor_of(at, "dy"),
                 tensor_or_null(at, "dsum"), tensor_of(at, "dx"), moments, layer.m, d, layer.eps});
  append_kernel(program, backward_file, fmt::format("layernorm_backward_columns<{}>", type),
                {static_cast<std::uint32_t>(column_blocks), static_cast<std::uint32_t>(chunks), 1},
                fallback_threads,
                {tensor_of(at, "x"), tensor_of(at, "dy"), moments, of_w, of_b, layer.m, d, chunk});
  append_column_sum(program, facts, backward_file, "layernorm_backward_sum", layer.dtype, of_w,
                    tensor_of(at, "dw"), chunks, layer.d);
  append_column_sum(program, facts, backward_file, "layernorm_backward_sum", layer.dtype, of_b,
                    tensor_of(at, "db"), chunks, layer.d);
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
                     .sources = {backward ? backward_file : forward_file},
                     .is_fallback = true}) {}

  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const Layer layer = layer_of(problem);
    return layer.backward ? backward_program(layer, facts) : forward_program(layer);
  }
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static const ForwardRows forward_rows;
  static const Fallback forward_fallback(false), backward_fallback(true);
  return {&forward_rows, &forward_fallback, &backward_fallback};
}

}  // namespace fftune::layernorm
