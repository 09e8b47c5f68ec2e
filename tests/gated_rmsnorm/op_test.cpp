#include <cmath>
#include <random>
#include <utility>

#include "core/error.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "support/gradients.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(const std::string& pass, std::map<std::string, std::int64_t> sizes,
                   Options options = {}, DType dtype = DType::f32) {
  return canonical(gated_rmsnorm_op(), {"gated-rmsnorm", pass, dtype, std::move(sizes), options},
                   DeviceKind::cpu);
}

double silu(double z) {
  return z / (1 + std::exp(-z));
}

}  // namespace

TEST_CASE("the gate is a factor of the result, or of what is normalised, by hand") {
  const ReferenceTensors in{{"x", {3, 4}}, {"z", {1, -2}}, {"w", {2, 0.5}}};
  const double r = 1 / std::sqrt(12.5 + 1e-6), sigmoid = 1 / (1 + std::exp(-1.0));
  const auto run = [&](Options options) {
    return test::run_reference(problem_of("fwd", {{"m", 1}, {"d", 2}}, options), in).at("y");
  };
  const auto after = run({});
  CHECK(after[0] == Approx(3 * r * 2 * silu(1)));
  CHECK(after[1] == Approx(4 * r * 0.5 * silu(-2)));
  CHECK(run({{"gate", "sigmoid"}})[0] == Approx(3 * r * 2 * sigmoid));
  const double u = 3 * silu(1), v = 4 * silu(-2);
  CHECK(run({{"order", "before"}})[1] == Approx(v / std::sqrt((u * u + v * v) / 2 + 1e-6) * 0.5));
}

TEST_CASE("groups of a token have norms and weights of their own, and z may be wider") {
  const ReferenceTensors in{{"x", {3, 4, 1, 1}}, {"z", {1, 1, 1, 1, 9}}, {"w", {1, 2, 3, 4}}};
  const auto y =
      test::run_reference(problem_of("fwd", {{"m", 1}, {"d", 2}, {"groups", 2}, {"z-row", 5}}), in)
          .at("y");
  CHECK(y[1] == Approx(4 / std::sqrt(12.5 + 1e-6) * 2 * silu(1)));
  CHECK(y[3] == Approx(4 / std::sqrt(1 + 1e-6) * silu(1)));
}

TEST_CASE("all norms of a token may have one w") {
  const ReferenceTensors in{{"x", {3, 4, 1, 1}}, {"z", {1, 1, 1, 1}}, {"w", {1, 2}}};
  const std::map<std::string, std::int64_t> sizes{{"m", 1}, {"d", 2}, {"groups", 2}};
  const Options options{{"weights-for", "token"}};
  const auto y = test::run_reference(problem_of("fwd", sizes, options), in).at("y");
  CHECK(y[1] == Approx(4 / std::sqrt(12.5 + 1e-6) * 2 * silu(1)));
  CHECK(y[3] == Approx(1 / std::sqrt(1 + 1e-6) * 2 * silu(1)));
  CHECK_THROWS_AS(problem_of("bwd", sizes, options), Error);
  CHECK_THROWS_WITH(problem_of("fwd", sizes, {{"weights-for", "token"}, {"norm", "none"}}),
                    "gated-rmsnorm: weights-for=token with norm=none: there are no weights");
}

TEST_CASE("without a norm the gate alone is a factor, and a norm may have one gate") {
  const ReferenceTensors in{{"x", {3, 4, 1, 2}}, {"z", {1, -2, 9}}};
  const Options options{{"norm", "none"}, {"gate", "sigmoid"}, {"gate-for", "norm"}};
  const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
  const auto y =
      test::run_reference(
          problem_of("fwd", {{"m", 1}, {"d", 2}, {"groups", 2}, {"z-row", 3}}, options), in)
          .at("y");
  CHECK(y[0] == Approx(3 * sigmoid(1)));
  CHECK(y[1] == Approx(4 * sigmoid(1)));
  CHECK(y[3] == Approx(2 * sigmoid(-2)));
  CHECK_THROWS_AS(problem_of("fwd", {{"m", 1}, {"d", 2}}, {{"norm", "none"}, {"order", "before"}}),
                  Error);
}

TEST_CASE("the gradients of the reference are the differences of its values") {
  std::mt19937_64 random(3);
  for (const char* order : {"after", "before"})
    for (const char* gate : {"silu", "sigmoid"})
      for (const std::int64_t groups : {1, 2}) {
        const Options options{{"order", order}, {"gate", gate}, {"eps", "0.01"}};
        const std::map<std::string, std::int64_t> sizes{{"m", 3}, {"d", 4}, {"groups", groups}};
        check_gradients(gated_rmsnorm_op(), problem_of("fwd", sizes, options),
                        problem_of("bwd", sizes, options), {{"x", "dx"}, {"z", "dz"}, {"w", "dw"}},
                        random);
      }
}

TEST_CASE("llama rounds the normalised value and its product with a weight of the same type") {
  const ReferenceTensors in{{"x", {3, 4}}, {"z", {1, 1}}, {"w", {1.0078125, 1}}};
  const auto y_of = [&](Options options) {
    options["convention"] = "llama";
    return test::run_reference(problem_of("fwd", {{"m", 1}, {"d", 2}}, options, DType::bf16), in)
        .at("y")[0];
  };
  const double normed = round_to(DType::bf16, 3 / std::sqrt(12.5 + double{1e-6f}));
  CHECK(y_of({}) == round_to(DType::bf16, normed * 1.0078125) * (1 / (1 + std::exp(-1.0))));
  CHECK(y_of({{"weights", "f32"}}) == normed * 1.0078125 * (1 / (1 + std::exp(-1.0))));
}

TEST_CASE("a gate whose rows overlap is refused") {
  CHECK_THROWS_WITH(problem_of("fwd", {{"m", 1}, {"d", 4}, {"groups", 2}, {"z-row", 7}}),
                    "gated-rmsnorm: z-row=7 is less than groups * d = 8");
}
