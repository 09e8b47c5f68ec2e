// The definition in float64: of each expert the products of its own rows.
#include <algorithm>
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
  /// y [m, d] = the sum over a token's choices of its row, times its weight if it has one.
  void combine(const char* rows, const char* weights, const char* y);

  const Shape& shape() const { return shape_; }
  Matrix& at(const char* name) { return tensors_.at(name); }
  void set(const std::string& name, Matrix value) { tensors_[name] = std::move(value); }

 private:
  Matrix matrix(std::int64_t rows, std::int64_t columns) const {
    return large_vector<double>(count(rows * columns), parallel_);
  }
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
  const SortedRouting sorted = sorted_routing(ids, shape_.experts, shape_.choices);
  const auto numbers = [](const std::vector<std::int32_t>& values) {
    return Matrix(values.begin(), values.end());
  };
  set("offsets", numbers(sorted.offsets));
  set("tokens", numbers(sorted.tokens));
  set("places", numbers(sorted.places));
}

Matrix Definition::product(std::int64_t n, std::int64_t k, bool transposed,
                           const std::vector<Term>& terms) {
  Matrix result = matrix(shape_.rows(), n);
  for (std::int64_t expert = 0; expert < shape_.experts; ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    if (first == last) continue;
    for (const Term& term : terms) {
      Matrix copies;
      const double* const in = rows_of(term, first, last, k, copies);
      const double* const w = at(term.w).data() + count(expert * n * k);
      reference_product(parallel_, last - first, n, k, {in, k}, {w, transposed ? n : k, transposed},
                        &term != &terms.front(), result.data() + count(first * n));
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

void Definition::gate_up() {
  const auto activation = parse_activation(problem_.option("act"));
  Matrix gate = product(shape_.h, shape_.d, false, {{"x", "w_gate", true}});
  Matrix up = product(shape_.h, shape_.d, false, {{"x", "w_up", true}});
  Matrix hidden = matrix(shape_.rows(), shape_.h);
  for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
    for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i)
      hidden[i] = activate(activation, gate[i]) * up[i];
  });
  if (stores_gates(problem_)) {
    set("gate", std::move(gate));
    set("up", std::move(up));
  }
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
  Matrix d_weights = matrix(shape_.m, shape_.choices);
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

void Definition::combine(const char* rows, const char* weights, const char* y) {
  const Matrix &from = at(rows), &places = at("places");
  Matrix sums = matrix(shape_.m, shape_.d);
  const auto width = count(shape_.d), choices = count(shape_.choices);
  for_each_row(count(shape_.m), width * choices, parallel_, [&](std::size_t token) {
    for (std::size_t choice = token * choices; choice < (token + 1) * choices; ++choice) {
      if (places[choice] < 0) continue;
      const double weight = weights == nullptr ? 1 : at(weights)[choice];
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
  const auto [m, d, h, experts, choices] = of.shape();
  if (stage == stage_route)
    of.route();
  else if (stage == ffn::stage_gate_up)
    of.gate_up();
  else if (stage == ffn::stage_down)
    of.set("expert_out", of.product(d, h, false, {{"hidden", "w_down"}}));
  else if (stage == stage_combine)
    of.combine("expert_out", "weights", "y");
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
    of.combine("dx_rows", nullptr, "dx");
}

}  // namespace fftune::moe
