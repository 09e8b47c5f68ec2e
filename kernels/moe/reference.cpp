// The definition in float64: of each expert the products of its own rows.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

using Matrix = std::vector<double>;

std::size_t count(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

class Definition {
 public:
  Definition(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel)
      : problem_(problem), shape_(shape_of(problem)), tensors_(tensors), parallel_(parallel) {}

  void route();
  void gate_up();
  void down();
  void d_hidden();
  void weigh();
  /// out [rows, n] = the sum of in · w of each pair; w is [experts, n, k], or [experts, k, n] where
  /// it is transposed.
  struct Term {
    const char *in, *w;
    bool of_tokens = false;  // `in` has the tokens' rows, not those of the choices
  };
  Matrix product(std::int64_t n, std::int64_t k, bool transposed, const std::vector<Term>& terms);
  /// Of each expert dw [n, k] = aᵀ·b over its own rows, and dw_before where gradients accumulate.
  void reduction(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                 std::int64_t k);
  /// y [m, d] = the sum over a token's choices of its row, times its weight or not.
  void combine(const char* rows, bool weighted, const char* y);

  const Shape& shape() const { return shape_; }
  Matrix& at(const char* name) { return tensors_.at(name); }
  void set(const std::string& name, Matrix value) { tensors_[name] = std::move(value); }

 private:
  /// Of a choice, those of the shared experts counted.
  double weight_of(std::size_t choice) {
    const std::size_t token = choice / count(shape_.choices());
    const std::size_t own = choice % count(shape_.choices());
    return own < count(shape_.top_k) ? at("weights")[token * count(shape_.top_k) + own] : 1;
  }
  Matrix matrix(std::int64_t rows, std::int64_t columns) const {
    return large_vector<double>(count(rows * columns), parallel_);
  }
  /// Where an expert's weight [n, k] is, or [k, n], and how far apart its rows are.
  struct Place {
    const double* matrix;
    std::int64_t pitch;
  };
  Place place_of(const std::string& w, std::int64_t expert, std::int64_t n, std::int64_t k,
                 bool transposed);
  /// In fp8: rows of a term in numbers, an expert's weight, and hidden as elements, with its scales
  /// where the op finds these.
  void scale_rows(const Term& term, std::int64_t first, std::int64_t last, std::int64_t k,
                  Matrix& rows);
  Matrix weight_in_numbers(const std::string& w, std::int64_t expert, std::int64_t n,
                           std::int64_t k, const Place& place);
  void quantise_hidden(Matrix& hidden);
  /// Adds to each row of the sorted order the bias [n] of its expert.
  void add_bias(Matrix& rows, std::int64_t n, const char* name);
  /// The rows [first, last) of the sorted order.
  std::int64_t first_row(std::int64_t expert) {
    return static_cast<std::int64_t>(at("offsets")[count(expert)]);
  }
  /// Those rows of a term, where they are, or copied from those of the tokens.
  const double* rows_of(const Term& term, std::int64_t first, std::int64_t last,
                        std::int64_t columns, Matrix& copies) {
    const auto width = count(columns);
    const Matrix& all = at(term.in);
    if (!term.of_tokens) return all.data() + count(first) * width;
    copies = matrix(last - first, columns);
    const Matrix& tokens = at("tokens");
    for_each_row(count(last - first), width, parallel_, [&](std::size_t i) {
      const auto token = static_cast<std::size_t>(tokens[count(first) + i]);
      std::copy_n(all.data() + token * width, width, copies.data() + i * width);
    });
    return copies.data();
  }

  const Problem& problem_;
  Shape shape_;
  ReferenceTensors& tensors_;
  Parallel& parallel_;
};

void Definition::route() {
  const Matrix& given = at("ids");
  const std::vector<std::int32_t> ids(given.begin(), given.end());
  const auto choices = all_choices(shape_, ids);
  const SortedRouting sorted = sorted_routing(choices, shape_.all_experts(), shape_.choices());
  const auto numbers = [](const std::vector<std::int32_t>& values) {
    return Matrix(values.begin(), values.end());
  };
  set("offsets", numbers(sorted.offsets));
  set("tokens", numbers(sorted.tokens));
  set("places", numbers(sorted.places));
  if (!weighs_before(problem_)) return;
  Matrix row_weights(count(shape_.rows()));
  for (std::size_t choice = 0; choice < choices.size(); ++choice)
    if (sorted.places[choice] >= 0)
      row_weights[static_cast<std::size_t>(sorted.places[choice])] = weight_of(choice);
  set("row_weights", std::move(row_weights));
}

Matrix Definition::product(std::int64_t n, std::int64_t k, bool transposed,
                           const std::vector<Term>& terms) {
  Matrix result = matrix(shape_.rows(), n);
  for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    if (first == last) continue;
    for (const Term& term : terms) {
      Matrix copies;
      const double* in = rows_of(term, first, last, k, copies);
      Place place = place_of(term.w, expert, n, k, transposed);
      Matrix numbers_of_w;
      if (scales_of(problem_) != Scales::none) {
        if (!term.of_tokens) copies.assign(in, in + count((last - first) * k));
        scale_rows(term, first, last, k, copies);
        numbers_of_w = weight_in_numbers(term.w, expert, n, k, place);
        in = copies.data();
        place = {numbers_of_w.data(), k};
      }
      reference_product(parallel_, last - first, n, k, {in, k},
                        {place.matrix, place.pitch, transposed}, &term != &terms.front(),
                        result.data() + count(first * n));
    }
  }
  return result;
}

void Definition::reduction(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                           std::int64_t k) {
  Matrix sums = accumulates(problem_) ? large_copy(tensors_.at(dw + "_before"), parallel_)
                                      : matrix(shape_.experts * n, k);
  for (std::int64_t expert = 0; expert < shape_.experts; ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    if (first == last) continue;
    Matrix a_copies, b_copies;
    const double* const left = rows_of(a, first, last, n, a_copies);
    const double* const right = rows_of(b, first, last, k, b_copies);
    reference_product(parallel_, n, k, last - first, {left, n, true}, {right, k, true},
                      accumulates(problem_), sums.data() + count(expert * n * k));
  }
  set(dw, std::move(sums));
}

Definition::Place Definition::place_of(const std::string& w, std::int64_t expert, std::int64_t n,
                                       std::int64_t k, bool transposed) {
  const std::int64_t width = transposed ? n : k;
  const Packing packed = packing_of(problem_);
  if (packed == Packing::separate || w == "w_down")
    return {at(w.c_str()).data() + count(expert * n * k), width};
  const double* const both = at("w_gate_up").data() + count(expert * 2 * n * k);
  const bool is_up = w == "w_up";
  if (packed == Packing::halves) return {both + (is_up ? count(n * k) : 0), width};
  return {both + (is_up ? count(width) : 0), 2 * width};
}

void Definition::scale_rows(const Term& term, std::int64_t first, std::int64_t last, std::int64_t k,
                            Matrix& rows) {
  const Matrix& scales = at((std::string(term.in) + "_scale").c_str());
  const bool in_one = scales_of(problem_) == Scales::tensor;
  const std::int64_t blocks =
      term.of_tokens && scales_of(problem_) == Scales::token ? 1 : ceil_div(k, scale_block);
  const std::int64_t width = blocks == 1 ? k : scale_block;
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t own =
        term.of_tokens ? static_cast<std::int64_t>(at("tokens")[count(row)]) : row;
    for (std::int64_t i = 0; i < k; ++i)
      rows[count((row - first) * k + i)] *= scales[in_one ? 0 : count(own * blocks + i / width)];
  }
}

Matrix Definition::weight_in_numbers(const std::string& w, std::int64_t expert, std::int64_t n,
                                     std::int64_t k, const Place& place) {
  const bool packed = packing_of(problem_) != Packing::separate && w != "w_down";
  const Matrix& scales = at(packed ? "w_gate_up_scale" : (w + "_scale").c_str());
  const std::int64_t matrix = packed ? 2 * expert + (w == "w_up" ? 1 : 0) : expert;
  const Scales kind = scales_of(problem_);
  const std::int64_t rows = ceil_div(n, scale_block), columns = ceil_div(k, scale_block);
  Matrix numbers = this->matrix(n, k);
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t i = 0; i < k; ++i) {
      std::int64_t own = matrix;
      if (kind == Scales::token) own = matrix * n + row;
      if (kind == Scales::block)
        own = (matrix * rows + row / scale_block) * columns + i / scale_block;
      numbers[count(row * k + i)] = place.matrix[row * place.pitch + i] * scales[count(own)];
    }
  return numbers;
}

void Definition::quantise_hidden(Matrix& hidden) {
  constexpr double largest_number = 448;
  const Scales kind = scales_of(problem_);
  if (kind == Scales::tensor) {
    const double scale = at("hidden_scale").front();
    for (double& value : hidden) value = round_to(DType::fp8, value / scale);
    return;
  }
  const std::int64_t blocks = ceil_div(shape_.h, scale_block);
  Matrix scales(count(shape_.rows() * blocks), 1);
  for (std::int64_t row = 0; row < shape_.rows(); ++row)
    for (std::int64_t block = 0; block < blocks; ++block) {
      const auto begin = hidden.begin() + row * shape_.h + block * scale_block;
      const auto end =
          hidden.begin() + row * shape_.h + std::min((block + 1) * scale_block, shape_.h);
      double largest = 0;
      for (auto value = begin; value != end; ++value) largest = std::max(largest, std::abs(*value));
      if (largest == 0) continue;
      const double scale = scales[count(row * blocks + block)] = largest / largest_number;
      for (auto value = begin; value != end; ++value) *value = round_to(DType::fp8, *value / scale);
    }
  set("hidden_scale", std::move(scales));
}

void Definition::add_bias(Matrix& rows, std::int64_t n, const char* name) {
  if (!has_bias(problem_)) return;
  const bool is_up = std::string(name) == "b_up", of_gates = std::string(name) != "b_down";
  const Packing packed = of_gates ? packing_of(problem_) : Packing::separate;
  const Matrix& bias = at(packed == Packing::separate ? name : "b_gate_up");
  for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert)
    for (std::int64_t row = first_row(expert); row < first_row(expert + 1); ++row)
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t place = expert * n + i;
        if (packed == Packing::halves) place = (2 * expert + (is_up ? 1 : 0)) * n + i;
        if (packed == Packing::interleaved) place = 2 * place + (is_up ? 1 : 0);
        rows[count(row * n + i)] += bias[count(place)];
      }
}

void Definition::down() {
  Matrix rows = product(shape_.d, shape_.h, false, {{"hidden", "w_down"}});
  add_bias(rows, shape_.d, "b_down");
  set("expert_out", std::move(rows));
}

void Definition::gate_up() {
  const auto activation = parse_activation(problem_.option("act"));
  Matrix gate = product(shape_.h, shape_.d, false, {{"x", "w_gate", true}});
  Matrix up = product(shape_.h, shape_.d, false, {{"x", "w_up", true}});
  if (weighs_before(problem_)) {
    const Matrix& weights = at("row_weights");
    for (Matrix* rows : {&gate, &up})
      for (std::size_t i = 0; i < rows->size(); ++i) (*rows)[i] *= weights[i / count(shape_.h)];
  }
  add_bias(gate, shape_.h, "b_gate");
  add_bias(up, shape_.h, "b_up");
  Matrix hidden = matrix(shape_.rows(), shape_.h);
  for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
    for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i)
      hidden[i] = activate(activation, gate[i]) * up_factor(activation, up[i]);
  });
  if (stores_gates(problem_)) {
    set("gate", std::move(gate));
    set("up", std::move(up));
  }
  if (scales_of(problem_) != Scales::none) quantise_hidden(hidden);
  set("hidden", std::move(hidden));
}

void Definition::d_hidden() {
  const auto activation = parse_activation(problem_.option("act"));
  Matrix d_up = product(shape_.h, shape_.d, true, {{"dy", "w_down", true}});
  const Matrix &gate = at("gate"), &up = at("up");
  Matrix d_gate = matrix(shape_.rows(), shape_.h), hidden = matrix(shape_.rows(), shape_.h);
  for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
    for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i) {
      const double value = activate(activation, gate[i]);
      d_gate[i] = d_up[i] * up[i] * activation_slope(activation, gate[i]);
      d_up[i] *= value;
      hidden[i] = value * up[i];
    }
  });
  set("d_gate", std::move(d_gate));
  set("d_up", std::move(d_up));
  if (!recomputes(problem_)) set("hidden", std::move(hidden));
}

void Definition::weigh() {
  const Matrix &d_gate = at("d_gate"), &d_up = at("d_up"), &hidden = at("hidden"), &up = at("up");
  const Matrix &weights = at("weights"), &places = at("places");
  Matrix d_weights = matrix(shape_.m, shape_.top_k);
  Matrix weighted_d_gate = matrix(shape_.rows(), shape_.h), weighted_d_up = weighted_d_gate,
         weighted_hidden = weighted_d_gate;
  for_each_row(weights.size(), count(shape_.h), parallel_, [&](std::size_t choice) {
    if (places[choice] < 0) return;
    const std::size_t first = static_cast<std::size_t>(places[choice]) * count(shape_.h);
    for (std::size_t i = first; i < first + count(shape_.h); ++i) {
      d_weights[choice] += d_up[i] * up[i];
      weighted_d_gate[i] = weights[choice] * d_gate[i];
      weighted_d_up[i] = weights[choice] * d_up[i];
      weighted_hidden[i] = weights[choice] * hidden[i];
    }
  });
  set("d_weights", std::move(d_weights));
  set("weighted_d_gate", std::move(weighted_d_gate));
  set("weighted_d_up", std::move(weighted_d_up));
  set("weighted_hidden", std::move(weighted_hidden));
}

void Definition::combine(const char* rows, bool weighted, const char* y) {
  const Matrix &from = at(rows), &places = at("places");
  Matrix sums =
      has_residual(problem_) ? large_copy(at("residual"), parallel_) : matrix(shape_.m, shape_.d);
  const auto width = count(shape_.d), choices = count(shape_.choices());
  for_each_row(count(shape_.m), width * choices, parallel_, [&](std::size_t token) {
    for (std::size_t choice = token * choices; choice < (token + 1) * choices; ++choice) {
      if (places[choice] < 0) continue;
      const double weight = weighted ? weight_of(choice) : 1;
      const double* const row = from.data() + static_cast<std::size_t>(places[choice]) * width;
      for (std::size_t i = 0; i < width; ++i) sums[token * width + i] += weight * row[i];
    }
  });
  set(y, std::move(sums));
}

}  // namespace

void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  Definition of(problem, tensors, parallel);
  const std::int64_t d = of.shape().d, h = of.shape().h;
  if (stage == stage_route)
    of.route();
  else if (stage == ffn::stage_gate_up)
    of.gate_up();
  else if (stage == ffn::stage_down)
    of.down();
  else if (stage == stage_combine)
    of.combine("expert_out", !weighs_before(problem), "y");
  else if (stage == ffn::stage_d_hidden)
    of.d_hidden();
  else if (stage == stage_weigh)
    of.weigh();
  else if (stage == ffn::stage_d_x)
    of.set("dx_rows",
           of.product(d, h, true, {{"weighted_d_gate", "w_gate"}, {"weighted_d_up", "w_up"}}));
  else if (stage == ffn::stage_d_gate_up)
    for (const auto& [gradient, dw] :
         {std::pair{"weighted_d_gate", "dw_gate"}, {"weighted_d_up", "dw_up"}})
      of.reduction(dw, {gradient, nullptr}, {"x", nullptr, true}, h, d);
  else if (stage == ffn::stage_d_down)
    of.reduction("dw_down", {"dy", nullptr, true}, {"weighted_hidden", nullptr}, d, h);
  else
    of.combine("dx_rows", false, "dx");
}

}  // namespace fftune::moe
