#include "kernels/gemm/cpu_product_block.hpp"

#include <algorithm>
#include <span>

namespace fftune {
namespace {

constexpr std::int64_t chunk = 256;  // elements that are finished at a time, on the stack

/// sums += the elements of a row of the product's dtype.
void add_row(const Product& product, const HostCall& call, const Pointer& matrix, std::int64_t at,
             std::span<float> sums) {
  float more[chunk];
  decode(product.dtype, element_at(call, matrix, product.dtype, at), {more, sums.size()});
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
}

void finish_gradient(const Product& product, const HostCall& call, std::int64_t at,
                     const RowKernels& loops, std::span<const float> sums) {
  const Activation activation = parse_activation(product.gradient->activation);
  const std::size_t count = sums.size();
  float gate[chunk], up[chunk], d_gate[chunk], d_up[chunk], hidden[chunk];
  decode(product.dtype, element_at(call, product.gradient->gate, product.dtype, at), {gate, count});
  decode(product.dtype, element_at(call, product.gradient->up, product.dtype, at), {up, count});
  loops.act_mul_gradient(activation, gate, up, sums.data(), d_gate, d_up, count, false);
  if (product.keeps_hidden()) loops.act_mul(activation, gate, up, hidden, count, false);
  const float* const results[] = {d_gate, d_up, hidden};
  for (std::size_t i = 0; i < product.c.size(); ++i)
    encode(product.dtype, {results[i], count}, element_at(call, product.c[i], product.dtype, at));
}

}  // namespace

std::byte* element_at(const HostCall& call, const Pointer& matrix, DType dtype,
                      std::int64_t element) {
  return static_cast<std::byte*>(call.tensors[std::get<TensorArgument>(matrix).tensor]) +
         static_cast<std::size_t>(element) * dtype_bytes(dtype);
}

void finish_block(const Product& product, const HostCall& call, const ProductBlock& block,
                  int result, const RowKernels& loops, float* sums) {
  for (std::int64_t row = block.row; row < block.row + block.rows; ++row)
    for (std::int64_t column = 0; column < block.columns; column += chunk) {
      const auto count = static_cast<std::size_t>(std::min(chunk, block.columns - column));
      const std::span<float> part(sums + (row - block.row) * block.columns + column, count);
      const std::int64_t at = row * product.shape.n + block.column + column;
      if (product.gradient) {
        finish_gradient(product, call, at, loops, part);
        continue;
      }
      if (product.bias) add_row(product, call, *product.bias, block.column + column, part);
      const auto place = static_cast<std::size_t>(result);
      if (!product.addends.empty()) add_row(product, call, product.addends[place], at, part);
      encode(product.dtype, part, element_at(call, product.c[place], product.dtype, at));
    }
}

std::size_t tensors_of(const Product& product) {
  std::size_t count = 0;
  const auto see = [&](const Pointer& pointer) {
    count = std::max(count, std::get<TensorArgument>(pointer).tensor + 1);
  };
  for (const auto* pointers : {&product.a, &product.b, &product.c, &product.addends})
    for (const Pointer& pointer : *pointers) see(pointer);
  if (product.bias) see(*product.bias);
  if (product.gradient) {
    see(product.gradient->gate);
    see(product.gradient->up);
  }
  return count;
}

}  // namespace fftune
