#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/pattern.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

/// The sum of a[i] b[i], in eight partial sums, which a compiler may keep in vectors.
double dot(const double* a, const double* b, std::size_t count) {
  double partial[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  double sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const double part : partial) sum += part;
  return sum;
}

struct Names {
  const char *in, *out;
  const char* weights[2][2];  // of the false expert, then of the true one
};

Names names_of(Stage stage) {
  switch (stage) {
    case Stage::gate_up:
      return {"x", "hidden", {{"w_gate_false", "w_up_false"}, {"w_gate_true", "w_up_true"}}};
    case Stage::down:
      return {"hidden", "y", {{"w_down_false", nullptr}, {"w_down_true", nullptr}}};
    case Stage::linear:
    case Stage::dx:
    case Stage::dw:
      break;
  }
  return {"x", "y", {{"w_false", nullptr}, {"w_true", nullptr}}};
}

/// dx_i = the sum over j of dy_ij times row j of the weights of token i's expert.
void reference_dx(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto m = static_cast<std::size_t>(problem.size("m"));
  const auto n = static_cast<std::size_t>(problem.size("n"));
  const auto k = static_cast<std::size_t>(problem.size("k"));
  const std::vector<double>&dy = tensors.at("dy"), &mask = tensors.at("mask");
  std::vector<double> dx(m * k);
  parallel.run(static_cast<int>(m), parallel.max_threads(), [&](int token) {
    const auto i = static_cast<std::size_t>(token);
    const double* const w = tensors.at(mask[i] != 0 ? "w_true" : "w_false").data();
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t l = 0; l < k; ++l) dx[i * k + l] += dy[i * n + j] * w[j * k + l];
  });
  tensors["dx"] = std::move(dx);
}

/// Row j of an expert's dw = the sum over its tokens i of dy_ij times row i of x, and what is
/// before.
void reference_dw(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto m = static_cast<std::size_t>(problem.size("m"));
  const auto n = static_cast<std::size_t>(problem.size("n"));
  const auto k = static_cast<std::size_t>(problem.size("k"));
  const std::vector<double>&dy = tensors.at("dy"), &x = tensors.at("x"), &mask = tensors.at("mask");
  std::vector<double> dw_true(n * k), dw_false(n * k);
  if (accumulates(problem)) {
    dw_true = tensors.at("dw_true_before");
    dw_false = tensors.at("dw_false_before");
  }
  parallel.run(static_cast<int>(n), parallel.max_threads(), [&](int feature) {
    const auto j = static_cast<std::size_t>(feature);
    for (std::size_t i = 0; i < m; ++i) {
      double* const dw = (mask[i] != 0 ? dw_true : dw_false).data() + j * k;
      for (std::size_t l = 0; l < k; ++l) dw[l] += dy[i * n + j] * x[i * k + l];
    }
  });
  tensors["dw_true"] = std::move(dw_true);
  tensors["dw_false"] = std::move(dw_false);
}

}  // namespace

void reference(Stage stage, const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  if (stage == Stage::dx) return reference_dx(problem, tensors, parallel);
  if (stage == Stage::dw) return reference_dw(problem, tensors, parallel);
  const Names names = names_of(stage);
  const std::vector<double>& in = tensors.at(names.in);
  const std::vector<double>& mask = tensors.at("mask");
  const std::size_t tokens = mask.size();
  const std::size_t k = in.size() / tokens;
  const std::size_t n = tensors.at(names.weights[0][0]).size() / k;
  std::vector<std::uint8_t> marks(tokens);
  for (std::size_t i = 0; i < tokens; ++i) marks[i] = mask[i] != 0;
  // The token of each row of hidden.
  const auto order = sorted_by_mark(marks);
  const auto activation =
      stage == Stage::gate_up ? parse_activation(problem.option("act")) : Activation::none;
  std::vector<double> out(tokens * n);

  constexpr std::size_t block = 16;  // rows of in stay in the cache beside some rows of weights
  const auto tasks = static_cast<int>((n + block - 1) / block);
  parallel.run(tasks, parallel.max_threads(), [&](int task) {
    const auto first = static_cast<std::size_t>(task) * block;
    for (std::size_t j = first; j < std::min(n, first + block); ++j)
      for (std::size_t row = 0; row < tokens; ++row) {
        const auto token = static_cast<std::size_t>(order[row]);
        const double* const x = in.data() + (stage == Stage::down ? row : token) * k;
        const auto product = [&](int index) {
          return dot(x, tensors.at(names.weights[marks[token]][index]).data() + j * k, k);
        };
        const double value =
            stage == Stage::gate_up ? activate(activation, product(0)) * product(1) : product(0);
        out[(stage == Stage::gate_up ? row : token) * n + j] = value;
      }
  });
  tensors[names.out] = std::move(out);
}

}  // namespace fftune::masked
