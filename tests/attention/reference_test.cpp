// The reference against the formulas by hand, and its gradients against central differences.
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/run.hpp"
#include "support/fields.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Values = std::vector<double>;
constexpr double infinity = std::numeric_limits<double>::infinity();

const SmallProblems one_head_problem{attention_problem,
                                     {{"s", 2}, {"b", 1}, {"heads", 1}, {"dim", 8}}};

Values zeros(std::int64_t count) {
  return Values(static_cast<std::size_t>(count));
}

/// Which keys the queries of head 0 see, a line for each: equal scores give equal weights, and v is
/// the identity, so that what a key has in `out` is its weight. At most 8 keys in memory.
std::vector<std::string> seen(const Problem& problem, ReferenceTensors rules = {}) {
  const attention::Layer layer = attention::layer_of(problem);
  REQUIRE(layer.kv_tokens() * layer.kv_heads <= 64);
  rules["q"] = zeros(layer.q_tokens() * layer.q_row);
  rules["k"] = zeros(layer.kv_tokens() * layer.k_row);
  Values v = zeros(layer.kv_tokens() * layer.v_row);
  for (std::int64_t token = 0; token < layer.kv_tokens(); ++token)
    v[static_cast<std::size_t>(token * layer.v_row + token % 8)] = 1;
  rules["v"] = v;
  const Values out = run_reference(problem, std::move(rules)).at("out");
  std::vector<std::string> lines;
  for (std::int64_t token = 0; token < layer.q_tokens(); ++token) {
    std::string line;
    const double* const row = out.data() + token * layer.heads * layer.dim;
    int count = 0;
    for (int key = 0; key < 8; ++key) count += row[key] != 0;
    for (int key = 0; key < 8; ++key) {
      line += row[key] == 0 ? '.' : 'x';
      if (row[key] != 0) CHECK(row[key] == Approx(1.0 / count));
    }
    lines.push_back(line);
  }
  return lines;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("keys that a query sees follow masks, windows, lengths and positions") {
  CHECK(seen(one_head_problem("fwd", {{"kv", 3}})) == Lines{"xxx.....", "xxx....."});
  // The last query stands at the last key.
  CHECK(seen(one_head_problem("fwd", {{"kv", 4}}, {{"mask", "causal"}})) ==
        Lines{"xxx.....", "xxxx...."});
  CHECK(seen(one_head_problem("fwd", {{"s", 4}, {"kv", 2}}, {{"mask", "causal"}})) ==
        Lines{"........", "........", "x.......", "xx......"});
  CHECK(seen(one_head_problem("fwd", {{"s", 3}, {"window", 2}}, {{"mask", "causal"}})) ==
        Lines{"x.......", "xx......", ".xx....."});
  CHECK(seen(one_head_problem("fwd", {{"s", 3}, {"window", 1}})) ==
        Lines{"xxx.....", ".xx.....", "..x....."});
  CHECK(
      seen(one_head_problem("fwd", {{"b", 2}, {"kv", 3}}, {{"mask", "causal"}, {"lengths", "yes"}}),
           {{"lengths", {3, 1}}}) == Lines{"xx......", "xxx.....", "........", "...x...."});
  CHECK(seen(one_head_problem("fwd", {{"kv", 3}}, {{"mask", "bool"}}),
             {{"mask", {1, 0, 255, 0, 0, 0}}}) == Lines{"x.x.....", "........"});
  CHECK(seen(one_head_problem("fwd", {{"kv", 3}}, {{"mask", "packed"}}),
             {{"mask_bits", {6, 0, 0, 0, 1, 0, 0, 0}}, {"mask_flags", {2}}}) ==
        Lines{".xx.....", "x......."});
}

TEST_CASE("packed sequences see their own keys") {
  CHECK(seen(one_head_problem("fwd", {{"s", 5}, {"b", 3}}, {{"layout", "thd"}, {"mask", "causal"}}),
             {{"offsets", {0, 2, 2, 5}}}) ==
        Lines{"x.......", "xx......", "..x.....", "..xx....", "..xxx..."});
  CHECK(seen(one_head_problem("fwd", {{"s", 3}, {"b", 2}, {"kv", 5}},
                              {{"layout", "thd"}, {"mask", "causal"}}),
             {{"offsets", {0, 1, 3}}, {"kv_offsets", {0, 4, 5}}}) ==
        Lines{"xxxx....", "........", "....x..."});
}

TEST_CASE("pages are read in the order of the table") {
  // There are 4 pages of 16 keys; key j of page p is feature (16 p + j) % 8 of v.
  const Problem problem =
      one_head_problem("fwd", {{"s", 1}, {"kv", 18}, {"page", 16}, {"pages", 4}},
                       {{"lengths", "yes"}, {"mask", "none"}});
  const attention::Layer layer = attention::layer_of(problem);
  Values v = zeros(64 * 8);
  for (std::size_t token = 0; token < 64; ++token) v[token * 8] = static_cast<double>(token);
  const auto out =
      run_reference(
          problem,
          {{"q", zeros(8)}, {"k", zeros(64 * 8)}, {"v", v}, {"pages", {2, 0}}, {"lengths", {17}}})
          .at("out");
  CHECK(layer.pages_of_sequence() == 2);
  CHECK(out[0] == Approx((16 * (32 + 47) / 2.0 + 0) / 17));
}

TEST_CASE("weights, lse, soft cap, bias and sinks are the formula, by hand") {
  Values q = zeros(8), k = zeros(2 * 8), v = zeros(2 * 8);
  q[0] = 2;
  k[0] = 3;  // products 6 and -2
  k[8] = -1;
  v[0] = 1;  // the first weight
  v[9] = 1;  // the second
  const auto run = [&](Options options, ReferenceTensors more = {}) {
    options["lse"] = "yes";
    more.insert({{"q", q}, {"k", k}, {"v", v}});
    return run_reference(one_head_problem("fwd", {{"s", 1}, {"kv", 2}}, std::move(options)), more);
  };
  const auto check = [](const ReferenceTensors& result, double first, double second, double sink) {
    const double sum = std::exp(first) + std::exp(second) + sink;
    CHECK(result.at("out")[0] == Approx(std::exp(first) / sum));
    CHECK(result.at("out")[1] == Approx(std::exp(second) / sum));
    CHECK(result.at("lse")[0] == Approx(std::log(sum)));
  };
  const double scale = static_cast<float>(1 / std::sqrt(8.0));
  check(run({}), 6 * scale, -2 * scale, 0);
  check(run({{"scale", "0.5"}}), 3, -1, 0);
  check(run({{"scale", "0.5"}, {"softcap", "2"}}), 2 * std::tanh(1.5), 2 * std::tanh(-0.5), 0);
  // The bias is added to what the soft cap leaves.
  check(run({{"scale", "0.5"}, {"softcap", "2"}, {"bias", "yes"}}, {{"bias", {0.25, 5}}}),
        2 * std::tanh(1.5) + 0.25, 2 * std::tanh(-0.5) + 5, 0);
  check(run({{"scale", "0.5"}, {"sinks", "yes"}}, {{"sinks", {1.5}}}), 3, -1, std::exp(1.5));
}

TEST_CASE("a query without keys has zeros, and the lse of nothing or of the sink") {
  const Options none{{"mask", "bool"}, {"lse", "yes"}};
  Options sunk = none;
  sunk["sinks"] = "yes";
  const ReferenceTensors in{{"q", zeros(16)},
                            {"k", zeros(16)},
                            {"v", Values(16, 1.0)},
                            {"mask", {0, 0, 1, 0}},
                            {"sinks", {0.75}}};
  const auto plain = run_reference(one_head_problem("fwd", {}, none), in);
  CHECK(plain.at("out")[0] == 0);
  CHECK(plain.at("out")[8] == 1);
  CHECK(plain.at("lse") == Values{-infinity, 0});
  const auto with_sink = run_reference(one_head_problem("fwd", {}, sunk), in);
  CHECK(with_sink.at("out")[0] == 0);
  CHECK(with_sink.at("lse")[0] == Approx(0.75));
}

TEST_CASE("heads of q share those of k and v in order, and q, k and v may be parts of rows") {
  const Problem problem = one_head_problem(
      "fwd", {{"s", 1}, {"heads", 4}, {"kv-heads", 2}, {"q-row", 64}, {"k-row", 24}, {"v-row", 32}},
      {{"mask", "none"}});
  Values v = zeros(32);
  v[0] = 5;
  v[8] = 7;
  const auto out = run_reference(problem, {{"q", zeros(64)}, {"k", zeros(24)}, {"v", v}}).at("out");
  CHECK(out[0] == 5);
  CHECK(out[8] == 5);
  CHECK(out[16] == 7);
  CHECK(out[24] == 7);
}

namespace {

/// Every element of dq, dk, dv and d_sinks of the sum of d_out ⊙ out.
void check_gradients(Sizes sizes, Options options, std::mt19937_64& random) {
  const Problem backward = one_head_problem("bwd", sizes, options);
  options["lse"] = "yes";
  const Problem forward = one_head_problem("fwd", sizes, options);
  CAPTURE(backward.text());
  ReferenceTensors inputs;
  draw_inputs(forward, random, inputs);
  ReferenceTensors saved = run_reference(forward, inputs);
  draw_inputs(backward, random, saved);
  const Values d_out = saved.at("d_out");
  const auto gradients = run_reference(backward, saved);
  const auto objective = [&](const ReferenceTensors& at) {
    const auto out = run_reference(forward, at).at("out");
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * d_out[i];
    return sum;
  };
  std::vector<std::pair<std::string, std::string>> pairs{{"q", "dq"}, {"k", "dk"}, {"v", "dv"}};
  if (options["sinks"] == "yes") pairs.emplace_back("sinks", "d_sinks");
  constexpr double step = 1e-5;
  for (const auto& [input, gradient] : pairs) {
    const auto& analytic = gradients.at(gradient);
    REQUIRE(analytic.size() == inputs.at(input).size());
    for (std::size_t i = 0; i < analytic.size(); i += 1 + analytic.size() / 64) {
      ReferenceTensors above = inputs, below = inputs;
      above[input][i] += step;
      below[input][i] -= step;
      const double numeric = (objective(above) - objective(below)) / (2 * step);
      CAPTURE(gradient, i);
      REQUIRE(analytic[i] == Approx(numeric).epsilon(1e-5).margin(1e-7));
    }
  }
}

}  // namespace

TEST_CASE("gradients are those of central differences, in every form") {
  std::mt19937_64 random(3);
  const Sizes sizes{{"s", 5}, {"kv", 7}, {"b", 2}, {"heads", 4}, {"kv-heads", 2}};
  check_gradients(sizes, {}, random);
  check_gradients(sizes, {{"mask", "causal"}}, random);
  check_gradients(sizes, {{"mask", "bool"}, {"mask-heads", "each"}}, random);
  check_gradients(sizes, {{"mask", "packed"}, {"mask-data", "upper"}}, random);
  check_gradients(sizes, {{"softcap", "1.5"}, {"scale", "0.7"}}, random);
  check_gradients(sizes, {{"bias", "yes"}, {"softcap", "2"}, {"sinks", "yes"}}, random);
  check_gradients(sizes, {{"lengths", "yes"}, {"mask", "causal"}, {"sinks", "yes"}}, random);
  check_gradients({{"s", 7}, {"kv", 3}, {"b", 1}}, {{"mask", "causal"}}, random);
  check_gradients({{"s", 9}, {"kv", 12}, {"b", 3}, {"heads", 2}, {"window", 3}},
                  {{"layout", "thd"}, {"mask", "causal"}}, random);
}
