// Layers that quantise their tokens, with weights of e4m3: buffers, families, and plans against the
// float64 reference.
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "layer/plans.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Layers of two kinds of scales, with experts, and with what stands beside the products.
std::vector<std::pair<Sizes, Options>> quantised_forms() {
  const Sizes experts{{"experts", 4}, {"top-k", 2}};
  Sizes shared = experts;
  shared["shared-h"] = 64;
  return {{{}, {{"quantise", "token"}, {"qkv-bias", "yes"}, {"qk-norm", "yes"}}},
          {{}, {{"quantise", "block"}, {"post-norms", "yes"}, {"residual-scale", "no"}}},
          {{}, {{"quantise", "token"}, {"ffn", "plain"}, {"act", "gelu"}, {"ffn-bias", "yes"}}},
          {experts, {{"quantise", "block"}, {"ffn", "moe"}, {"qkv-weights", "packed"}}},
          {shared, {{"quantise", "token"}, {"ffn", "moe"}, {"attn-weights", "dense"}}},
          {shared, {{"quantise", "block"}, {"ffn", "moe"}, {"shared-gate", "yes"}}}};
}

void verify_quantised(Backend& backend, DType dtype, const Sizes& tokens) {
  for (const auto& [more, options] : quantised_forms()) {
    Sizes sizes = llama_sizes(144, 208, 32, tokens);
    sizes.insert(more.begin(), more.end());
    verify_plan(backend, layer_problem(backend.facts().kind, dtype, sizes, options));
  }
}

}  // namespace

TEST_CASE("layers that quantise have their weights' scales in the order that the API promises") {
  const auto inputs = [](Sizes more, const Options& options) {
    more.insert({{"batch", 2}, {"cache", 24}});
    Names names;
    for (const auto& tensor : layer_op().tensors(layer_problem(
             DeviceKind::cuda, DType::bf16, llama_sizes(144, 208, 32, std::move(more)), options)))
      if (tensor.role == Role::input && (tensor.name[0] == 'w' || tensor.dtype == DType::fp8))
        names.push_back(tensor.name);
    return names;
  };
  CHECK(inputs({}, {{"quantise", "token"}}) == Names{"w_qkv", "w_qkv_scale", "w_o", "w_o_scale",
                                                     "w_gate", "w_up", "w_down", "w_gate_scale",
                                                     "w_up_scale", "w_down_scale"});
  CHECK(inputs({{"experts", 4}, {"top-k", 2}}, {{"quantise", "block"},
                                                {"ffn", "moe"},
                                                {"gate-up", "separate"},
                                                {"attn-weights", "dense"}}) ==
        Names{"w_q", "w_k", "w_v", "w_o", "w_router", "w_gate", "w_up", "w_down", "w_gate_scale",
              "w_up_scale", "w_down_scale"});
}

TEST_CASE("layers that quantise refuse what does not go together in one line") {
  const Sizes sizes = llama_sizes(144, 208, 32, {{"batch", 1}, {"cache", 8}});
  CHECK(layer_complaint(sizes, {{"quantise", "token"}, {"weights", "fp8"}}) ==
        "layer: quantise=token with weights=fp8: the weight is e4m3, and not packed");
  CHECK(layer_complaint(sizes, {{"quantise", "block"}, {"qkv-weights", "grouped"}}) ==
        "layer: qkv-weights=grouped with quantise=block: its rows are those of q, of k and of v");
  CHECK(layer_complaint(sizes, {{"attn-weights", "dense"}})
            .find("is of packed weights and quantise") != std::string::npos);
  CHECK(layer_complaint(sizes, {{"quantise", "token"}, {"attn-weights", "dense"}}) == "");
}

TEST_CASE("layers that quantise are right on the CPU", "[quantise]") {
  const auto backend = open_cpu();
  verify_quantised(*backend, DType::f32, {{"batch", 2}, {"cache", 20}});
  verify_quantised(*backend, DType::bf16, {{"batch", 2}, {"s", 5}, {"cache", 20}, {"page", 16}});
  verify_quantised(*backend, DType::bf16, {{"batch", 1}, {"cache", 20}, {"layers", 2}});
}

TEST_CASE("layers that quantise are right on a GPU", "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  verify_quantised(*backend, DType::bf16, {{"batch", 2}, {"cache", 20}});
  verify_quantised(*backend, DType::fp16, {{"batch", 2}, {"s", 70}, {"cache", 90}, {"page", 16}});
}
