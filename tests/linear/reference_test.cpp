#include <random>

#include "kernels/linear/linear.hpp"
#include "support/gradients.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(const std::string& pass, std::int64_t m, std::int64_t k, std::int64_t n,
                   std::map<std::string, std::string> options = {}) {
  return {"linear", pass, DType::f32, {{"m", m}, {"k", k}, {"n", n}}, std::move(options)};
}

}  // namespace

TEST_CASE("the reference of a linear layer, by hand") {
  ReferenceTensors tensors{{"x", {1, 2, 3, 4}},         // [2, 2]
                           {"w", {5, 6, 7, 8, 9, 10}},  // [3, 2]
                           {"bias", {100, 200, 300}},
                           {"residual", {1, 2, 3, 4, 5, 6}}};
  run_reference(linear_op(), problem_of("fwd", 2, 2, 3, {{"bias", "yes"}, {"residual", "yes"}}),
                tensors);
  CHECK(tensors.at("y") == std::vector<double>{118, 225, 332, 143, 258, 373});
}

TEST_CASE("the reference of its gradients, by hand, and added to others") {
  ReferenceTensors tensors{{"dy", {1, 2, 3, 4, 5, 6}},  // [2, 3]
                           {"x", {1, 2, 3, 4}},         // [2, 2]
                           {"w", {5, 6, 7, 8, 9, 10}},  // [3, 2]
                           {"dw_before", {1, 1, 1, 1, 1, 1}},
                           {"dbias_before", {10, 20, 30}}};
  run_reference(linear_op(), problem_of("bwd", 2, 2, 3, {{"bias", "yes"}, {"accumulate", "yes"}}),
                tensors);
  CHECK(tensors.at("dx") == std::vector<double>{46, 52, 109, 124});
  CHECK(tensors.at("dw") == std::vector<double>{14, 19, 18, 25, 22, 31});
  CHECK(tensors.at("dbias") == std::vector<double>{15, 27, 39});
}

TEST_CASE("linear's gradients are its central differences") {
  std::mt19937_64 random(1);
  for (const auto& [m, k, n] : {std::tuple{1, 3, 2}, {2, 5, 7}, {7, 4, 3}})
    check_gradients(linear_op(), problem_of("fwd", m, k, n, {{"bias", "yes"}}),
                    problem_of("bwd", m, k, n, {{"bias", "yes"}}),
                    {{"x", "dx"}, {"w", "dw"}, {"bias", "dbias"}}, random);
}
