#include <cmath>
#include <random>

#include "cpu/pool.hpp"
#include "kernels/ffn/ffn.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

Problem f32_problem(std::int64_t m, std::int64_t d, std::int64_t h, const std::string& act) {
  return {"ffn", "fwd", DType::f32, {{"m", m}, {"d", d}, {"h", h}}, {{"act", act}}};
}

}  // namespace

TEST_CASE("the reference of a 1x2x1 layer, by hand") {
  Pool pool(1);
  const auto problem = f32_problem(1, 2, 1, "none");
  ReferenceTensors tensors{
      {"x", {2, 3}}, {"w_gate", {1, -1}}, {"w_up", {4, 5}}, {"w_down", {7, -2}}};
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{-1.0 * 23.0});
  ffn::reference(problem, ffn::stage_down, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{-161, 46});
}

TEST_CASE("the training form keeps both products as they are") {
  Pool pool(1);
  auto problem = f32_problem(1, 2, 1, "relu");
  problem.options["save"] = "preact";
  ReferenceTensors tensors{{"x", {2, 3}}, {"w_gate", {1, -1}}, {"w_up", {4, 5}}};
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("gate") == std::vector<double>{-1});
  REQUIRE(tensors.at("up") == std::vector<double>{23});
  REQUIRE(tensors.at("hidden") == std::vector<double>{0});
}

TEST_CASE("bias and residual are added to y") {
  Pool pool(1);
  auto problem = f32_problem(2, 2, 1, "none");
  problem.options["bias"] = "down";
  problem.options["residual"] = "yes";
  ReferenceTensors tensors{
      {"hidden", {3, 5}}, {"w_down", {7, -2}}, {"b_down", {100, 200}}, {"residual", {1, 2, 3, 4}}};
  ffn::reference(problem, ffn::stage_down, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{122, 196, 138, 194});
  problem.options["y-scale"] = "yes";
  tensors["y_scale"] = {2, -1};
  ffn::reference(problem, ffn::stage_down, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{243, -192, 273, -186});
}

TEST_CASE("in fp8 scales turn elements into numbers, and hidden is rounded in units of its own") {
  Pool pool(1);
  auto problem = f32_problem(1, 2, 1, "none");
  problem.dtype = DType::fp8;
  ReferenceTensors tensors{{"x", {2, 3}},          {"w_gate", {1, -1}},   {"w_up", {4, 5}},
                           {"w_down", {7, -2}},    {"x_scale", {0.5}},    {"w_gate_scale", {2}},
                           {"w_up_scale", {0.25}}, {"hidden_scale", {8}}, {"w_down_scale", {3}}};
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  // gate -1 * 1, up 23 * 0.125, so hidden is -2.875 / 8 = -0.359375, halfway between two elements.
  REQUIRE(tensors.at("hidden") == std::vector<double>{-0.375});
  ffn::reference(problem, ffn::stage_down, tensors, pool);
  REQUIRE(tensors.at("y") == std::vector<double>{24 * -0.375 * 7, 24 * -0.375 * -2});
}

TEST_CASE("with scales of blocks each 128 elements have one, and hidden's are found") {
  Pool pool(1);
  auto problem = f32_problem(2, 130, 129, "none");
  problem.dtype = DType::fp8;
  problem.options["scales"] = "block";
  const std::size_t d = 130, h = 129;
  // Token 0 has ones, token 1 twos; scales tell the two blocks of d and of h apart.
  ReferenceTensors tensors{{"x", std::vector<double>(2 * d, 1)},
                           {"w_gate", std::vector<double>(h * d, 1)},
                           {"w_up", std::vector<double>(h * d, 1)},
                           {"w_down", std::vector<double>(d * h, 1)},
                           {"x_scale", {1, 10, 2, 20}},
                           {"w_gate_scale", {1, 3, 5, 7}},
                           {"w_up_scale", {1, 1, 1, 1}},
                           {"w_down_scale", {1, 2, 3, 4}}};
  for (std::size_t i = d; i < 2 * d; ++i) tensors["x"][i] = 2;
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  // The first block of d has 128 elements, the second 2.
  const double gate = 128 * 1 + 2 * 10 * 3, last_gate = 128 * 5 + 2 * 10 * 7, up = 128 + 2 * 10;
  const auto& scales = tensors.at("hidden_scale");
  REQUIRE(scales.size() == 4);
  REQUIRE(scales[0] == Approx(gate * up / 448));
  REQUIRE(scales[1] == Approx(last_gate * up / 448));
  REQUIRE(scales[2] == Approx(16 * gate * up / 448));
  REQUIRE(scales[3] == Approx(16 * last_gate * up / 448));
  REQUIRE(tensors.at("hidden") == std::vector<double>(2 * h, 448));
  ffn::reference(problem, ffn::stage_down, tensors, pool);
  const auto& y = tensors.at("y");
  REQUIRE(y[0] == Approx(128 * gate * up + last_gate * up * 2));
  REQUIRE(y[d - 1] == Approx(128 * gate * up * 3 + last_gate * up * 4));
  REQUIRE(y[d] == Approx(16 * y[0]));
}

TEST_CASE("a block of zeros has a scale of 1") {
  Pool pool(1);
  auto problem = f32_problem(1, 1, 2, "none");
  problem.dtype = DType::fp8;
  problem.options["scales"] = "block";
  ReferenceTensors tensors{{"x", {0}},       {"w_gate", {1, 1}},    {"w_up", {1, 1}},
                           {"x_scale", {1}}, {"w_gate_scale", {1}}, {"w_up_scale", {1}}};
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("hidden_scale") == std::vector<double>{1});
  REQUIRE(tensors.at("hidden") == std::vector<double>{0, 0});
}

TEST_CASE("the activation is the gate's, not up's") {
  Pool pool(1);
  ReferenceTensors tensors{{"x", {1}}, {"w_gate", {-3}}, {"w_up", {5}}};
  ffn::reference(f32_problem(1, 1, 1, "relu"), ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{0});
  tensors["w_gate"] = {3};
  tensors["w_up"] = {-5};
  ffn::reference(f32_problem(1, 1, 1, "relu"), ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("hidden") == std::vector<double>{-15});
  ffn::reference(f32_problem(1, 1, 1, "silu"), ffn::stage_gate_up, tensors, pool);
  REQUIRE(tensors.at("hidden")[0] == Approx(3 / (1 + std::exp(-3.0)) * -5));
}

TEST_CASE("the reference agrees with the formula written out, at ragged sizes") {
  Pool pool(2);
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const std::size_t m = 3, d = 21, h = 37;
  const auto problem = f32_problem(3, 21, 37, "silu");
  ReferenceTensors tensors;
  for (const auto& [name, size] :
       {std::pair{"x", m * d}, {"w_gate", h * d}, {"w_up", h * d}, {"w_down", d * h}}) {
    tensors[name].resize(size);
    for (auto& value : tensors[name]) value = normal(random);
  }
  ffn::reference(problem, ffn::stage_gate_up, tensors, pool);
  ffn::reference(problem, ffn::stage_down, tensors, pool);
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
