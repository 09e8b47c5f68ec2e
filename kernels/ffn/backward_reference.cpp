#include <utility>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/backward.hpp"
#include "kernels/gemm/reference_product.hpp"

namespace fftune::ffn {
namespace {

/// out (+)= a · bᵀ, with `beta` times what `start` has.
struct Products {
  const ReferenceTensors& tensors;
  Parallel& parallel;

  DoubleMatrixView view(const char* name, std::int64_t columns, bool transposed) const {
    return {tensors.at(name).data(), columns, transposed};
  }
  std::vector<double> start(bool adds, const char* name, std::int64_t elements) const {
    return adds ? tensors.at(name) : std::vector<double>(static_cast<std::size_t>(elements));
  }
};

void d_hidden(const Problem& problem, ReferenceTensors& tensors, const Products& by) {
  const auto [m, d, h] = shape_of(problem);
  const auto activation = parse_activation(problem.option("act"));
  auto dc = by.start(false, "", m * h);
  reference_product(by.parallel, m, h, d, by.view("dy", d, false), by.view("w_down", h, true), 0,
                    dc.data());
  const std::vector<double>&gate = tensors.at("gate"), &up = tensors.at("up");
  std::vector<double> d_gate(dc.size()), d_up(dc.size()), hidden(dc.size());
  const auto row = static_cast<std::size_t>(h);
  by.parallel.run(static_cast<int>(m), by.parallel.max_threads(), [&](int task) {
    const std::size_t first = static_cast<std::size_t>(task) * row;
    for (std::size_t i = first; i < first + row; ++i) {
      const double value = activate(activation, gate[i]);
      d_gate[i] = dc[i] * up[i] * activation_slope(activation, gate[i]);
      d_up[i] = dc[i] * value;
      hidden[i] = value * up[i];
    }
  });
  tensors["d_gate"] = std::move(d_gate);
  tensors["d_up"] = std::move(d_up);
  if (!recomputes(problem)) tensors["hidden"] = std::move(hidden);
}

}  // namespace

void backward_reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
                        Parallel& parallel) {
  const auto [m, d, h] = shape_of(problem);
  const bool adds = form_of(problem).accumulates;
  const Products by{tensors, parallel};
  if (stage == stage_d_hidden) {
    d_hidden(problem, tensors, by);
  } else if (stage == stage_d_x) {
    auto dx = by.start(false, "", m * d);
    for (const auto& [gradient, weights] : {std::pair{"d_gate", "w_gate"}, {"d_up", "w_up"}})
      reference_product(parallel, m, d, h, by.view(gradient, h, false), by.view(weights, d, true),
                        1, dx.data());
    tensors["dx"] = std::move(dx);
  } else if (stage == stage_d_gate_up) {
    auto dw_gate = by.start(adds, "dw_gate_before", h * d);
    auto dw_up = by.start(adds, "dw_up_before", h * d);
    reference_product(parallel, h, d, m, by.view("d_gate", h, true), by.view("x", d, true), 1,
                      dw_gate.data());
    reference_product(parallel, h, d, m, by.view("d_up", h, true), by.view("x", d, true), 1,
                      dw_up.data());
    tensors["dw_gate"] = std::move(dw_gate);
    tensors["dw_up"] = std::move(dw_up);
  } else {
    auto dw_down = by.start(adds, "dw_down_before", d * h);
    reference_product(parallel, d, h, m, by.view("dy", d, true), by.view("hidden", h, true), 1,
                      dw_down.data());
    tensors["dw_down"] = std::move(dw_down);
  }
}

}  // namespace fftune::ffn
