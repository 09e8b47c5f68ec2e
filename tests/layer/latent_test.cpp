// Layers with latent attention against the float64 reference.
#include <random>

#include "layer/problems.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "support/op_reference.hpp"
#include "support/verify_plan.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<SmallModel> latent_models() {
  const Sizes plain{{"d", 72},   {"h", 40},     {"heads", 3}, {"nope", 12},
                    {"rope", 8}, {"v-dim", 20}, {"rank", 24}, {"cache", 24}};
  Sizes v3 = plain;
  v3.insert({{"q-rank", 28},
             {"experts", 8},
             {"top-k", 2},
             {"groups", 4},
             {"top-groups", 2},
             {"shared-h", 40}});
  Sizes paged = plain;
  paged.insert({{"q-rank", 28}, {"page", 16}});
  return {{"deepseek-v3",
           v3,
           {{"mixer", "mla"},
            {"rotation", "interleaved"},
            {"rope-order", "halves"},
            {"angles", "yarn"},
            {"factor", "8"},
            {"scale", "0.3"},
            {"lengths", "ragged"},
            {"ffn", "moe"},
            {"score", "sigmoid"},
            {"choice-bias", "yes"},
            {"renormalise", "yes"},
            {"group-score", "top2"},
            {"route-scale", "2.5"},
            {"gate-up", "halves"}}},
          {"minicpm3",
           paged,
           {{"mixer", "mla"},
            {"residual-scale", "yes"},
            {"latent-eps", "0.001"},
            {"eps", "1e-5"},
            {"lengths", "ragged"}}},
          {"mistral4", plain, {{"mixer", "mla"}, {"query-scale", "rows"}, {"lengths", "ragged"}}},
          {"without rotation", plain, {{"mixer", "mla"}, {"rotation", "none"}}},
          {"ling", plain, {{"mixer", "mla"}, {"output-gate", "heads"}}},
          {"with gates of features", plain, {{"mixer", "mla"}, {"output-gate", "features"}}}};
}

Problem latent_layer(const SmallModel& model, DeviceKind kind, DType dtype, const Sizes& more) {
  Sizes sizes = model.sizes;
  for (const auto& [name, value] : more) sizes[name] = value;
  return layer_problem(kind, dtype, std::move(sizes), model.options);
}

void verify_latent(Backend& backend, DType dtype, int more) {
  const DeviceKind kind = backend.facts().kind;
  std::mt19937_64 random(1);
  for (const SmallModel& model : latent_models()) DYNAMIC_SECTION(model.name) {
      for (const Sizes& tokens : {Sizes{{"batch", 1}}, {{"batch", 5}}, {{"batch", 2}, {"s", 7}}}) {
        const Problem problem = latent_layer(model, kind, dtype, tokens);
        CHECK(verify_variants(backend, layer_op(), problem, random, more) > 0);
        verify_plan(backend, layer_op(), problem, 1);
        Sizes several = tokens;
        several["layers"] = 3;
        verify_plan(backend, layer_op(), latent_layer(model, kind, dtype, several), 2);
      }
      verify_plan(backend, layer_op(),
                  latent_layer(model, kind, dtype, {{"batch", 2}, {"s", 3}, {"ranks", 2}}), 3);
    }
}

}  // namespace

TEST_CASE("layers with latent attention have one cache, and weights of latents") {
  const auto inputs = [](const SmallModel& model) {
    Names all;
    for (const auto& tensor :
         layer_op().tensors(latent_layer(model, DeviceKind::cuda, DType::bf16, {{"batch", 2}})))
      if (tensor.role != Role::intermediate) all.push_back(tensor.name);
    return all;
  };
  const auto models = latent_models();
  CHECK(inputs(models[0]) == Names{"x",
                                   "positions",
                                   "slots",
                                   "lengths",
                                   "attn_norm",
                                   "w_q_a",
                                   "q_a_norm",
                                   "w_q_b",
                                   "w_kv_a",
                                   "kv_a_norm",
                                   "w_kv_b",
                                   "cache",
                                   "w_o",
                                   "ffn_norm",
                                   "w_router",
                                   "choice_bias",
                                   "w_gate_up",
                                   "w_down",
                                   "w_shared_gate",
                                   "w_shared_up",
                                   "w_shared_down",
                                   "y"});
  CHECK(inputs(models[3]) == Names{"x", "slots", "lengths", "attn_norm", "w_q", "w_kv_a",
                                   "kv_a_norm", "w_kv_b", "cache", "w_o", "ffn_norm", "w_gate",
                                   "w_up", "w_down", "y"});
  const auto tensors = layer_op().tensors(
      latent_layer(models[1], DeviceKind::cuda, DType::bf16, {{"batch", 2}, {"layers", 2}}));
  const TensorSpec& cache = tensors[tensor_index(tensors, "layers.1.cache")];
  CHECK(cache.shape == std::vector<std::int64_t>{64, 32});
  CHECK(cache.role == Role::updated);
}

TEST_CASE("layers with latent attention refuse what they have not") {
  Sizes sizes = latent_models()[2].sizes;
  sizes["batch"] = 2;
  const auto with = [&](const char* name, std::int64_t size) {
    Sizes more = sizes;
    more[name] = size;
    return more;
  };
  const Options options{{"mixer", "mla"}};
  CHECK(layer_complaint(sizes, options) == "");
  CHECK(mentions(layer_complaint(with("dim", 16), options), "dim=16 is of mixer="));
  CHECK(mentions(layer_complaint(with("window", 8), options), "window=8 is of mixer=attention"));
  CHECK(mentions(layer_complaint(with("s", 30), options), "s=30 exceeds cache=24"));
  CHECK(mentions(layer_complaint(with("rope", 7), options), "rope=7 is odd"));
  CHECK(mentions(layer_complaint(sizes, {{"mixer", "mla"}, {"sinks", "yes"}}), "sinks=yes is of"));
  CHECK(mentions(layer_complaint(sizes, {{"mixer", "mla"}, {"weights", "int4"}, {"group", "row"}}),
                 "give attn-weights=dense"));
  sizes.erase("rank");
  CHECK(mentions(layer_complaint(sizes, options), "mixer=mla without rank"));
}

TEST_CASE("layers with latent attention are right on the CPU, in decode and prefill") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const DType dtype : layer_op().dtypes(DeviceKind::cpu)) verify_latent(*backend, dtype, 1);
}

TEST_CASE("layers with latent attention are right on the GPU", "[gpu][latent]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32}) verify_latent(*backend, dtype, 0);
}
