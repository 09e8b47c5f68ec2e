#include <cmath>

#include "kernels/masked/baselines.hpp"
#include "kernels/masked/families.hpp"
#include "kernels/masked/masked_op.hpp"

namespace fftune {
namespace masked {
namespace {

class MaskedLinear final : public MaskedOp {
 public:
  std::string_view name() const override { return "masked-linear"; }
  std::string_view summary() const override {
    return "linear layer of two experts: y_i = x_i w_true^T where mask_i, else x_i w_false^T";
  }

  std::vector<SizeField> sizes() const override {
    return {tokens(),
            {.name = "k", .help = "input features"},
            {.name = "n", .help = "output features"}};
  }
  std::vector<OptionField> options() const override {
    return {mask_option(), accumulate_option("the weights")};
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
    const DType dtype = problem.dtype;
    // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
    const double by_k = 1 / std::sqrt(static_cast<double>(k));
    if (problem.pass == "bwd") {
      const double by_n = 1 / std::sqrt(static_cast<double>(n));
      TensorSpec x{"x", dtype, {m, k}, Role::input, 1}, mask = mask_tensor(problem);
      x.kept = mask.kept = true;
      std::vector<TensorSpec> tensors{{"dy", dtype, {m, n}, Role::input, 1},
                                      x,
                                      mask,
                                      {"w_true", dtype, {n, k}, Role::input, by_n},
                                      {"w_false", dtype, {n, k}, Role::input, by_n}};
      if (accumulates(problem))
        for (const char* name : {"dw_true_before", "dw_false_before"}) {
          tensors.push_back({name, dtype, {n, k}, Role::input, 1});
          tensors.back().begins_sum = true;
        }
      tensors.push_back({"dx", dtype, {m, k}, Role::output, 1});
      for (const char* name : {"dw_true", "dw_false"}) {
        tensors.push_back({name, dtype, {n, k}, Role::output, 1});
        tensors.back().sums_tokens = true;
      }
      return tensors;
    }
    return {{"x", dtype, {m, k}, Role::input, 1},
            mask_tensor(problem),
            {"w_true", dtype, {n, k}, Role::input, by_k},
            {"w_false", dtype, {n, k}, Role::input, by_k},
            {"y", dtype, {m, n}, Role::output, 1}};
  }

  std::vector<const Family*> families() const override {
    return all_of({linear_sm90_families(), linear_sm90_sum_families(), linear_sm80_families(),
                   linear_sm80_sum_families(), linear_fallback_families(),
                   linear_cpu_blas_families(), linear_cpu_blas_sum_families(),
                   linear_cpu_plain_families()});
  }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return linear_baselines(problem, facts);
  }
};

}  // namespace
}  // namespace masked

const Op& masked_linear_op() {
  static const masked::MaskedLinear op;
  return op;
}

}  // namespace fftune
