#include <fmt/format.h>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/moe_route/moe_route.hpp"

namespace fftune::moe_route {
namespace {

constexpr const char* kernel_file = "moe_route/route.cu";

/// route.cu's router_form. The backward pass takes the ids as they are.
std::string template_argument(const Router& router) {
  constexpr std::string_view scores[] = {"softmax_of_all", "softmax_of_chosen", "sigmoid"};
  return StructText("router_form", "experts", router.experts, "choices", router.choices, "groups",
                    router.groups, "top_groups", router.top_groups, "score",
                    fmt::format("fftune::router_score::{}",
                                scores[static_cast<std::size_t>(router.score)]),
                    "sums_two", router.sums_two, "bias", router.bias, "renormalises",
                    router.renormalises)
      .flags("adds_millionth", router.adds_millionth);
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  constexpr std::int64_t tokens_of_block = 4;
  const Router router = router_of(problem);
  const bool backward = problem.pass == "bwd";
  const TensorPlaces places(moe_route_op().tensors(problem));
  const auto given = [&](const char* name) { return tensor_or_null(places.at(name)); };
  std::vector<Argument> arguments =
      backward ? std::vector{given("d_weights"), given("logits"), given("ids"), given("d_logits")}
               : std::vector{given("logits"), given("bias"), given("ids"), given("weights")};
  arguments.emplace_back(router.scale);
  arguments.emplace_back(router.m);
  return pdl_program(
      facts, kernel_file,
      fmt::format("{}<{}, {}>", backward ? "choose_experts_gradient" : "choose_experts",
                  element_type(router.dtype), template_argument(router)),
      {static_cast<std::uint32_t>(quotient_up(router.m, tokens_of_block))}, 128,
      std::move(arguments));
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const auto families = of_passes({"choose", "choose_gradient"},
                                         {.summary = "a warp a token, its logits in registers",
                                          .stage = moe_route::stage,
                                          .sources = {kernel_file},
                                          .is_fallback = true,
                                          .program = program});
  return addresses_of(families);
}

}  // namespace fftune::moe_route
