// Every family of linear against the float64 reference: sizes that no tile divides, every form.
#include <random>

#include "cpu/open.hpp"
#include "kernels/linear/linear.hpp"
#include "linear/problems.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Every form of both passes.
std::vector<Problem> forms_of(const LinearSizes& sizes, DType dtype) {
  std::vector<Problem> problems;
  for (const char* bias : {"no", "yes"})
    for (const char* more : {"no", "yes"})
      for (const auto& [pass, option] : {std::pair{"fwd", "residual"}, {"bwd", "accumulate"}})
        problems.push_back(linear_problem(pass, sizes, dtype, {{"bias", bias}, {option, more}}));
  for (const char* more : {"no", "yes"})
    problems.push_back(linear_problem("fwd", sizes, dtype,
                                      {{"bias", more}, {"y-scale", "yes"}, {"residual", more}}));
  for (const char* more : {"no", "yes"})
    problems.push_back(linear_problem("fwd", sizes, dtype,
                                      {{"bias", more}, {"residual", more}, {"output", "f32"}}));
  return problems;
}

}  // namespace

TEST_CASE("linear is right on the CPU in every form and dtype, at ragged sizes") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : linear_op().dtypes(DeviceKind::cpu))
    for (const LinearSizes sizes : {LinearSizes{1, 1, 1}, {2, 3, 5}, {33, 130, 67}, {300, 65, 259}})
      for (const Problem& problem : forms_of(sizes, dtype))
        verify_families(*backend, linear_op(), {problem}, random, 2);
  // More of k than a slice of widened operands has.
  for (const Problem& problem : forms_of({1100, 40, 70}, DType::bf16))
    verify_families(*backend, linear_op(), {problem}, random, 1);
}

TEST_CASE("linear is right on a GPU at sizes that no tile divides", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  for (const LinearSizes sizes :
       {LinearSizes{1, 8, 8}, {2, 72, 40}, {50, 136, 200}, {77, 136, 264}, {1001, 520, 328}})
    for (const char* pass : {"fwd", "bwd"})
      verify_families(*backend, linear_op(), {linear_problem(pass, sizes, DType::bf16)}, random, 2);
  for (const LinearSizes sizes : {LinearSizes{64, 104, 200}, {333, 136, 264}})
    for (const Problem& problem : forms_of(sizes, DType::bf16))
      verify_families(*backend, linear_op(), {problem}, random, 1);
  for (const DType dtype : {DType::fp16, DType::f32})
    for (const LinearSizes sizes : {LinearSizes{3, 5, 7}, {129, 200, 96}})
      for (const Problem& problem : forms_of(sizes, dtype))
        verify_families(*backend, linear_op(), {problem}, random, 0);
}

TEST_CASE("linear's baselines write the same, and its gradients accumulate in place") {
  const auto backend = open_cpu();
  for (const char* pass : {"fwd", "bwd"})
    check_baselines(*backend, linear_op(), linear_problem(pass, {33, 40, 72}, DType::bf16), 2e-2);
  check_in_place(
      *backend, linear_op(),
      linear_problem("bwd", {33, 40, 72}, DType::bf16, {{"bias", "yes"}, {"accumulate", "yes"}}),
      {{"dw", "dw_before"}, {"dbias", "dbias_before"}});
}

TEST_CASE("on a GPU too, linear's baselines write the same, and gradients accumulate in place",
          "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const char* pass : {"fwd", "bwd"})
    check_baselines(*backend, linear_op(), linear_problem(pass, {333, 136, 264}, DType::bf16),
                    2e-2);
  for (const std::int64_t m : {40, 333})
    check_in_place(
        *backend, linear_op(),
        linear_problem("bwd", {m, 136, 264}, DType::bf16, {{"bias", "yes"}, {"accumulate", "yes"}}),
        {{"dw", "dw_before"}, {"dbias", "dbias_before"}});
}
