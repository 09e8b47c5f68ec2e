// The ops' descriptions and their references, by hand.
#include <cmath>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/masked/masked.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;

namespace {

Problem linear_problem(std::int64_t m, std::int64_t k, std::int64_t n, std::string mask = "all") {
  return canonical(masked_linear_op(),
                   {"masked-linear",
                    "fwd",
                    DType::f32,
                    {{"m", m}, {"k", k}, {"n", n}},
                    {{"mask", std::move(mask)}}},
                   DeviceKind::cpu);
}

Problem ffn_problem(std::int64_t m, std::int64_t d, std::int64_t h) {
  return canonical(masked_ffn_op(),
                   {"masked-ffn", "fwd", DType::f32, {{"m", m}, {"d", d}, {"h", h}}, {}},
                   DeviceKind::cpu);
}

std::vector<std::string> names(const Op& op, const Problem& problem, Role role) {
  std::vector<std::string> names;
  for (const auto& tensor : op.tensors(problem))
    if (tensor.role == role) names.push_back(tensor.name);
  return names;
}

}  // namespace

TEST_CASE("the masked ops are in the catalog, and every source of their families is embedded") {
  const auto& catalog = builtin_catalog();
  for (const Op* op : {&masked_linear_op(), &masked_ffn_op()}) {
    REQUIRE(&catalog.op(op->name()) == op);
    for (const auto* family : op->families())
      REQUIRE(catalog.sources->hash(family->sources()).size() == 16);
  }
}

TEST_CASE("buffers are in the order that the C API promises") {
  using Names = std::vector<std::string>;
  const Problem linear = linear_problem(2, 3, 4);
  CHECK(names(masked_linear_op(), linear, Role::input) == Names{"x", "mask", "w_true", "w_false"});
  CHECK(names(masked_linear_op(), linear, Role::output) == Names{"y"});
  Problem backward = linear;
  backward.pass = "bwd";
  CHECK(names(masked_linear_op(), backward, Role::input) ==
        Names{"dy", "x", "mask", "w_true", "w_false"});
  CHECK(names(masked_linear_op(), backward, Role::output) == Names{"dx", "dw_true", "dw_false"});
  const Problem ffn = ffn_problem(2, 3, 4);
  CHECK(names(masked_ffn_op(), ffn, Role::input) == Names{"x", "mask", "w_gate_true", "w_up_true",
                                                          "w_down_true", "w_gate_false",
                                                          "w_up_false", "w_down_false"});
  CHECK(names(masked_ffn_op(), ffn, Role::output) == Names{"y"});
  const auto mask = masked_ffn_op().tensors(ffn)[1];
  CHECK(mask.dtype == DType::u8);
  CHECK(mask.shape == std::vector<std::int64_t>{2});
}

TEST_CASE("every place of a stage's tensors is that of its name") {
  const auto check = [](const Op& op, const Problem& problem, masked::Stage stage,
                        const std::string& a, const std::vector<std::string>& weights,
                        const std::string& c) {
    const auto tensors = op.tensors(problem);
    const auto product = masked::product_of(stage, problem);
    CHECK(tensors.at(product.a).name == a);
    CHECK(tensors.at(product.mask).name == "mask");
    CHECK(tensors.at(product.c).name == c);
    CHECK(tensors.at(product.a).sorted == product.sorted_a);
    CHECK(tensors.at(product.c).sorted == product.sorted_c);
    for (std::size_t expert = 0; expert < 2; ++expert)
      for (std::size_t i = 0; i < weights.size(); ++i)
        CHECK(tensors.at(product.b.at(expert).at(i)).name ==
              weights[i] + (expert == 0 ? "_true" : "_false"));
  };
  check(masked_linear_op(), linear_problem(2, 3, 4), masked::Stage::linear, "x", {"w"}, "y");
  check(masked_ffn_op(), ffn_problem(2, 3, 4), masked::Stage::gate_up, "x", {"w_gate", "w_up"},
        "hidden");
  check(masked_ffn_op(), ffn_problem(2, 3, 4), masked::Stage::down, "hidden", {"w_down"}, "y");
}

TEST_CASE("each token goes through its own expert, whatever byte marks it") {
  HostThreads threads;
  ReferenceTensors tensors{{"x", {1, 2, 3, 4, 5, 6}},
                           {"mask", {0, 255, 1}},
                           {"w_true", {1, 0, 0, 10}},
                           {"w_false", {-1, 0, 0, -100}}};
  masked_linear_op().reference(linear_problem(3, 2, 2), 0, tensors, threads);
  CHECK(tensors.at("y") == std::vector<double>{-1, -200, 3, 40, 5, 60});
}

TEST_CASE("gradients go through the token's expert, and an expert without tokens has none") {
  HostThreads threads;
  Problem problem = linear_problem(3, 2, 1);
  problem.pass = "bwd";
  ReferenceTensors tensors{{"dy", {2, 3, 5}},
                           {"x", {1, 2, 3, 4, 5, 6}},
                           {"mask", {0, 9, 0}},
                           {"w_true", {1, 10}},
                           {"w_false", {-1, 7}}};
  for (const std::size_t stage : {0, 1})
    masked_linear_op().reference(problem, stage, tensors, threads);
  CHECK(tensors.at("dx") == std::vector<double>{-2, 14, 3, 30, -5, 35});
  CHECK(tensors.at("dw_true") == std::vector<double>{9, 12});
  CHECK(tensors.at("dw_false") == std::vector<double>{27, 34});
  tensors["mask"] = {0, 0, 0};
  masked_linear_op().reference(problem, 1, tensors, threads);
  CHECK(tensors.at("dw_true") == std::vector<double>{0, 0});
}

TEST_CASE("hidden has the rows of the true expert first") {
  HostThreads threads;
  ReferenceTensors tensors{{"x", {1, 2, 3}},     {"mask", {0, 1, 0}},  {"w_gate_true", {1}},
                           {"w_up_true", {1}},   {"w_down_true", {2}}, {"w_gate_false", {1}},
                           {"w_up_false", {-1}}, {"w_down_false", {3}}};
  const Problem problem = ffn_problem(3, 1, 1);
  masked_ffn_op().reference(problem, 0, tensors, threads);
  const auto gated = [](double x) { return activate(Activation::silu, x) * x; };
  const auto& hidden = tensors.at("hidden");
  CHECK(hidden[0] == Approx(gated(2)));
  CHECK(hidden[1] == Approx(-gated(1)));
  CHECK(hidden[2] == Approx(-gated(3)));
  masked_ffn_op().reference(problem, 1, tensors, threads);
  const auto& y = tensors.at("y");
  CHECK(y[0] == Approx(-3 * gated(1)));
  CHECK(y[1] == Approx(2 * gated(2)));
  CHECK(y[2] == Approx(-3 * gated(3)));
}

TEST_CASE("a pattern is written in its shortest form, and anything else is refused") {
  CHECK(linear_problem(2, 3, 4, "random:0.50").option("mask") == "random:0.5");
  CHECK(linear_problem(2, 3, 4, "all").option("mask") == "block:1");
  CHECK(linear_problem(2, 3, 4, "none").option("mask") == "block:0");
  for (const char* wrong : {"", "block", "block:", "block:1.5", "block:-0.1", "stripes:0.5", "0.5"})
    CHECK_THROWS_AS(linear_problem(2, 3, 4, wrong), Error);
}
