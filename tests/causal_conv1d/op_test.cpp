#include <cmath>
#include <random>
#include <utility>

#include "causal_conv1d/problems.hpp"
#include "core/error.hpp"
#include "support/error_of.hpp"
#include "support/gradients.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const SmallProblems problem_of{conv_problem, {{"s", 3}, {"b", 1}, {"channels", 1}, {"width", 3}}};

std::string refusal(const std::string& pass, Sizes sizes, Options options = {}) {
  return error_of([&] { problem_of(pass, std::move(sizes), std::move(options)); });
}

using Values = std::vector<double>;

}  // namespace

TEST_CASE("buffers are those that pass, sizes and options ask for") {
  using Names = std::vector<std::string>;
  CHECK(tensor_names(problem_of("fwd", {})) == Names{"x", "w", "y"});
  CHECK(tensor_names(problem_of("fwd", {{"slots", 4}},
                                {{"layout", "sc"},
                                 {"bias", "yes"},
                                 {"state", "update"},
                                 {"has-state", "yes"},
                                 {"accepted", "yes"}})) ==
        Names{"x", "w", "bias", "offsets", "indices", "has_state", "accepted", "state", "y"});
  CHECK(tensor_names(problem_of("fwd", {}, {{"state", "pass"}})) ==
        Names{"x", "w", "initial", "y", "final"});
  CHECK(tensor_names(problem_of("bwd", {}, {{"state", "pass"}, {"bias", "yes"}})) ==
        Names{"dy", "x", "w", "bias", "initial", "d_final", "dx", "dw", "dbias", "d_initial"});
  CHECK(tensor_names(problem_of("bwd", {}, {{"frozen", "yes"}})) == Names{"dy", "x", "w", "dx"});
}

TEST_CASE("the last tap multiplies the token itself, and history is zero before the first") {
  const auto out = run_reference(problem_of("fwd", {}), {{"x", {1, 2, 3}}, {"w", {100, 10, 1}}});
  CHECK(out.at("y") == Values{1, 12, 123});
}

TEST_CASE("gates multiply the inputs, which a state holds, and the result") {
  // Tokens of B, C and a value each.
  const auto out = run_reference(
      problem_of("fwd", {{"s", 2}, {"entries", 2}}, {{"state", "update"}, {"gates", "yes"}}),
      {{"x", {2, 7, 3, 5, -1, 4}}, {"w", {100, 10, 1}}, {"state", {1, 8}}});
  CHECK(out.at("y") == Values{7 * 186, -1 * 880});
  CHECK(out.at("state") == Values{6, 20});
}

TEST_CASE("x may have the channels of each head of k together") {
  // Two heads, each with a channel of q, one of k, two of v, and a column that is not read.
  const Sizes sizes{{"s", 1}, {"channels", 8}, {"width", 2}};
  Sizes grouped = sizes;
  grouped.insert({{"x-row", 10}, {"x-groups", 2}, {"x-keys", 1}});
  const auto y_of = [&](const Sizes& own, Values x) {
    return run_reference(
               problem_of("fwd", own),
               {{"x", std::move(x)}, {"w", {0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8}}})
        .at("y");
  };
  CHECK(y_of(grouped, {1, 3, 5, 6, -9, 2, 4, 7, 8, -9}) == y_of(sizes, {1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_CASE("packed sequences share no history, and rows behind the last offset are zeros") {
  const auto out =
      run_reference(problem_of("fwd", {{"s", 5}, {"b", 3}}, {{"layout", "sc"}}),
                    {{"x", {1, 2, 3, 4, 5}}, {"w", {100, 10, 1}}, {"offsets", {0, 2, 2, 4}}});
  CHECK(out.at("y") == Values{1, 12, 3, 34, 0});
}

TEST_CASE("a state holds the newest inputs, in width - 1 or more entries") {
  const ReferenceTensors in{{"x", {3}}, {"w", {100, 10, 1}}, {"state", {1, 2}}};
  const auto out =
      run_reference(problem_of("fwd", {{"s", 1}, {"entries", 2}}, {{"state", "update"}}), in);
  CHECK(out.at("y") == Values{123});
  CHECK(out.at("state") == Values{2, 3});
  const auto wider = run_reference(problem_of("fwd", {{"s", 1}}, {{"state", "update"}}),
                                   {{"x", {3}}, {"w", {100, 10, 1}}, {"state", {9, 1, 2}}});
  CHECK(wider.at("y") == Values{123});
  CHECK(wider.at("state") == Values{1, 2, 3});
  const auto longer = run_reference(problem_of("fwd", {{"entries", 2}}, {{"state", "pass"}}),
                                    {{"x", {3, 4, 5}}, {"w", {100, 10, 1}}, {"initial", {1, 2}}});
  CHECK(longer.at("y") == Values{123, 234, 345});
  CHECK(longer.at("final") == Values{4, 5});
}

TEST_CASE("slots below the first are padding, and a state that does not count is zeros") {
  const auto out =
      run_reference(problem_of("fwd", {{"s", 1}, {"b", 3}, {"slots", 4}, {"entries", 2}},
                               {{"state", "update"}, {"has-state", "yes"}, {"first-slot", "1"}}),
                    {{"x", {7, 8, 9}},
                     {"w", {100, 10, 1}},
                     {"indices", {2, 0, 3}},
                     {"has_state", {1, 1, 0}},
                     {"state", {-1, -1, -2, -2, 1, 2, 5, 6}}});
  CHECK(out.at("y") == Values{127, 0, 9});
  CHECK(out.at("state") == Values{-1, -1, -2, -2, 2, 7, 0, 9});
}

TEST_CASE("after drafts the history is that of the accepted tokens") {
  // Two drafts and a token behind a history of two; then one of them is accepted.
  const Problem problem =
      problem_of("fwd", {{"entries", 4}}, {{"state", "update"}, {"accepted", "yes"}});
  const auto first = run_reference(
      problem,
      {{"x", {3, 4, 5}}, {"w", {100, 10, 1}}, {"accepted", {1}}, {"state", {1, 2, -1, -1}}});
  CHECK(first.at("y") == Values{123, 234, 345});
  CHECK(first.at("state") == Values{2, 3, 4, 5});
  for (const int accepted : {1, 2, 3}) {
    const auto next = run_reference(problem, {{"x", {6, 7, 8}},
                                              {"w", {100, 10, 1}},
                                              {"accepted", {static_cast<double>(accepted)}},
                                              {"state", first.at("state")}});
    const double last = 2 + accepted;  // the newest token that was kept
    CHECK(next.at("y")[0] == (last - 1) * 100 + last * 10 + 6);
    CHECK(next.at("state") == Values{last, 6, 7, 8});
  }
}

TEST_CASE("two parts with the state between them are the whole") {
  Draw draw(5);
  for (int i = 0; i < 50; ++i) {
    const std::int64_t width = 2 + draw.below(7), n = 1 + draw.below(12), cut = draw.below(n + 1);
    const std::int64_t entries = width - 1 + draw.below(3);
    Values x(static_cast<std::size_t>(n)), w(static_cast<std::size_t>(width));
    std::normal_distribution<double> normal;
    for (Values* values : {&x, &w})
      for (double& value : *values) value = normal(draw.random());
    const Options options{{"state", "pass"}, {"layout", "sc"}, {"act", "silu"}};
    const auto part = [&](Values own, Values initial) {
      const auto count = static_cast<std::int64_t>(own.size());
      own.push_back(0);  // a row behind the last offset, so that there is one
      return run_reference(
          problem_of("fwd", {{"s", count + 1}, {"width", width}, {"entries", entries}}, options),
          {{"x", own},
           {"w", w},
           {"offsets", {0, static_cast<double>(count)}},
           {"initial", std::move(initial)}});
    };
    const Values zeros(static_cast<std::size_t>(entries));
    const auto whole = part(x, zeros);
    const auto first = part(Values(x.begin(), x.begin() + cut), zeros);
    const auto second = part(Values(x.begin() + cut, x.end()), first.at("final"));
    CHECK(second.at("final") == whole.at("final"));
    for (std::int64_t t = 0; t < n; ++t) {
      const auto place = static_cast<std::size_t>(t);
      CHECK((t < cut
                 ? first.at("y")[place]
                 : second.at("y")[place - static_cast<std::size_t>(cut)]) == whole.at("y")[place]);
    }
  }
}

TEST_CASE("the gradients of the reference are the differences of its values") {
  std::mt19937_64 random(7);
  const Sizes sizes{{"s", 7}, {"b", 3}, {"channels", 3}, {"width", 3}};
  const std::vector<std::pair<std::string, std::string>> all{
      {"x", "dx"}, {"w", "dw"}, {"bias", "dbias"}};
  const Options options{{"act", "silu"}, {"bias", "yes"}};
  check_gradients(causal_conv1d_op(), problem_of("fwd", sizes, options),
                  problem_of("bwd", sizes, options), all, random);
  Options packed = options;
  packed["layout"] = "sc";
  check_gradients(causal_conv1d_op(), problem_of("fwd", sizes, packed),
                  problem_of("bwd", sizes, packed), all, random, {{"offsets", {0, 2, 2, 6}}});
}

TEST_CASE("the gradient of a final state reaches the inputs and the initial state") {
  // y does not count: dy is 0. final = [initial entries 1.., x].
  const auto out = run_reference(problem_of("bwd", {{"s", 1}, {"entries", 3}}, {{"state", "pass"}}),
                                 {{"dy", {0}},
                                  {"x", {3}},
                                  {"w", {100, 10, 1}},
                                  {"initial", {9, 1, 2}},
                                  {"d_final", {0.5, 0.25, 0.125}}});
  CHECK(out.at("d_initial") == Values{0, 0.5, 0.25});
  CHECK(out.at("dx") == Values{0.125});
  // And y alone: its gradient at the history is that of the taps.
  const auto history = run_reference(
      problem_of("bwd", {{"s", 1}, {"entries", 2}}, {{"state", "pass"}}),
      {{"dy", {2}}, {"x", {3}}, {"w", {100, 10, 1}}, {"initial", {1, 2}}, {"d_final", {0, 0}}});
  CHECK(history.at("d_initial") == Values{200, 20});
  CHECK(history.at("dx") == Values{2});
  CHECK(history.at("dw") == Values{2, 4, 6});
}

TEST_CASE("fields that contradict each other are refused") {
  CHECK(refusal("fwd", {{"width", 1}}) ==
        "causal-conv1d: width=1: a convolution has at least 2 taps");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-row", 7}}) ==
        "causal-conv1d: x-row=7 is less than channels=8");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-row", 23}}, {{"gates", "yes"}}) ==
        "causal-conv1d: x-row=23 is less than 3 * channels=8");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-groups", 2}}) ==
        "causal-conv1d: x-groups and x-keys: give both, or none");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-groups", 3}, {"x-keys", 1}}) ==
        "causal-conv1d: x-groups=3 do not divide channels=8");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-row", 9}, {"x-groups", 2}, {"x-keys", 1}}) ==
        "causal-conv1d: x-groups=2 do not divide x-row=9");
  CHECK(refusal("fwd", {{"channels", 8}, {"x-groups", 2}, {"x-keys", 2}}) ==
        "causal-conv1d: x-keys=2 leaves no channels of v among the 4 of a group");
  CHECK(refusal("bwd", {{"channels", 8}, {"x-groups", 2}, {"x-keys", 1}}) ==
        "causal-conv1d: x-groups=2 with pass bwd: there is no kernel for it");
  CHECK(refusal("fwd", {{"slots", 7}}) == "causal-conv1d: slots without a state");
  CHECK(refusal("fwd", {}, {{"accepted", "yes"}}) == "causal-conv1d: accepted=yes without a state");
  CHECK(refusal("fwd", {{"width", 4}, {"entries", 2}}, {{"state", "update"}}) ==
        "causal-conv1d: entries=2 is less than width - 1 = 3: a state holds the history");
  CHECK(refusal("fwd", {{"b", 3}, {"slots", 2}}, {{"state", "update"}}) ==
        "causal-conv1d: slots=2 is less than b=3: sequences do not share a slot");
  CHECK(refusal("bwd", {}, {{"state", "update"}}) ==
        "causal-conv1d: state=update in pass bwd: the gradients of states are those of state=pass");
  CHECK(refusal("fwd", {{"slots", 2}}, {{"state", "pass"}}) ==
        "causal-conv1d: state=pass has neither slots, has-state, accepted nor state-row");
}
