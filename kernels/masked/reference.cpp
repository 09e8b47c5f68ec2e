// The definitions in float64: of each expert the products of its own tokens, gathered into matrices
// of their own.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

using Matrix = std::vector<double>;

constexpr const char* names[2] = {"_true", "_false"};

/// An expert's tokens, in their order, and where they begin in the order of the mask.
struct Expert {
  std::string name;  // "_true" or "_false"
  std::vector<std::size_t> tokens;
  std::size_t first = 0;

  std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
};

class Definition {
 public:
  Definition(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel)
      : problem_(&problem), tensors_(&tensors), parallel_(&parallel) {
    for (const std::size_t expert : {0, 1}) experts_[expert].name = names[expert];
    const Matrix& mask = tensors.at("mask");
    for (std::size_t i = 0; i < mask.size(); ++i)
      experts_[mask[i] != 0 ? 0 : 1].tokens.push_back(i);
    experts_[1].first = experts_[0].tokens.size();
    m_ = static_cast<std::int64_t>(mask.size());
  }

  std::int64_t size(const char* name) const { return problem_->size(name); }

  /// out [m, n] = the sum of in_i [m, k] · w_i, of each expert its own: w_i [n, k]ᵀ, or [k, n]
  /// where it is transposed.
  struct Term {
    const char *in, *w;
    bool sorted;
  };
  void product(const char* out, bool sorted, std::int64_t n, std::int64_t k, bool transposed,
               const std::vector<Term>& terms) {
    Matrix result(static_cast<std::size_t>(m_ * n));
    for (const Expert& expert : experts_) {
      if (expert.tokens.empty()) continue;
      Matrix own(static_cast<std::size_t>(expert.rows() * n));
      for (const Term& term : terms) {
        const Matrix rows = gathered(term.in, term.sorted, expert, k);
        const Matrix& w = tensors_->at(term.w + expert.name);
        reference_product(*parallel_, expert.rows(), n, k, {rows.data(), k},
                          {w.data(), transposed ? n : k, transposed}, 1, own.data());
      }
      scatter(own, sorted, expert, n, result);
    }
    (*tensors_)[out] = std::move(result);
  }

  /// Of each expert dw [n, k] = aᵀ·b over its own tokens, a [m, n] and b [m, k], and dw_before
  /// where gradients accumulate.
  void token_sum(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                 std::int64_t k) {
    for (const Expert& expert : experts_) {
      Matrix sum(static_cast<std::size_t>(n * k));
      if (accumulates(*problem_)) sum = tensors_->at(dw + expert.name + "_before");
      if (!expert.tokens.empty()) {
        const Matrix left = gathered(a.in, a.sorted, expert, n);
        const Matrix right = gathered(b.in, b.sorted, expert, k);
        reference_product(*parallel_, n, k, expert.rows(), {left.data(), n, true},
                          {right.data(), k, true}, 1, sum.data());
      }
      (*tensors_)[dw + expert.name] = std::move(sum);
    }
  }

 private:
  static std::size_t row_of(const Expert& expert, std::size_t i, bool sorted) {
    return sorted ? expert.first + i : expert.tokens[i];
  }
  Matrix gathered(const char* name, bool sorted, const Expert& expert, std::int64_t columns) const {
    const Matrix& all = tensors_->at(name);
    const auto width = static_cast<std::size_t>(columns);
    Matrix own(expert.tokens.size() * width);
    for (std::size_t i = 0; i < expert.tokens.size(); ++i)
      for (std::size_t j = 0; j < width; ++j)
        own[i * width + j] = all[row_of(expert, i, sorted) * width + j];
    return own;
  }
  static void scatter(const Matrix& own, bool sorted, const Expert& expert, std::int64_t columns,
                      Matrix& all) {
    const auto width = static_cast<std::size_t>(columns);
    for (std::size_t i = 0; i < expert.tokens.size(); ++i)
      for (std::size_t j = 0; j < width; ++j)
        all[row_of(expert, i, sorted) * width + j] = own[i * width + j];
  }

  const Problem* problem_;
  ReferenceTensors* tensors_;
  Parallel* parallel_;
  Expert experts_[2];
  std::int64_t m_ = 0;
};

void gate_up(const Problem& problem, ReferenceTensors& tensors, Definition& of) {
  const std::int64_t d = of.size("d"), h = of.size("h");
  of.product("gate", true, h, d, false, {{"x", "w_gate", false}});
  of.product("up", true, h, d, false, {{"x", "w_up", false}});
  const auto activation = parse_activation(problem.option("act"));
  const Matrix &gate = tensors.at("gate"), &up = tensors.at("up");
  Matrix hidden(gate.size());
  for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] = activate(activation, gate[i]) * up[i];
  tensors["hidden"] = std::move(hidden);
}

void d_hidden(const Problem& problem, ReferenceTensors& tensors, Definition& of) {
  const std::int64_t d = of.size("d"), h = of.size("h");
  of.product("dc", true, h, d, true, {{"dy", "w_down", false}});
  const auto activation = parse_activation(problem.option("act"));
  const Matrix &dc = tensors.at("dc"), &gate = tensors.at("gate"), &up = tensors.at("up");
  Matrix d_gate(dc.size()), d_up(dc.size()), hidden(dc.size());
  for (std::size_t i = 0; i < dc.size(); ++i) {
    const double value = activate(activation, gate[i]);
    d_gate[i] = dc[i] * up[i] * activation_slope(activation, gate[i]);
    d_up[i] = dc[i] * value;
    hidden[i] = value * up[i];
  }
  tensors.erase("dc");
  tensors["d_gate"] = std::move(d_gate);
  tensors["d_up"] = std::move(d_up);
  if (!recomputes(problem)) tensors["hidden"] = std::move(hidden);
}

}  // namespace

void reference(Stage stage, const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  Definition of(problem, tensors, parallel);
  switch (stage) {
    case Stage::linear:
      return of.product("y", false, of.size("n"), of.size("k"), false, {{"x", "w", false}});
    case Stage::dx:
      return of.product("dx", false, of.size("k"), of.size("n"), true, {{"dy", "w", false}});
    case Stage::dw:
      return of.token_sum("dw", {"dy", nullptr, false}, {"x", nullptr, false}, of.size("n"),
                          of.size("k"));
    case Stage::gate_up:
      return gate_up(problem, tensors, of);
    case Stage::down:
      return of.product("y", false, of.size("d"), of.size("h"), false,
                        {{"hidden", "w_down", true}});
    case Stage::d_hidden:
      return d_hidden(problem, tensors, of);
    case Stage::d_x:
      return of.product("dx", false, of.size("d"), of.size("h"), true,
                        {{"d_gate", "w_gate", true}, {"d_up", "w_up", true}});
    case Stage::d_gate_up:
      for (const auto& [gradient, dw] : {std::pair{"d_gate", "dw_gate"}, {"d_up", "dw_up"}})
        of.token_sum(dw, {gradient, nullptr, true}, {"x", nullptr, false}, of.size("h"),
                     of.size("d"));
      return;
    case Stage::d_down:
      return of.token_sum("dw_down", {"dy", nullptr, false}, {"hidden", nullptr, true},
                          of.size("d"), of.size("h"));
  }
}

}  // namespace fftune::masked
