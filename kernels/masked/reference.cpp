// The definitions in float64: the products of each expert over its own tokens, gathered into
// matrices of their own.
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
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

  /// out [m, n] = the sum of in_i [m, k] · w_i, with each expert's own w_i: [n, k]ᵀ, or [k, n] if
  /// it is transposed.
  struct Term {
    const char *in, *w;
    bool sorted;
  };
  void product(const char* out, bool sorted, std::int64_t n, std::int64_t k, bool transposed,
               const std::vector<Term>& terms) {
    const auto width = static_cast<std::size_t>(n);
    Matrix result = matrix(m_, n);
    for (const Expert& expert : experts_) {
      if (expert.tokens.empty()) continue;
      Matrix apart;  // the expert's rows, where they do not follow each other in the result
      if (!sorted) apart = matrix(expert.rows(), n);
      double* const own = sorted ? result.data() + expert.first * width : apart.data();
      for (const Term& term : terms) {
        const Rows rows(*this, term.in, term.sorted, expert, k);
        const Matrix& w = tensors_->at(term.w + expert.name);
        reference_product(*parallel_, expert.rows(), n, k, {rows.data, k},
                          {w.data(), transposed ? n : k, transposed}, &term != &terms.front(), own);
      }
      if (sorted) continue;
      for_each_row(expert.tokens.size(), width, *parallel_, [&](std::size_t i) {
        std::copy_n(own + i * width, width, result.data() + expert.tokens[i] * width);
      });
    }
    (*tensors_)[out] = std::move(result);
  }

  /// Computes dw [n, k] = aᵀ·b of each expert over its own tokens, a [m, n] and b [m, k], plus
  /// dw_before if gradients accumulate.
  void token_sum(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                 std::int64_t k) {
    for (const Expert& expert : experts_) {
      Matrix sum = accumulates(*problem_)
                       ? large_copy(tensors_->at(initial_name(dw + expert.name)), *parallel_)
                       : matrix(n, k);
      if (!expert.tokens.empty()) {
        const Rows left(*this, a.in, a.sorted, expert, n), right(*this, b.in, b.sorted, expert, k);
        reference_product(*parallel_, n, k, expert.rows(), {left.data, n, true},
                          {right.data, k, true}, accumulates(*problem_), sum.data());
      }
      (*tensors_)[dw + expert.name] = std::move(sum);
    }
  }

  Matrix matrix(std::int64_t rows, std::int64_t columns) const {
    return large_vector<double>(static_cast<std::size_t>(rows * columns), *parallel_);
  }

 private:
  /// An expert's rows of a tensor: where they are, if they follow each other there, else copied.
  struct Rows {
    Rows(const Definition& of, const char* name, bool sorted, const Expert& expert,
         std::int64_t columns) {
      const Matrix& all = of.tensors_->at(name);
      const auto width = static_cast<std::size_t>(columns);
      data = all.data() + expert.first * width;
      if (sorted) return;
      copies = of.matrix(expert.rows(), columns);
      for_each_row(expert.tokens.size(), width, *of.parallel_, [&](std::size_t i) {
        std::copy_n(all.data() + expert.tokens[i] * width, width, copies.data() + i * width);
      });
      data = copies.data();
    }
    Matrix copies;
    const double* data = nullptr;
  };

  const Problem* problem_;
  ReferenceTensors* tensors_;
  Parallel* parallel_;
  Expert experts_[2];
  std::int64_t m_ = 0;
};

void gate_up(const Problem& problem, ReferenceTensors& tensors, Definition& of,
             Parallel& parallel) {
  const std::int64_t d = of.size("d"), h = of.size("h");
  of.product("gate", true, h, d, false, {{"x", "w_gate", false}});
  of.product("up", true, h, d, false, {{"x", "w_up", false}});
  const auto activation = parse_activation(problem.option("act"));
  const Matrix &gate = tensors.at("gate"), &up = tensors.at("up");
  Matrix hidden = of.matrix(std::ssize(gate), 1);
  for_each_row(gate.size(), 1, parallel,
               [&](std::size_t i) { hidden[i] = activate(activation, gate[i]) * up[i]; });
  tensors["hidden"] = std::move(hidden);
}

}  // namespace

void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  Definition of(problem, tensors, parallel);
  if (stage == "linear")
    of.product("y", false, of.size("n"), of.size("k"), false, {{"x", "w", false}});
  else if (stage == "dx")
    of.product("dx", false, of.size("k"), of.size("n"), true, {{"dy", "w", false}});
  else if (stage == "dw")
    of.token_sum("dw", {"dy", nullptr, false}, {"x", nullptr, false}, of.size("n"), of.size("k"));
  else if (stage == ffn::stage_gate_up)
    gate_up(problem, tensors, of, parallel);
  else if (stage == ffn::stage_down)
    of.product("y", false, of.size("d"), of.size("h"), false, {{"hidden", "w_down", true}});
  else if (stage == ffn::stage_d_hidden) {
    of.product("dc", true, of.size("h"), of.size("d"), true, {{"dy", "w_down", false}});
    ffn::gate_gradient(problem, tensors, parallel);
  } else if (stage == ffn::stage_d_x)
    of.product("dx", false, of.size("d"), of.size("h"), true,
               {{"d_gate", "w_gate", true}, {"d_up", "w_up", true}});
  else if (stage == ffn::stage_d_gate_up)
    for (const auto& [gradient, dw] : {std::pair{"d_gate", "dw_gate"}, {"d_up", "dw_up"}})
      of.token_sum(dw, {gradient, nullptr, true}, {"x", nullptr, false}, of.size("h"),
                   of.size("d"));
  else
    of.token_sum("dw_down", {"dy", nullptr, false}, {"hidden", nullptr, true}, of.size("d"),
                 of.size("h"));
}

}  // namespace fftune::masked
