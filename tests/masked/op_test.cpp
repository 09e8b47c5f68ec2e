// The ops' descriptions and their references, by hand.
#include <cmath>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/masked/masked.hpp"
#include "registry/catalog.hpp"
#include "support/op_reference.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;

namespace {

Problem cpu_linear_problem(std::int64_t m, std::int64_t k, std::int64_t n,
                           std::string mask = "all") {
  return canonical(masked_linear_op(),
                   {"masked-linear",
                    "fwd",
                    DType::f32,
                    {{"m", m}, {"k", k}, {"n", n}},
                    {{"mask", std::move(mask)}}},
                   DeviceKind::cpu);
}

Problem cpu_ffn_problem(std::int64_t m, std::int64_t d, std::int64_t h) {
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
  for (const Op* op : {&masked_linear_op(), &masked_ffn_op()}) test::check_registration(*op);
}

TEST_CASE("buffers are in the order that the C API promises") {
  using Names = std::vector<std::string>;
  const Problem linear = cpu_linear_problem(2, 3, 4);
  CHECK(names(masked_linear_op(), linear, Role::input) == Names{"x", "mask", "w_true", "w_false"});
  CHECK(names(masked_linear_op(), linear, Role::output) == Names{"y"});
  Problem backward = linear;
  backward.pass = "bwd";
  CHECK(names(masked_linear_op(), backward, Role::input) ==
        Names{"dy", "x", "mask", "w_true", "w_false"});
  CHECK(names(masked_linear_op(), backward, Role::output) == Names{"dx", "dw_true", "dw_false"});
  const Problem ffn = cpu_ffn_problem(2, 3, 4);
  CHECK(names(masked_ffn_op(), ffn, Role::input) == Names{"x", "mask", "w_gate_true", "w_up_true",
                                                          "w_down_true", "w_gate_false",
                                                          "w_up_false", "w_down_false"});
  CHECK(names(masked_ffn_op(), ffn, Role::output) == Names{"y"});
  const auto mask = masked_ffn_op().tensors(ffn)[1];
  CHECK(mask.dtype == DType::u8);
  CHECK(mask.shape == std::vector<std::int64_t>{2});
}

TEST_CASE("the buffers of masked-ffn's passes are in the order that the C API promises") {
  using Names = std::vector<std::string>;
  const Op& op = masked_ffn_op();
  Problem saving = cpu_ffn_problem(2, 3, 4);
  saving.options["save"] = "preact";
  CHECK(names(op, saving, Role::output) == Names{"y", "gate", "up"});
  Problem backward = cpu_ffn_problem(2, 3, 4);
  backward.pass = "bwd";
  const Names weights{"w_gate_true",  "w_up_true",  "w_down_true",
                      "w_gate_false", "w_up_false", "w_down_false"};
  const Names gradients{"dx",           "dw_gate_true",  "dw_up_true",
                        "dw_down_true", "dw_gate_false", "dw_up_false",
                        "dw_down_false"};
  Names inputs{"dy", "x", "mask", "gate", "up"};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  CHECK(names(op, backward, Role::input) == inputs);
  CHECK(names(op, backward, Role::output) == gradients);
  backward.options = {{"save", "input"}, {"accumulate", "yes"}, {"act", "silu"}};
  backward = canonical(op, backward, DeviceKind::cpu);
  inputs = {"dy", "x", "mask"};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  for (auto name = gradients.begin() + 1; name != gradients.end(); ++name)
    inputs.push_back(*name + "_before");
  CHECK(names(op, backward, Role::input) == inputs);
  CHECK(names(op, backward, Role::output) == gradients);
}

TEST_CASE("every stage's GEMM has the experts' tensors, in the order that the tensors say") {
  using Names = std::vector<std::string>;
  const auto gemm_of = [](const Problem& problem, const std::string& name) {
    for (const GemmStage& stage : masked::gemm_stages(problem))
      if (stage.name == name) return stage.gemm(problem);
    FAIL("there is no stage " << name);
    return GemmProblem();
  };
  const auto names_of = [](const std::vector<TensorNames>& matrices, std::size_t group) {
    Names names;
    for (const TensorNames& matrix : matrices) names.emplace_back(matrix.at(group));
    return names;
  };
  const auto check_sorted = [](const Op& op, const Problem& problem, const Names& names,
                               bool sorted) {
    const auto tensors = op.tensors(problem);
    for (const auto& name : names) CHECK(tensors.at(tensor_index(tensors, name)).sorted == sorted);
  };
  const auto outputs_of = [&](const GemmProblem& gemm) {
    Names names = names_of(gemm.c, 0);
    const Epilogue& epilogue = gemm.epilogue;
    const bool gradient = epilogue.kind == EpilogueKind::activation_gradient;
    for (const auto name : {gradient ? "" : epilogue.gate, gradient ? "" : epilogue.up,
                            epilogue.d_up, epilogue.hidden})
      if (!name.empty()) names.emplace_back(name);
    return names;
  };
  const auto check_groups = [&](const GemmProblem& gemm, Grouping by, const Names& a) {
    CHECK(gemm.groups.by == by);
    CHECK(gemm.groups.count == 2);
    CHECK(gemm.groups.mask == "mask");
    CHECK(names_of(gemm.a, 0) == a);
  };
  const auto check_rows = [&](const Op& op, const Problem& problem, const std::string& stage,
                              const Names& a, const Names& weights, const Names& c) {
    CAPTURE(problem.text(), stage);
    const GemmProblem gemm = gemm_of(problem, stage);
    check_groups(gemm, Grouping::rows, a);
    CHECK(outputs_of(gemm) == c);
    check_sorted(op, problem, a, gemm.a_sorted);
    check_sorted(op, problem, c, gemm.c_sorted);
    for (const std::size_t expert : {0, 1}) {
      Names own;
      for (const auto& name : weights) own.push_back(name + (expert == 0 ? "_true" : "_false"));
      CHECK(names_of(gemm.b, expert) == own);
    }
  };
  const auto check_reduction = [&](const Op& op, const Problem& problem, const std::string& stage,
                                   const Names& a, const std::string& b, const Names& gradients) {
    CAPTURE(problem.text(), stage);
    const GemmProblem gemm = gemm_of(problem, stage);
    check_groups(gemm, Grouping::reduction, a);
    CHECK(names_of(gemm.b, 0) == Names{b});
    check_sorted(op, problem, a, gemm.a_sorted);
    check_sorted(op, problem, {b}, gemm.b_sorted);
    for (const std::size_t expert : {0, 1}) {
      Names own, before;
      for (const auto& name : gradients) {
        own.push_back(name + (expert == 0 ? "_true" : "_false"));
        before.push_back(own.back() + "_before");
      }
      CHECK(names_of(gemm.c, expert) == own);
      CHECK(names_of(gemm.epilogue.source, expert) == (accumulates(problem) ? before : Names{}));
    }
  };
  Problem linear = cpu_linear_problem(2, 3, 4);
  check_rows(masked_linear_op(), linear, "linear", {"x"}, {"w"}, {"y"});
  linear.pass = "bwd";
  check_rows(masked_linear_op(), linear, "dx", {"dy"}, {"w"}, {"dx"});
  check_reduction(masked_linear_op(), linear, "dw", {"dy"}, "x", {"dw"});
  const Op& op = masked_ffn_op();
  Problem ffn = cpu_ffn_problem(2, 3, 4);
  check_rows(op, ffn, "gate_up", {"x"}, {"w_gate", "w_up"}, {"hidden"});
  check_rows(op, ffn, "down", {"hidden"}, {"w_down"}, {"y"});
  ffn.options["save"] = "preact";
  check_rows(op, ffn, "gate_up", {"x"}, {"w_gate", "w_up"}, {"hidden", "gate", "up"});
  for (const char* save : {"preact", "input"})
    for (const char* accumulate : {"no", "yes"}) {
      ffn.pass = "bwd";
      ffn.options["save"] = save;
      ffn.options["accumulate"] = accumulate;
      const bool again = recomputes(ffn);
      if (again)
        check_rows(op, ffn, "gate_up", {"x"}, {"w_gate", "w_up"}, {"hidden", "gate", "up"});
      check_rows(op, ffn, "d_hidden", {"dy"}, {"w_down"},
                 again ? Names{"d_gate", "d_up"} : Names{"d_gate", "d_up", "hidden"});
      check_rows(op, ffn, "d_x", {"d_gate", "d_up"}, {"w_gate", "w_up"}, {"dx"});
      check_reduction(op, ffn, "d_gate_up", {"d_gate", "d_up"}, "x", {"dw_gate", "dw_up"});
      check_reduction(op, ffn, "d_down", {"dy"}, "hidden", {"dw_down"});
    }
}

TEST_CASE("a GEMM gets the share of a mask's pattern, and whether it scatters the tokens") {
  struct Expected {
    const char* mask;
    double share;
    bool scattered;
  };
  for (const auto& [mask, share, scattered] :
       {Expected{"block:0.33", 0.33, false}, Expected{"tail:0.1", 0.1, false},
        Expected{"even:0.5", 0.5, true}, Expected{"random:0.9", 0.9, true},
        Expected{"random:0", 0, false}, Expected{"all", 1, false}, Expected{"none", 0, false}}) {
    CAPTURE(mask);
    Problem problem = cpu_linear_problem(2, 3, 4);
    problem.options["mask"] = mask;
    const Groups groups = masked::gemm_stages(problem).front().gemm(problem).groups;
    CHECK(groups.expected_share == share);
    CHECK(groups.scattered == scattered);
  }
}

TEST_CASE("each token goes through its own expert, whatever byte marks it") {
  HostThreads threads;
  ReferenceTensors tensors{{"x", {1, 2, 3, 4, 5, 6}},
                           {"mask", {0, 255, 1}},
                           {"w_true", {1, 0, 0, 10}},
                           {"w_false", {-1, 0, 0, -100}}};
  masked_linear_op().reference(cpu_linear_problem(3, 2, 2), 0, tensors, threads);
  CHECK(tensors.at("y") == std::vector<double>{-1, -200, 3, 40, 5, 60});
}

TEST_CASE("gradients go through the token's expert, and an expert without tokens has none") {
  HostThreads threads;
  Problem problem = cpu_linear_problem(3, 2, 1);
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

TEST_CASE("computing gate and up again costs two products more and keeps 2 m h elements less") {
  Problem kept = cpu_ffn_problem(5, 16, 24);
  kept.pass = "bwd";
  Problem again = kept;
  kept.options["save"] = "preact";
  again.options["save"] = "input";
  const Op& op = masked_ffn_op();
  CHECK(cost_of(op, kept).flops == 12.0 * 5 * 16 * 24);
  CHECK(cost_of(op, again).flops == 16.0 * 5 * 16 * 24);
  CHECK(kept_bytes(op.tensors(kept)) == 4 * (5 * 16 + 2 * 5 * 24) + 5);
  CHECK(kept_bytes(op.tensors(again)) == 4 * 5 * 16 + 5);
}

TEST_CASE("hidden has the rows of the true expert first") {
  HostThreads threads;
  ReferenceTensors tensors{{"x", {1, 2, 3}},     {"mask", {0, 1, 0}},  {"w_gate_true", {1}},
                           {"w_up_true", {1}},   {"w_down_true", {2}}, {"w_gate_false", {1}},
                           {"w_up_false", {-1}}, {"w_down_false", {3}}};
  const Problem problem = cpu_ffn_problem(3, 1, 1);
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
  CHECK(cpu_linear_problem(2, 3, 4, "random:0.50").option("mask") == "random:0.5");
  CHECK(cpu_linear_problem(2, 3, 4, "all").option("mask") == "block:1");
  CHECK(cpu_linear_problem(2, 3, 4, "none").option("mask") == "block:0");
  for (const char* wrong : {"", "block", "block:", "block:1.5", "block:-0.1", "stripes:0.5", "0.5"})
    CHECK_THROWS_AS(cpu_linear_problem(2, 3, 4, wrong), Error);
}
