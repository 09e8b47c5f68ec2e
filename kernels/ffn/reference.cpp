#include "kernels/ffn/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/reference_product.hpp"

namespace fftune::ffn {

namespace {

/// The numbers of a quantised tensor [rows, columns]: its elements times their scales, one for each
/// block of block_rows x block_columns elements.
std::vector<double> numbers(const std::vector<double>& elements, const std::vector<double>& scales,
                            std::size_t columns, std::size_t block_rows, std::size_t block_columns,
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

/// Quantises hidden [rows, columns] in place, 128 elements of a row with one scale: the scales.
std::vector<double> quantise_blocks(std::vector<double>& hidden, std::size_t columns,
                                    Parallel& parallel) {
  constexpr double largest_number = 448;
  constexpr auto width = static_cast<std::size_t>(scale_block);
  const std::size_t blocks = (columns + width - 1) / width;
  std::vector<double> scales(hidden.size() / columns * blocks);
  for_each_row(hidden.size() / columns, columns, parallel, [&](std::size_t row) {
    double* const values = hidden.data() + row * columns;
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t last = std::min((block + 1) * width, columns);
      double largest = 0;
      for (std::size_t i = block * width; i < last; ++i)
        largest = std::max(largest, std::abs(values[i]));
      const double scale = largest > 0 ? largest / largest_number : 1;
      for (std::size_t i = block * width; i < last; ++i)
        values[i] = round_to(DType::fp8, values[i] / scale);
      scales[row * blocks + block] = scale;
    }
  });
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
    const auto h = static_cast<std::size_t>(shape_.h);
    // In fp8 the op itself quantises hidden.
    const bool in_blocks = has_block_scales(problem_);
    const bool in_one = is_quantised(problem_) && !in_blocks;
    const double scale = in_one ? tensors_.at("hidden_scale").front() : 1;
    auto hidden = large_vector<double>(gates.size(), parallel_);
    for_each_row(hidden.size() / h, h, parallel_, [&](std::size_t row) {
      for (std::size_t i = row * h; i < (row + 1) * h; ++i) {
        hidden[i] = activate(activation, gates[i]) * ups[i];
        if (in_one) hidden[i] = round_to(DType::fp8, hidden[i] / scale);
      }
    });
    if (in_blocks) tensors_["hidden_scale"] = quantise_blocks(hidden, h, parallel_);
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
    for_each_row(y.size() / d, d, parallel_, [&](std::size_t row) {
      for (std::size_t i = row * d; i < (row + 1) * d; ++i)
        y[i] += (bias ? bias[i - row * d] : 0) + (residual ? residual[i] : 0);
    });
    tensors_["y"] = std::move(y);
  }

 private:
  /// a [m, depth] times b [rows, depth] transposed, both in numbers.
  std::vector<double> product(const std::string& a, const std::string& b, std::int64_t rows,
                              std::int64_t depth) const {
    std::vector<double> own_a, own_b;
    const double* first = operand(a, depth, 1, own_a);
    const double* second = operand(b, depth, scale_block, own_b);
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
    own = has_block_scales(problem_)
              ? numbers(elements, scales, width, static_cast<std::size_t>(block_rows),
                        static_cast<std::size_t>(scale_block), parallel_)
              : numbers(elements, scales, width, elements.size() / width, width, parallel_);
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
