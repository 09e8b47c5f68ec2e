#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/cross_entropy/cross_entropy.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem loss_problem(DeviceKind kind, const std::string& pass, DType dtype, std::int64_t m,
                     std::int64_t vocab, std::map<std::string, std::string> options = {}) {
  return canonical(cross_entropy_op(),
                   {"cross-entropy", pass, dtype, {{"m", m}, {"vocab", vocab}}, std::move(options)},
                   kind);
}

Problem random_loss(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "bwd"});
  // The loss of a single id is 0, to which no error can be relative.
  auto [m, vocab] = draw.matrix(most_elements);
  vocab = std::max<std::int64_t>(vocab, 2);
  std::map<std::string, std::string> options{{"reduction", draw.of({"none", "sum", "mean"})},
                                             {"class-weights", draw.of({"no", "yes"})}};
  if (draw.below(2)) options["label-smoothing"] = "0.1";
  if (draw.below(3) == 0) options["z-loss"] = "0.001";
  if (draw.below(3) == 0) options["softcap"] = "5";
  if (draw.below(3) == 0) options["ignore-index"] = "0";
  if (pass == "fwd") {
    options["logprobs"] = draw.of({"no", "yes"});
    options["entropy"] = draw.of({"no", "yes"});
  }
  if (draw.below(4) == 0) {
    options["slice-of"] = std::to_string(vocab + draw.below(3) * 50);
    options["reduction"] = "none";
    options["class-weights"] = "no";
  }
  return loss_problem(kind, pass, draw.of(cross_entropy_op().dtypes(kind)), m, vocab, options);
}

}  // namespace

TEST_CASE("the reference of cross-entropy is the formula, by hand") {
  const ReferenceTensors in{{"logits", {0, std::log(3.0), 1, 1, 5, 9}}, {"labels", {1, 0, -100}}};
  const auto run = [&](std::map<std::string, std::string> options) {
    return run_reference(loss_problem(DeviceKind::cpu, "fwd", DType::f32, 3, 2, std::move(options)),
                         in);
  };
  const auto plain = run({{"logprobs", "yes"}, {"entropy", "yes"}});
  CHECK(plain.at("loss")[0] == Approx(std::log(4.0 / 3)));
  CHECK(plain.at("loss")[1] == Approx(std::log(2.0)));
  CHECK(plain.at("loss")[2] == 0);
  CHECK(plain.at("lse")[0] == Approx(std::log(4.0)));
  CHECK(plain.at("lse")[2] == 0);
  CHECK(plain.at("logprob")[0] == Approx(std::log(0.75)));
  CHECK(plain.at("entropy")[0] == Approx(-0.25 * std::log(0.25) - 0.75 * std::log(0.75)));
  CHECK(run({{"reduction", "sum"}}).at("loss")[0] == Approx(std::log(4.0 / 3) + std::log(2.0)));
  const double smooth = (std::log(4.0) + std::log(4.0 / 3)) / 2;
  const double lse = std::log(4.0);
  CHECK(run({{"label-smoothing", "0.5"}, {"z-loss", "0.25"}}).at("loss")[0] ==
        Approx(0.5 * std::log(4.0 / 3) + 0.5 * smooth + 0.25 * lse * lse));
}

TEST_CASE("the gradient of cross-entropy's reference is that of its differences") {
  const std::int64_t m = 3, vocab = 5;
  const std::map<std::string, std::string> options{{"reduction", "mean"},
                                                   {"class-weights", "yes"},
                                                   {"label-smoothing", "0.2"},
                                                   {"z-loss", "0.03"},
                                                   {"softcap", "4"}};
  const Problem forward = loss_problem(DeviceKind::cpu, "fwd", DType::f32, m, vocab, options);
  ReferenceTensors in{{"logits", {}},
                      {"labels", {4, -100, 2}},
                      {"class_weights", {0.5, 1, 2, 0.25, 3}},
                      {"items", {7}},
                      {"dloss", {1.5}}};
  for (int i = 0; i < m * vocab; ++i) in["logits"].push_back(std::sin(i * 1.7) * 3);
  in["lse"] = run_reference(forward, in).at("lse");
  const auto gradient =
      run_reference(loss_problem(DeviceKind::cpu, "bwd", DType::f32, m, vocab, options), in)
          .at("dlogits");
  constexpr double step = 1e-5;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const auto loss_at = [&](double by) {
      ReferenceTensors moved = in;
      moved["logits"][i] += by;
      return run_reference(forward, moved).at("loss")[0];
    };
    CHECK(gradient[i] == Approx(1.5 * (loss_at(step) - loss_at(-step)) / (2 * step)).margin(1e-8));
  }
}

TEST_CASE("slices of a vocabulary have the loss and the gradient of the whole") {
  const std::map<std::string, std::string> rules{
      {"label-smoothing", "0.2"}, {"z-loss", "0.03"}, {"softcap", "4"}};
  const std::vector<double> labels{4, -100, 2, 0};
  const std::int64_t rows = 4, vocab = 5;
  ReferenceTensors whole{{"logits", {}}, {"labels", labels}, {"dloss", {1.5, 1, 0.5, 2}}};
  for (int i = 0; i < rows * vocab; ++i) whole["logits"].push_back(std::sin(i * 1.7) * 3);
  const auto problem = [&](const char* pass, std::int64_t ids, bool is_slice) {
    auto options = rules;
    if (is_slice) options["slice-of"] = std::to_string(vocab);
    if (std::string(pass) == "fwd") options["logprobs"] = "yes";
    return loss_problem(DeviceKind::cpu, pass, DType::f32, rows, ids, options);
  };
  const auto right = run_reference(problem("fwd", vocab, false), whole);
  whole["lse"] = right.at("lse");
  const auto gradient = run_reference(problem("bwd", vocab, false), whole).at("dlogits");
  std::vector<double> powers(rows), logprob(rows), loss(rows);
  for (const auto& [first, ids] : {std::pair{0, 3}, std::pair{3, 2}}) {
    ReferenceTensors part{{"logits", {}}, {"labels", {}}, {"dloss", whole.at("dloss")}};
    for (int row = 0; row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row);
      part["labels"].push_back(labels[at] < 0       ? -100
                               : labels[at] < first ? ids
                                                    : labels[at] - first);
      for (int id = 0; id < ids; ++id)
        part["logits"].push_back(
            whole["logits"][at * vocab + static_cast<std::size_t>(first + id)]);
    }
    const auto found = run_reference(problem("fwd", ids, true), part);
    part["lse"] = whole.at("lse");
    const auto own = run_reference(problem("bwd", ids, true), part).at("dlogits");
    for (int row = 0; row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row);
      if (labels[at] < 0) continue;
      CAPTURE(first, row);
      const double lse = found.at("lse")[at], all = right.at("lse")[at];
      const bool is_here = labels[at] >= first && labels[at] < first + ids;
      CHECK((found.at("logprob")[at] != 0) == is_here);
      powers[at] += std::exp(lse);
      if (is_here) logprob[at] = found.at("logprob")[at] + lse - all;
      // The loss by the log-sum-exp of all slices, and the term of z-loss once.
      loss[at] += found.at("loss")[at] - 0.03 * lse * lse +
                  ((is_here ? 0.8 : 0) + 0.2 * ids / vocab) * (all - lse);
      for (int id = 0; id < ids; ++id)
        CHECK(own[at * static_cast<std::size_t>(ids) + static_cast<std::size_t>(id)] ==
              Approx(gradient[at * vocab + static_cast<std::size_t>(first + id)]));
    }
  }
  for (std::size_t row = 0; row < labels.size(); ++row)
    if (labels[row] >= 0) {
      const double all = right.at("lse")[row];
      CHECK(std::log(powers[row]) == Approx(all));
      CHECK(logprob[row] == Approx(right.at("logprob")[row]));
      CHECK(loss[row] + 0.03 * all * all == Approx(right.at("loss")[row]));
    }
}

TEST_CASE("options that a slice of a vocabulary cannot have are refused") {
  const auto refuse = [](std::map<std::string, std::string> options, const char* words) {
    options["slice-of"] = "9";
    CHECK_THROWS_WITH(loss_problem(DeviceKind::cpu, "fwd", DType::f32, 3, 5, options), words);
  };
  refuse({{"reduction", "mean"}},
         "cross-entropy: slice-of with a reduction: the loss of a token needs the other slices; "
         "give reduction=none");
  refuse({{"class-weights", "yes"}},
         "cross-entropy: slice-of with class-weights=yes: the weight of a label in another slice "
         "is not known; weigh dloss instead");
  CHECK_THROWS_WITH(
      loss_problem(DeviceKind::cpu, "fwd", DType::f32, 3, 10, {{"slice-of", "9"}}),
      "cross-entropy: slice-of=9 with vocab=10: a slice has no more ids than the vocabulary");
}

TEST_CASE("gradients of cross-entropy may lie where the logits do") {
  const auto backend = open_cpu();
  check_in_place(
      *backend, cross_entropy_op(),
      loss_problem(DeviceKind::cpu, "bwd", DType::bf16, 33, 70, {{"label-smoothing", "0.1"}}),
      {{"dlogits", "logits"}});
}

const FuzzCases<cross_entropy_op, random_loss, FuzzCounts{.small = 2000, .gpu = 300}>
    cross_entropy_cases;
