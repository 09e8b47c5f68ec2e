#include <utility>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
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
    return adds ? large_copy(tensors.at(name), parallel)
                : large_vector<double>(static_cast<std::size_t>(elements), parallel);
  }
};

void d_hidden(const Problem& problem, ReferenceTensors& tensors, const Products& by) {
  const auto [m, d, h] = shape_of(problem);
  const auto activation = parse_activation(problem.option("act"));
  auto dc = by.start(false, "", m * h);
  reference_product(by.parallel, m, h, d, by.view("dy", d, false), by.view("w_down", h, true), 0,
                    dc.data());
  const std::vector<double>&gate = tensors.at("gate"), &up = tensors.at("up");
  const bool wants_hidden = !recomputes(problem);
  auto d_gate = by.start(false, "", m * h);
  std::vector<double> hidden;
  if (wants_hidden) hidden = large_vector<double>(dc.size(), by.parallel);
  for_each_block(m * h, 1, by.parallel, [&](const Block& block) {
    const auto last = static_cast<std::size_t>(block.last_row);
    for (auto i = static_cast<std::size_t>(block.first_row); i < last; ++i) {
      const double value = activate(activation, gate[i]);
      d_gate[i] = dc[i] * up[i] * activation_slope(activation, gate[i]);
      dc[i] *= value;
      if (wants_hidden) hidden[i] = value * up[i];
    }
  });
  tensors["d_gate"] = std::move(d_gate);
  tensors["d_up"] = std::move(dc);
  if (wants_hidden) tensors["hidden"] = std::move(hidden);
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
    reference_product(parallel, m, d, h, by.view("d_gate", h, false), by.view("w_gate", d, true), 0,
                      dx.data());
    reference_product(parallel, m, d, h, by.view("d_up", h, false), by.view("w_up", d, true), 1,
                      dx.data());
    tensors["dx"] = std::move(dx);
  } else if (stage == stage_d_gate_up) {
    auto dw_gate = by.start(adds, "dw_gate_before", h * d);
    auto dw_up = by.start(adds, "dw_up_before", h * d);
    reference_product(parallel, h, d, m, by.view("d_gate", h, true), by.view("x", d, true), adds,
                      dw_gate.data());
    reference_product(parallel, h, d, m, by.view("d_up", h, true), by.view("x", d, true), adds,
                      dw_up.data());
    tensors["dw_gate"] = std::move(dw_gate);
    tensors["dw_up"] = std::move(dw_up);
  } else {
    auto dw_down = by.start(adds, "dw_down_before", d * h);
    reference_product(parallel, d, h, m, by.view("dy", d, true), by.view("hidden", h, true), adds,
                      dw_down.data());
    tensors["dw_down"] = std::move(dw_down);
  }
}

}  // namespace fftune::ffn
