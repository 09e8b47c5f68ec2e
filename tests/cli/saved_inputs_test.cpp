// The inputs of ops from saved models, by the names of each kind of model.
#include "apps/fftune/saved/weight_options.hpp"

#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "process.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::tool;
using namespace fftune::testing;

namespace {

using Shape = std::vector<std::int64_t>;

/// first, first + 1, …
std::vector<float> counting(const Shape& shape, float first) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

class DenseModel {
 public:
  void add(const std::string& name, const Shape& shape, float first, const char* dtype = "F32") {
    writer_.add(name, dtype, shape, counting(shape, first));
  }
  /// Weights, counted from 10, and their biases, counted from 20.
  void add_with_biases(const std::string& prefix,
                       const std::vector<std::pair<std::string, Shape>>& weights, bool transposed) {
    for (const auto& [name, shape] : weights) {
      add(prefix + name + ".weight", shape, 10);
      add(prefix + name + ".bias", {transposed ? shape.back() : shape.front()}, 20);
    }
  }
  void config(const std::string& text) { write_text(folder_->path() / "config.json", text); }

  const Op& op(const std::string& name) const { return catalog_.op(name); }
  SavedInputs open(const std::string& name, SavedValues options = {}) const {
    writer_.write(folder_->path() / "model.safetensors");
    options.weights = folder_->path().string();
    return SavedInputs(catalog_, op(name), options);
  }
  std::vector<Problem> problems(const SavedInputs& saved, ProblemOptions given = {}) const {
    if (given.sizes[std::string(saved.op().token_size())].empty())
      given.sizes[std::string(saved.op().token_size())] = "3";
    return saved_problems(saved.op(), given, &saved, DeviceKind::cpu);
  }
  std::string complaint(const std::string& name, const SavedValues& options = {},
                        const ProblemOptions& given = {}) const {
    return test::error_of([&] { problems(open(name, options), given); });
  }

 private:
  std::unique_ptr<TemporaryFolder> folder_ = std::make_unique<TemporaryFolder>();
  SafetensorsWriter writer_;
  const Catalog& catalog_ = builtin_catalog();
};

std::vector<float> values(const SavedInputs& saved, const Problem& problem,
                          const std::string& name) {
  HostThreads threads;
  const auto tensors = saved.op().tensors(problem);
  const TensorSpec& spec = tensors[tensor_index(tensors, name)];
  std::vector<std::byte> bytes(spec.bytes());
  if (!saved.fill(spec, bytes, threads)) return {};
  std::vector<float> values(static_cast<std::size_t>(spec.elements()));
  decode(spec.dtype, bytes.data(), std::span<float>(values));
  return values;
}

/// Llama's names in layer 0, with d = 4, h = 6, 2 heads of 4, 1 head of k and v.
DenseModel llama_weights(const std::string& prefix = "model.layers.0.") {
  DenseModel model;
  model.add(prefix + "input_layernorm.weight", {4}, 1);
  model.add(prefix + "self_attn.q_proj.weight", {8, 4}, 100);
  model.add(prefix + "self_attn.k_proj.weight", {4, 4}, 200);
  model.add(prefix + "self_attn.v_proj.weight", {4, 4}, 300);
  model.add(prefix + "self_attn.o_proj.weight", {4, 8}, 400);
  model.add(prefix + "mlp.gate_proj.weight", {6, 4}, 500);
  model.add(prefix + "mlp.up_proj.weight", {6, 4}, 600);
  model.add(prefix + "mlp.down_proj.weight", {4, 6}, 700);
  return model;
}

std::string sizes_text(const Problem& problem) {
  std::string text;
  for (const auto& [name, size] : problem.sizes)
    if (name != "m") text += name + "=" + std::to_string(size) + " ";
  return text;
}

}  // namespace

TEST_CASE("sizes, options and values come from a model with Llama's names") {
  for (const char* prefix : {"model.layers.0.", "layers.0.", "model.language_model.layers.0.",
                             "language_model.model.layers.0."}) {
    CAPTURE(prefix);
    DenseModel model = llama_weights(prefix);
    model.config(R"({"num_attention_heads":2,"hidden_act":"gelu_pytorch_tanh"})");
    const SavedInputs ffn = model.open("ffn");
    const Problem problem = model.problems(ffn).at(0);
    CHECK(sizes_text(problem) == "d=4 h=6 ");
    CHECK(problem.option("act") == "gelu-tanh");
    CHECK(problem.dtype == DType::f32);
    CHECK(values(ffn, problem, "w_gate") == counting({6, 4}, 500));
    CHECK(values(ffn, problem, "w_down") == counting({4, 6}, 700));
    CHECK(values(ffn, problem, "x").empty());

    const SavedInputs qkv = model.open("qkv");
    const Problem heads = model.problems(qkv).at(0);
    CHECK(sizes_text(heads) == "d=4 dim=4 heads=2 kv-heads=1 ");
    CHECK_FALSE(heads.has("bias", "yes"));
    CHECK(values(qkv, heads, "w_k") == counting({4, 4}, 200));
    ProblemOptions packed;
    packed.options["weights"] = "packed";
    CHECK(values(qkv, model.problems(qkv, packed).at(0), "w").at(8 * 4) == 200);

    const SavedInputs norm = model.open("rmsnorm");
    CHECK(values(norm, model.problems(norm).at(0), "w") == counting({4}, 1));
    const SavedInputs linear = model.open("linear");
    CHECK(sizes_text(model.problems(linear).at(0)) == "k=8 n=4 ");
  }
}

TEST_CASE("biases and norms of heads are options that the model tells") {
  DenseModel model = llama_weights();
  model.add("model.layers.0.self_attn.q_proj.bias", {8}, 10);
  model.add("model.layers.0.self_attn.k_proj.bias", {4}, 20);
  model.add("model.layers.0.self_attn.v_proj.bias", {4}, 30);
  model.add("model.layers.0.self_attn.q_norm.weight", {4}, 40);
  model.add("model.layers.0.self_attn.k_norm.weight", {4}, 50);
  const SavedInputs qkv = model.open("qkv");
  const Problem problem = model.problems(qkv).at(0);
  CHECK(problem.has("bias", "yes"));
  CHECK(problem.has("norm", "yes"));
  CHECK(values(qkv, problem, "b_v") == counting({4}, 30));
  CHECK(values(qkv, problem, "k_norm") == counting({4}, 50));
  ProblemOptions without;
  without.options = {{"bias", "no"}, {"norm", "no"}};
  CHECK_FALSE(model.problems(qkv, without).at(0).has("bias", "yes"));
}

TEST_CASE("Gemma's norm is by its convention and ahead of the network by another name") {
  DenseModel model = llama_weights();
  model.add("model.layers.0.post_attention_layernorm.weight", {4}, 10);
  ProblemOptions norm;
  norm.options["norm"] = "rms";
  const SavedInputs two = model.open("ffn");
  CHECK(values(two, model.problems(two, norm).at(0), "w_norm") == counting({4}, 10));
  model.add("model.layers.0.pre_feedforward_layernorm.weight", {4}, 20);
  model.config(R"({"model_type":"gemma3","text_config":{"model_type":"gemma3_text",)"
               R"("rms_norm_eps":1e-05}})");
  const SavedInputs three = model.open("ffn");
  const Problem problem = model.problems(three, norm).at(0);
  CHECK(problem.option("convention") == "gemma");
  CHECK(problem.option("eps") == "1e-05");
  CHECK(values(three, problem, "w_norm") == counting({4}, 20));
}

TEST_CASE("Phi-3 has gate and up, and q, k and v, in one tensor each") {
  DenseModel model;
  model.add("model.layers.0.mlp.gate_up_proj.weight", {12, 4}, 0);
  model.add("model.layers.0.mlp.down_proj.weight", {4, 6}, 100);
  model.add("model.layers.0.self_attn.qkv_proj.weight", {16, 4}, 200);
  model.config(R"({"num_attention_heads":2,"num_key_value_heads":1,"head_dim":4})");
  const SavedInputs ffn = model.open("ffn");
  const Problem problem = model.problems(ffn).at(0);
  CHECK(sizes_text(problem) == "d=4 h=6 ");
  CHECK(values(ffn, problem, "w_gate") == counting({6, 4}, 0));
  CHECK(values(ffn, problem, "w_up") == counting({6, 4}, 24));
  const SavedInputs qkv = model.open("qkv");
  const Problem heads = model.problems(qkv).at(0);
  CHECK(values(qkv, heads, "w_q") == counting({8, 4}, 200));
  CHECK(values(qkv, heads, "w_k") == counting({4, 4}, 232));
  CHECK(values(qkv, heads, "w_v") == counting({4, 4}, 248));
  ProblemOptions fewer;
  fewer.sizes["heads"] = "1";
  CHECK_THAT(model.complaint("qkv", {}, fewer), ContainsSubstring("has 16 rows, and "));
}

TEST_CASE("GPT-2's Conv1D keeps weights as [in, out]") {
  DenseModel model;
  model.add("h.0.attn.c_attn.weight", {2, 6}, 0);
  model.add("h.0.attn.c_attn.bias", {6}, 50);
  model.config(R"({"n_head":1})");
  ProblemOptions dim;
  dim.sizes["dim"] = "2";
  const SavedInputs qkv = model.open("qkv");
  const Problem problem = model.problems(qkv, dim).at(0);
  CHECK(sizes_text(problem) == "d=2 dim=2 heads=1 ");
  CHECK(values(qkv, problem, "w_q") == std::vector<float>{0, 6, 1, 7});
  CHECK(values(qkv, problem, "w_v") == std::vector<float>{4, 10, 5, 11});
  CHECK(values(qkv, problem, "b_k") == std::vector<float>{52, 53});
  const SavedInputs linear = model.open("linear", {.map = "w=attn.c_attn.weight"});
  CHECK(sizes_text(model.problems(linear).at(0)) == "k=2 n=6 ");
  CHECK(model.problems(linear).at(0).has("bias", "yes"));
  CHECK(values(linear, model.problems(linear).at(0), "bias") == counting({6}, 50));
}

TEST_CASE("experts are stacked, by Qwen's names or Mixtral's") {
  for (const bool mixtral : {false, true}) {
    DenseModel model;
    for (int expert = 0; expert < 12; ++expert) {
      const std::string start =
          mixtral ? "model.layers.0.block_sparse_moe.experts." : "model.layers.0.mlp.experts.";
      const auto first = static_cast<float>(100 * expert);
      const std::string name = start + std::to_string(expert);
      model.add(name + (mixtral ? ".w1.weight" : ".gate_proj.weight"), {3, 2}, first);
      model.add(name + (mixtral ? ".w3.weight" : ".up_proj.weight"), {3, 2}, first + 20);
      model.add(name + (mixtral ? ".w2.weight" : ".down_proj.weight"), {2, 3}, first + 40);
    }
    model.config(R"({"num_experts_per_tok":2})");
    const SavedInputs moe = model.open("moe-ffn");
    const Problem problem = model.problems(moe).at(0);
    CHECK(sizes_text(problem) == "d=2 experts=12 h=3 top-k=2 ");
    CHECK(values(moe, problem, "w_down").at(11 * 6) == 1140);
    CHECK(values(moe, problem, "w_up").at(2 * 6 + 5) == 225);
  }
}

TEST_CASE("experts of gpt-oss are transposed, interleaved, and have biases") {
  DenseModel model;
  const std::string experts = "model.layers.0.mlp.experts.";
  model.add(experts + "gate_up_proj", {2, 3, 6}, 0);
  model.add(experts + "gate_up_proj_bias", {2, 6}, 100);
  model.add(experts + "down_proj", {2, 3, 3}, 200);  // d = h, as in the models
  model.add(experts + "down_proj_bias", {2, 3}, 300);
  model.config(R"({"num_experts_per_tok":2,"hidden_act":"silu"})");
  const SavedInputs moe = model.open("moe-ffn");
  const Problem problem = model.problems(moe).at(0);
  CHECK(sizes_text(problem) == "d=3 experts=2 h=3 top-k=2 ");
  CHECK(problem.has("act", "swiglu-oai"));
  CHECK(problem.has("bias", "all"));
  CHECK(problem.has("gate-up", "interleaved"));
  const auto gate_up = values(moe, problem, "w_gate_up"), down = values(moe, problem, "w_down");
  CHECK(gate_up.at(1) == 6);            // expert 0, row 0, column 1
  CHECK(gate_up.at(18 + 3 + 2) == 31);  // expert 1, row 1, column 2
  CHECK(down.at(9 + 3) == 210);         // expert 1, row 1, column 0
  CHECK(values(moe, problem, "b_gate_up") == counting({2, 6}, 100));
  CHECK(values(moe, problem, "b_down") == counting({2, 3}, 300));
}

TEST_CASE("an expert that is missing between others is named") {
  DenseModel model;
  for (const char* expert : {"0", "1", "3"})
    for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{
             {"gate_proj", {3, 2}}, {"up_proj", {3, 2}}, {"down_proj", {2, 3}}})
      model.add("model.layers.0.mlp.experts." + std::string(expert) + "." + name + ".weight", shape,
                0);
  model.config(R"({"num_experts_per_tok":2})");
  CHECK_THAT(model.complaint("moe-ffn"),
             ContainsSubstring("but not model.layers.0.mlp.experts.2.down_proj.weight"));
}

TEST_CASE("experts that are packed are one tensor of gate and up") {
  DenseModel model;
  model.add("model.layers.0.mlp.experts.gate_up_proj", {5, 6, 2}, 0);
  model.add("model.layers.0.mlp.experts.down_proj", {5, 2, 3}, 100);
  model.config(R"({"num_experts_per_tok":2})");
  const SavedInputs moe = model.open("moe-ffn");
  const Problem problem = model.problems(moe).at(0);
  CHECK(sizes_text(problem) == "d=2 experts=5 h=3 top-k=2 ");
  CHECK(problem.has("gate-up", "halves"));
  CHECK(values(moe, problem, "w_gate_up") == counting({5, 6, 2}, 0));
}

namespace {

const ProblemOptions decoding{{.sizes = {{"batch", "2"}, {"cache", "8"}}}};

/// Those of the options that are named.
std::string options_text(const Problem& problem, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    text += name + "=" + (problem.options.contains(name) ? problem.option(name) : "-") + " ";
  return text;
}

}  // namespace

TEST_CASE("a layer of Phi is parallel, with biases and no gate") {
  DenseModel model;
  model.add_with_biases("model.layers.0.",
                        {{"input_layernorm", {4}},
                         {"self_attn.q_proj", {16, 4}},
                         {"self_attn.k_proj", {16, 4}},
                         {"self_attn.v_proj", {16, 4}},
                         {"self_attn.dense", {4, 16}},
                         {"mlp.fc1", {6, 4}},
                         {"mlp.fc2", {4, 6}}},
                        false);
  model.config(R"({"model_type":"phi","num_attention_heads":2,"hidden_size":16,)"
               R"("hidden_act":"gelu_new","layer_norm_eps":0.001,)"
               R"("rope_parameters":{"rope_theta":500.0,"partial_rotary_factor":0.25}})");
  const SavedInputs saved = model.open("layer");
  const Problem problem = model.problems(saved, decoding).at(0);
  CHECK(sizes_text(problem) == "batch=2 cache=8 d=4 dim=8 h=6 heads=2 rotary=2 ");
  CHECK(options_text(problem, {"norm", "block", "ffn", "act", "qkv-bias", "out-bias", "ffn-bias",
                               "eps", "base"}) ==
        "norm=layer block=parallel ffn=plain act=gelu-tanh qkv-bias=yes out-bias=yes ffn-bias=yes "
        "eps=0.001 base=500 ");
  CHECK(values(saved, problem, "w_down") == counting({4, 6}, 10));
  CHECK(values(saved, problem, "attn_norm_bias") == counting({4}, 20));
  CHECK(values(saved, problem, "b_up") == counting({6}, 20));
  const SavedInputs ffn = model.open("ffn");
  CHECK(options_text(model.problems(ffn).at(0), {"gate", "bias"}) == "gate=no bias=both ");
  // Its norm is layer normalisation.
  CHECK_FALSE(model.open("rmsnorm").has_weights());
  CHECK(model.open("layernorm").has_weights());
}

TEST_CASE("a layer of GPT-2 has no RoPE, and transposed weights") {
  DenseModel model;
  model.add_with_biases("transformer.h.0.",
                        {{"ln_1", {16}},
                         {"attn.c_attn", {16, 48}},
                         {"attn.c_proj", {16, 16}},
                         {"ln_2", {16}},
                         {"mlp.c_fc", {16, 6}},
                         {"mlp.c_proj", {6, 16}}},
                        true);
  model.config(R"({"model_type":"gpt2","n_head":2,"n_embd":16,"activation_function":"gelu_new"})");
  const SavedInputs saved = model.open("layer");
  const Problem problem = model.problems(saved, decoding).at(0);
  CHECK(sizes_text(problem) == "batch=2 cache=8 d=16 dim=8 h=6 heads=2 ");
  CHECK(options_text(problem, {"norm", "block", "ffn", "act", "rotation", "qkv-bias"}) ==
        "norm=layer block=- ffn=plain act=gelu-tanh rotation=none qkv-bias=yes ");
  CHECK(values(saved, problem, "w_up").at(1) == 16);    // [1, 0] in the file
  CHECK(values(saved, problem, "w_down").at(1) == 26);  // [1, 0]
  CHECK(values(saved, problem, "w_v").at(1) == 90);     // [1, 32]
  CHECK(values(saved, problem, "b_v") == counting({16}, 52));
  CHECK(values(saved, problem, "ffn_norm_bias") == counting({16}, 20));
}

TEST_CASE("layers of Gemma differ by the window and the angles") {
  DenseModel model;
  for (const char* layer : {"0.", "1."}) {
    const std::string start = std::string("model.layers.") + layer;
    for (const char* name : {"input", "post_attention", "pre_feedforward", "post_feedforward"})
      model.add(start + name + "_layernorm.weight", {8}, 1);
    for (const char* name : {"q", "k", "v", "o"})
      model.add(start + "self_attn." + name + "_proj.weight", {8, 8}, 100);
    for (const char* name : {"gate", "up", "down"})
      model.add(start + "mlp." + name + "_proj.weight", {8, 8}, 500);
  }
  const auto layer_text = [&](std::int64_t layer) {
    const SavedInputs saved = model.open("layer", {.layer = layer});
    const Problem problem = model.problems(saved, decoding).at(0);
    return options_text(problem, {"base", "factor"}) +
           (problem.sizes.contains("window") ? "window" : "");
  };
  const std::string common = R"("num_attention_heads":1,"head_dim":8,"sliding_window":4)";
  model.config(
      R"({"model_type":"gemma3_text","layer_types":["sliding_attention","full_attention"],)"
      R"("rope_parameters":{"sliding_attention":{"rope_theta":1000.0},)"
      R"("full_attention":{"rope_theta":5000.0,"rope_type":"linear","factor":8.0}},)" +
      common + "}");
  CHECK(layer_text(0) == "base=1000 factor=- window");
  CHECK(layer_text(1) == "base=5000 factor=8 ");
  model.config(
      R"({"model_type":"gemma3_text","sliding_window_pattern":2,"rope_theta":5000.0,)"
      R"("rope_local_base_freq":1000.0,"rope_scaling":{"rope_type":"linear","factor":8.0},)" +
      common + "}");
  CHECK(layer_text(0) == "base=1000 factor=- window");
  CHECK(layer_text(1) == "base=5000 factor=8 ");
  model.config(
      R"({"model_type":"gemma2","query_pre_attn_scalar":64,"attn_logit_softcapping":50.0,)" +
      common + "}");
  CHECK(layer_text(0) == "base=- factor=- window");
  CHECK(layer_text(1) == "base=- factor=- ");
  const SavedInputs saved = model.open("layer");
  CHECK(options_text(model.problems(saved, decoding).at(0),
                     {"scale", "softcap", "post-norms", "convention"}) ==
        "scale=0.125 softcap=50 post-norms=yes convention=gemma ");
  // A value that is no list, or a missing one, leaves the rule of the model.
  model.config(R"({"model_type":"gemma2","layer_types":[1],)" + common + "}");
  CHECK(layer_text(0) == "base=- factor=- window");
  CHECK(layer_text(1) == "base=- factor=- ");
}

TEST_CASE("a layer with experts has a router") {
  for (const bool packed : {false, true}) {
    CAPTURE(packed);
    DenseModel model;
    const std::string start = "model.layers.0.";
    const std::string moe = start + (packed ? "mlp." : "block_sparse_moe.");
    for (const char* name : {"input", "post_attention"})
      model.add(start + name + "_layernorm.weight", {8}, 1);
    for (const char* name : {"q", "k", "v", "o"})
      model.add(start + "self_attn." + name + "_proj.weight", {8, 8}, 100);
    model.add(moe + "gate.weight", {3, 8}, 200);
    if (packed) {
      model.add(moe + "experts.gate_up_proj", {3, 12, 8}, 300);
      model.add(moe + "experts.down_proj", {3, 8, 6}, 500);
    } else {
      for (const char* expert : {"0.", "1.", "2."}) {
        model.add(moe + "experts." + expert + "w1.weight", {6, 8}, 300);
        model.add(moe + "experts." + expert + "w3.weight", {6, 8}, 400);
        model.add(moe + "experts." + expert + "w2.weight", {8, 6}, 500);
      }
    }
    model.config(std::string(R"({"num_attention_heads":1,"num_experts_per_tok":2,)") +
                 (packed ? R"("model_type":"qwen3_moe","norm_topk_prob":true})"
                         : R"("model_type":"mixtral"})"));
    const SavedInputs saved = model.open("layer");
    const Problem problem = model.problems(saved, decoding).at(0);
    CHECK(sizes_text(problem) == "batch=2 cache=8 d=8 dim=8 experts=3 h=6 heads=1 top-k=2 ");
    CHECK(options_text(problem, {"ffn", "renormalise", "gate-up"}) ==
          std::string("ffn=moe renormalise=yes gate-up=") + (packed ? "halves " : "- "));
    CHECK(values(saved, problem, "w_router") == counting({3, 8}, 200));
    CHECK(values(saved, problem, packed ? "w_gate_up" : "w_up").at(6 * 8) == (packed ? 348 : 400));
  }
}

TEST_CASE("layers of one plan are those from --layer on") {
  DenseModel model;
  for (int layer = 0; layer < 3; ++layer) {
    const std::string start = "model.layers." + std::to_string(layer) + ".";
    const auto first = static_cast<float>(1000 * layer);
    model.add(start + "input_layernorm.weight", {4}, first);
    model.add(start + "post_attention_layernorm.weight", {4}, first + 10);
    model.add(start + "self_attn.q_proj.weight", {16, 4}, first + 100);
    model.add(start + "self_attn.k_proj.weight", {8, 4}, first + 200);
    model.add(start + "self_attn.v_proj.weight", {8, 4}, first + 300);
    model.add(start + "self_attn.o_proj.weight", {4, 16}, first + 400);
    model.add(start + "mlp.gate_proj.weight", {6, 4}, first + 500);
    model.add(start + "mlp.up_proj.weight", {6, 4}, first + 600);
    model.add(start + "mlp.down_proj.weight", {4, 6}, first + 700);
  }
  model.config(R"({"head_dim":8,"rope_scaling":{"rope_type":"llama3","factor":8.0,)"
               R"("low_freq_factor":1.0,"high_freq_factor":4.0}})");
  const SavedInputs saved = model.open("layer", {.layer = 1});
  ProblemOptions given;
  given.sizes = {{"batch", "2"}, {"cache", "8"}, {"layers", "2"}};
  const Problem problem = model.problems(saved, given).at(0);
  CHECK(sizes_text(problem) == "batch=2 cache=8 d=4 dim=8 h=6 heads=2 kv-heads=1 layers=2 ");
  CHECK(problem.has("angles", "llama3"));
  CHECK(problem.has("factor", "8"));
  CHECK(values(saved, problem, "layers.0.attn_norm") == counting({4}, 1000));
  CHECK(values(saved, problem, "layers.1.ffn_norm") == counting({4}, 2010));
  CHECK(values(saved, problem, "layers.1.w_o") == counting({4, 16}, 2400));
  CHECK(values(saved, problem, "layers.1.k_cache").empty());
  given.sizes["layers"] = "3";
  CHECK_THAT(model.complaint("layer", {.layer = 1}, given),
             ContainsSubstring("model.layers.3.input_layernorm.weight"));
}

TEST_CASE("elements are rounded to the problem's type") {
  DenseModel model;
  model.add("model.layers.0.input_layernorm.weight", {4}, 257, "F32");
  ProblemOptions bf16;
  bf16.dtypes = "bf16";
  const SavedInputs norm = model.open("rmsnorm");
  CHECK(values(norm, model.problems(norm, bf16).at(0), "w") ==
        std::vector<float>{256, 258, 260, 260});
  DenseModel half;
  half.add("model.layers.0.input_layernorm.weight", {4}, 1, "BF16");
  CHECK(half.problems(half.open("rmsnorm")).at(0).dtype == DType::bf16);
}

TEST_CASE("recorded inputs repeat where there are more tokens") {
  const TemporaryFolder folder;
  SafetensorsWriter recorded;
  recorded.add("x", "F32", {1, 2, 4}, counting({8}, 0));
  recorded.add("hidden_states", "F32", {4, 2}, counting({8}, 10));
  recorded.write(folder.path() / "x.safetensors");
  const std::string file = (folder.path() / "x.safetensors").string();
  const DenseModel model = llama_weights();
  const SavedInputs ffn = model.open("ffn", {.input = file});
  const auto x = values(ffn, model.problems(ffn).at(0), "x");
  CHECK(x == std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
  const SavedInputs turned = model.open("ffn", {.input = file, .map = "x=hidden_states^T"});
  CHECK(values(turned, model.problems(turned).at(0), "x").at(1) == 12);
  SafetensorsWriter others;
  others.add("activations", "F32", {2, 4}, counting({8}, 0));
  others.write(folder.path() / "others.safetensors");
  const std::string said =
      model.complaint("ffn", {.input = (folder.path() / "others.safetensors").string()});
  CHECK_THAT(said, ContainsSubstring("others.safetensors has none of the inputs of ffn"));
  CHECK_THAT(said, ContainsSubstring("x, w_gate, w_up, w_down"));
}

TEST_CASE("a contradiction to a saved model is one line") {
  const DenseModel model = llama_weights();
  ProblemOptions wide;
  wide.sizes["d"] = "5";
  struct Wrong {
    std::string said;
    std::vector<std::string> named;
  };
  const std::vector<Wrong> all{
      {model.complaint("ffn", {}, wide),
       {"w_gate of ffn is [6, 5]", "mlp.gate_proj.weight", "[6, 4]"}},
      {model.complaint("ffn", {.layer = 7}), {"no layer 7", "from 0 to 0"}},
      {model.complaint("moe-ffn"), {"mlp.experts", "--map w_down=TENSOR"}},
      {model.complaint("linear", {.map = "w=mlp.gateproj.weight"}),
       {"no tensor", "did you mean model.layers.0.mlp.gate_proj.weight?"}},
      {model.complaint("linear", {.map = "w"}), {"--map 'w' is not a pair"}},
      {model.complaint("linear", {.map = "w=mlp.up_proj.weight,w=mlp.up_proj.weight"}),
       {"--map gives w twice"}},
      {model.complaint("linear", {.map = "v=mlp.up_proj.weight"}),
       {"'v'", "not an input of linear", "x, w"}},
      {model.complaint("qkv"), {"qkv needs --heads"}},
      {model.complaint("ffn", {.input = "/none.safetensors"}),
       {"/none.safetensors: this path does not exist"}}};
  for (const auto& [said, named] : all) {
    CAPTURE(said);
    for (const std::string& name : named) CHECK(said.find(name) != said.npos);
    CHECK(said.find('\n') == said.npos);
    CHECK_FALSE(said.empty());
  }
  DenseModel damaged = llama_weights();
  damaged.config("{");
  CHECK_THAT(damaged.complaint("ffn"), ContainsSubstring("config.json: not JSON"));
}
