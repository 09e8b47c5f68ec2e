#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/common/activation.hpp"
#include "support/catch.hpp"
#include "support/op_reference.hpp"

using namespace fftune;

namespace {

Problem problem_of(const std::string& pass, const std::string& act, DType dtype = DType::f32) {
  return canonical(bias_gelu_op(), {"bias-gelu", pass, dtype, {{"m", 2}, {"h", 3}}, {{"act", act}}},
                   DeviceKind::cpu);
}

}  // namespace

TEST_CASE("buffers are those that pass and options ask for") {
  using Names = std::vector<std::string>;
  const auto names = [](const std::string& pass, const std::string& save) {
    Names found;
    auto problem = problem_of(pass, "gelu");
    if (save == "input") problem.options["save"] = save;
    for (const auto& tensor : bias_gelu_op().tensors(problem)) found.push_back(tensor.name);
    return found;
  };
  CHECK(names("fwd", "nothing") == Names{"x", "bias", "y"});
  CHECK(names("fwd", "input") == Names{"x", "bias", "y", "input"});
  CHECK(names("bwd", "nothing") == Names{"x", "bias", "dy", "dx", "dbias"});
  CHECK(names("bwd", "input") == Names{"input", "dy", "dx", "dbias"});
}

TEST_CASE("the saved input replaces x and bias") {
  auto forward = problem_of("fwd", "gelu");
  auto backward = problem_of("bwd", "gelu");
  const ReferenceTensors in{
      {"x", {1, -2, 3, 0.5, 0, -1}}, {"bias", {0.5, 1, -1}}, {"dy", {1, 2, 3, 4, 5, 6}}};
  const auto plain = test::run_reference(backward, in);
  forward.options["save"] = backward.options["save"] = "input";
  auto saved = test::run_reference(forward, in);
  CHECK(saved.at("input") == std::vector<double>{1.5, -1, 2, 1, 1, -2});
  saved.erase("x");
  saved.erase("bias");
  const auto from_saved = test::run_reference(backward, saved);
  CHECK(from_saved.at("dx") == plain.at("dx"));
  CHECK(from_saved.at("dbias") == plain.at("dbias"));
}

TEST_CASE("slopes are the derivatives of the activations") {
  for (const auto& name : activation_names()) {
    const auto activation = parse_activation(name);
    for (double x = -6.03; x < 6; x += 0.17) {
      const double step = 1e-3;
      const auto at = [&](double by) { return activate(activation, x + by * step); };
      const double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step);
      CAPTURE(name, x);
      CHECK(activation_gradient(activation, x, 1) == Approx(slope).margin(1e-9));
    }
  }
}

TEST_CASE("the reference is the formula, by hand") {
  // Φ(1) = 0.841344746, φ(1) = 0.241970725.
  const ReferenceTensors in{
      {"x", {0.5, -1, 3, 0, 1, 0}}, {"bias", {0.5, 0, -2}}, {"dy", {2, 1, 1, 0, 1, 0}}};
  const auto forward = test::run_reference(problem_of("fwd", "gelu"), in);
  CHECK(forward.at("y")[0] == Approx(0.841344746));
  CHECK(forward.at("y")[1] == Approx(0.841344746 - 1));
  CHECK(forward.at("y")[2] == Approx(0.841344746));
  const auto backward = test::run_reference(problem_of("bwd", "gelu"), in);
  const double slope = 0.841344746 + 0.241970725;
  CHECK(backward.at("dx")[0] == Approx(2 * slope));
  CHECK(backward.at("dx")[1] == Approx(1 - slope));
  CHECK(backward.at("dbias")[0] == Approx(2 * slope));
  CHECK(backward.at("dbias")[1] == Approx(1));
  const auto tanh = test::run_reference(problem_of("fwd", "gelu-tanh"), in);
  CHECK(tanh.at("y")[0] == Approx(0.5 * (1 + std::tanh(0.79788456 * 1.044715))));
}
