// The fallbacks of both ops: plain kernels with a block for each row, for any width and alignment.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "core/lookup.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

constexpr std::uint32_t fallback_threads = 256;  // but of the last sum

struct Sources {
  const char *forward, *backward;
};

Sources sources_of(bool centres) {
  if (centres) return {"norm/centred_forward.cu", "norm/centred_backward.cu"};
  return {"norm/forward_fallback.cu", "norm/backward_fallback.cu"};
}

Program forward_program(const Layer& layer) {
  const std::string own = template_arguments(layer);
  Program program;
  append_kernel(program, sources_of(layer.centres).forward,
                layer.centres ? fmt::format("layernorm_fallback<{}>", own)
                              : fmt::format("forward_fallback<{}, {}, {}>", own,
                                            element_type(layer.out_dtype), layer.adds_after),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads, forward_arguments(layer));
  return program;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = layer_of(problem);
  return layer.backward ? backward_fallback_program(layer, facts) : forward_program(layer);
}

std::vector<StageFamily> fallbacks(bool centres) {
  const auto of = [](const char* name, const char* pass, const char* file) {
    return StageFamily({.name = name,
                        .summary = "plain loops for any width and alignment: the fallback",
                        .pass = pass,
                        .sources = {file},
                        .is_fallback = true,
                        .program = program});
  };
  const auto [forward, backward] = sources_of(centres);
  return {of("forward_fallback", "fwd", forward), of("backward_fallback", "bwd", backward)};
}

}  // namespace

std::string convention_type(Convention convention) {
  using enum Convention;
  return value_of<Convention, std::string>(
      convention,
      {{llama, "fftune::llama_norm"}, {gemma, "fftune::gemma_norm"}, {t5, "fftune::t5_norm"}});
}

std::string template_arguments(const Layer& layer) {
  const std::string type = element_type(layer.dtype);
  if (layer.centres) return fmt::format("{}, {}", type, layer.adds);
  return fmt::format("{}, {}, {}, {}, {}", type, element_type(layer.weight_dtype),
                     convention_type(layer.convention), layer.adds, layer.saves);
}

std::vector<Argument> forward_arguments(const Layer& layer) {
  const TensorPlaces at = places_of(layer);
  std::vector<Argument> arguments{tensor_of(at, "x"), tensor_or_null(at, "residual"),
                                  tensor_of(at, "w")};
  if (layer.centres) arguments.push_back(tensor_of(at, "b"));
  arguments.insert(arguments.end(), {tensor_of(at, "y"), tensor_or_null(at, "sum")});
  if (!layer.centres)
    arguments.insert(arguments.end(), {tensor_or_null(at, "rstd"), tensor_or_null(at, "scale")});
  arguments.insert(arguments.end(),
                   {std::int64_t{layer.m}, static_cast<std::int32_t>(layer.d), layer.eps});
  return arguments;
}

std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third) {
  const TensorPlaces at = places_of(layer);
  std::vector<Argument> arguments{tensor_of(at, "x"), tensor_of(at, "w"), tensor_of(at, "dy"),
                                  tensor_or_null(at, "dsum")};
  if (!layer.centres) arguments.push_back(tensor_or_null(at, "rstd"));
  arguments.insert(arguments.end(), {tensor_of(at, "dx"), third, std::int64_t{layer.m},
                                     static_cast<std::int32_t>(layer.d), layer.eps});
  return arguments;
}

Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts) {
  // Chunks of rows enough for four blocks an SM, and few enough for their sum to be little work.
  const std::int64_t column_blocks = quotient_up(layer.d, fallback_threads);
  const std::int64_t wanted = quotient_up(4 * facts.multiprocessors, column_blocks);
  const std::int64_t chunk = quotient_up(layer.m, std::min(wanted, layer.m));
  const std::int64_t chunks = quotient_up(layer.m, chunk);
  const auto floats = [](std::int64_t count) {
    return Scratch{static_cast<std::size_t>(count) * sizeof(float), false};
  };
  const TensorPlaces at = places_of(layer);
  const char* const file = sources_of(layer.centres).backward;
  const std::string prefix = layer.centres ? "layernorm_backward" : "backward_fallback";
  const ScratchArgument of_rows{0};  // reciprocal deviations, of layernorm with the mean before
  // The outputs that are sums over rows, and where chunks of them are.
  std::vector<std::pair<const char*, ScratchArgument>> sums{{"dw", {1}}};
  if (layer.centres) sums.push_back({"db", {2}});

  Program program;
  program.scratch = {floats(layer.centres ? 2 * layer.m : layer.m)};
  append_kernel(program, file, fmt::format("{}<{}>", prefix, template_arguments(layer)),
                {static_cast<std::uint32_t>(layer.m)}, fallback_threads,
                backward_arguments(layer, of_rows));
  if (layer.frozen) return program;
  std::vector<Argument> columns{tensor_of(at, "x"), tensor_of(at, "dy"), of_rows};
  for (const auto& [name, partial] : sums) {
    program.scratch.push_back(floats(chunks * layer.d));
    columns.emplace_back(partial);
  }
  columns.insert(columns.end(), {layer.m, static_cast<std::int32_t>(layer.d), chunk});
  append_kernel(program, file, fmt::format("{}_columns<{}>", prefix, element_type(layer.dtype)),
                {static_cast<std::uint32_t>(column_blocks), static_cast<std::uint32_t>(chunks), 1},
                fallback_threads, std::move(columns));
  for (const auto& [name, partial] : sums)
    append_column_sum(program, facts, file, prefix + (layer.centres ? "_sum" : "_weight"),
                      layer.weight_dtype, partial, tensor_of(at, name), chunks, layer.d);
  return program;
}

std::vector<const Family*> fallback_families() {
  static const auto families = fallbacks(false);
  return addresses_of(families);
}

std::vector<const Family*> centred_fallback_families() {
  static const auto families = fallbacks(true);
  return addresses_of(families);
}

}  // namespace fftune::norm
