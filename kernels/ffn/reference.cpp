#include "kernels/ffn/reference.hpp"

#include <cstddef>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/reference_product.hpp"

namespace fftune::ffn {

void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  const Shape shape = shape_of(problem);
  const auto m = static_cast<std::size_t>(shape.m);
  const auto d = static_cast<std::size_t>(shape.d);
  const auto h = static_cast<std::size_t>(shape.h);
  const auto scale = [&](const char* name) {
    return is_quantised(problem) ? tensors.at(name).front() : 1.0;
  };
  if (stage == 0) {
    const double gate_scale = scale("x_scale") * scale("w_gate_scale");
    const double up_scale = scale("x_scale") * scale("w_up_scale");
    const double hidden_scale = scale("hidden_scale");
    const auto activation = parse_activation(problem.option("act"));
    const double* x = tensors.at(form_of(problem).normalises ? "normalised" : "x").data();
    std::vector<double> hidden(m * h), gates(m * h), ups(m * h);
    reference_product(parallel, shape.m, shape.h, shape.d, {x, shape.d},
                      {tensors.at("w_gate").data(), shape.d}, 0, gates.data());
    reference_product(parallel, shape.m, shape.h, shape.d, {x, shape.d},
                      {tensors.at("w_up").data(), shape.d}, 0, ups.data());
    for (std::size_t i = 0; i < m * h; ++i) {
      gates[i] *= gate_scale;
      ups[i] *= up_scale;
      const double value = activate(activation, gates[i]) * ups[i] / hidden_scale;
      // In fp8 the op itself quantises hidden.
      hidden[i] = is_quantised(problem) ? round_to(DType::fp8, value) : value;
    }
    tensors["hidden"] = std::move(hidden);
    if (!form_of(problem).saves) return;
    tensors["gate"] = std::move(gates);
    tensors["up"] = std::move(ups);
  } else {
    const double y_scale = scale("hidden_scale") * scale("w_down_scale");
    const Form form = form_of(problem);
    std::vector<double> y(m * d);
    reference_product(parallel, shape.m, shape.d, shape.h, {tensors.at("hidden").data(), shape.h},
                      {tensors.at("w_down").data(), shape.h}, 0, y.data());
    const double* bias = form.bias ? tensors.at("b_down").data() : nullptr;
    const double* residual = form.residual ? tensors.at("residual").data() : nullptr;
    for (std::size_t i = 0; i < m * d; ++i)
      y[i] = y_scale * y[i] + (bias ? bias[i % d] : 0) + (residual ? residual[i] : 0);
    tensors["y"] = std::move(y);
  }
}

}  // namespace fftune::ffn
