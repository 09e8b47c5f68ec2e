#include <fmt/format.h>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/decode.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune {

std::optional<std::string> DecodeProduct::refusal(const Problem& problem,
                                                  const DeviceFacts& facts) const {
  if (auto refusal = refuse_stage(stage(), problem, facts, DeviceKind::cuda)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(problem.dtype));
  const Product work = product(problem);
  if (work.shape.m > decode_max_tokens)
    return fmt::format("the kernel holds the tokens in one operand of mma.sync: m={} is over {}",
                       work.shape.m, decode_max_tokens);
  return refuse_rows(work);
}

Space DecodeProduct::space(const Problem& problem, const DeviceFacts& facts) const {
  return decode_space(product(problem).shape, facts);
}

Config DecodeProduct::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return decode_default(product(problem).shape, facts);
}

Program DecodeProduct::program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) const {
  const Product work = product(problem);
  const GemmShape& shape = work.shape;
  const Argument null = std::int64_t{0};
  Program program;
  program.kernels.push_back(
      {"gemm/product_decode.cu",
       fmt::format("fftune::product_decode<{}, {}, {}>", element_type(work.dtype),
                   epilogue_type(work), decode_template_arguments(shape, config))});
  decode_launch(program, shape, facts, config,
                {argument_of(work.a[0]), argument_of(work.b[0]), argument_of(work.c[0]),
                 work.bias ? argument_of(*work.bias) : null,
                 work.addends.empty() ? null : argument_of(work.addends[0])},
                {shape.m, shape.n, shape.k});
  return program;
}

std::vector<std::string> DecodeProduct::sources() const {
  return {"gemm/product_decode.cu"};
}

}  // namespace fftune
