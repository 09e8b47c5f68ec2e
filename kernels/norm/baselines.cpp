#include <fmt/format.h>

#include <string>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

constexpr const char* file = "norm/baseline.cu";
constexpr std::uint32_t threads = 256;

/// Sum, mean square, quotient and product: each reads the previous one's result.
Baseline unfused_forward(const Layer& layer) {
  const TensorPlaces at = places_of(layer);
  const auto rows = static_cast<std::uint32_t>(layer.m);
  const Dim3 by_element = grid_of_matrix(layer.m, layer.d, 1024);
  const auto d = static_cast<std::int32_t>(layer.d);
  const std::string type = element_type(layer.dtype);
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "a plain kernel each for the sum of squares, x / root and * w";
  baseline.extra = {{"normalised", layer.dtype, {layer.m, layer.d}, Role::intermediate, 1}};
  Argument root = ScratchArgument{0};
  if (layer.saves)
    root = tensor_of(at, "rstd");
  else
    baseline.program.scratch = {{static_cast<std::size_t>(layer.m) * sizeof(float), false}};
  Argument x = tensor_of(at, "x");
  if (layer.adds) {
    append_kernel(baseline.program, file, fmt::format("baseline_add<{}>", type), by_element,
                  threads, {x, tensor_of(at, "residual"), tensor_of(at, "sum"), layer.m, d});
    x = tensor_of(at, "sum");
  }
  const TensorArgument normalised{at.count()};
  append_kernel(baseline.program, file, fmt::format("baseline_root<{}>", type), Dim3{rows, 1, 1},
                threads, {x, root, layer.m, d, layer.eps});
  append_kernel(baseline.program, file, fmt::format("baseline_scale<{}>", type), by_element,
                threads, {x, root, normalised, layer.m, d});
  append_kernel(baseline.program, file,
                fmt::format("baseline_weigh<{}, {}, {}>", type, element_type(layer.weight_dtype),
                            layer.convention == Convention::gemma),
                by_element, threads,
                {normalised, tensor_of(at, "w"), tensor_of(at, "y"), layer.m, d});
  return baseline;
}

}  // namespace

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  // PyTorch's kernel is the layernorm that a user would take: bench/ compares with it.
  if (layer.centres || facts.kind == DeviceKind::cpu || layer.quantises() || layer.adds_after)
    return {};
  if (!layer.backward) return {unfused_forward(layer)};
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "a plain kernel each for dx, for dw by chunks of rows, and for their sum";
  baseline.program = backward_fallback_program(layer, facts);
  return {baseline};
}

}  // namespace fftune::norm
