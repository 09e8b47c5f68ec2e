#include <fmt/format.h>

#include <utility>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/product_families.hpp"
#include "kernels/gemm/wgmma.hpp"

namespace fftune {
namespace {

/// The kernel of gemm/product_sm90.cu for the product's form.
std::string kernel_name(const Product& product) {
  if (product.gradient) return "product_gradient_sm90";
  if (product.shape.terms == 2) return "product_terms_sm90";
  if (product.shape.results == 2) return "product_results_sm90";
  return product.bias || !product.addends.empty() ? "product_adding_sm90" : "product_sm90";
}

/// The kernel's arguments up to the sizes, in its order.
std::vector<Argument> matrices(const Product& product, const WgmmaMaps& maps) {
  std::vector<Argument> arguments;
  const auto& [a, b, c] = std::tie(product.a, product.b, product.c);
  for (const Pointer& matrix : a) arguments.emplace_back(maps.a(matrix));
  for (const Pointer& matrix : b) arguments.emplace_back(maps.b(matrix));
  if (product.gradient)
    for (const Pointer& matrix : {product.gradient->gate, product.gradient->up})
      arguments.emplace_back(maps.c(matrix));
  for (const Pointer& matrix : c) arguments.emplace_back(maps.c(matrix));
  if (product.gradient) {
    if (c.size() == 2) arguments.emplace_back(maps.c(c.back()));
  } else if (product.shape.results == 2) {
    for (const Pointer& matrix : product.addends.empty() ? c : product.addends)
      arguments.emplace_back(maps.c(matrix));
  } else if (product.bias || !product.addends.empty()) {
    arguments.emplace_back(maps.c(product.addends.empty() ? c.front() : product.addends.front()));
    arguments.push_back(product.bias ? argument_of(*product.bias) : Argument{std::int64_t{0}});
  }
  return arguments;
}

}  // namespace

std::optional<std::string> WgmmaProduct::refusal(const Problem& problem,
                                                 const DeviceFacts& facts) const {
  if (auto refusal = refuse_stage(stage(), problem, facts, DeviceKind::cuda)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("wgmma multiplies bf16 and fp16 here, not {}", dtype_name(problem.dtype));
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  return refuse_rows(product(problem));
}

Space WgmmaProduct::space(const Problem& problem, const DeviceFacts& facts) const {
  return wgmma_space(product(problem).shape, facts);
}

Config WgmmaProduct::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return wgmma_default(product(problem).shape, facts);
}

std::optional<double> WgmmaProduct::estimate(const Problem& problem, const DeviceFacts& facts,
                                             const Config& config) const {
  if (facts.clock_hz <= 0) return std::nullopt;
  return wgmma_cost(product(problem).shape, facts, config) / facts.clock_hz;
}

Program WgmmaProduct::program(const Problem& problem, const DeviceFacts& facts,
                              const Config& config) const {
  const Product work = product(problem);
  const GemmShape& shape = work.shape;
  Program program;
  program.kernels.push_back(
      {"gemm/product_sm90.cu",
       fmt::format("fftune::{}<{}, {}, {}, {}>", kernel_name(work), element_type(work.dtype),
                   epilogue_type(work), operands_type(work),
                   wgmma_template_arguments(config, shape.products, shape.box_buffers))});
  KernelLaunch launch = wgmma_geometry(program, shape, facts, config, work.follows);
  launch.arguments = matrices(work, WgmmaMaps(shape, config, work.dtype, work.dtype));
  wgmma_append_sizes(launch, config, {shape.m, shape.n, shape.k});
  program.steps.emplace_back(std::move(launch));
  return program;
}

std::vector<std::string> WgmmaProduct::sources() const {
  return {"gemm/product_sm90.cu"};
}

}  // namespace fftune
