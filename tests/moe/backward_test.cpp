// The backward passes' references against central differences.
#include <random>
#include <string>
#include <vector>

#include "core/routing.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "moe/problems.hpp"
#include "support/gradients.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<double> ids_of(const MoeSizes& sizes, std::uint64_t seed) {
  const auto drawn = draw_routing({1}, sizes.m, sizes.experts, sizes.choices, seed);
  return {drawn.begin(), drawn.end()};
}

}  // namespace

TEST_CASE("the gradients of a mixture are its central differences") {
  std::mt19937_64 random(1);
  for (const std::string& act : activation_names())
    for (const char* save : {"preact", "input"})
      for (const MoeSizes& sizes : {MoeSizes{1, 2, 3, 2, 1}, MoeSizes{5, 3, 2, 4, 3}}) {
        auto ids = ids_of(sizes, random());
        if (sizes.choices > 1) ids.front() = -1;
        check_gradients(
            moe_ffn_op(),
            moe_problem(sizes, DType::f32, DeviceKind::cuda, {{"act", act}, {"save", "preact"}}),
            moe_problem(sizes, DType::f32, DeviceKind::cuda, {{"act", act}, {"save", save}}, "bwd"),
            {{"x", "dx"},
             {"weights", "d_weights"},
             {"w_gate", "dw_gate"},
             {"w_up", "dw_up"},
             {"w_down", "dw_down"}},
            random, {{"ids", ids}});
      }
}

TEST_CASE("the gradient of a router is the central difference of its weights") {
  constexpr double step = 1e-5;
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
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
        ReferenceTensors tensors;
        for (int i = 0; i < 21; ++i) tensors["logits"].push_back(normal(random));
        for (int i = 0; i < 9; ++i) tensors["d_weights"].push_back(normal(random));
        moe_route_op().reference(problem("fwd"), 0, tensors, pool);
        moe_route_op().reference(problem("bwd"), 0, tensors, pool);
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
