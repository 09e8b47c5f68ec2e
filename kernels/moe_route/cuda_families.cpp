#include <fmt/format.h>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/moe_route/moe_route.hpp"

namespace fftune::moe_route {
namespace {

constexpr const char* kernel_file = "moe_route/route.cu";

/// route.cu's router_form. The backward pass takes the ids as they are.
std::string template_argument(const Router& router) {
  constexpr std::string_view scores[] = {"softmax_of_all", "softmax_of_chosen", "sigmoid"};
  return fmt::format("fftune::router_form{{{}, {}, {}, {}, fftune::router_score::{}, {}, {}, {}}}",
                     router.experts, router.choices, router.groups, router.top_groups,
                     scores[static_cast<std::size_t>(router.score)], router.sums_two, router.bias,
                     router.renormalises);
}

class Choose final : public StageFamily {
 public:
  explicit Choose(bool backward)
      : StageFamily({.name = backward ? "choose_gradient" : "choose",
                     .summary = "a warp a token, its logits in registers",
                     .stage = moe_route::stage,
                     .pass = backward ? "bwd" : "fwd",
                     .sources = {kernel_file},
                     .is_fallback = true}),
        backward_(backward) {}

  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    constexpr std::int64_t tokens_of_block = 4;
    const Router router = router_of(problem);
    const TensorPlaces places(moe_route_op().tensors(problem));
    const auto given = [&](const char* name) { return tensor_or_null(places.at(name)); };
    std::vector<Argument> arguments =
        backward_
            ? std::vector{given("d_weights"), given("logits"), given("ids"), given("d_logits")}
            : std::vector{given("logits"), given("bias"), given("ids"), given("weights")};
    arguments.emplace_back(router.scale);
    arguments.emplace_back(router.m);
    Program program;
    KernelLaunch& launch = append_kernel(
        program, kernel_file,
        fmt::format("{}<{}, {}>", backward_ ? "choose_experts_gradient" : "choose_experts",
                    element_type(router.dtype), template_argument(router)),
        {static_cast<std::uint32_t>(quotient_up(router.m, tokens_of_block))}, 128,
        std::move(arguments));
    launch.programmatic = facts.compute_capability >= 90;
    return program;
  }

 private:
  bool backward_;
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static const Choose forward(false), backward(true);
  return {&forward, &backward};
}

}  // namespace fftune::moe_route
