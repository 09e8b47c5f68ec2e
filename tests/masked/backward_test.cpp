// The backward passes of the masked ops: their references against central differences, gradients
// that accumulate, and experts without tokens.
#include <random>

#include "cpu/open.hpp"
#include "kernels/masked/masked.hpp"
#include "support/gradients.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem linear_problem(const std::string& pass, std::int64_t m, std::int64_t k, std::int64_t n,
                       DType dtype = DType::f32, std::map<std::string, std::string> options = {}) {
  return canonical(
      masked_linear_op(),
      {"masked-linear", pass, dtype, {{"m", m}, {"k", k}, {"n", n}}, std::move(options)},
      DeviceKind::cuda);
}

const std::vector<std::pair<std::string, std::string>> linear_accumulating{
    {"dw_true", "dw_true_before"}, {"dw_false", "dw_false_before"}};

/// Marks of the first tokens, with bytes other than 0 and 1, in an order of no pattern.
std::vector<double> marks_of(std::int64_t m, std::mt19937_64& random) {
  std::vector<double> marks(static_cast<std::size_t>(m));
  for (double& mark : marks) mark = static_cast<double>(random() % 3 * 100);
  return marks;
}

}  // namespace

TEST_CASE("the gradients of masked layers are their central differences") {
  std::mt19937_64 random(1);
  for (const auto& [m, k, n] : {std::tuple{1, 3, 2}, {2, 5, 7}, {7, 4, 3}})
    check_gradients(masked_linear_op(), linear_problem("fwd", m, k, n),
                    linear_problem("bwd", m, k, n),
                    {{"x", "dx"}, {"w_true", "dw_true"}, {"w_false", "dw_false"}}, random,
                    {{"mask", marks_of(m, random)}});
}

TEST_CASE("gradients of masked layers are added to others where that is asked for") {
  std::mt19937_64 random(2);
  const auto plain = linear_problem("bwd", 5, 3, 4);
  const auto adding = linear_problem("bwd", 5, 3, 4, DType::f32, {{"accumulate", "yes"}});
  ReferenceTensors tensors{{"mask", {0, 0, 0, 0, 0}}};
  draw_inputs(masked_linear_op(), adding, random, tensors);
  ReferenceTensors alone = tensors;
  run_reference(masked_linear_op(), plain, alone);
  run_reference(masked_linear_op(), adding, tensors);
  CHECK(tensors.at("dx") == alone.at("dx"));
  CHECK(tensors.at("dw_true") == tensors.at("dw_true_before"));
  for (std::size_t i = 0; i < alone.at("dw_false").size(); ++i)
    CHECK(tensors.at("dw_false")[i] ==
          Approx(alone.at("dw_false")[i] + tensors.at("dw_false_before")[i]).margin(1e-12));
}

TEST_CASE("gradients of masked layers accumulate in place") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16})
    check_in_place(*backend, masked_linear_op(),
                   linear_problem("bwd", 33, 40, 72, dtype, {{"accumulate", "yes"}}),
                   linear_accumulating);
}

TEST_CASE("on a GPU too, gradients of masked layers accumulate in place", "[gpu]") {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
  for (const std::int64_t m : {3, 333})
    check_in_place(*backend, masked_linear_op(),
                   linear_problem("bwd", m, 136, 264, DType::bf16, {{"accumulate", "yes"}}),
                   linear_accumulating);
}
