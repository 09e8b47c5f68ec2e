#include <cmath>
#include <string>
#include <vector>

#include "norm/problems.hpp"

using namespace fftune;
using test::layernorm_problem;

namespace {

Problem layernorm_of(const std::string& pass, std::map<std::string, std::string> options,
                     std::int64_t m = 1, std::int64_t d = 4) {
  return layernorm_problem(DeviceKind::cpu, pass, DType::f32, m, d, std::move(options));
}

}  // namespace

TEST_CASE("layernorm: buffers are those that pass and options ask for") {
  using Names = std::vector<std::string>;
  CHECK(test::tensor_names(layernorm_of("fwd", {})) == Names{"x", "w", "b", "y"});
  CHECK(test::tensor_names(layernorm_of("fwd", {{"residual", "yes"}})) ==
        Names{"x", "residual", "w", "b", "y", "sum"});
  CHECK(test::tensor_names(layernorm_of("bwd", {})) == Names{"x", "w", "dy", "dx", "dw", "db"});
  CHECK(test::tensor_names(layernorm_of("bwd", {{"frozen", "yes"}})) ==
        Names{"x", "w", "dy", "dx"});
  CHECK(test::tensor_names(layernorm_of("bwd", {{"residual", "yes"}})) ==
        Names{"x", "w", "dy", "dsum", "dx", "dw", "db"});
}

TEST_CASE("layernorm: the reference is the formula, by hand") {
  // The mean is 3, the variance 3.5, with eps 4.
  const ReferenceTensors in{{"x", {1, 2, 3, 6}}, {"w", {1, 2, -1, 0.5}}, {"b", {0, 1, 2, 3}}};
  const auto out = test::run_reference(layernorm_of("fwd", {{"eps", "0.5"}}), in);
  const std::vector<double> expected{-1, 0, 2, 3.75};
  for (std::size_t i = 0; i < 4; ++i) CHECK(out.at("y")[i] == Approx(expected[i]));
}

TEST_CASE("layernorm: the gradients are those of finite differences") {
  const std::int64_t m = 2, d = 5;
  const Problem forward = layernorm_of("fwd", {{"eps", "0.1"}}, m, d);
  const Problem backward = layernorm_of("bwd", {{"eps", "0.1"}}, m, d);
  ReferenceTensors in;
  const auto fill = [&](const char* name, std::size_t count, double step) {
    for (std::size_t i = 0; i < count; ++i)
      in[name].push_back(std::sin(step * static_cast<double>(i + 1)));
  };
  fill("x", 10, 1.3), fill("w", 5, 0.7), fill("b", 5, 2.1), fill("dy", 10, 0.9);
  const auto loss = [&](const ReferenceTensors& at) {
    const auto y = test::run_reference(forward, at).at("y");
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * in.at("dy")[i];
    return sum;
  };
  const auto gradients = test::run_reference(backward, in);
  for (const auto& [name, gradient] :
       {std::pair("x", "dx"), std::pair("w", "dw"), std::pair("b", "db")})
    for (std::size_t i = 0; i < in.at(name).size(); ++i) {
      constexpr double step = 1e-5;
      auto more = in, less = in;
      more.at(name)[i] += step;
      less.at(name)[i] -= step;
      CAPTURE(name, i);
      CHECK(gradients.at(gradient)[i] ==
            Approx((loss(more) - loss(less)) / (2 * step)).epsilon(1e-5).margin(1e-7));
    }
}
