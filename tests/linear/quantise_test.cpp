// linear with tokens that the op quantises to e4m3 (quantise=token, block).
#include <cmath>
#include <limits>
#include <random>

#include "cpu/open.hpp"
#include "kernels/linear/linear.hpp"
#include "linear/problems.hpp"
#include "runtime/plan.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Both kinds of scales, and every epilogue.
std::vector<Problem> quantised_forms_of(const LinearSizes& sizes, DType dtype) {
  std::vector<Problem> problems;
  for (const char* quantise : {"token", "block"}) {
    problems.push_back(linear_problem("fwd", sizes, dtype, {{"quantise", quantise}}));
    problems.push_back(linear_problem(
        "fwd", sizes, dtype,
        {{"quantise", quantise}, {"bias", "yes"}, {"y-scale", "yes"}, {"residual", "yes"}}));
    problems.push_back(linear_problem(
        "fwd", sizes, dtype, {{"quantise", quantise}, {"bias", "yes"}, {"output", "f32"}}));
  }
  return problems;
}

}  // namespace

TEST_CASE("the reference quantises tokens, by hand", "[quantise]") {
  // The first token's largest magnitude is 4, whose scale is 4 / 448; 1 becomes 112. The second
  // token is zero, and its scale 1.
  const Problem problem = linear_problem("fwd", {2, 3, 2}, DType::f32, {{"quantise", "token"}});
  ReferenceTensors tensors{
      {"x", {1, -4, 0.01, 0, 0, 0}}, {"w", {1, 2, 4, 8, -16, 32}}, {"w_scale", {0.5, 2}}};
  tensors = run_reference(problem, tensors);
  HostThreads threads;
  linear_op().reference(problem, 1, tensors, threads);
  CHECK(tensors.at("x_scale") == std::vector<double>{4.0 / 448, 1});
  CHECK(tensors.at("x_quantised") == std::vector<double>{112, -448, 1.125, 0, 0, 0});
  const double scale = 4.0 / 448;
  CHECK(tensors.at("y")[0] == Approx((112 - 2 * 448 + 4 * 1.125) * scale * 0.5));
  CHECK(tensors.at("y")[1] == Approx((8 * 112 + 16 * 448 + 32 * 1.125) * scale * 2));
  CHECK(tensors.at("y")[2] == 0);
}

TEST_CASE("linear with quantised tokens is right on the CPU at ragged sizes", "[quantise]") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : linear_op().dtypes(DeviceKind::cpu))
    for (const LinearSizes sizes : {LinearSizes{1, 1, 1}, {2, 3, 5}, {33, 130, 67}, {9, 600, 259}})
      verify_families(*backend, linear_op(), quantised_forms_of(sizes, dtype), random, 1);
}

TEST_CASE("linear with quantised tokens is right on a GPU", "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const LinearSizes sizes : {LinearSizes{1, 16, 16},
                                    {2, 80, 48},
                                    {50, 144, 208},
                                    {77, 1040, 264},
                                    {130, 72, 100},
                                    {1001, 528, 320},
                                    {16, 40000, 64}})
      verify_families(*backend, linear_op(), quantised_forms_of(sizes, dtype), random, 2);
}

TEST_CASE("linear with quantised tokens is right on a GPU at the sizes of models",
          "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  for (const std::int64_t m : {1, 16, 1024})
    for (const char* quantise : {"token", "block"})
      verify_families(
          *backend, linear_op(),
          {linear_problem("fwd", {m, 4096, 6144}, DType::bf16, {{"quantise", quantise}})}, random,
          2);
}

TEST_CASE("a token with a NaN gives NaN alone where it is quantised", "[quantise]") {
  const auto backend = open_cpu();
  const Problem problem = canonical(
      linear_op(), linear_problem("fwd", {3, 200, 5}, DType::f32, {{"quantise", "token"}}),
      DeviceKind::cpu);
  OpRun run(*backend, linear_op(), problem);
  auto x = run.values("x");
  x[200 + 7] = std::numeric_limits<float>::quiet_NaN();
  run.set("x", x);
  run.run(linear_op(), problem, default_recipe(linear_op(), problem, backend->facts()));
  const auto y = run.values("y");
  for (std::size_t i = 0; i < 15; ++i) CHECK(std::isnan(y[i]) == (i / 5 == 1));
}

TEST_CASE("quantise=token and block refuse what they are not for", "[quantise]") {
  CHECK(linear_complaint({4, 256, 64}, {{"quantise", "token"}}).empty());
  CHECK(linear_complaint({4, 256, 64}, {{"quantise", "block"}, {"weights", "int4"}})
            .find("quantise=block with weights=int4: the weight is e4m3, and not packed") !=
        std::string::npos);
}
