#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gated_delta_rule/states.hpp"
#include "kernels/ssd/ssd.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem ssd_problem(DeviceKind kind, const std::string& pass, DType dtype, Sizes sizes,
                    Options options = {}) {
  return canonical(ssd_op(), {"ssd", pass, dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_ssd(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "fwd", "bwd"});
  Options options{{"decay", draw.of({"log", "log", "given"})},
                  {"softplus", draw.of({"yes", "yes", "no"})},
                  {"dt-bias", draw.of({"no", "yes"})},
                  {"skip", draw.of({"no", "yes"})},
                  {"layout", draw.of({"bshd", "thd"})},
                  {"state-dtype", draw.of({"f32", "f32", "bf16"})}};
  const bool cached = pass == "fwd" && draw.below(2) == 1;
  const std::int64_t groups = 1 + draw.below(2), heads = groups * (1 + draw.below(4));
  const std::int64_t dims[] = {1, 3, 8, 16, 20, 32, 64, 80, 128, 256};
  const std::int64_t state_dims[] = {1, 3, 8, 16, 20, 32, 64, 96, 128, 256};
  Sizes sizes{{"heads", heads},
              {"groups", groups},
              {"dim", dims[draw.below(10)]},
              {"state-dim", state_dims[draw.below(10)]}};
  const std::int64_t row =
      std::max(heads * sizes["dim"], std::max(groups, heads / 2) * sizes["state-dim"]);
  const std::int64_t tokens =
      std::max<std::int64_t>(1, std::min(draw.size(9), most_elements / row));
  draw_states(draw, pass, cached, tokens, heads * sizes["dim"] * sizes["state-dim"], sizes,
              options);
  if (cached && draw.below(3) == 0) sizes["slots"] = 1 + draw.below(4);
  if (draw.below(3) == 0) options["dt-min"] = "0.01";
  if (draw.below(3) == 0) options["dt-max"] = "0.05";
  if (draw.below(3) == 0) sizes["x-row"] = heads * sizes["dim"] + draw.below(3) * 8 + draw.below(2);
  for (const char* name : {"b-row", "c-row"})
    if (draw.below(3) == 0)
      sizes[name] = groups * sizes["state-dim"] + draw.below(3) * 8 + draw.below(2);
  if (draw.below(3) == 0) sizes["dt-row"] = heads + draw.below(9);
  return ssd_problem(kind, pass, draw.of(ssd_op().dtypes(kind)), sizes, options);
}

double softplus(double x) {
  return std::log1p(std::exp(x));
}

/// Tokens, rows and features at the edges of tiles, and each form of sequences.
void verify_chunks(const char* pass) {
  FFTUNE_FIRST_CUDA(backend);
  const Options rest{{"dt-bias", "yes"}, {"skip", "yes"}};
  std::vector<Problem> problems;
  const auto add = [&](const Sizes& sizes, Options options = {}) {
    if (pass == std::string("bwd") && (sizes.at("dim") % 16 != 0 || options.contains("has-state")))
      return;
    options.insert(rest.begin(), rest.end());
    problems.push_back(ssd_problem(DeviceKind::cuda, pass, DType::bf16, sizes, options));
  };
  for (const std::int64_t s : {2, 63, 64, 65, 130})
    add({{"s", s}, {"b", 1}, {"heads", 1}, {"dim", 64}, {"state-dim", 64}},
        {{"final-state", "yes"}});
  add({{"s", 70}, {"b", 1}, {"heads", 2}, {"groups", 2}, {"dim", 80}, {"state-dim", 128}},
      {{"initial-state", "yes"}, {"final-state", "yes"}, {"state-dtype", "bf16"}});
  add({{"s", 70}, {"b", 1}, {"heads", 2}, {"dim", 64}, {"state-dim", 256}},
      {{"initial-state", "yes"}, {"final-state", "yes"}, {"has-state", "yes"}});
  add({{"s", 70}, {"b", 1}, {"heads", 1}, {"dim", 16}, {"state-dim", 256}});
  add({{"s", 70},
       {"b", 1},
       {"heads", 1},
       {"dim", 8},
       {"state-dim", 16},
       {"x-row", 16},
       {"b-row", 24}},
      {{"final-state", "yes"}});
  add({{"s", 150}, {"b", 5}, {"heads", 2}, {"dim", 32}, {"state-dim", 48}},
      {{"layout", "thd"}, {"initial-state", "yes"}, {"final-state", "yes"}, {"dt-max", "0.05"}});
  add({{"s", 33}, {"b", 4}, {"heads", 2}, {"dim", 24}, {"state-dim", 64}, {"states", 4}},
      {{"indices", "yes"}, {"has-state", "yes"}, {"decay", "given"}});
  std::mt19937_64 random(7);
  verify_families(*backend, ssd_op(), problems, random, 1,
                  [](const Family& family) { return family.name().starts_with("chunks"); });
}

/// Chunks by wgmma: stages and places of states that are used again, blocks of a head, slabs of
/// rows and features, clusters.
void verify_sm90_chunks() {
  FFTUNE_FIRST_CUDA(backend);
  if (backend->facts().arch != "sm_90a") FFTUNE_SKIP("it needs wgmma");
  const Options rest{{"dt-bias", "yes"}, {"skip", "yes"}};
  std::vector<Problem> problems;
  const auto add = [&](const Sizes& sizes, Options options = {}) {
    options.insert(rest.begin(), rest.end());
    problems.push_back(ssd_problem(DeviceKind::cuda, "fwd", DType::bf16, sizes, options));
  };
  add({{"s", 650}, {"b", 1}, {"heads", 4}, {"dim", 64}, {"state-dim", 128}},
      {{"final-state", "yes"}});
  add({{"s", 330}, {"b", 2}, {"heads", 2}, {"dim", 80}, {"state-dim", 64}},
      {{"initial-state", "yes"}, {"final-state", "yes"}});
  add({{"s", 200}, {"b", 1}, {"heads", 2}, {"dim", 32}, {"state-dim", 256}});
  add({{"s", 140}, {"b", 1}, {"heads", 1}, {"dim", 128}, {"state-dim", 128}});
  add({{"s", 130}, {"b", 1}, {"heads", 2}, {"dim", 208}, {"state-dim", 64}},
      {{"final-state", "yes"}});
  add({{"s", 500},
       {"b", 4},
       {"heads", 4},
       {"groups", 2},
       {"dim", 48},
       {"state-dim", 128},
       {"x-row", 200},
       {"b-row", 264},
       {"c-row", 272}},
      {{"layout", "thd"}, {"initial-state", "yes"}, {"final-state", "yes"}});
  add({{"s", 300}, {"b", 3}, {"heads", 4}, {"dim", 64}, {"state-dim", 128}, {"states", 4}},
      {{"layout", "thd"}, {"indices", "yes"}, {"has-state", "yes"}, {"state-dtype", "bf16"}});
  std::mt19937_64 random(11);
  verify_families(*backend, ssd_op(), problems, random, 3,
                  [](const Family& family) { return family.name() == "chunks_sm90"; });
}

/// NaN of a sequence does not reach the one before it, whose last chunk ends within a tile.
void check_foreign_values(Backend& backend) {
  constexpr std::int64_t own = 70, all = 150, heads = 2, dim = 64, features = 64;
  const Problem problem =
      ssd_problem(backend.facts().kind, "fwd", DType::bf16,
                  {{"s", all}, {"b", 2}, {"heads", heads}, {"dim", dim}, {"state-dim", features}},
                  {{"layout", "thd"}, {"final-state", "yes"}, {"skip", "yes"}});
  for (const Family* family : ssd_op().families()) {
    if (family->device_kind() != backend.facts().kind || family->refusal(problem, backend.facts()))
      continue;
    CAPTURE(family->name());
    std::vector<std::vector<float>> results[2];
    for (const bool hostile : {false, true}) {
      OpRun run(backend, ssd_op(), problem);
      run.set("offsets", {0, own, all});
      for (const char* name : {"x", "dt", "B", "C"}) {
        std::vector<float> values = run.values(name);
        if (hostile)
          std::fill(values.begin() + static_cast<std::ptrdiff_t>(values.size()) * own / all,
                    values.end(), std::numeric_limits<float>::quiet_NaN());
        run.set(name, values);
      }
      run.run(family->program(problem, backend.facts(),
                              family->default_config(problem, backend.facts())));
      for (const auto& [name, count] : {std::pair{"out", own * heads * dim},
                                        std::pair{"final_state", heads * dim * features}}) {
        std::vector<float> values = run.values(name);
        values.resize(static_cast<std::size_t>(count));
        results[hostile].push_back(std::move(values));
      }
    }
    CHECK(results[0] == results[1]);
    CHECK(std::none_of(results[1][0].begin(), results[1][0].end(),
                       [](float value) { return std::isnan(value); }));
  }
}

}  // namespace

TEST_CASE("the reference of ssd is the recurrence, by hand") {
  // One head of one feature, a state of 2, 2 tokens.
  const Sizes sizes{{"s", 2}, {"b", 1}, {"heads", 1}, {"dim", 1}, {"state-dim", 2}};
  const auto found = run_reference(ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                               {{"initial-state", "yes"},
                                                {"final-state", "yes"},
                                                {"softplus", "no"},
                                                {"skip", "yes"},
                                                {"decay", "given"},
                                                {"dt-max", "2"}}),
                                   {{"x", {3, 5}},
                                    {"dt", {0.5, 7}},
                                    {"A", {-std::log(4.0)}},
                                    {"B", {1, 0, 0.5, 1}},
                                    {"C", {1, 1, 2, -1}},
                                    {"D", {10}},
                                    {"initial_state", {2, 4}}});
  // exp(0.5 A) is 1/2: [1, 2], and 0.5 * 3 [1, 0] is written.
  CHECK(found.at("out")[0] == Approx(2.5 + 2 + 30));
  // dt is 2, exp(2 A) is 1/16, and 2 * 5 [0.5, 1] is written.
  CHECK(found.at("final_state")[0] == Approx(2.5 / 16 + 5));
  CHECK(found.at("final_state")[1] == Approx(2.0 / 16 + 10));
  CHECK(found.at("out")[1] == Approx(2 * (2.5 / 16 + 5) - (2.0 / 16 + 10) + 50));
}

TEST_CASE("the step of ssd follows from its input, its bias and limits") {
  const Sizes sizes{{"s", 1}, {"b", 1}, {"heads", 2}, {"dim", 1}, {"state-dim", 1}};
  const auto steps_of = [&](Options options) {
    options["final-state"] = "yes", options["dt-bias"] = "yes";
    return run_reference(ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options),
                         {{"x", {1, 1}},
                          {"dt", {0.5, -2}},
                          {"A_log", {0, 0}},
                          {"B", {1}},
                          {"C", {1}},
                          {"dt_bias", {0.25, 1}}})
        .at("final_state");
  };
  CHECK(steps_of({})[0] == Approx(softplus(0.75)));
  CHECK(steps_of({})[1] == Approx(softplus(-1)));
  CHECK(steps_of({{"softplus", "no"}})[0] == Approx(0.75));
  CHECK(steps_of({{"softplus", "no"}})[1] == 0);
  CHECK(steps_of({{"dt-max", "0.9"}, {"dt-min", "0.5"}})[0] == Approx(0.9));
  CHECK(steps_of({{"dt-max", "0.9"}, {"dt-min", "0.5"}})[1] == Approx(0.5));
}

TEST_CASE("heads of ssd share the group before them, and a padded index leaves states") {
  const Sizes sizes{{"s", 1},   {"b", 3},         {"heads", 4}, {"groups", 2},
                    {"dim", 1}, {"state-dim", 1}, {"states", 2}};
  const auto found =
      run_reference(ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                {{"indices", "yes"}, {"softplus", "no"}, {"decay", "given"}}),
                    {{"x", {1, 2, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1}},
                     {"dt", std::vector<double>(12, 1)},
                     {"A", {0, 0, 0, 0}},
                     {"B", {1, 10, 1, 1, 1, 1}},
                     {"C", {1, 1, 1, 1, 1, 1}},
                     {"states", {7, 7, 7, 7, 100, 200, 300, 400}},
                     {"state_indices", {1, 0, 2}}});
  CHECK(found.at("out") == std::vector<double>{101, 202, 330, 440, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(found.at("states") == std::vector<double>{7, 7, 7, 7, 101, 202, 330, 440});
}

TEST_CASE("slots of ssd hold the states behind single tokens") {
  const Sizes sizes{{"s", 2},   {"b", 4},         {"heads", 1},  {"groups", 1},
                    {"dim", 1}, {"state-dim", 1}, {"states", 8}, {"slots", 2}};
  const auto found =
      run_reference(ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                {{"indices", "yes"}, {"softplus", "no"}, {"decay", "given"}}),
                    {{"x", {1, 2, 3, 4, 5, 6, 7, 8}},
                     {"dt", std::vector<double>(8, 1)},
                     {"A", {0}},
                     {"B", std::vector<double>(8, 1)},
                     {"C", std::vector<double>(8, 1)},
                     {"states", {10, 20, 30, 40, 50, 60, 70, 80}},
                     {"state_indices", {1, 2, 3, 4, 0, 5, 6, 0}},
                     {"accepted", {1, 2, 1, 9}}});
  // The third sequence is padding; the fourth begins with its last slot, which is padding.
  CHECK(found.at("out") == std::vector<double>{21, 23, 53, 57, 0, 0, 0, 0});
  CHECK(found.at("states") == std::vector<double>{10, 21, 23, 53, 57, 60, 70, 80});
}

TEST_CASE("gradients of ssd's reference are those of its differences") {
  std::mt19937_64 random(5);
  for (const char* decay : {"log", "given"}) {
    const bool given = std::string(decay) == "given";
    Options options{{"decay", decay},
                    {"layout", "thd"},
                    {"skip", "yes"},
                    {"initial-state", "yes"},
                    {"final-state", "yes"},
                    {"dt-bias", "yes"},
                    {"softplus", given ? "no" : "yes"}};
    const Sizes sizes{{"s", 70},     {"b", 3},   {"heads", 2},
                      {"groups", 1}, {"dim", 2}, {"state-dim", 3}};
    const Problem forward = ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes, options);
    const Problem backward = ssd_problem(DeviceKind::cpu, "bwd", DType::f32, sizes, options);
    ReferenceTensors inputs{{"offsets", {0, 66, 66, 70}}};
    for (const TensorSpec& tensor : ssd_op().tensors(backward))
      if (tensor.draw && tensor.name != "offsets") {
        inputs[tensor.name].resize(static_cast<std::size_t>(tensor.elements()));
        tensor.draw(random(), inputs[tensor.name]);
        for (double& value : inputs[tensor.name]) {
          value = std::min(std::max(value, -7.0), 1.0);
          // Far from the least step, 0.
          if (given && tensor.name == "dt") value = 0.1 + std::abs(value);
        }
      }
    std::vector<std::pair<std::string, std::string>> gradients{
        {"initial_state", "d_initial_state"}};
    for (const std::string input : {"x", "dt", given ? "A" : "A_log", "B", "C", "D", "dt_bias"})
      gradients.emplace_back(input, "d" + input);
    check_differences(ssd_op(), forward, backward, gradients, random, inputs);
  }
}

TEST_CASE("a step of ssd at a limit has no gradient, and one at the limit itself has") {
  const Sizes sizes{{"s", 3}, {"b", 1}, {"heads", 1}, {"dim", 1}, {"state-dim", 1}};
  const auto found =
      run_reference(ssd_problem(DeviceKind::cpu, "bwd", DType::f32, sizes,
                                {{"softplus", "no"}, {"dt-min", "0.5"}, {"dt-max", "1"}}),
                    {{"d_out", {1, 1, 1}},
                     {"x", {1, 1, 1}},
                     {"dt", {0.25, 1, 2}},
                     {"A_log", {0}},
                     {"B", {1, 1, 1}},
                     {"C", {1, 1, 1}}});
  CHECK(found.at("ddt")[0] == 0);
  CHECK(found.at("ddt")[1] != 0);
  CHECK(found.at("ddt")[2] == 0);
}

TEST_CASE("most steps of ssd's test data are between the limits, and some are beyond each") {
  const Sizes sizes{{"s", 500}, {"b", 1}, {"heads", 40}, {"dim", 1}, {"state-dim", 1}};
  const auto limits = GENERATE(std::pair{"0", "0"}, std::pair{"0.01", "0"}, std::pair{"0", "0.05"},
                               std::pair{"0.01", "0.05"}, std::pair{"0.5", "0"},
                               std::pair{"0", "0.0005"}, std::pair{"0.02", "0.025"});
  const char *softplused = GENERATE("yes", "no"), *biased = GENERATE("yes", "no");
  const Problem problem = ssd_problem(DeviceKind::cpu, "fwd", DType::f32, sizes,
                                      {{"dt-min", limits.first},
                                       {"dt-max", limits.second},
                                       {"softplus", softplused},
                                       {"dt-bias", biased}});
  CAPTURE(problem.text());
  std::map<std::string, std::vector<double>> inputs;
  std::mt19937_64 random(3);
  for (const TensorSpec& tensor : ssd_op().tensors(problem)) {
    auto& values = inputs[tensor.name];
    values.resize(static_cast<std::size_t>(tensor.elements()));
    if (tensor.draw) {
      tensor.draw(random(), values);
      continue;
    }
    std::normal_distribution<double> normal(tensor.mean, tensor.scale);
    for (double& value : values) value = normal(random);
  }
  const ssd::Layer layer = ssd::layer_of(problem);
  std::size_t below = 0, above = 0;
  const auto& dt = inputs.at("dt");
  for (std::size_t i = 0; i < dt.size(); ++i) {
    double step = dt[i] + (layer.bias ? inputs.at("dt_bias")[i % 40] : 0);
    if (layer.softplus) step = softplus(step);
    below += step<layer.dt_min, above += step> layer.dt_max;
  }
  CHECK(below + above < dt.size() * 2 / 5);
  CHECK((below > dt.size() / 50) == (layer.dt_min > 0));
  CHECK((above > dt.size() / 50) == std::isfinite(layer.dt_max));
}

TEST_CASE("chunks of ssd are right on the GPU at their edges", "[gpu][small]") {
  verify_chunks("fwd");
}
TEST_CASE("chunks of ssd by wgmma are right on the GPU in all their parts", "[gpu][small]") {
  verify_sm90_chunks();
}
TEST_CASE("values of another sequence have no effect on ssd on the GPU", "[gpu][small]") {
  on_first_cuda(check_foreign_values);
}
TEST_CASE("gradients of chunks of ssd are right on the GPU at their edges", "[gpu][small]") {
  verify_chunks("bwd");
}

TEST_CASE("single tokens of ssd are right on the GPU", "[gpu][small]") {
  verify_on_gpu(ssd_op(), single_tokens<ssd_op, random_ssd>, 40, 13);
}

TEST_CASE("a few problems with slots of ssd are right on the GPU", "[gpu][small]") {
  verify_on_gpu(ssd_op(), with_slots<random_ssd>, 8);
}

const FuzzCases<ssd_op, random_ssd, FuzzCounts{.small = 1500, .larger = 30, .gpu = 400}> ssd_cases;
