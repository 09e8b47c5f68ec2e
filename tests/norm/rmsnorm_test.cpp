#include <cmath>
#include <set>

#include "norm/problems.hpp"

using namespace fftune;
using test::rmsnorm_problem;

namespace {

Problem rmsnorm_of(const std::string& pass, std::map<std::string, std::string> options,
                   DType dtype = DType::f32, std::int64_t m = 2, std::int64_t d = 4) {
  return rmsnorm_problem(DeviceKind::cpu, pass, dtype, m, d, std::move(options));
}

}  // namespace

TEST_CASE("rmsnorm: buffers are those that pass and options ask for") {
  using Names = std::vector<std::string>;
  CHECK(test::tensor_names(rmsnorm_of("fwd", {})) == Names{"x", "w", "y"});
  CHECK(test::tensor_names(rmsnorm_of("fwd", {{"residual", "yes"}, {"save", "rstd"}})) ==
        Names{"x", "residual", "w", "y", "sum", "rstd"});
  CHECK(test::tensor_names(rmsnorm_of("bwd", {})) == Names{"x", "w", "dy", "dx", "dw"});
  CHECK(test::tensor_names(rmsnorm_of("bwd", {{"frozen", "yes"}})) == Names{"x", "w", "dy", "dx"});
  CHECK(test::tensor_names(rmsnorm_of("bwd", {{"residual", "yes"}, {"save", "rstd"}})) ==
        Names{"x", "w", "dy", "dsum", "rstd", "dx", "dw"});
  const auto mixed =
      rmsnorm_op().tensors(rmsnorm_of("bwd", {{"weights", "f32"}, {"save", "rstd"}}, DType::bf16));
  for (const auto& tensor : mixed) {
    CAPTURE(tensor.name);
    const bool single = tensor.name == "w" || tensor.name == "dw" || tensor.name == "rstd";
    CHECK(tensor.dtype == (single ? DType::f32 : DType::bf16));
  }
}

TEST_CASE("rmsnorm: the reference is the formula, by hand") {
  // mean(x²) = 7.5 and 0.25; with eps they are 8 and 0.75.
  const ReferenceTensors in{{"x", {1, -2, 3, -4, 0.5, 0.5, -0.5, 0.5}}, {"w", {1, 2, -1, 0.5}}};
  const auto t5 = test::run_reference(
      rmsnorm_of("fwd", {{"convention", "t5"}, {"save", "rstd"}, {"eps", "0.5"}}), in);
  CHECK(t5.at("rstd")[0] == Approx(1 / std::sqrt(8.0)));
  CHECK(t5.at("rstd")[1] == Approx(1 / std::sqrt(0.75)));
  CHECK(t5.at("y")[1] == Approx(-4 / std::sqrt(8.0)));
  CHECK(t5.at("y")[6] == Approx(0.5 / std::sqrt(0.75)));
  const auto gemma =
      test::run_reference(rmsnorm_of("fwd", {{"convention", "gemma"}, {"eps", "0.5"}}), in);
  CHECK(gemma.at("y")[1] == Approx(-6 / std::sqrt(8.0)));
  CHECK(gemma.at("y")[2] == Approx(0).margin(1e-12));
  const auto llama = test::run_reference(rmsnorm_of("fwd", {{"eps", "0.5"}}, DType::bf16), in);
  CHECK(llama.at("y")[3] == round_to(DType::bf16, -4 / std::sqrt(8.0)) * 0.5);
}

TEST_CASE("rmsnorm: a residual is added, rounded, written and normalised") {
  const ReferenceTensors in{
      {"x", {256, 1, 1, 1}}, {"residual", {0.5, 0, 0, 0}}, {"w", {1, 1, 1, 1}}};
  const auto out = test::run_reference(
      rmsnorm_of("fwd", {{"residual", "yes"}, {"convention", "t5"}}, DType::bf16, 1, 4), in);
  CHECK(out.at("sum")[0] == 256.5);
  CHECK(out.at("y")[0] / out.at("y")[1] == Approx(256));  // 256.5 is no bf16
}

TEST_CASE("rmsnorm: a quantised output has a scale for each token, and is rounded once") {
  const ReferenceTensors in{{"x", {1, -2, 3, -4, 0, 0, 0, 0}}, {"w", {1, 1, 1, 1}}};
  for (const auto& [type, limit] : {std::pair{"fp8", 448.0}, {"i8", 127.0}}) {
    const auto problem = rmsnorm_of("fwd", {{"output", type}, {"eps", "0.5"}}, DType::bf16);
    const auto out = test::run_reference(problem, in);
    CHECK(out.at("scale")[0] == Approx(4 / std::sqrt(8.0) / limit));
    CHECK(out.at("y")[3] == Approx(-limit));
    CHECK(out.at("y")[0] == Approx(limit / 4));
    CHECK(out.at("scale")[1] == 1);
    CHECK(out.at("y")[4] == 0);
    CHECK(test::tensor_names(problem) == std::vector<std::string>{"x", "w", "y", "scale"});
    CHECK(dtype_name(rmsnorm_op().tensors(problem)[2].dtype) == type);
  }
  CHECK(test::tensor_names(rmsnorm_of("bwd", {{"output", "i8"}})) ==
        test::tensor_names(rmsnorm_of("bwd", {})));
}

TEST_CASE("rmsnorm: the backward reference is the derivative of the forward one") {
  test::NormalValues draw{std::mt19937(5)};
  for (const std::string convention : {"llama", "gemma", "t5"})
    for (const std::string residual : {"no", "yes"})
      for (const std::int64_t d : {1, 2, 5}) {
        const std::int64_t m = 3;
        const auto n = static_cast<std::size_t>(m * d);
        const std::map<std::string, std::string> options{
            {"convention", convention}, {"residual", residual}, {"eps", "0.01"}};
        const auto forward = rmsnorm_of("fwd", options, DType::f32, m, d);
        const auto backward = rmsnorm_of("bwd", options, DType::f32, m, d);
        ReferenceTensors in{{"x", draw(n)},
                            {"residual", std::vector<double>(n)},
                            {"w", draw(static_cast<std::size_t>(d))},
                            {"dy", draw(n)},
                            {"dsum", draw(n)}};
        const auto out = test::run_reference(backward, in);
        // The sum of the outputs weighted by dy and dsum, as a function of x and w.
        const auto loss = [&](const ReferenceTensors& at) {
          const auto result = test::run_reference(forward, at);
          double sum = 0;
          for (std::size_t i = 0; i < n; ++i) {
            sum += result.at("y")[i] * in.at("dy")[i];
            if (residual == "yes") sum += result.at("sum")[i] * in.at("dsum")[i];
          }
          return sum;
        };
        // llama's x̂ moves in steps of its rounding to f32, which a quotient over less would see.
        const double step = 1e-2;
        for (const auto& [name, gradient] : {std::pair{"x", "dx"}, {"w", "dw"}})
          for (std::size_t i = 0; i < in.at(name).size(); ++i) {
            const auto moved = [&](double by) {
              ReferenceTensors at = in;
              at[name][i] = round_to(DType::f32, at[name][i] + by * step);
              return loss(at);
            };
            // Fourth order: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h.
            const double slope =
                (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * step);
            CAPTURE(convention, residual, d, name, i);
            CHECK(out.at(gradient)[i] == Approx(slope).epsilon(0.01).margin(2e-3));
          }
      }
}

TEST_CASE("rmsnorm: every option is a problem of its own, and eps is not") {
  std::set<std::string> texts;
  for (const std::string convention : {"llama", "gemma", "t5"})
    for (const std::string eps : {"1e-6", "0.000001"})
      texts.insert(rmsnorm_of("fwd", {{"convention", convention}, {"eps", eps}}).text());
  CHECK(texts.size() == 3);
}
