#include "kernels/ffn/reference.hpp"

#include <cmath>
#include <random>

#include "cpu/pool.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

Problem problem_of(std::int64_t m, std::int64_t d, std::int64_t h, const std::string& act) {
  return {"ffn", "fwd", DType::f32, {{"m", m}, {"d", d}, {"h", h}}, {{"act", act}}};
}

}  // namespace

TEST_CASE("the reference of a 1x2x1 layer, by hand") {
  Pool pool(1);
  const auto problem = problem_of(1, 2, 1, "none");
  ReferenceTensors tensors{
      {"x", {2, 3}}, {"w_gate", {1, -1}}, {"w_up", {4, 5}}, {"w_down", {7, -2}}};
  ffn::reference(problem, 0, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{-1.0 * 23.0});
  ffn::reference(problem, 1, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{-161, 46});
}

TEST_CASE("the training form keeps both products as they are") {
  Pool pool(1);
  auto problem = problem_of(1, 2, 1, "relu");
  problem.options["save"] = "preact";
  ReferenceTensors tensors{{"x", {2, 3}}, {"w_gate", {1, -1}}, {"w_up", {4, 5}}};
  ffn::reference(problem, 0, tensors, pool);
  REQUIRE(tensors.at("gate") == std::vector<double>{-1});
  REQUIRE(tensors.at("up") == std::vector<double>{23});
  REQUIRE(tensors.at("hidden") == std::vector<double>{0});
}

TEST_CASE("bias and residual are added to y") {
  Pool pool(1);
  auto problem = problem_of(2, 2, 1, "none");
  problem.options["bias"] = "down";
  problem.options["residual"] = "yes";
  ReferenceTensors tensors{
      {"hidden", {3, 5}}, {"w_down", {7, -2}}, {"b_down", {100, 200}}, {"residual", {1, 2, 3, 4}}};
  ffn::reference(problem, 1, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{122, 196, 138, 194});
}

TEST_CASE("the activation is the gate's, not up's") {
  Pool pool(1);
  ReferenceTensors tensors{{"x", {1}}, {"w_gate", {-3}}, {"w_up", {5}}};
  ffn::reference(problem_of(1, 1, 1, "relu"), 0, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{0});
  tensors["w_gate"] = {3};
  tensors["w_up"] = {-5};
  ffn::reference(problem_of(1, 1, 1, "relu"), 0, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{-15});
  ffn::reference(problem_of(1, 1, 1, "silu"), 0, tensors, pool);
  REQUIRE(tensors.at("hidden")[0] == Approx(3 / (1 + std::exp(-3.0)) * -5));
}

TEST_CASE("the reference agrees with the formula written out, at ragged sizes") {
  Pool pool(2);
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const std::size_t m = 3, d = 21, h = 37;
  const auto problem = problem_of(3, 21, 37, "silu");
  ReferenceTensors tensors;
  for (const auto& [name, size] :
       {std::pair{"x", m * d}, {"w_gate", h * d}, {"w_up", h * d}, {"w_down", d * h}}) {
    tensors[name].resize(size);
    for (auto& value : tensors[name]) value = normal(random);
  }
  ffn::reference(problem, 0, tensors, pool);
  ffn::reference(problem, 1, tensors, pool);
  for (std::size_t i = 0; i < m; ++i) {
    std::vector<double> hidden(h);
    for (std::size_t j = 0; j < h; ++j) {
      double gate = 0, up = 0;
      for (std::size_t k = 0; k < d; ++k) {
        gate += tensors["x"][i * d + k] * tensors["w_gate"][j * d + k];
        up += tensors["x"][i * d + k] * tensors["w_up"][j * d + k];
      }
      hidden[j] = gate / (1 + std::exp(-gate)) * up;
      REQUIRE(tensors["hidden"][i * h + j] == Approx(hidden[j]).margin(1e-12));
    }
    for (std::size_t k = 0; k < d; ++k) {
      double sum = 0;
      for (std::size_t j = 0; j < h; ++j) sum += hidden[j] * tensors["w_down"][k * h + j];
      REQUIRE(tensors["y"][i * d + k] == Approx(sum).margin(1e-10));
    }
  }
}
