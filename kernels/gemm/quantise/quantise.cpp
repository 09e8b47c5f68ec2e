#include "kernels/gemm/quantise/quantise.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "device/parallel.hpp"
#include "kernels/gemm/packed/packed.hpp"

namespace fftune {
namespace {

/// Elements of e4m3 are drawn well above their subnormals, and below 448; the scales undo that.
constexpr double elements_by = 16;

}  // namespace

OptionField quantise_option() {
  return rare_option(
      "quantise",
      "whether tokens are quantised to e4m3, for weights of e4m3: with a scale for each token and "
      "row of a weight, or each 128 elements and block of 128 x 128",
      {"no", "token", "block"}, "fwd");
}

Scaling quantised_scaling(const Problem& problem) {
  // Other forms have other tensors, whatever is asked for: quantise_contradiction() refuses it.
  if (problem.dtype == DType::fp8 || packed_format(problem).packed) return Scaling::none;
  if (problem.has("quantise", "token")) return Scaling::channel;
  return problem.has("quantise", "block") ? Scaling::block : Scaling::none;
}

std::string quantise_contradiction(const Problem& problem) {
  if (!problem.options.contains("quantise") || problem.has("quantise", "no")) return "";
  if (problem.dtype == DType::fp8)
    return fmt::format("quantise={} is for x of bf16, fp16 and f32: x of fp8 is quantised",
                       problem.option("quantise"));
  if (packed_format(problem).packed)
    return fmt::format("quantise={} with weights={}: the weight is e4m3, and not packed",
                       problem.option("quantise"), problem.option("weights"));
  return "";
}

std::vector<TensorSpec> quantised_tensors(const QuantisedRows& rows) {
  return {{std::string(rows.elements), DType::fp8, {rows.rows, rows.k}, Role::intermediate, 1},
          {std::string(rows.scales),
           DType::f32,
           {rows.rows, rows.scales_of_row()},
           Role::intermediate,
           1}};
}

std::vector<TensorSpec> quantised_weight(std::string_view name, std::int64_t n, std::int64_t k,
                                         Scaling scaling, double deviation) {
  const double scale = deviation / elements_by;
  std::vector<std::int64_t> shape{n};
  if (scaling == Scaling::block) shape = {ceil_div(n, scale_block), ceil_div(k, scale_block)};
  return {
      {std::string(name), DType::fp8, {n, k}, Role::input, elements_by},
      {std::string(name) + "_scale", DType::f32, std::move(shape), Role::input, scale / 10, scale}};
}

GemmProblem with_quantised_a(GemmProblem gemm, const QuantisedRows& rows,
                             std::vector<std::string_view> b_scales) {
  gemm.dtype = DType::fp8;
  gemm.a = {{rows.elements}};
  gemm.quantisation.scaling = rows.scaling;
  gemm.quantisation.a_scale = rows.scales;
  gemm.quantisation.b_scale = std::move(b_scales);
  gemm.follows = true;
  return gemm;
}

StageSpec quantise_spec(std::string_view name, const QuantisedRows& rows,
                        const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = name;
  stage.inputs = {std::string(rows.from)};
  stage.outputs = {std::string(rows.elements), std::string(rows.scales)};
  stage.flops = 2 * static_cast<double>(rows.rows * rows.k);
  for (const auto& names : {stage.inputs, stage.outputs})
    for (const auto& tensor : names)
      stage.bytes += static_cast<double>(tensors[tensor_index(tensors, tensor)].bytes());
  return stage;
}

std::vector<double> quantise_rows(std::vector<double>& values, std::size_t columns,
                                  std::size_t length, Parallel& parallel) {
  constexpr double largest_number = 448;
  const std::size_t blocks = (columns + length - 1) / length;
  std::vector<double> scales(values.size() / columns * blocks);
  for_each_row(values.size() / columns, columns, parallel, [&](std::size_t row) {
    double* const own = values.data() + row * columns;
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t first = block * length, last = std::min(first + length, columns);
      const double largest = largest_magnitude(std::span<const double>(own + first, last - first));
      const double scale = largest <= 0x1p-100 ? 1 : largest / largest_number;
      for (std::size_t i = first; i < last; ++i) own[i] = round_to(DType::fp8, own[i] / scale);
      scales[row * blocks + block] = scale;
    }
  });
  return scales;
}

void reference_quantise(const QuantisedRows& rows, ReferenceTensors& tensors, Parallel& parallel) {
  auto elements = large_copy(tensors.at(std::string(rows.from)), parallel);
  tensors[std::string(rows.scales)] =
      quantise_rows(elements, static_cast<std::size_t>(rows.k),
                    static_cast<std::size_t>(rows.length()), parallel);
  tensors[std::string(rows.elements)] = std::move(elements);
}

std::vector<double> quantised_numbers(const std::vector<double>& elements,
                                      const std::vector<double>& scales, std::size_t columns,
                                      std::size_t block_rows, std::size_t block_columns,
                                      Parallel& parallel) {
  const std::size_t blocks = (columns + block_columns - 1) / block_columns;
  auto result = large_vector<double>(elements.size(), parallel);
  for_each_row(elements.size() / columns, columns, parallel, [&](std::size_t row) {
    for (std::size_t block = 0; block < blocks; ++block) {
      const double scale = scales[row / block_rows * blocks + block];
      const std::size_t last = std::min((block + 1) * block_columns, columns);
      for (std::size_t i = block * block_columns; i < last; ++i)
        result[row * columns + i] = elements[row * columns + i] * scale;
    }
  });
  return result;
}

std::vector<double> numbers_of(const QuantisedRows& rows, const ReferenceTensors& tensors,
                               Parallel& parallel) {
  return quantised_numbers(tensors.at(std::string(rows.elements)),
                           tensors.at(std::string(rows.scales)), static_cast<std::size_t>(rows.k),
                           1, static_cast<std::size_t>(rows.length()), parallel);
}

std::vector<double> numbers_of_weight(const std::string& name, std::int64_t k, Scaling scaling,
                                      const ReferenceTensors& tensors, Parallel& parallel) {
  const std::int64_t rows = scaling == Scaling::block ? scale_block : 1;
  return quantised_numbers(tensors.at(name), tensors.at(name + "_scale"),
                           static_cast<std::size_t>(k), static_cast<std::size_t>(rows),
                           static_cast<std::size_t>(rows == 1 ? k : rows), parallel);
}

std::optional<std::string> refuse_unquantised(const Problem& problem, const DeviceFacts&) {
  if (quantises(problem)) return std::nullopt;
  return "it is for quantise=token and quantise=block";
}

}  // namespace fftune
