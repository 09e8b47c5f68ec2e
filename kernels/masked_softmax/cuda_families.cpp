// Rows in registers, read once, by lanes of a warp, by a block, or by a cluster of blocks; and the
// fallbacks, with a block for each row.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/common/row_space.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/masked_softmax/masked_softmax.hpp"

namespace fftune::masked_softmax {
namespace {

constexpr std::int64_t other_registers = 36;  // addresses, sums, one vector as loaded

RowShape shape_of(const Layer& layer) {
  return {.rows = layer.rows(), .elements = layer.n, .dtype = layer.dtype};
}

/// Forward: powers in f32, and one vector as it is loaded; the loads of all are in flight before
/// the first is a power. Backward: y and dy as they are loaded.
std::int64_t registers_needed(const Layer& layer, const Config& config) {
  const RowShape shape = shape_of(layer);
  const std::int64_t count = elements_of_vector(shape, config);
  const std::int64_t elements = vectors_of_thread(shape, config) * count;
  const std::int64_t raw = raw_registers(elements, shape.element_bytes(), count);
  return other_registers + (layer.backward ? 2 * raw + 2 * count : elements + raw / 2);
}

/// Widest accesses to which rows, and the mask's, are aligned; about four of them a thread, 256
/// threads a block or what a row takes; wider rows on a cluster where there are clusters.
Config default_rows(const Layer& layer, const DeviceFacts& facts) {
  const RowShape shape = shape_of(layer);
  const std::int64_t accesses = shape.vectors(widest_vector(shape.bytes()));
  constexpr std::int64_t most_vectors = 4;
  std::int64_t cluster = 1;
  if (facts.compute_capability >= 90)
    while (cluster < 8 && accesses > 512 * most_vectors * cluster) cluster *= 2;
  Config config = fftune::default_rows(shape, {.vectors = 2, .cluster = cluster});
  config.set("cluster", cluster);
  config.set("evict_first", 0);
  return config;
}

std::string mask_name(Mask mask) {
  return mask == Mask::causal ? "causal" : mask == Mask::boolean ? "boolean" : "none";
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_row_parameters(space, shape_of(layer),
                     {.group = {8, 16, 32, 64, 128, 256, 512, 1024},
                      .groups = {1, 2, 4, 8, 16, 32},
                      .clusters = true},
                     facts);
  space.constraint("a thread's part of a row must fit in registers",
                   [layer, facts](const Config& c) {
                     return registers_needed(layer, c) <=
                            registers_of_thread(facts, block_threads(c));
                   },
                   {"vector", "group", "groups", "cluster"});
  return space;
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  return default_rows(layer_of(problem), facts);
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const Places at = places_of(problem);
  const std::string shape = fmt::format(
      "{}, {}, {}, {}, {}, {}", config.at("vector"), vectors_of_thread(shape_of(layer), config),
      config.at("group"), config.at("groups"), config.at("cluster"), config.at("evict_first") != 0);
  const auto n = static_cast<std::int32_t>(layer.n), s = static_cast<std::int32_t>(layer.s);
  const std::int64_t sets = quotient_up(layer.rows(), config.at("groups"));
  Program program;
  if (layer.backward)
    append_row_kernel(program, facts, "masked_softmax/backward_rows.cu",
                      fmt::format("softmax_backward_rows<{}, {}, {}>", element_type(layer.dtype),
                                  layer.mask == Mask::causal, shape),
                      sets, config,
                      {TensorArgument{at.y}, TensorArgument{at.dy}, TensorArgument{at.dx},
                       layer.rows(), n, s, layer.scale});
  else
    append_row_kernel(
        program, facts, "masked_softmax/forward_rows.cu",
        fmt::format("softmax_forward_rows<{}, fftune::softmax_mask::{}, {}>",
                    element_type(layer.dtype), mask_name(layer.mask), shape),
        sets, config,
        {TensorArgument{at.x}, tensor_or_null(at.mask), TensorArgument{at.y}, layer.rows(), n, s,
         static_cast<std::int32_t>(layer.mask_of_head ? 1 : layer.heads), layer.scale});
  return program;
}

/// Fallback of either pass: plain loops, one block per row.
Program fallback_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = layer_of(problem);
  const Places at = places_of(problem);
  const auto n = static_cast<std::int32_t>(layer.n), s = static_cast<std::int32_t>(layer.s);
  constexpr std::int64_t most_blocks = (std::int64_t{1} << 31) - 1;
  const Dim3 grid{static_cast<std::uint32_t>(std::min(layer.rows(), most_blocks)), 1, 1};
  std::vector<Argument> arguments{TensorArgument{at.x},
                                  tensor_or_null(at.mask),
                                  TensorArgument{at.y},
                                  layer.rows(),
                                  n,
                                  s,
                                  static_cast<std::int32_t>(layer.mask_of_head ? 1 : layer.heads),
                                  layer.scale};
  if (layer.backward)
    arguments = {
        TensorArgument{at.y}, TensorArgument{at.dy}, TensorArgument{at.dx}, layer.rows(), n, s,
        layer.scale};
  return pdl_program(
      facts, "masked_softmax/fallback.cu",
      fmt::format("softmax_{}_fallback<{}, {}>", layer.backward ? "backward" : "forward",
                  element_type(layer.dtype), static_cast<int>(layer.mask)),
      grid, 256, std::move(arguments));
}

}  // namespace

std::vector<const Family*> cuda_families() {
  const auto rows_of = [](const char* name, const char* pass, const char* file) {
    return RowFamily({.name = name,
                      .summary = "rows in registers of a group of threads, read once",
                      .pass = pass,
                      .sources = {file},
                      .search = {space, default_config},
                      .program = program},
                     [](const Problem& problem) { return shape_of(layer_of(problem)); });
  };
  static const std::vector<RowFamily> rows{
      rows_of("forward_rows", "fwd", "masked_softmax/forward_rows.cu"),
      rows_of("backward_rows", "bwd", "masked_softmax/backward_rows.cu")};
  static const auto fallbacks =
      cuda_fallbacks("plain loops for any width and alignment: the fallback",
                     "masked_softmax/fallback.cu", fallback_program);
  return addresses_of(rows, fallbacks);
}

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (facts.kind == DeviceKind::cpu) return {};
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "a plain kernel that reads each row twice";
  baseline.program = fallback_program(problem, facts, {});
  return {baseline};
}

}  // namespace fftune::masked_softmax
