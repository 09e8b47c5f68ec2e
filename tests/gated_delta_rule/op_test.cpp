#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gated_delta_rule/states.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem delta_problem(DeviceKind kind, const std::string& pass, DType dtype, Sizes sizes,
                      Options options = {}) {
  return canonical(gated_delta_rule_op(),
                   {"gated-delta-rule", pass, dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_delta(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "fwd", "bwd"});
  Options options{{"gate", draw.of({"log", "softplus", "bounded"})},
                  {"decay", draw.of({"head", "head", "channel"})},
                  {"beta", draw.of({"given", "sigmoid"})},
                  {"qk-norm", draw.of({"none", "l2"})},
                  {"layout", draw.of({"bshd", "thd"})},
                  {"state-dtype", draw.of({"f32", "f32", "bf16"})},
                  {"state-layout", draw.of({"vk", "kv"})}};
  const bool cached = pass == "fwd" && draw.below(2) == 1;
  const std::int64_t heads = 1 + draw.below(3);
  const std::int64_t dims[] = {1, 2, 3, 8, 16, 20, 64, 96, 128, 192, 256};
  Sizes sizes{{"heads", heads}, {"dim", dims[draw.below(11)]}};
  if (sizes["dim"] == 1) options["qk-norm"] = "none";
  if (draw.below(2)) sizes["v-heads"] = heads * (1 + draw.below(4));
  sizes["v-dim"] = draw.below(2) ? sizes["dim"] : dims[draw.below(11)];
  const std::int64_t v_heads = sizes.contains("v-heads") ? sizes["v-heads"] : heads;
  const std::int64_t v_dim = sizes["v-dim"];
  const std::int64_t row = std::max(heads * sizes["dim"], v_heads * v_dim);
  const std::int64_t tokens =
      std::max<std::int64_t>(1, std::min(draw.size(8), most_elements / row));
  draw_states(draw, pass, cached, tokens, v_heads * v_dim * sizes["dim"], sizes, options);
  if (cached && draw.below(3) == 0) sizes["slots"] = 1 + draw.below(4);
  if (draw.below(3) == 0) options["scale"] = "0.5";
  if (options["beta"] == "sigmoid" && draw.below(2) && options["qk-norm"] == "l2")
    options["beta-scale"] = "2";
  for (const char* name : {"q-row", "k-row"})
    if (draw.below(3) == 0) sizes[name] = heads * sizes["dim"] + draw.below(3) * 8 + draw.below(2);
  if (draw.below(3) == 0) sizes["v-row"] = v_heads * v_dim + draw.below(3) * 8 + draw.below(2);
  if (draw.below(3) == 0) {
    const bool in_blocks = draw.below(2);
    if (in_blocks) sizes["gate-block"] = v_heads / heads + draw.below(5);
    const std::int64_t gates = in_blocks ? heads * sizes["gate-block"] : v_heads;
    if (!in_blocks || draw.below(2)) sizes["gate-row"] = gates + draw.below(9);
  }
  return delta_problem(kind, pass, draw.of(gated_delta_rule_op().dtypes(kind)), sizes, options);
}

/// A problem that a family of chunks takes on an H100.
Problem random_chunks(DeviceKind kind, Draw& draw, std::int64_t) {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  for (;;) {
    const Problem problem = random_delta(kind, draw, std::int64_t{1} << 14);
    for (const Family* family : gated_delta_rule_op().families())
      if (family->name().find("chunks") != std::string_view::npos &&
          !family->refusal(problem, facts))
        return problem;
  }
}

}  // namespace

TEST_CASE("the reference of gated-delta-rule is the recurrence, by hand") {
  // One head of 2 features, 2 tokens: S is [v, k].
  const Sizes sizes{{"s", 2}, {"b", 1}, {"heads", 1}, {"dim", 2}, {"v-dim", 1}};
  const Options options{{"initial-state", "yes"}, {"final-state", "yes"}, {"scale", "1"}};
  const auto found =
      run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options),
                    {{"q", {1, 0, 0.5, 1}},
                     {"k", {1, 0, 0.6, 0.8}},
                     {"v", {3, 5}},
                     {"g", {std::log(0.5), 0}},
                     {"beta", {1, 0.5}},
                     {"initial_state", {2, 4}}});
  // Decayed to [1, 2]; k holds 1, so delta is 2 and S [3, 2]. The next k holds 3.4: delta 0.8.
  CHECK(found.at("out")[0] == Approx(3));
  CHECK(found.at("final_state")[0] == Approx(3 + 0.8 * 0.6));
  CHECK(found.at("final_state")[1] == Approx(2 + 0.8 * 0.8));
  CHECK(found.at("out")[1] == Approx(0.5 * 3.48 + 2.64));
}

TEST_CASE("gates, the norm and beta of gated-delta-rule follow from their inputs") {
  const Sizes sizes{{"s", 1}, {"b", 1}, {"heads", 1}, {"dim", 2}, {"v-dim", 1}};
  const auto state_of = [&](const Options& more, const ReferenceTensors& gates) {
    Options options{{"initial-state", "yes"}, {"final-state", "yes"}};
    options.insert(more.begin(), more.end());
    ReferenceTensors in{{"q", {1, 0}}, {"k", {3, 4}}, {"v", {0}}, {"initial_state", {1, 0}}};
    in.insert(gates.begin(), gates.end());
    return run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options), in)
        .at("final_state");
  };
  const ReferenceTensors decay{{"a", {0.5}}, {"A_log", {std::log(2.0)}}, {"dt_bias", {0.25}}};
  auto gates = decay;
  gates["beta"] = {0};
  CHECK(state_of({{"gate", "softplus"}}, gates)[0] ==
        Approx(std::exp(-2 * std::log1p(std::exp(0.75)))));
  CHECK(state_of({{"gate", "bounded"}, {"gate-bound", "-3"}}, gates)[0] ==
        Approx(std::exp(-3 / (1 + std::exp(-2 * 0.75)))));
  // Without decay the norm's k [0.6, 0.8] holds 0.6: the state loses beta 0.6 [0.6, 0.8].
  const auto erased = state_of({{"qk-norm", "l2"}, {"beta", "sigmoid"}, {"beta-scale", "2"}},
                               {{"g", {0}}, {"beta_logits", {std::log(3.0)}}});
  CHECK(erased[0] == Approx(1 - 1.5 * 0.36));
  CHECK(erased[1] == Approx(-1.5 * 0.48));
}

TEST_CASE("gates of gated-delta-rule may be in blocks, one for each head of k") {
  // Two heads of two value heads each: a of the four is 1, 2, 3, 4, and beta 5, 6, 7, 8.
  const Sizes sizes{{"s", 1}, {"b", 1}, {"heads", 2}, {"v-heads", 4}, {"dim", 1}, {"v-dim", 1}};
  const auto run = [&](Sizes more, std::vector<double> g, std::vector<double> beta) {
    more.insert(sizes.begin(), sizes.end());
    return run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, more,
                                       {{"initial-state", "yes"}, {"final-state", "yes"}}),
                         {{"q", {1, 1}},
                          {"k", {1, 1}},
                          {"v", {1, 1, 1, 1}},
                          {"g", std::move(g)},
                          {"beta", std::move(beta)},
                          {"initial_state", {1, 2, 3, 4}}})
        .at("final_state");
  };
  const std::vector<double> g{-0.1, -0.2, -0.3, -0.4}, beta{0.5, 0.6, 0.7, 0.8};
  CHECK(run({{"gate-block", 4}}, {-0.1, -0.2, 9, 9, -0.3, -0.4, 9, 9},
            {0.5, 0.6, 9, 9, 0.7, 0.8, 9, 9}) == run({}, g, beta));
  const auto refused = [&](Sizes more) {
    more.insert(sizes.begin(), sizes.end());
    return error_of([&] { delta_problem(DeviceKind::cpu, "fwd", DType::f32, more); });
  };
  CHECK(refused({{"gate-block", 4}}).empty());
  CHECK(refused({{"gate-block", 1}}) ==
        "gated-delta-rule: gate-block=1 is less than v-heads / heads = 2");
  CHECK(refused({{"gate-block", 4}, {"gate-row", 5}}) ==
        "gated-delta-rule: gate-row=5 is less than its heads * features = 6");
}

TEST_CASE("an index of gated-delta-rule that is padding leaves states, and gives zeros") {
  const Sizes sizes{{"s", 1}, {"b", 4}, {"heads", 1}, {"dim", 1}, {"v-dim", 1}, {"states", 3}};
  const ReferenceTensors in{{"q", {1, 1, 1, 1}},
                            {"k", {1, 1, 1, 1}},
                            {"v", {5, 6, 7, 8}},
                            {"g", {0, 0, 0, 0}},
                            {"beta", {1, 1, 1, 1}},
                            {"states", {10, 20, 30}},
                            {"state_indices", {2, 0, -1, 3}}};
  const auto run = [&](const char* null_index) {
    return run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                       {{"indices", "yes"}, {"null-index", null_index}}),
                         in);
  };
  const auto usual = run("0");
  CHECK(usual.at("out") == std::vector<double>{5, 0, 0, 0});
  CHECK(usual.at("states") == std::vector<double>{10, 20, 5});
  CHECK(run("-1").at("states") == std::vector<double>{6, 20, 5});
}

TEST_CASE("slots of gated-delta-rule hold the states behind single tokens") {
  // Keys of 1 and beta 1 write v itself, which out reads.
  const Sizes sizes{{"s", 2},     {"b", 4},      {"heads", 1}, {"dim", 1},
                    {"v-dim", 1}, {"states", 8}, {"slots", 2}};
  const ReferenceTensors in{{"q", {1, 1, 1, 1, 1, 1, 1, 1}},
                            {"k", {0, 1, 0, 1, 0, 1, 0, 1}},
                            {"v", {1, 2, 3, 4, 5, 6, 7, 8}},
                            {"g", {0, 0, 0, 0, 0, 0, 0, 0}},
                            {"beta", {1, 1, 1, 1, 1, 1, 1, 1}},
                            {"states", {10, 11, 12, 13, 14, 15, 16, 17}},
                            {"state_indices", {1, 2, 3, 4, 0, 5, 6, 0}},
                            {"accepted", {1, 2, 1, 9}}};
  const auto found = run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                                 {{"indices", "yes"}, {"scale", "1"}}),
                                   in);
  // The first token writes nothing. The third sequence is padding; the fourth begins with its last
  // slot, which is padding.
  CHECK(found.at("out") == std::vector<double>{11, 2, 14, 4, 0, 0, 0, 0});
  CHECK(found.at("states") == std::vector<double>{10, 11, 2, 14, 4, 15, 16, 17});
}

TEST_CASE(
    "an empty sequence of gated-delta-rule keeps its state, and parts of a sequence are a whole") {
  const Sizes sizes{{"s", 3}, {"b", 3}, {"heads", 1}, {"dim", 1}, {"v-dim", 1}};
  const Options options{{"layout", "thd"}, {"initial-state", "yes"}, {"final-state", "yes"}};
  const auto found =
      run_reference(delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options),
                    {{"q", {1, 1, 1}},
                     {"k", {0.5, 0.25, 1}},
                     {"v", {1, 2, 3}},
                     {"g", {-0.5, -0.25, -1}},
                     {"beta", {1, 0.5, 1}},
                     {"initial_state", {7, 8, 9}},
                     {"offsets", {0, 2, 2, 3}}});
  CHECK(found.at("final_state")[1] == 8);
  CHECK(found.at("final_state")[2] == Approx(3));
  double state = 7 * std::exp(-0.5);
  state += (1 - state * 0.5) * 0.5;
  state *= std::exp(-0.25);
  state += 0.5 * (2 - state * 0.25) * 0.25;
  CHECK(found.at("final_state")[0] == Approx(state));
}

TEST_CASE("gradients of gated-delta-rule's reference are those of its differences") {
  std::mt19937_64 random(5);
  for (const char* gate : {"log", "softplus", "bounded"})
    for (const char* decay : {"head", "channel"}) {
      CAPTURE(gate, decay);
      const bool plain = std::string(gate) == "log";
      Options options{{"gate", gate},         {"decay", decay},
                      {"layout", "thd"},      {"initial-state", "yes"},
                      {"final-state", "yes"}, {"qk-norm", plain ? "none" : "l2"},
                      {"state-layout", "kv"}, {"beta", plain ? "given" : "sigmoid"}};
      const Sizes sizes{{"s", 70},      {"b", 3},   {"heads", 1},
                        {"v-heads", 2}, {"dim", 3}, {"v-dim", 2}};
      const Problem forward = delta_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options);
      const Problem backward = delta_problem(DeviceKind::cpu, "bwd", DType::f32, sizes, options);
      std::vector<std::pair<std::string, std::string>> gradients{
          {"q", "dq"}, {"k", "dk"}, {"v", "dv"}, {"initial_state", "d_initial_state"}};
      ReferenceTensors given{{"offsets", {0, 66, 66, 70}}};
      for (const TensorSpec& tensor : gated_delta_rule_op().tensors(backward))
        if (tensor.draw && tensor.name != "offsets") {
          std::vector<double> values(static_cast<std::size_t>(tensor.elements()));
          tensor.draw(random(), values);
          // Differences need gates that are no steps.
          for (double& value : values) value = std::max(value, -7.0);
          given[tensor.name] = std::move(values);
        }
      if (plain) {
        gradients.insert(gradients.end(), {{"g", "dg"}, {"beta", "dbeta"}});
      } else {
        gradients.insert(gradients.end(), {{"a", "da"},
                                           {"A_log", "dA_log"},
                                           {"dt_bias", "ddt_bias"},
                                           {"beta_logits", "dbeta_logits"}});
      }
      check_differences(gated_delta_rule_op(), forward, backward, gradients, random, given);
    }
}

TEST_CASE("a chunk's matrices of gated-delta-rule, in float64, give its recurrence") {
  // The algebra of chunk_prepare.cu and chunk_scan.cu, on one head and a chunk of all tokens.
  constexpr std::size_t tokens = 9, dim = 4, v_dim = 3;
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  ReferenceTensors in;
  for (const auto& [name, count] : {std::pair{"q", tokens * dim},
                                    {"k", tokens * dim},
                                    {"v", tokens * v_dim},
                                    {"initial_state", v_dim * dim}})
    for (std::size_t i = 0; i < count; ++i) in[name].push_back(normal(random));
  in["g"] = {0, -0.1, -30, -0.5, -200, -0.01, 0, -1, -0.3};
  in["beta"] = {1, 0.5, 2, 0, 0.9, 1, 0.3, 1.9, 0.7};
  const auto right = run_reference(
      delta_problem(DeviceKind::cpu, "fwd", DType::f32,
                    {{"s", tokens}, {"b", 1}, {"heads", 1}, {"dim", dim}, {"v-dim", v_dim}},
                    {{"qk-norm", "l2"}, {"initial-state", "yes"}, {"final-state", "yes"}}),
      in);
  const auto row = [&](const char* name, std::size_t i, std::size_t width) {
    return std::vector<double>(in[name].begin() + static_cast<std::ptrdiff_t>(i * width),
                               in[name].begin() + static_cast<std::ptrdiff_t>((i + 1) * width));
  };
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  std::vector<std::vector<double>> q, k;
  std::vector<double> sums, of_q, of_k;
  for (std::size_t i = 0; i < tokens; ++i) {
    q.push_back(row("q", i, dim));
    k.push_back(row("k", i, dim));
    of_q.push_back(0.5 / std::sqrt(dot(q[i], q[i]) + 1e-6));  // with the scale
    of_k.push_back(1 / std::sqrt(dot(k[i], k[i]) + 1e-6));
    sums.push_back((i > 0 ? sums[i - 1] : 0) + in["g"][i]);
  }
  const auto decay = [&](std::size_t i, std::size_t j) { return std::exp(sums[i] - sums[j]); };
  // T = (I + M)^-1 without the decay, by rows.
  std::vector<std::vector<double>> inverse(tokens, std::vector<double>(tokens));
  for (std::size_t i = 0; i < tokens; ++i) {
    inverse[i][i] = 1;
    for (std::size_t j = 0; j < i; ++j)
      for (std::size_t c = 0; c <= j; ++c)
        inverse[i][c] -= in["beta"][i] * of_k[i] * of_k[j] * dot(k[i], k[j]) * inverse[j][c];
  }
  for (std::size_t v = 0; v < v_dim; ++v) {
    const auto state = row("initial_state", v, dim);
    std::vector<double> delta(tokens);
    for (std::size_t i = 0; i < tokens; ++i) {
      double out = std::exp(sums[i]) * of_q[i] * dot(state, q[i]);
      for (std::size_t j = 0; j <= i; ++j) {
        const double error =
            in["v"][j * v_dim + v] - std::exp(sums[j]) * of_k[j] * dot(state, k[j]);
        delta[i] += inverse[i][j] * decay(i, j) * in["beta"][j] * error;
      }
      for (std::size_t j = 0; j <= i; ++j)
        out += of_q[i] * of_k[j] * dot(q[i], k[j]) * decay(i, j) * delta[j];
      CHECK(right.at("out")[i * v_dim + v] == Approx(out).margin(1e-12));
    }
    for (std::size_t c = 0; c < dim; ++c) {
      double last = std::exp(sums.back()) * state[c];
      for (std::size_t i = 0; i < tokens; ++i)
        last += decay(tokens - 1, i) * of_k[i] * delta[i] * k[i][c];
      CHECK(right.at("final_state")[v * dim + c] == Approx(last).margin(1e-12));
    }
  }
}

TEST_CASE("a few problems with chunks of gated-delta-rule are right on the GPU", "[gpu][small]") {
  verify_on_gpu(gated_delta_rule_op(), random_chunks, 8);
}

TEST_CASE("a few problems with slots of gated-delta-rule are right on the GPU", "[gpu][small]") {
  verify_on_gpu(gated_delta_rule_op(), with_slots<random_delta>, 8);
}

TEST_CASE("single tokens of gated-delta-rule are right on the GPU", "[gpu][small]") {
  verify_on_gpu(gated_delta_rule_op(), single_tokens<gated_delta_rule_op, random_delta>, 40, 13);
}

TEST_CASE("states of gated-delta-rule of single tokens are prefetched in whole 16 bytes") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const auto prefetches = [&](Sizes more, Options options, const std::string& pass = "fwd") {
    Sizes sizes{{"s", 1}, {"b", 4}, {"heads", 2}, {"dim", 64}, {"v-dim", 64}};
    for (const auto& [name, size] : more) sizes[name] = size;
    const Problem problem =
        delta_problem(DeviceKind::cuda, pass, DType::bf16, sizes, std::move(options));
    const std::string name = pass == "fwd" ? "recurrent" : "recurrent_backward";
    for (const Family* family : gated_delta_rule_op().families()) {
      if (family->name() != name) continue;
      Config config = family->default_config(problem, facts);
      config.set("prefetch", 1);
      return family->space(problem, facts).violations(config).empty();
    }
    return false;
  };
  CHECK(prefetches({}, {}));
  CHECK(prefetches({{"dim", 8}}, {{"state-dtype", "bf16"}}));
  CHECK_FALSE(prefetches({{"dim", 20}}, {{"state-dtype", "bf16"}}));
  CHECK(prefetches({{"states", 9}}, {{"indices", "yes"}}));
  CHECK_FALSE(prefetches({{"states", 9}, {"state-block", 8194}}, {{"indices", "yes"}}));
  CHECK_FALSE(prefetches({{"states", 9}, {"slots", 1}}, {{"indices", "yes"}}));
  CHECK_FALSE(prefetches({{"s", 2}}, {}));
  CHECK_FALSE(prefetches({}, {{"layout", "thd"}}));
  CHECK_FALSE(prefetches({}, {{"state-layout", "kv"}}));
  CHECK_FALSE(prefetches({}, {}, "bwd"));
}

const FuzzCases<gated_delta_rule_op, random_delta,
                FuzzCounts{.small = 1500, .larger = 30, .gpu = 400}>
    delta_cases;
