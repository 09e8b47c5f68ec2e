// The definition of ffn in float64.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/ffn/norm.hpp"
#include "kernels/gemm/reference_product.hpp"

namespace fftune::ffn {
namespace {

/// The definition of the forward pass.
class Forward {
 public:
  Forward(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel)
      : problem_(problem), tensors_(tensors), parallel_(parallel), shape_(shape_of(problem)) {}

  void gate_up() {
    const auto activation = parse_activation(problem_.option("act"));
    const char* x = form_of(problem_).normalises ? "normalised" : "x";
    auto gates = product(x, weight("w_gate"), shape_.h, shape_.d);
    auto ups = product(x, weight("w_up"), shape_.h, shape_.d);
    const auto h = static_cast<std::size_t>(shape_.h);
    // In fp8 the op itself quantises hidden.
    const bool in_blocks =
        has_block_scales(problem_) || (quantises(problem_) && !has_hidden_stage(problem_));
    const bool in_one = is_quantised(problem_) && !in_blocks;
    const double scale = in_one ? tensors_.at("hidden_scale").front() : 1;
    auto hidden = large_vector<double>(gates.size(), parallel_);
    for_each_row(hidden.size() / h, h, parallel_, [&](std::size_t row) {
      for (std::size_t i = row * h; i < (row + 1) * h; ++i) {
        hidden[i] = activate(activation, gates[i]) * ups[i];
        if (in_one) hidden[i] = round_to(DType::fp8, hidden[i] / scale);
      }
    });
    if (in_blocks)
      tensors_["hidden_scale"] = quantise_rows(hidden, h, std::size_t{scale_block}, parallel_);
    tensors_["hidden"] = std::move(hidden);
    if (!form_of(problem_).saves) return;
    tensors_["gate"] = std::move(gates);
    tensors_["up"] = std::move(ups);
  }

  void up() {
    const auto activation = parse_activation(problem_.option("act"));
    const Form form = form_of(problem_);
    auto hidden = product(form.normalises ? "normalised" : "x", weight("w_up"), shape_.h, shape_.d);
    const double* bias = form.bias_up ? tensors_.at("b_up").data() : nullptr;
    const auto h = static_cast<std::size_t>(shape_.h);
    for_each_row(hidden.size() / h, h, parallel_, [&](std::size_t row) {
      for (std::size_t i = 0; i < h; ++i) {
        double& value = hidden[row * h + i];
        value = activate(activation, value + (bias ? bias[i] : 0));
      }
    });
    tensors_["hidden"] = std::move(hidden);
  }

  void down() {
    const Form form = form_of(problem_);
    auto y = product("hidden", weight("w_down"), shape_.d, shape_.h);
    const double* bias = form.bias ? tensors_.at("b_down").data() : nullptr;
    const double* scale = form.y_scale ? tensors_.at("y_scale").data() : nullptr;
    const double* residual = form.residual ? tensors_.at("residual").data() : nullptr;
    const auto d = static_cast<std::size_t>(shape_.d);
    for_each_row(y.size() / d, d, parallel_, [&](std::size_t row) {
      for (std::size_t i = 0; i < d; ++i) {
        double& value = y[row * d + i];
        value = (value + (bias ? bias[i] : 0)) * (scale ? scale[i] : 1) +
                (residual ? residual[row * d + i] : 0);
      }
    });
    tensors_["y"] = std::move(y);
  }

 private:
  std::string weight(const char* name) const {
    return packed_format(problem_).packed ? std::string(name) + "_dense" : name;
  }

  /// a [m, depth] times b [rows, depth] transposed, both in numbers.
  std::vector<double> product(const std::string& a, const std::string& b, std::int64_t rows,
                              std::int64_t depth) const {
    std::vector<double> own_a, own_b;
    const double *first, *second;
    if (quantises(problem_)) {
      own_a = numbers_of(a == "hidden" ? quantised_hidden(problem_) : quantised_x(problem_),
                         tensors_, parallel_);
      own_b = numbers_of_weight(b, depth, quantised_scaling(problem_), tensors_, parallel_);
      first = own_a.data(), second = own_b.data();
    } else {
      first = operand(a, depth, 1, own_a);
      second = operand(b, depth, scale_block, own_b);
    }
    auto result = large_vector<double>(static_cast<std::size_t>(shape_.m * rows), parallel_);
    reference_product(parallel_, shape_.m, rows, depth, {first, depth}, {second, depth}, 0,
                      result.data());
    return result;
  }

  /// The tensor in numbers, which are in `own` if they are not its elements.
  const double* operand(const std::string& name, std::int64_t columns, std::int64_t block_rows,
                        std::vector<double>& own) const {
    const auto& elements = tensors_.at(name);
    if (!is_quantised(problem_)) return elements.data();
    const auto width = static_cast<std::size_t>(columns);
    const auto& scales = tensors_.at(name + "_scale");
    own =
        has_block_scales(problem_)
            ? quantised_numbers(elements, scales, width, static_cast<std::size_t>(block_rows),
                                static_cast<std::size_t>(scale_block), parallel_)
            : quantised_numbers(elements, scales, width, elements.size() / width, width, parallel_);
    return own.data();
  }

  const Problem& problem_;
  ReferenceTensors& tensors_;
  Parallel& parallel_;
  Shape shape_;
};

/// out (+)= a · bᵀ, plus `beta` times `start`.
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
  auto dc = by.start(false, "", m * h);
  reference_product(by.parallel, m, h, d, by.view("dy", d, false), by.view("w_down", h, true), 0,
                    dc.data());
  tensors["dc"] = std::move(dc);
  gate_gradient(problem, tensors, by.parallel);
}

void gradients(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
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

}  // namespace

void gate_gradient(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto activation = parse_activation(problem.option("act"));
  std::vector<double> dc = std::move(tensors.at("dc"));
  tensors.erase("dc");
  const std::vector<double>&gate = tensors.at("gate"), &up = tensors.at("up");
  auto d_gate = large_vector<double>(dc.size(), parallel);
  std::vector<double> hidden;
  if (stores_hidden(problem)) hidden = large_vector<double>(dc.size(), parallel);
  for_each_block(std::ssize(dc), 1, parallel, [&](const Block& block) {
    const auto last = static_cast<std::size_t>(block.last_row);
    for (auto i = static_cast<std::size_t>(block.first_row); i < last; ++i) {
      const double value = activate(activation, gate[i]);
      d_gate[i] = activation_gradient(activation, gate[i], dc[i] * up[i]);
      dc[i] *= value;
      if (!hidden.empty()) hidden[i] = value * up[i];
    }
  });
  tensors["d_gate"] = std::move(d_gate);
  tensors["d_up"] = std::move(dc);
  if (!hidden.empty()) tensors["hidden"] = std::move(hidden);
}

void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  if (stage == stage_norm) return norm_reference(problem, tensors, parallel);
  if (stage == stage_expand_gate_up)
    return reference_expand(packed_gate_up(problem), tensors, parallel);
  if (stage == stage_expand_down) return reference_expand(packed_down(problem), tensors, parallel);
  if (stage == stage_quantise) return reference_quantise(quantised_x(problem), tensors, parallel);
  if (stage == stage_quantise_hidden)
    return reference_quantise(quantised_hidden(problem), tensors, parallel);
  if (stage == stage_gate_up) return Forward(problem, tensors, parallel).gate_up();
  if (stage == stage_up) return Forward(problem, tensors, parallel).up();
  if (stage == stage_down) return Forward(problem, tensors, parallel).down();
  gradients(problem, stage, tensors, parallel);
}

}  // namespace fftune::ffn
