#include "kernels/gemm/product.hpp"

#include <fmt/format.h>

#include "kernels/common/activation.hpp"
#include "kernels/common/device_types.hpp"

namespace fftune {

std::optional<std::string> refuse_stage(const ProductStage& stage, const Problem& problem,
                                        const DeviceFacts& facts, DeviceKind kind) {
  if (facts.kind != kind)
    return kind == DeviceKind::cuda ? "the kernel needs a CUDA device" : "it runs on the CPU";
  if (problem.pass != stage.pass)
    return fmt::format("it computes the pass {}, not {}", stage.pass, problem.pass);
  if (kind == DeviceKind::cuda && facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0 for bf16: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

std::vector<Argument> pointer_arguments(const Product& product) {
  std::vector<Argument> arguments;
  const auto pass = [&](const std::vector<Pointer>& pointers, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      arguments.push_back(i < pointers.size() ? argument_of(pointers[i])
                                              : Argument{std::int64_t{0}});
  };
  pass(product.a, 2);
  pass(product.b, 2);
  pass(product.c, 3);
  pass(product.bias ? std::vector{*product.bias} : std::vector<Pointer>{}, 1);
  pass(product.gradient ? std::vector{product.gradient->gate, product.gradient->up}
                        : product.addends,
       2);
  return arguments;
}

std::optional<std::string> refuse_rows(const Product& product) {
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(product.dtype));
  const GemmShape& shape = product.shape;
  for (const std::int64_t row :
       {shape.a_transposed ? shape.m : shape.k, shape.b_transposed ? shape.n : shape.k, shape.n})
    if (row % elements != 0)
      return fmt::format("rows of {} elements are not 16-byte aligned: use multiples of {}", row,
                         elements);
  return std::nullopt;
}

std::string epilogue_type(const Product& product) {
  if (product.gradient)
    return fmt::format("fftune::gated_gradient<{}, {}>",
                       activation_type(parse_activation(product.gradient->activation)),
                       product.keeps_hidden());
  return fmt::format("fftune::linear_epilogue<{}, {}>", product.bias.has_value(),
                     !product.addends.empty());
}

std::string operands_type(const Product& product) {
  const GemmShape& shape = product.shape;
  return fmt::format("fftune::matrix_operands<{}, {}, {}, {}, {}>", shape.a_transposed,
                     shape.b_transposed, shape.terms, shape.results, product.b_is_written);
}

}  // namespace fftune
