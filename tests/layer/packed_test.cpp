// Layers with packed weights: buffers, families, and plans against the float64
// reference.
#include <algorithm>
#include <cstddef>
#include <random>

#include "core/error.hpp"
#include "layer/plans.hpp"

#include "kernels/gemm/packed/params.cuh"  // behind the names that it would hide

using namespace fftune;
using namespace fftune::test;

namespace {

Problem packed_layer(DeviceKind kind, DType dtype, const Sizes& sizes, Options options) {
  options.emplace("weights", "int4");
  return layer_problem(kind, dtype, sizes, std::move(options));
}

/// Dense forms beside the weights: biases, norms, blocks.
std::vector<Options> packed_forms() {
  return {{{"group", "32"}},
          {{"group", "row"}, {"zeros", "yes"}, {"qkv-bias", "yes"}, {"out-bias", "yes"}},
          {{"group", "32"}, {"zeros", "yes"}, {"qk-norm", "yes"}, {"post-norms", "yes"}},
          {{"group", "32"}, {"block", "parallel"}, {"norm", "layer"}, {"ffn-bias", "yes"}},
          {{"weights", "mxfp4"}, {"qkv-bias", "yes"}},
          {{"weights", "nvfp4"}},
          {{"group", "32"}, {"ffn", "plain"}, {"act", "gelu"}, {"ffn-bias", "yes"}},
          {{"weights", "fp8"}, {"group", "32"}, {"out-bias", "yes"}},
          {{"weights", "int8"}, {"group", "row"}, {"qk-norm", "yes"}},
          {{"group", "32"}, {"residual-scale", "yes"}, {"rotation", "interleaved"}}};
}

/// gpt-oss' layer with a window and sinks, and experts beside shared ones; all sizes but tokens.
std::vector<std::pair<Sizes, Options>> mixtures() {
  const Sizes experts = {{"d", 64},   {"h", 96},      {"heads", 4}, {"kv-heads", 2},
                         {"dim", 16}, {"experts", 4}, {"top-k", 2}};
  const auto with = [&](const Sizes& more) {
    Sizes all = experts;
    all.insert(more.begin(), more.end());
    return all;
  };
  return {
      {with({{"window", 9}}),
       {{"weights", "mxfp4"},
        {"attn-weights", "dense"},
        {"ffn", "moe"},
        {"order", "after"},
        {"act", "swiglu-oai"},
        {"sinks", "yes"},
        {"angles", "table"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"},
        {"router-bias", "yes"}}},
      {with({{"shared-h", 32}}), {{"group", "32"}, {"zeros", "yes"}, {"ffn", "moe"}}},
      {with({{"shared-h", 32}}), {{"weights", "nvfp4"}, {"ffn", "moe"}, {"shared-gate", "yes"}}}};
}

/// Plans of one layer and of three.
void verify_plans(Backend& backend, DType dtype, const Sizes& sizes, const Options& options) {
  const DeviceKind kind = backend.facts().kind;
  for (const std::int64_t layers : {0, 3}) {
    Sizes all = sizes;
    if (layers > 0) all["layers"] = layers;
    verify_plan(backend, packed_layer(kind, dtype, all, options));
  }
}

}  // namespace

TEST_CASE("layers with packed weights have them in the order that the API promises") {
  const Problem problem = packed_layer(DeviceKind::cuda, DType::bf16,
                                       llama_sizes(64, 96, 16, {{"batch", 2}, {"cache", 24}}),
                                       {{"group", "32"}, {"zeros", "yes"}, {"qkv-bias", "yes"}});
  Names names;
  for (const auto& tensor : layer_op().tensors(problem))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  CHECK(names == Names{"x",          "positions",   "slots",        "lengths",      "attn_norm",
                       "w_qkv",      "w_qkv_scale", "w_qkv_zero",   "b_qkv",        "k_cache",
                       "v_cache",    "w_o",         "w_o_scale",    "w_o_zero",     "ffn_norm",
                       "w_gate",     "w_up",        "w_down",       "w_gate_scale", "w_gate_zero",
                       "w_up_scale", "w_up_zero",   "w_down_scale", "w_down_zero",  "y"});
}

TEST_CASE("attn-weights=dense leaves the weights of attention as they are") {
  const auto [sizes, options] = mixtures().front();
  Sizes all = sizes;
  all.insert({{"batch", 2}, {"cache", 20}});
  Names packed;
  for (const auto& tensor :
       layer_op().tensors(packed_layer(DeviceKind::cuda, DType::bf16, all, options)))
    if (tensor.role == Role::input && tensor.dtype == DType::u8) packed.push_back(tensor.name);
  CHECK(packed == Names{"w_gate", "w_up", "w_down", "w_gate_scale", "w_up_scale", "w_down_scale"});
}

TEST_CASE("a step of layers with packed weights expands none of them") {
  const auto families = [](const char* architecture, std::int64_t batch) {
    const Problem problem = packed_layer(DeviceKind::cuda, DType::bf16,
                                         {{"batch", batch},
                                          {"cache", 2048},
                                          {"d", 4096},
                                          {"h", 14336},
                                          {"heads", 32},
                                          {"kv-heads", 8},
                                          {"dim", 128}},
                                         {});
    Names names;
    for (const auto& variant :
         default_recipe(layer_op(), problem, facts_of_architecture(architecture)))
      names.push_back(variant.family);
    return names;
  };
  const auto count = [](const Names& names, const std::string& name) {
    return std::count(names.begin(), names.end(), name);
  };
  CHECK(families("sm_90a", 1) == Names{"persistent_packed"});
  for (const auto& [architecture, batch] : {std::pair{"sm_80", 1}, {"sm_90a", 16}}) {
    const Names few = families(architecture, batch);
    CHECK(few.size() == 8);
    for (const std::string& name : few) CHECK(name.find("expand") == std::string::npos);
  }
  const Names one = families("sm_80", 1), many = families("sm_80", 2000);
  for (const char* name :
       {"qkv.packed_decode", "out.packed_decode", "ffn.gate_up_packed", "ffn.down_packed"})
    CHECK(count(one, name) == 1);
  for (const char* name : {"qkv.expand", "out.expand", "ffn.expand_gate_up", "ffn.expand_down"})
    CHECK(count(many, name) == 1);
}

TEST_CASE("packed products of a layer load their weights before the launch before is complete") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Problem problem =
      packed_layer(DeviceKind::cuda, DType::bf16,
                   llama_sizes(64, 96, 16, {{"batch", 16}, {"cache", 24}}), {{"group", "32"}});
  int products = 0;
  for (const Variant& variant : default_recipe(layer_op(), problem, facts)) {
    const Program program =
        family_of(layer_op(), variant.family).program(problem, facts, variant.config);
    for (const Step& step : program.steps) {
      const auto& launch = std::get<KernelLaunch>(step);
      if (program.kernels.at(launch.kernel).file != "gemm/sm90/packed.cu") continue;
      CAPTURE(variant.id());
      CHECK(launch.programmatic);
      const auto& fields = launch.parameters->fields;
      const auto early = std::find_if(fields.begin(), fields.end(), [](const auto& field) {
        return field.offset == offsetof(packed_params, loads_early);
      });
      REQUIRE(early != fields.end());
      CHECK(std::get<std::int32_t>(early->value) == 1);
      ++products;
    }
  }
  CHECK(products == 4);
}

TEST_CASE("packed weights that layers cannot have are refused in one line") {
  const Sizes sizes = llama_sizes(64, 96, 16, {{"batch", 1}, {"cache", 8}});
  const auto why = [](const Sizes& of, Options options) {
    options.emplace("weights", "int4");
    return layer_complaint(of, options);
  };
  CHECK(why(sizes, {}).find("groups of 128 do not divide d=64") != std::string::npos);
  CHECK(why(sizes, {{"group", "32"}, {"qkv-weights", "grouped"}}) ==
        "layer: qkv-weights=grouped with weights=int4: its rows are those of q, of k and of v");
  CHECK(why(sizes, {{"group", "32"}, {"ffn", "plain"}}) == "");
  Sizes experts = sizes;
  experts.insert({{"experts", 4}, {"top-k", 2}});
  CHECK(why(experts, {{"group", "32"}, {"ffn", "moe"}}) == "");
  CHECK(why(experts, {{"group", "32"}, {"ffn", "moe"}, {"gate-up", "halves"}})
            .find("give gate and up a packed weight each") != std::string::npos);
  CHECK(
      why(sizes, {{"weights", "dense"}, {"attn-weights", "dense"}})
          .find("layer: attn-weights=dense is of packed weights and quantise: give weights=int4") ==
      0);
  CHECK(why(sizes, {{"group", "32"}}) == "");
}

TEST_CASE("layers with packed weights are right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const Options& options : packed_forms())
    for (const Sizes& sizes :
         {llama_sizes(64, 96, 16, {{"batch", 2}, {"cache", 20}}),
          llama_sizes(64, 96, 16, {{"batch", 2}, {"s", 5}, {"cache", 20}, {"page", 16}})}) {
      const DType dtype = sizes.contains("s") ? DType::bf16 : DType::f32;
      const Problem problem = packed_layer(DeviceKind::cpu, dtype, sizes, options);
      CHECK(verify_variants(*backend, layer_op(), problem, random, 1) > 0);
      verify_plans(*backend, dtype, sizes, options);
    }
}

TEST_CASE("layers with packed experts are right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(2);
  for (const auto& [sizes, options] : mixtures())
    for (Sizes tokens :
         {Sizes{{"batch", 2}, {"cache", 20}}, {{"batch", 1}, {"s", 7}, {"cache", 20}}}) {
      tokens.insert(sizes.begin(), sizes.end());
      const DType dtype = tokens.contains("s") ? DType::bf16 : DType::f32;
      const Problem problem = packed_layer(DeviceKind::cpu, dtype, tokens, options);
      CHECK(verify_variants(*backend, layer_op(), problem, random, 1) > 0);
      verify_plans(*backend, dtype, tokens, options);
    }
}

TEST_CASE("layers with packed experts are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const auto& [sizes, options] : mixtures())
    for (Sizes tokens :
         {Sizes{{"batch", 2}, {"cache", 20}}, {{"batch", 1}, {"s", 70}, {"cache", 90}}}) {
      tokens.insert(sizes.begin(), sizes.end());
      verify_plans(*backend, DType::bf16, tokens, options);
    }
}

TEST_CASE("layers with packed weights are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(1);
  // Forms, sizes and types take turns: a kernel takes seconds to compile.
  const auto all = packed_forms();
  const Sizes sizes[] = {
      llama_sizes(64, 96, 16, {{"batch", 1}, {"cache", 33}}),
      llama_sizes(64, 96, 16, {{"batch", 20}, {"cache", 20}}),
      llama_sizes(64, 96, 16, {{"batch", 2}, {"s", 70}, {"cache", 90}, {"page", 16}})};
  const auto each = [&](const auto& body) {
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t j = i % 2; j < std::size(sizes); j += 2)
        body((i + j) / 2 % 2 == 0 ? DType::bf16 : DType::fp16, sizes[j], all[i]);
  };
  std::vector<Problem> problems;
  each([&](DType dtype, const Sizes& of, const Options& options) {
    problems.push_back(packed_layer(DeviceKind::cuda, dtype, of, options));
  });
  verify_families(*backend, layer_op(), problems, random, 0, reads_packed_weights);
  each([&](DType dtype, const Sizes& of, const Options& options) {
    verify_plans(*backend, dtype, of, options);
  });
}
