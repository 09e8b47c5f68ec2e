// Rows in registers, each read once by the threads that share it; and plain kernels with a block
// for each row, for any width and alignment.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/row_space.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"

namespace fftune::gated_rmsnorm {
namespace {

constexpr const char* file = "gated_rmsnorm/gated.cu";
constexpr std::int64_t other_registers = 40;  // addresses, sums, one vector of each as floats
constexpr std::uint32_t fallback_threads = 256;
constexpr std::int64_t most_blocks = (std::int64_t{1} << 31) - 1;

RowShape shape_of(const Layer& layer) {
  return {.rows = layer.rows(), .elements = layer.d, .dtype = layer.dtype};
}

std::string gate_type(const Layer& layer) {
  return layer.sigmoid ? "fftune::sigmoid_gate" : "fftune::silu";
}

/// "fftune::bf16, float, fftune::silu, fftune::t5_norm, false, true, false": the convention and
/// what is behind the order are those of the forward pass.
std::string template_arguments(const Layer& layer) {
  const std::string convention = layer.backward ? ""
                                 : layer.rounds ? "fftune::llama_norm, "
                                                : "fftune::t5_norm, ";
  const std::string form =
      layer.backward ? "" : fmt::format(", {}, {}", layer.normed, layer.row_gate);
  return fmt::format("{}, {}, {}, {}{}{}", element_type(layer.dtype),
                     element_type(layer.weight_dtype), gate_type(layer), convention, layer.before,
                     form);
}

/// The last template argument of the forward kernels.
std::string one_w_type(const Layer& layer) {
  return layer.one_w ? ", true" : "";
}

std::vector<Argument> sizes_of(const Layer& layer, std::int64_t rows) {
  return {rows, static_cast<std::int32_t>(layer.groups), static_cast<std::int32_t>(layer.d),
          layer.z_row, layer.eps};
}

std::vector<Argument> arguments_of(const Layer& layer, std::int64_t rows,
                                   const std::vector<Argument>& third = {}) {
  const TensorPlaces at(tensors_of(layer));
  std::vector<Argument> arguments;
  for (const std::string_view name : {"dy", "x", "z", "w", "y", "dx", "dz"})
    if (name == "w" || at.at(name) != absent) arguments.push_back(tensor_or_null(at, name));
  append(arguments, third);
  append(arguments, sizes_of(layer, rows));
  return arguments;
}

Scratch floats(std::int64_t count) {
  return {static_cast<std::size_t>(count) * sizeof(float), false};
}

void add_parameters(Space& space, const Layer& layer, const DeviceFacts& facts) {
  add_row_parameters(space, shape_of(layer),
                     {.group = {4, 8, 16, 32, 64, 128, 256, 512, 1024},
                      .groups = {1, 2, 4, 8, 16, 32, 64},
                      .wide_alone = true},
                     facts);
  space.constraint(
      "a thread's part of a row, of its gate and of what sums need must fit in registers",
      [layer, facts](const Config& c) {
        const RowShape shape = shape_of(layer);
        const std::int64_t count = elements_of_vector(shape, c);
        const std::int64_t elements = vectors_of_thread(shape, c) * count;
        const std::int64_t raw = raw_registers(elements, shape.element_bytes(), count);
        const std::int64_t needed =
            layer.backward ? 3 * raw + elements * (layer.frozen ? 0 : 1) : 2 * raw;
        return needed + other_registers <= registers_of_thread(facts, block_threads(c));
      },
      {"vector", "group", "groups"});
}

std::optional<std::string> refuse_rows(const Problem& problem, const DeviceFacts&) {
  const Layer layer = layer_of(problem);
  const RowShape shape = shape_of(layer);
  const std::int64_t vector = widest_vector(shape.bytes());
  if (!layer.row_gate && layer.z_row * shape.element_bytes() % vector != 0)
    return fmt::format("z-row={} is no multiple of accesses of {} bytes", layer.z_row, vector);
  return std::nullopt;
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_parameters(space, layer, facts);
  if (!layer.backward) return space;
  space.parameter("waves", "blocks for each SM, which go on to further rows", {1, 2, 3, 4, 6, 8});
  limit_waves(space);
  return space;
}

// Two vectors a thread where there are many rows, and blocks of 256 threads: as in rmsnorm.
Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const RowShape shape = shape_of(layer);
  const bool few = shape.rows <= 2 * facts.multiprocessors;
  Config config =
      default_rows(shape, {.vectors = few ? 1 : 2, .least_group = 4, .most_group = 1024});
  if (config.at("group") > 256) config.set("groups", 1);
  if (layer.backward) config.set("waves", block_threads(config) <= 512 ? 4 : 2);
  return config;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const RowShape shape = shape_of(layer);
  const std::string division =
      fmt::format("{}, {}, {}, {}", config.at("vector"), vectors_of_thread(shape, config),
                  config.at("group"), config.at("groups"));
  Program program;
  if (!layer.backward) {
    append_row_kernel(program, facts, file,
                      fmt::format("gated_rmsnorm_rows<{}, {}{}>", template_arguments(layer),
                                  division, one_w_type(layer)),
                      quotient_up(shape.rows, config.at("groups")), config,
                      arguments_of(layer, shape.rows));
    return program;
  }
  const std::int64_t blocks = std::min(
      quotient_up(layer.m, config.at("groups")),
      std::max<std::int64_t>(1, config.at("waves") * facts.multiprocessors / layer.groups));
  const std::int64_t parts = blocks * config.at("groups");
  std::vector<Argument> partial;
  if (layer.frozen) {
    partial.emplace_back(std::int64_t{0});
  } else {
    partial.emplace_back(ScratchArgument{0});
    program.scratch = {floats(parts * layer.width())};
  }
  append_row_kernel(program, facts, file,
                    fmt::format("gated_rmsnorm_backward<{}, {}, {}>", template_arguments(layer),
                                layer.frozen, division),
                    blocks * layer.groups, config, arguments_of(layer, layer.m, partial));
  if (!layer.frozen)
    append_column_sum(program, facts, file, "gated_rmsnorm_sum", layer.weight_dtype, {0},
                      tensor_of(TensorPlaces(tensors_of(layer)), "dw"), parts, layer.width());
  return program;
}

Program fallback_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = layer_of(problem);
  const Dim3 grid{static_cast<std::uint32_t>(std::min(layer.rows(), most_blocks))};
  Program program;
  if (!layer.backward) {
    append_kernel(
        program, file,
        fmt::format("gated_rmsnorm_fallback<{}{}>", template_arguments(layer), one_w_type(layer)),
        grid, fallback_threads, arguments_of(layer, layer.rows()));
    return program;
  }
  program.scratch = {floats(layer.rows())};
  append_kernel(program, file,
                fmt::format("gated_rmsnorm_backward_fallback<{}>", template_arguments(layer)), grid,
                fallback_threads, arguments_of(layer, layer.rows(), {ScratchArgument{0}}));
  if (layer.frozen) return program;
  // Chunks of tokens enough for four blocks an SM, and few enough for their sum to be little
  // work.
  const std::int64_t across = quotient_up(layer.width(), fallback_threads);
  const std::int64_t wanted = quotient_up(4 * facts.multiprocessors, across);
  const std::int64_t chunk = quotient_up(layer.m, std::min(wanted, layer.m));
  const std::int64_t chunks = quotient_up(layer.m, chunk);
  program.scratch.push_back(floats(chunks * layer.width()));
  const TensorPlaces at(tensors_of(layer));
  append_kernel(program, file,
                fmt::format("gated_rmsnorm_backward_columns<{}, {}>", element_type(layer.dtype),
                            gate_type(layer)),
                {static_cast<std::uint32_t>(across), static_cast<std::uint32_t>(chunks), 1},
                fallback_threads,
                {tensor_of(at, "dy"), tensor_of(at, "x"), tensor_of(at, "z"), ScratchArgument{0},
                 ScratchArgument{1}, layer.m, static_cast<std::int32_t>(layer.groups),
                 static_cast<std::int32_t>(layer.d), layer.z_row, chunk});
  append_column_sum(program, facts, file, "gated_rmsnorm_sum", layer.weight_dtype, {1},
                    tensor_of(at, "dw"), chunks, layer.width());
  return program;
}

}  // namespace

std::vector<const Family*> cuda_families() {
  const auto rows_of = [](const char* name, const char* summary, const char* pass) {
    return RowFamily({.name = name,
                      .summary = summary,
                      .pass = pass,
                      .sources = {file},
                      .refusal = refuse_rows,
                      .search = {space, default_config},
                      .program = program},
                     [](const Problem& problem) { return shape_of(layer_of(problem)); });
  };
  static const std::vector<RowFamily> rows{
      rows_of("forward_rows", "rows in registers of a group of threads, read once", "fwd"),
      rows_of("backward_rows", "rows in registers, read once, dw summed on the way", "bwd")};
  static const auto fallbacks = cuda_fallbacks(
      "plain loops for any width and alignment: the fallback", file, fallback_program);
  return addresses_of(rows, fallbacks);
}

}  // namespace fftune::gated_rmsnorm
