// layernorm's rows in registers, each read once by the threads that share it.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

constexpr const char* forward_file = "layernorm/forward.cu";
constexpr std::int64_t most_groups = 16;

class ForwardRows final : public RowFamily {
 public:
  ForwardRows()
      : RowFamily({.name = "forward_rows",
                   .summary = "rows in registers of a group of threads, read once",
                   .stage = stage_forward,
                   .pass = "fwd",
                   .sources = {forward_file}}) {}

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const RowShape shape = row_shape(problem);
    Space space;
    add_row_parameters(
        space, shape,
        {.group = {8, 16, 32, 64, 128, 256, 512, 1024}, .groups = {1, 2, 4, 8, most_groups}},
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
    const RowShape shape = row_shape(problem);
    Config config = default_rows(
        shape, {.vectors = shape.rows <= 2 * facts.multiprocessors ? 1 : 2, .most_group = 1024});
    config.set("groups", std::min<std::int64_t>(config.at("groups"), most_groups));
    return config;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Layer layer = layer_of(problem);
    Program program;
    append_row_kernel(program, facts, forward_file,
                      fmt::format("layernorm_rows<{}, {}, {}, {}, {}>", template_arguments(layer),
                                  config.at("vector"), vectors_of_thread(layer.rows(), config),
                                  config.at("group"), config.at("groups")),
                      quotient_up(layer.m, config.at("groups")), config, forward_arguments(layer));
    return program;
  }

 private:
  RowShape row_shape(const Problem& problem) const override { return layer_of(problem).rows(); }
};

}  // namespace

std::vector<const Family*> centred_row_families() {
  static const ForwardRows forward;
  return {&forward};
}

}  // namespace fftune::norm
