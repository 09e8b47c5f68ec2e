// Layers, and decode steps, with caches of e4m3: buffers, families, and plans against the float64
// reference.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cpu/open.hpp"
#include "kernels/decode/decode.hpp"
#include "layer/plans.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<std::pair<Sizes, Options>> forms_of_e4m3() {
  return {{{{"batch", 2}, {"cache", 20}}, {}},
          {{{"batch", 3}, {"s", 4}, {"cache", 40}, {"page", 16}, {"pages", 12}},
           {{"cache-scales", "head"}, {"lengths", "ragged"}, {"qk-norm", "yes"}}},
          {{{"batch", 2}, {"cache", 33}, {"layers", 2}, {"window", 9}, {"kv-head", 48}},
           {{"cache-scales", "head"}, {"qkv-weights", "packed"}, {"sinks", "yes"}}},
          {{{"batch", 1}, {"s", 3}, {"cache", 18}},
           {{"quantise", "token"}, {"rotation", "none"}, {"softcap", "20"}}}};
}

void verify_e4m3(Backend& backend, DType dtype) {
  for (auto [sizes, options] : forms_of_e4m3()) {
    options["cache-format"] = "e4m3";
    verify_plan(backend, layer_problem(backend.facts().kind, dtype, llama_sizes(96, 112, 24, sizes),
                                       options));
  }
}

}  // namespace

TEST_CASE("layers with caches of e4m3 have scales of their own behind each cache") {
  Names names;
  for (const TensorSpec& tensor : layer_op().tensors(
           layer_problem(DeviceKind::cuda, DType::bf16,
                         llama_sizes(96, 112, 24, {{"batch", 2}, {"cache", 24}, {"layers", 2}}),
                         {{"cache-format", "e4m3"}, {"cache-scales", "head"}}))) {
    const bool is_scale = tensor.name.ends_with("k_scale") || tensor.name.ends_with("v_scale");
    if (is_scale) CHECK(tensor.shape == std::vector<std::int64_t>{2});
    if (is_scale || tensor.role == Role::updated) names.push_back(tensor.name);
    CHECK((tensor.dtype == DType::fp8) == (tensor.role == Role::updated));
  }
  CHECK(names == Names{"layers.0.k_cache", "layers.0.v_cache", "layers.0.k_scale",
                       "layers.0.v_scale", "layers.1.k_cache", "layers.1.v_cache",
                       "layers.1.k_scale", "layers.1.v_scale"});
}

TEST_CASE("layers, and decode steps, in one launch refuse caches of e4m3") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  Sizes sizes{{"batch", 1},  {"cache", 512},  {"d", 2048}, {"h", 8192},
              {"heads", 32}, {"kv-heads", 8}, {"dim", 64}};
  const auto serving = [&](const Op& op, const Options& options) {
    const Problem problem = canonical(
        op, {std::string(op.name()), "fwd", DType::bf16, sizes, options}, DeviceKind::cuda);
    const auto families = op.families();
    return std::count_if(families.begin(), families.end(), [&](const Family* family) {
      return family->name().find("persistent") != std::string::npos &&
             !family->refusal(problem, facts);
    });
  };
  CHECK(serving(layer_op(), {}) > 0);
  CHECK(serving(layer_op(), {{"cache-format", "e4m3"}}) == 0);
  sizes["vocab"] = 32000;
  CHECK(serving(decode_op(), {}) > 0);
  CHECK(serving(decode_op(), {{"cache-format", "e4m3"}}) == 0);
}

TEST_CASE("layers with caches of e4m3 are right on the CPU") {
  const auto backend = open_cpu();
  verify_e4m3(*backend, DType::f32);
  verify_e4m3(*backend, DType::bf16);
}

TEST_CASE("layers with caches of e4m3 are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  verify_e4m3(*backend, DType::bf16);
  verify_e4m3(*backend, DType::fp16);
}
