// The backward passes' references against central differences.
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/distribution.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "moe/problems.hpp"
#include "support/fields.hpp"
#include "support/gradients.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<double> ids_of(const MoeSizes& sizes, std::uint64_t seed) {
  const auto drawn = draw_routing({1}, sizes.m, sizes.experts, sizes.choices, seed);
  return {drawn.begin(), drawn.end()};
}

/// The router's tensors of both passes, for random logits and gradients of the weights.
ReferenceTensors routed(const Problem& forward, const Problem& backward, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  ReferenceTensors tensors;
  for (const auto& [name, columns] : {std::pair{"logits", "experts"}, {"d_weights", "top-k"}})
    for (std::int64_t i = 0; i < forward.size("m") * forward.size(columns); ++i)
      tensors[name].push_back(normal(random));
  for (const Problem& problem : {forward, backward}) run_stages(moe_route_op(), problem, tensors);
  return tensors;
}

}  // namespace

TEST_CASE("the gradients of a mixture are its central differences") {
  std::mt19937_64 random(1);
  const auto check = [&](const MoeSizes& sizes, Options options, const std::string& save) {
    auto ids = ids_of(sizes, random());
    if (sizes.choices > 1) ids.front() = -1;
    const bool separate = !options.contains("gate-up") || options["gate-up"] == "separate";
    std::vector<std::pair<std::string, std::string>> gradients{{"x", "dx"},
                                                               {"weights", "d_weights"}};
    const bool frozen = options.contains("frozen");
    if (!frozen) gradients.emplace_back("w_down", "dw_down");
    const auto add = [&](const char* of, bool is_there) {
      for (const char* name : {"gate", "up", "gate_up"})
        if (is_there && separate == (std::string(name) != "gate_up"))
          gradients.emplace_back(of + std::string(name), "d" + (of + std::string(name)));
    };
    add("w_", !frozen);
    add("b_", options.contains("bias") && !frozen);
    if (options.contains("bias") && !frozen) gradients.emplace_back("b_down", "db_down");
    const auto problem = [&](const char* pass, const std::string& kept) {
      Options all = options;
      all["save"] = kept;
      if (std::string(pass) == "fwd") all.erase("frozen");
      return moe_problem(sizes, DType::f32, DeviceKind::cuda, std::move(all), pass);
    };
    check_gradients(moe_ffn_op(), problem("fwd", "preact"), problem("bwd", save), gradients, random,
                    {{"ids", ids}});
  };
  for (const std::string& act : gated_activation_names())
    for (const char* save : {"preact", "input"})
      for (const MoeSizes& sizes : {MoeSizes{1, 2, 3, 2, 1}, MoeSizes{5, 3, 2, 4, 3, 1}})
        check(sizes, {{"act", act}}, save);
  for (const char* packing : {"separate", "halves", "interleaved"})
    for (const char* weigh : {"after", "before"})
      for (const char* save : {"preact", "input"}) {
        check({4, 3, 5, 3, 2, 2}, {{"gate-up", packing}, {"weigh", weigh}, {"bias", "all"}}, save);
        check({4, 3, 5, 3, 2}, {{"gate-up", packing}, {"weigh", weigh}, {"act", "swiglu-oai"}},
              save);
        check({4, 3, 5, 3, 2, 2},
              {{"gate-up", packing}, {"weigh", weigh}, {"bias", "all"}, {"frozen", "yes"}}, save);
      }
}

TEST_CASE("values limited by swiglu-oai have no gradient for gate and up, but one for the weight") {
  // gate and up are 1000 times x: beyond the limits, where the expert gives 7 sigmoid(7·1.702) · 8.
  for (const char* weigh : {"after", "before"}) {
    const std::map<std::string, std::string> options{{"act", "swiglu-oai"}, {"weigh", weigh}};
    const MoeSizes sizes{1, 1, 1, 1, 1};
    const Problem backward = moe_problem(sizes, DType::f32, DeviceKind::cuda, options, "bwd");
    ReferenceTensors tensors{{"dy", {2}},        {"x", {1}},       {"ids", {0}},
                             {"weights", {1}},   {"gate", {1000}}, {"up", {1000}},
                             {"w_gate", {1000}}, {"w_up", {1000}}, {"w_down", {0.5}}};
    run_stages(moe_ffn_op(), backward, tensors);
    for (const char* zero : {"dx", "dw_gate", "dw_up"}) CHECK(tensors.at(zero).front() == 0);
    const double given = 7 / (1 + std::exp(-1.702 * 7)) * 8;
    CHECK(tensors.at("dw_down").front() == Approx(2 * given));
    CHECK(tensors.at("d_weights").front() ==
          Approx(std::string(weigh) == "after" ? 2 * 0.5 * given : 0));
  }
}

TEST_CASE("the gradient of a router is the central difference of its weights") {
  constexpr double step = 1e-5;
  std::mt19937_64 random(2);
  Pool pool(1);
  for (const char* score : {"softmax", "sigmoid"})
    for (const char* order : {"before", "after"})
      for (const char* renormalise : {"no", "yes"}) {
        if (std::string(score) == "sigmoid" && std::string(order) == "after") continue;
        CAPTURE(score, order, renormalise);
        const auto problem = [&](const char* pass) {
          return canonical(moe_route_op(),
                           {"moe-route",
                            pass,
                            DType::f32,
                            {{"m", 3}, {"experts", 7}, {"top-k", 3}},
                            {{"score", score},
                             {"order", order},
                             {"renormalise", renormalise},
                             {"scale", "2.5"}}},
                           DeviceKind::cpu);
        };
        const ReferenceTensors tensors = routed(problem("fwd"), problem("bwd"), random);
        const auto objective = [&](std::vector<double> logits) {
          ReferenceTensors at{{"logits", std::move(logits)}};
          moe_route_op().reference(problem("fwd"), 0, at, pool);
          REQUIRE(at.at("ids") == tensors.at("ids"));
          double sum = 0;
          for (std::size_t i = 0; i < 9; ++i)
            sum += at.at("weights")[i] * tensors.at("d_weights")[i];
          return sum;
        };
        for (std::size_t i = 0; i < 21; ++i) {
          auto above = tensors.at("logits"), below = above;
          above[i] += step;
          below[i] -= step;
          const double numeric = (objective(above) - objective(below)) / (2 * step);
          CHECK(tensors.at("d_logits")[i] == Approx(numeric).epsilon(1e-5).margin(1e-8));
        }
      }
}

TEST_CASE("a weight that is divided by itself has no gradient at all") {
  std::mt19937_64 random(3);
  for (const char* scale : {"1", "2.5", "0.3"}) {
    const auto problem = [&](const char* pass) {
      return canonical(moe_route_op(),
                       {"moe-route",
                        pass,
                        DType::f32,
                        {{"m", 64}, {"experts", 8}, {"top-k", 1}},
                        {{"renormalise", "yes"}, {"scale", scale}}},
                       DeviceKind::cpu);
    };
    const ReferenceTensors tensors = routed(problem("fwd"), problem("bwd"), random);
    // Rounding errors instead would be all of the reference, by which a kernel is judged.
    CHECK(tensors.at("d_logits") == std::vector<double>(512, 0.0));
  }
}
