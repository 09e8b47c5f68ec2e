// layernorm's rows in registers, each read once by the threads that share it.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/row_space.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

constexpr const char* forward_file = "layernorm/forward.cu";

RowShape shape_of(const Problem& problem) {
  return {.rows = problem.size("m"), .elements = problem.size("d"), .dtype = problem.dtype};
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
    return refuse_rows(*this, problem, "fwd", facts, "d", problem.size("d"));
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const RowShape shape = shape_of(problem);
    Space space;
    add_row_parameters(space, shape,
                       {.group = {8, 16, 32, 64, 128, 256, 512, 1024}, .groups = {1, 2, 4, 8, 16}},
                       facts);
    space.constraint("a thread has at most 64 elements of a row in registers, in float",
                     [shape](const Config& c) {
                       return vectors_of_thread(shape, c) * elements_of_vector(shape, c) <= 64;
                     },
                     {"vector", "group"});
    return space;
  }

  /// The widest accesses, about one a thread where there are few rows and two where there are many.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const RowShape shape = shape_of(problem);
    const std::int64_t vector = widest_vector(shape.bytes());
    const std::int64_t vectors = shape.rows <= 2 * facts.multiprocessors ? 1 : 2;
    const std::int64_t group = std::clamp<std::int64_t>(
        power_of_two(quotient_up(shape.vectors(vector), vectors)), 8, 1024);
    const std::int64_t groups =
        std::max(quotient_up(64, group),
                 std::min(std::max<std::int64_t>(1, 256 / group), power_of_two(shape.rows)));
    return {{"vector", std::max(vector, shape.element_bytes())},
            {"group", group},
            {"groups", std::min<std::int64_t>(groups, 16)}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    Program program;
    auto& launch =
        append_kernel(program, forward_file,
                      fmt::format("layernorm_rows<{}, {}, {}, {}, {}>", template_arguments(layer),
                                  config.at("vector"), vectors_of_thread(shape_of(problem), config),
                                  config.at("group"), config.at("groups")),
                      {static_cast<std::uint32_t>(quotient_up(layer.m, config.at("groups")))},
                      static_cast<std::uint32_t>(block_threads(config)), forward_arguments(layer));
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }
};

}  // namespace

std::vector<const Family*> centred_row_families() {
  static const ForwardRows forward;
  return {&forward};
}

}  // namespace fftune::norm
