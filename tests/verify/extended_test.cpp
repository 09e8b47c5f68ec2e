// A truth that goes on from fewer tokens is the one that begins with all of them, in every op whose
// outputs sum over the tokens.
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "verify/host_threads.hpp"
#include "verify/truth.hpp"

using namespace fftune;

namespace {

using Options = std::map<std::string, std::string>;
using Sizes = std::map<std::string, std::int64_t>;

Problem problem_of(const std::string& op, const Sizes& sizes, const Options& options,
                   DType dtype = DType::bf16) {
  const Op& found = builtin_catalog().op(op);
  auto problem = canonical(found, {op, "bwd", dtype, sizes, options}, DeviceKind::cuda);
  return problem.with_size(found.token_size(), 1);
}

/// A problem of every op with sums, in its forms.
std::vector<Problem> problems() {
  const Sizes ffn{{"m", 1}, {"d", 24}, {"h", 40}}, linear{{"m", 1}, {"k", 24}, {"n", 40}};
  std::vector<Problem> problems{
      problem_of("rmsnorm", {{"m", 1}, {"d", 40}}, {}),
      problem_of("rmsnorm", {{"m", 1}, {"d", 40}}, {{"save", "rstd"}, {"residual", "yes"}}),
      problem_of("layernorm", {{"m", 1}, {"d", 40}}, {{"residual", "yes"}}),
      problem_of("bias-gelu", {{"m", 1}, {"h", 40}}, {}),
      problem_of("bias-gelu", {{"m", 1}, {"h", 40}}, {{"save", "input"}})};
  for (const std::string accumulate : {"no", "yes"}) {
    const Options options{{"accumulate", accumulate}};
    problems.push_back(problem_of("linear", linear, {{"accumulate", accumulate}, {"bias", "yes"}}));
    problems.push_back(problem_of("linear-cross-entropy", {{"m", 1}, {"d", 24}, {"vocab", 40}},
                                  {{"accumulate", accumulate}, {"bias", "yes"}}));
    for (const std::string save : {"preact", "input"})
      problems.push_back(problem_of("ffn", ffn, {{"accumulate", accumulate}, {"save", save}}));
    for (const std::string mask : {"block:0.33", "tail:0.25", "even:0.5", "random:0.4", "all"}) {
      problems.push_back(
          problem_of("masked-linear", linear, {{"accumulate", accumulate}, {"mask", mask}}));
      for (const std::string save : {"preact", "input"})
        problems.push_back(problem_of(
            "masked-ffn", ffn, {{"accumulate", accumulate}, {"mask", mask}, {"save", save}}));
    }
  }
  problems.push_back(problem_of("gated-rmsnorm", {{"m", 1}, {"d", 24}}, {}));
  problems.push_back(
      problem_of("causal-conv1d", {{"s", 1}, {"b", 2}, {"channels", 8}, {"width", 4}}, {}));
  problems.push_back(
      problem_of("gated-delta-rule",
                 {{"s", 1}, {"b", 2}, {"heads", 1}, {"v-heads", 2}, {"dim", 8}, {"v-dim", 4}}, {}));
  problems.push_back(problem_of(
      "ssd", {{"s", 1}, {"b", 2}, {"heads", 2}, {"groups", 1}, {"dim", 8}, {"state-dim", 4}}, {}));
  return problems;
}

/// An op that counts the tokens whose reference is computed, stage by stage.
class Counted final : public Op {
 public:
  explicit Counted(const Op& op) : op_(op) {}
  std::string_view name() const override { return op_.name(); }
  std::string_view summary() const override { return op_.summary(); }
  std::vector<std::string> passes() const override { return op_.passes(); }
  std::vector<SizeField> sizes() const override { return op_.sizes(); }
  std::vector<OptionField> options() const override { return op_.options(); }
  std::vector<DType> dtypes(DeviceKind kind) const override { return op_.dtypes(kind); }
  std::string_view token_size() const override { return op_.token_size(); }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return op_.tensors(problem);
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    return op_.stages(problem);
  }
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    tokens += problem.size(token_size());
    op_.reference(problem, stage, tensors, parallel);
  }
  std::vector<const Family*> families() const override { return op_.families(); }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return op_.baselines(problem, facts);
  }

  mutable std::int64_t tokens = 0;

 private:
  const Op& op_;
};

/// The tokens of all stages' references for what leaves the op, going from some tokens to more.
std::int64_t tokens_of_more(const Problem& problem, std::int64_t from, std::int64_t to) {
  HostThreads threads;
  const Counted op(builtin_catalog().op(problem.op));
  Truth truth(op, problem.with_size("m", from), 7, threads);
  const auto ask = [&] {
    for (std::size_t tensor = 0; tensor < truth.tensors().size(); ++tensor)
      if (truth.tensors()[tensor].role == Role::output) truth.expected(0, tensor);
  };
  ask();
  op.tokens = 0;
  truth.retoken(to);
  ask();
  return op.tokens;
}

/// Rows that are near each other, or the same in every bit where they count tokens.
void check_rows(const std::vector<const double*>& extended, const std::vector<const double*>& fresh,
                std::int64_t columns, double norm) {
  REQUIRE(extended.size() == fresh.size());
  double squares = 0;
  for (std::size_t row = 0; row < fresh.size(); ++row)
    for (std::int64_t column = 0; column < columns; ++column)
      squares += std::pow(extended[row][column] - fresh[row][column], 2);
  CHECK(std::sqrt(squares) <= 1e-13 * norm);
}

/// Checks every output of every run of stages that ends with it.
void check_alike(Truth& extended, Truth& fresh) {
  for (std::size_t tensor = 0; tensor < fresh.tensors().size(); ++tensor) {
    INFO(fresh.tensors()[tensor].name);
    if (const std::size_t stage = fresh.producer(tensor); stage < fresh.stages().size())
      for (const std::size_t first : {stage, std::size_t{0}}) {
        INFO("from stage " << first);
        const Expected& got = extended.expected(first, tensor);
        const Expected& wanted = fresh.expected(first, tensor);
        check_rows(got.rows, wanted.rows, fresh.columns(tensor), wanted.norm);
        CHECK(std::abs(got.norm - wanted.norm) <= 1e-13 * wanted.norm);
        CHECK(std::abs(got.tolerance - wanted.tolerance) <= 1e-6 * wanted.tolerance);
      }
    if (fresh.data().counts_tokens(tensor))
      CHECK(extended.encoded(tensor) == fresh.encoded(tensor));
  }
}

}  // namespace

TEST_CASE("a truth of more tokens goes on from fewer, in every op with sums") {
  HostThreads threads;
  std::set<std::string> ops;
  for (const Problem& problem : problems()) {
    const Op& op = builtin_catalog().op(problem.op);
    ops.insert(problem.op);
    Truth extended(op, problem, 7, threads);
    for (const std::int64_t tokens : {1, 99, 100, 101, 160, 161}) {
      const Problem whole = problem.with_size(op.token_size(), tokens);
      INFO(whole.text());
      extended.retoken(tokens);
      Truth fresh(op, whole, 7, threads);
      // Not at every size, so that several parts come together too.
      if (tokens != 100 && tokens != 160) check_alike(extended, fresh);
    }
  }
  for (const Op* op : builtin_catalog().ops)
    for (const auto& pass : op->passes()) {
      if (pass != "bwd") continue;
      INFO(op->name());
      const std::set<std::string_view> without_sums{"act-mul",        "rope",    "attention",
                                                    "masked-softmax", "moe-ffn", "moe-route",
                                                    "cross-entropy"};
      CHECK((ops.contains(std::string(op->name())) || without_sums.contains(op->name())));
    }
}

TEST_CASE("more tokens cost what is new, and again each token whose mark has changed") {
  const Sizes ffn{{"m", 1}, {"d", 24}, {"h", 40}};
  const auto masked = [&](const char* mask) {
    return problem_of("masked-ffn", ffn, {{"mask", mask}});
  };
  // Each stage behind the first is computed with exact and with rounded inputs.
  CHECK(tokens_of_more(problem_of("ffn", ffn, {}), 300, 301) == 7);
  CHECK(tokens_of_more(problem_of("ffn", ffn, {{"save", "input"}}), 300, 301) == 9);
  CHECK(tokens_of_more(problem_of("rmsnorm", {{"m", 1}, {"d", 24}}, {}), 300, 310) == 10);
  CHECK(tokens_of_more(masked("random:0.5"), 300, 301) == 7);
  // A third of 300 tokens are 100, and of 301 tokens too; of 302 they are 101: one has changed. The
  // sums that it leaves take all stages but that of dx.
  CHECK(tokens_of_more(masked("block:0.3334"), 300, 301) == 7);
  CHECK(tokens_of_more(masked("block:0.3334"), 301, 302) == 7 * 2 + 5);
  // Where half of the marks move, all is computed anew.
  CHECK(tokens_of_more(masked("tail:0.5"), 300, 601) == 7 * 601);
}
