#include "kernels/ffn/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/reference_product.hpp"

namespace fftune::ffn {

namespace {

/// The numbers of a quantised tensor [rows, columns]: its elements times their scales, one for each
/// block of block_rows x block_columns elements.
std::vector<double> numbers(const std::vector<double>& elements, const std::vector<double>& scales,
                            std::size_t columns, std::size_t block_rows,
                            std::size_t block_columns) {
  const std::size_t blocks = (columns + block_columns - 1) / block_columns;
  std::vector<double> result(elements.size());
  for (std::size_t row = 0; row < elements.size() / columns; ++row)
    for (std::size_t block = 0; block < blocks; ++block) {
      const double scale = scales[row / block_rows * blocks + block];
      const std::size_t last = std::min((block + 1) * block_columns, columns);
      for (std::size_t i = block * block_columns; i < last; ++i)
        result[row * columns + i] = elements[row * columns + i] * scale;
    }
  return result;
}

/// Quantises hidden [rows, columns] in place, 128 elements of a row with one scale: the scales.
std::vector<double> quantise_blocks(std::vector<double>& hidden, std::size_t columns) {
  constexpr double largest_number = 448;
  std::vector<double> scales;
  for (std::size_t row = 0; row < hidden.size(); row += columns)
    for (std::size_t first = 0; first < columns; first += static_cast<std::size_t>(scale_block)) {
      const std::size_t last = std::min(first + static_cast<std::size_t>(scale_block), columns);
      double largest = 0;
      for (std::size_t i = first; i < last; ++i)
        largest = std::max(largest, std::abs(hidden[row + i]));
      scales.push_back(largest > 0 ? largest / largest_number : 1);
      for (std::size_t i = first; i < last; ++i)
        hidden[row + i] = round_to(DType::fp8, hidden[row + i] / scales.back());
    }
  return scales;
}

class Reference {
 public:
  Reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel)
      : problem_(problem), tensors_(tensors), parallel_(parallel), shape_(shape_of(problem)) {}

  void gate_up() {
    const auto activation = parse_activation(problem_.option("act"));
    const char* x = form_of(problem_).normalises ? "normalised" : "x";
    auto gates = product(x, "w_gate", shape_.h, shape_.d);
    auto ups = product(x, "w_up", shape_.h, shape_.d);
    std::vector<double> hidden(gates.size());
    for (std::size_t i = 0; i < hidden.size(); ++i)
      hidden[i] = activate(activation, gates[i]) * ups[i];
    // In fp8 the op itself quantises hidden.
    if (has_block_scales(problem_))
      tensors_["hidden_scale"] = quantise_blocks(hidden, static_cast<std::size_t>(shape_.h));
    else if (is_quantised(problem_))
      for (double& value : hidden)
        value = round_to(DType::fp8, value / tensors_.at("hidden_scale").front());
    tensors_["hidden"] = std::move(hidden);
    if (!form_of(problem_).saves) return;
    tensors_["gate"] = std::move(gates);
    tensors_["up"] = std::move(ups);
  }

  void down() {
    const Form form = form_of(problem_);
    auto y = product("hidden", "w_down", shape_.d, shape_.h);
    const double* bias = form.bias ? tensors_.at("b_down").data() : nullptr;
    const double* residual = form.residual ? tensors_.at("residual").data() : nullptr;
    const auto d = static_cast<std::size_t>(shape_.d);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] += (bias ? bias[i % d] : 0) + (residual ? residual[i] : 0);
    tensors_["y"] = std::move(y);
  }

 private:
  /// a [m, depth] times b [rows, depth] transposed, both in numbers.
  std::vector<double> product(const std::string& a, const std::string& b, std::int64_t rows,
                              std::int64_t depth) const {
    std::vector<double> own_a, own_b;
    const double* first = operand(a, depth, 1, own_a);
    const double* second = operand(b, depth, scale_block, own_b);
    std::vector<double> result(static_cast<std::size_t>(shape_.m * rows));
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
    own = has_block_scales(problem_)
              ? numbers(elements, scales, width, static_cast<std::size_t>(block_rows),
                        static_cast<std::size_t>(scale_block))
              : numbers(elements, scales, width, elements.size() / width, width);
    return own.data();
  }

  const Problem& problem_;
  ReferenceTensors& tensors_;
  Parallel& parallel_;
  Shape shape_;
};

}  // namespace

void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  Reference reference(problem, tensors, parallel);
  if (stage == 0)
    reference.gate_up();
  else
    reference.down();
}

}  // namespace fftune::ffn
