#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "cpu/blas.hpp"
#include "kernels/linear/linear.hpp"
#include "linear/problems.hpp"
#include "support/gradients.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("the reference of a linear layer, by hand") {
  ReferenceTensors tensors{{"x", {1, 2, 3, 4}},         // [2, 2]
                           {"w", {5, 6, 7, 8, 9, 10}},  // [3, 2]
                           {"bias", {100, 200, 300}},
                           {"residual", {1, 2, 3, 4, 5, 6}}};
  run_stages(linear_op(),
             linear_problem("fwd", {2, 2, 3}, DType::f32, {{"bias", "yes"}, {"residual", "yes"}}),
             tensors);
  CHECK(tensors.at("y") == std::vector<double>{118, 225, 332, 143, 258, 373});
  tensors["y_scale"] = {2, 0, -1};
  run_stages(linear_op(),
             linear_problem("fwd", {2, 2, 3}, DType::f32,
                            {{"bias", "yes"}, {"y-scale", "yes"}, {"residual", "yes"}}),
             tensors);
  CHECK(tensors.at("y") == std::vector<double>{235, 2, -326, 282, 5, -361});
}

TEST_CASE("the reference of its gradients, by hand, and added to others") {
  ReferenceTensors tensors{{"dy", {1, 2, 3, 4, 5, 6}},  // [2, 3]
                           {"x", {1, 2, 3, 4}},         // [2, 2]
                           {"w", {5, 6, 7, 8, 9, 10}},  // [3, 2]
                           {"dw_before", {1, 1, 1, 1, 1, 1}},
                           {"dbias_before", {10, 20, 30}}};
  run_stages(linear_op(),
             linear_problem("bwd", {2, 2, 3}, DType::f32, {{"bias", "yes"}, {"accumulate", "yes"}}),
             tensors);
  CHECK(tensors.at("dx") == std::vector<double>{46, 52, 109, 124});
  CHECK(tensors.at("dw") == std::vector<double>{14, 19, 18, 25, 22, 31});
  CHECK(tensors.at("dbias") == std::vector<double>{15, 27, 39});
}

TEST_CASE("linear's gradients are its central differences") {
  std::mt19937_64 random(1);
  for (const auto& [m, k, n] : {std::tuple{1, 3, 2}, {2, 5, 7}, {7, 4, 3}})
    check_gradients(linear_op(), linear_problem("fwd", {m, k, n}, DType::f32, {{"bias", "yes"}}),
                    linear_problem("bwd", {m, k, n}, DType::f32, {{"bias", "yes"}}),
                    {{"x", "dx"}, {"w", "dw"}, {"bias", "dbias"}}, random);
}

TEST_CASE("large products of a reference go where they are computed faster") {
  /// Runs its tasks as they come, and leaves no large product to them.
  struct Elsewhere final : Parallel {
    int max_threads() const override { return 2; }
    void run(int tasks, int, const std::function<void(int)>& body) override {
      for (int task = 0; task < tasks; ++task) body(task);
    }
    bool multiply(const DoubleProduct& p) override {
      ++products;
      dgemm(p.m, p.n, p.k, {p.a, p.a_transposed ? p.m : p.k, p.a_transposed},
            {p.b, p.b_transposed ? p.n : p.k, p.b_transposed}, 0, p.c, p.n);
      return true;
    }
    int products = 0;
  };
  std::mt19937_64 random(5);
  for (const std::string accumulate : {"no", "yes"}) {
    const auto problem =
        linear_problem("bwd", {1300, 1200, 1250}, DType::f32, {{"accumulate", accumulate}});
    ReferenceTensors tensors;
    draw_inputs(linear_op(), problem, random, tensors);
    ReferenceTensors others = tensors;
    run_stages(linear_op(), problem, tensors);
    Elsewhere elsewhere;
    for (std::size_t stage = 0; stage < 2; ++stage)
      linear_op().reference(problem, stage, others, elsewhere);
    CHECK(elsewhere.products == 2);
    for (const char* name : {"dx", "dw"}) {
      double worst = 0;
      for (std::size_t i = 0; i < tensors.at(name).size(); ++i)
        worst = std::max(worst, std::abs(tensors.at(name)[i] - others.at(name)[i]));
      CHECK(worst < 1e-11);
    }
  }
}
