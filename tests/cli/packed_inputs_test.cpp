// Packed weights of ops from the quantised weights that other packages wrote
// (tests/data/quantised).
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "apps/fftune/saved/weight_options.hpp"
#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "sandbox.hpp"
#include "saved/model.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/json.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::tool;
using namespace fftune::testing;
using nlohmann::json;

namespace {

namespace fs = std::filesystem;

const fs::path vectors = fs::path(FFTUNE_SOURCE_DIR) / "tests/data/quantised";

json index_of_vectors() {
  return json_of(text_of(vectors / "index.json"));
}

/// Saved tensors by other names.
class PackedModel {
 public:
  /// `change` may change a tensor, or leave it out by false.
  void add(const std::string& file, const std::string& start,
           const std::function<bool(const std::string&, json&, std::string&)>& change = {}) {
    json header;
    std::ifstream stream(vectors / file, std::ios::binary);
    std::uint64_t length = 0;
    stream.read(reinterpret_cast<char*>(&length), sizeof length);
    std::string text(length, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(length));
    header = json_of(text);
    const std::string data{std::istreambuf_iterator<char>(stream), {}};
    for (auto& [name, tensor] : header.items()) {
      if (name == "__metadata__" || (name == "expected" && has_expected_)) continue;
      has_expected_ |= name == "expected";
      const std::size_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
      std::string own = data.substr(begin, end - begin);
      if (change && !change(name, tensor, own)) continue;
      writer.add(name == "expected" ? name : start + name, tensor["dtype"].get<std::string>(),
                 tensor["shape"], own);
    }
  }
  void config(const json& quantisation) {
    write_text(path() / "config.json", json{{"quantization_config", quantisation},
                                            {"num_experts_per_tok", 1},
                                            {"hidden_act", "silu"}}
                                           .dump());
  }
  fs::path path() const { return folder_->path(); }
  std::string write() const {
    writer.write(path() / "model.safetensors");
    return path().string();
  }
  /// A problem of the op in f32, so that nothing is rounded.
  Problem problem(const SavedInputs& saved, std::map<std::string, std::string> options = {}) const {
    ProblemOptions given;
    given.sizes["m"] = "3";
    given.dtypes = "f32";
    given.options = std::move(options);
    return saved_problems(saved.op(), given, &saved, DeviceKind::cpu).at(0);
  }
  SavedInputs open(const std::string& op) const {
    return SavedInputs(builtin_catalog(), builtin_catalog().op(op), {.weights = write()});
  }
  std::string complaint(const std::string& op,
                        const std::map<std::string, std::string>& options = {}) const {
    return test::error_of([&] { problem(open(op), options); });
  }

  SafetensorsWriter writer;

 private:
  std::unique_ptr<TemporaryFolder> folder_ = std::make_unique<TemporaryFolder>();
  bool has_expected_ = false;
};

/// The dense weight that the op's reference expands.
std::vector<double> expanded(const SavedInputs& saved, const Problem& problem,
                             const std::string& name) {
  HostThreads threads;
  ReferenceTensors tensors;
  for (const TensorSpec& spec : saved.op().tensors(problem)) {
    if (spec.role != Role::input || !spec.name.starts_with(name)) continue;
    std::vector<std::byte> bytes(spec.bytes());
    REQUIRE(saved.fill(spec, bytes, threads));
    std::vector<double> values(static_cast<std::size_t>(spec.elements()));
    decode(spec.dtype, bytes.data(), std::span<double>(values));
    tensors[spec.name] = std::move(values);
  }
  const auto stages = saved.op().stages(problem);
  for (std::size_t i = 0; i < stages.size(); ++i)
    for (const std::string& output : stages[i].outputs)
      if (output == name + "_dense") {
        // Other weights of the stage are not looked at.
        for (const std::string& input : stages[i].inputs)
          if (!tensors.contains(input)) {
            const auto specs = saved.op().tensors(problem);
            tensors[input].resize(
                static_cast<std::size_t>(specs[tensor_index(specs, input)].elements()));
          }
        saved.op().reference(problem, i, tensors, threads);
        return tensors.at(output);
      }
  return {};
}

std::vector<float> dense(const fs::path& path, const std::string& name) {
  const SavedModel model(path);
  const auto& tensor = model.at(name);
  std::vector<float> values(static_cast<std::size_t>(tensor.saved.elements()));
  model.read(tensor, 0, DType::f32, reinterpret_cast<std::byte*>(values.data()), values.size());
  return values;
}

std::size_t differences(const std::vector<double>& ours, const std::vector<float>& right) {
  if (ours.size() != right.size()) return right.size() + 1;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < ours.size(); ++i)
    wrong += std::fabs(ours[i] - right[i]) > std::ldexp(std::fabs(right[i]), -22);
  return wrong;
}

constexpr const char* o_proj = "model.layers.0.self_attn.o_proj.";

}  // namespace

TEST_CASE("linear has the packed weights of every format that kernels have") {
  // Without a format that kernels have: others are dense.
  const std::map<std::string, std::string> unfit{
      {"gptq_v1_sym_g128_desc_act.safetensors", "order of activations"},
      {"gptq_v1_sym_g32_desc_act.safetensors", "order of activations"},
      {"ct_int4_sym_g64_g_idx.safetensors", "order of activations"},
      {"ct_fp8_block_ragged.safetensors", "groups of 128 do not divide"},
      {"fp8_block_ragged.safetensors", "groups of 128 do not divide"}};
  const json index = index_of_vectors();
  std::size_t packed = 0;
  for (const auto& [file, entry] : index.items()) {
    const json& config = entry.at("quantization_config");
    if (config.at("quant_method") == "mxfp4") continue;
    CAPTURE(file);
    PackedModel model;
    model.add(file, o_proj);
    model.config(config);
    const SavedInputs saved = model.open("linear");
    const Problem problem = model.problem(saved);
    if (const auto why = unfit.find(file); why != unfit.end()) {
      CHECK_FALSE(problem.options.contains("weights"));
      const bool is_fp8 = file.find("fp8") != file.npos;
      CHECK(model.complaint("linear", {{"weights", is_fp8 ? "fp8" : "int4"}}).find(why->second) !=
            std::string::npos);
      continue;
    }
    REQUIRE(problem.options.contains("weights"));
    CHECK(differences(expanded(saved, problem, "w"), dense(model.path(), "expected")) == 0);
    ++packed;
  }
  CHECK(packed >= 20);
}

namespace {

std::string noise_bytes(std::size_t bytes, unsigned seed, unsigned char least = 0,
                        unsigned char most = 255) {
  std::string text(bytes, '\0');
  for (char& byte : text) {
    seed = seed * 1664525 + 1013904223;
    byte = static_cast<char>(least + (seed >> 16) % (most - least + 1u));
  }
  return text;
}

/// A symmetric layer as GPTQModel writes it, with groups of 32.
void add_gptq(SafetensorsWriter& writer, const std::string& start, std::int64_t n, std::int64_t k,
              const std::string& zeros = "\x77") {
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  writer.add(start + "qweight", "I32", {k / 8, n},
             noise_bytes(size(n * k / 2), static_cast<unsigned>(n)));
  std::string words;
  while (words.size() < size(k / 32 * n / 2)) words += zeros;
  writer.add(start + "qzeros", "I32", {k / 32, n / 8}, words);
  writer.add(start + "scales", "F16", {k / 32, n},
             std::vector<float>(size(k / 32 * n), 0.0078125f));
}

const json gptq_config{{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}};

/// A network and attention of d = 64, h = 96, two heads of 32.
void add_layer(SafetensorsWriter& writer) {
  const std::string start = "model.layers.0.";
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
    add_gptq(writer, start + "self_attn." + name + ".", 64, 64);
  for (const char* name : {"gate_proj", "up_proj"})
    add_gptq(writer, start + "mlp." + name + ".", 96, 64);
  add_gptq(writer, start + "mlp.down_proj.", 64, 96);
  for (const char* name : {"input_layernorm.weight", "post_attention_layernorm.weight"})
    writer.add(start + name, "F32", {64}, std::vector<float>(64, 1));
}

/// Experts as gpt-oss has them, with d = 64 and h = 32.
void add_gpt_oss(SafetensorsWriter& writer) {
  const std::string start = "model.layers.0.mlp.experts.";
  for (const auto& [name, n, k] :
       {std::tuple<std::string, std::int64_t, std::int64_t>{"gate_up_proj", 64, 64},
        {"down_proj", 64, 32}}) {
    const auto codes = static_cast<std::size_t>(2 * n * k / 2);
    writer.add(start + name + "_blocks", "U8", {2, n, k / 32, 16}, noise_bytes(codes, 1));
    writer.add(start + name + "_scales", "U8", {2, n, k / 32},
               noise_bytes(codes / 16, 2, 118, 124));
    std::vector<float> bias(static_cast<std::size_t>(2 * n));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
    writer.add(start + name + "_bias", "BF16", {2, n}, bias);
  }
}

TEST_CASE("packed experts of a model have a weight each for gate and up, however dense ones lie") {
  const Op& op = builtin_catalog().op("moe-ffn");
  const auto interleaves = [&](const char* weights, const char* layout) {
    ProblemOptions given;
    given.model = "gpt-oss-20b";
    given.options = {{"weights", weights}, {"gate-up", layout}};
    return problems_of(op, given, Sizes::optional, DeviceKind::cuda)
        .at(0)
        .has("gate-up", "interleaved");
  };
  CHECK(interleaves("", ""));
  CHECK(interleaves("dense", ""));
  CHECK(!interleaves("mxfp4", ""));
  CHECK_THROWS_WITH(interleaves("mxfp4", "interleaved"), ContainsSubstring("a packed weight each"));
}

}  // namespace

TEST_CASE("experts of gpt-oss are packed, gate and up apart") {
  PackedModel model;
  add_gpt_oss(model.writer);
  model.config({{"quant_method", "mxfp4"}});
  const SavedInputs saved = model.open("moe-ffn");
  const Problem problem = model.problem(saved);
  CHECK(problem.has("weights", "mxfp4"));
  CHECK(problem.has("act", "swiglu-oai"));
  CHECK(problem.has("bias", "all"));
  const auto both = dense(model.path(), "model.layers.0.mlp.experts.gate_up_proj");
  const auto down = dense(model.path(), "model.layers.0.mlp.experts.down_proj");
  constexpr std::size_t experts = 2, d = 64, h = 32;
  for (const std::size_t odd : {0, 1}) {
    std::vector<float> right;
    for (std::size_t row = 0; row < experts * h; ++row)
      for (std::size_t i = 0; i < d; ++i)
        right.push_back(both[(row / h * d + i) * 2 * h + row % h * 2 + odd]);
    CHECK(differences(expanded(saved, problem, odd != 0 ? "w_up" : "w_gate"), right) == 0);
  }
  std::vector<float> right;
  for (std::size_t row = 0; row < experts * d; ++row)
    for (std::size_t i = 0; i < h; ++i) right.push_back(down[(row / d * h + i) * d + row % d]);
  CHECK(differences(expanded(saved, problem, "w_down"), right) == 0);

  HostThreads threads;
  const auto specs = saved.op().tensors(problem);
  const TensorSpec& spec = specs[tensor_index(specs, "b_up")];
  std::vector<float> bias(static_cast<std::size_t>(spec.elements()));
  REQUIRE(saved.fill(spec, std::as_writable_bytes(std::span(bias)), threads));
  CHECK(bias[0] == 1);
  CHECK(bias[h] == 65);

  // As dense weights they stay together.
  const Problem as_dense = model.problem(saved, {{"weights", "dense"}});
  CHECK(as_dense.has("gate-up", "interleaved"));
}

TEST_CASE("a layer of a quantised model is packed whole, or dense where its formats differ") {
  PackedModel model;
  add_layer(model.writer);
  model.config(gptq_config);
  const auto options = [](const Problem& problem) {
    return std::array{problem.has("weights", "int4"), problem.has("group", "32"),
                      problem.has("zeros", "yes")};
  };
  const SavedInputs ffn = model.open("ffn");
  const Problem network = model.problem(ffn);
  CHECK(options(network) == std::array{true, true, false});
  for (const char* name : {"gate", "up", "down"})
    CHECK(differences(expanded(ffn, network, std::string("w_") + name),
                      dense(model.path(),
                            std::string("model.layers.0.mlp.") + name + "_proj.weight")) == 0);
  const SavedInputs qkv = model.open("qkv");
  ProblemOptions given;
  given.sizes = {{"m", "2"}, {"heads", "2"}, {"dim", "32"}, {"kv-heads", "2"}};
  given.dtypes = "f32";
  const Problem product = saved_problems(qkv.op(), given, &qkv, DeviceKind::cpu).at(0);
  CHECK(options(product) == std::array{true, true, false});
  std::vector<float> rows;
  for (const char* name : {"q", "k", "v"})
    for (const float value :
         dense(model.path(), std::string("model.layers.0.self_attn.") + name + "_proj.weight"))
      rows.push_back(value);
  CHECK(differences(expanded(qkv, product, "w"), rows) == 0);

  // One weight with zero points: all have them, of 8.
  PackedModel other;
  const std::string start = "model.layers.0.mlp.";
  add_gptq(other.writer, start + "gate_proj.", 96, 64);
  add_gptq(other.writer, start + "up_proj.", 96, 64, "\x36");
  add_gptq(other.writer, start + "down_proj.", 64, 96);
  other.config(gptq_config);
  const SavedInputs mixed = other.open("ffn");
  const Problem with_zeros = other.problem(mixed);
  CHECK(options(with_zeros) == std::array{true, true, true});
  for (const char* name : {"gate", "up"})
    CHECK(differences(expanded(mixed, with_zeros, std::string("w_") + name),
                      dense(other.path(), start + name + "_proj.weight")) == 0);
  // Dense weights beside them.
  PackedModel half;
  add_gptq(half.writer, start + "gate_proj.", 96, 64);
  add_gptq(half.writer, start + "up_proj.", 96, 64);
  half.writer.add(start + "down_proj.weight", "F32", {64, 96}, std::vector<float>(64 * 96, 1));
  half.config(gptq_config);
  CHECK_FALSE(half.problem(half.open("ffn")).options.contains("weights"));
  CHECK(half.complaint("ffn", {{"weights", "int4"}, {"group", "32"}}).find("is not quantised") !=
        std::string::npos);
}

TEST_CASE("packed weights that the checkpoint has not are one line") {
  PackedModel model;
  add_layer(model.writer);
  model.config(gptq_config);
  struct Wrong {
    std::map<std::string, std::string> options;
    std::string named;
  };
  for (const auto& [options, named] :
       {Wrong{{{"weights", "mxfp4"}},
              "is packed as mxfp4, and model.layers.0.mlp.gate_proj.weight"},
        {{{"weights", "int4"}, {"group", "row"}}, "with groups of 32: give other sizes or --group"},
        {{{"weights", "int4"}, {"group", "128"}}, "groups of 128 do not divide d=64"}}) {
    const std::string complaint = model.complaint("ffn", options);
    INFO(complaint);
    CHECK(complaint.find(named) != std::string::npos);
    CHECK(complaint.find('\n') == std::string::npos);
  }
  PackedModel zeros;
  add_gptq(zeros.writer, o_proj, 64, 64, "\x36");
  zeros.config(gptq_config);
  CHECK(zeros.complaint("linear", {{"weights", "int4"}, {"zeros", "no"}})
            .find("has zero points: give --zeros yes") != std::string::npos);
}

TEST_CASE("the commands run on packed weights of a checkpoint") {
  const Sandbox sandbox;
  const auto folder = sandbox.folder() / "model";
  fs::create_directory(folder);
  SafetensorsWriter writer;
  add_layer(writer);
  writer.write(folder / "model.safetensors");
  write_text(folder / "config.json", json{{"quantization_config", gptq_config},
                                          {"num_attention_heads", 2},
                                          {"num_key_value_heads", 2},
                                          {"head_dim", 32},
                                          {"rms_norm_eps", 1e-5},
                                          {"hidden_act", "silu"}}
                                         .dump());
  const auto check =
      sandbox.fftune("check --weights model --op ffn --device cpu --m 5 --dtype bf16 --json");
  INFO(check.err);
  REQUIRE(check.code == 0);
  const json checks = json_of(check.out).at("checks");
  for (const json& each : checks) {
    CHECK(each.at("state") == "passed");
    CHECK(each.dump().find("int4") != std::string::npos);
  }
  const auto bench = sandbox.fftune(
      "bench layer --weights model --device cpu --batch 2 --cache 16 --dtype bf16 --samples 3 "
      "--budget 100ms --json");
  INFO(bench.err);
  REQUIRE(bench.code == 0);
  CHECK(json_of(bench.out).at("problems").at(1).at("problem").dump().find("int4") !=
        std::string::npos);
  const auto search =
      sandbox.fftune("linear --weights model --device cpu --m 4 --budget 2s --max-variants 3");
  INFO(search.err);
  CHECK(search.code == 0);
  INFO(search.out);
  CHECK(search.out.find("expand") != std::string::npos);
}

TEST_CASE("damaged quantised tensors are read, or refused with one line") {
  // Tensors of real files with other shapes, types, bytes and without some of them.
  const json index = index_of_vectors();
  std::mt19937 random(11);
  const auto below = [&](std::size_t count) { return random() % count; };
  std::size_t read = 0, refused = 0;
  HostThreads threads;
  for (int round = 0; round < 8; ++round)
    for (const auto& [file, entry] : index.items()) {
      json config = entry.at("quantization_config");
      if (config.at("quant_method") == "mxfp4") continue;
      if (below(3) == 0)
        for (const char* key : {"group_size", "bits"})
          if (config.contains(key)) config[key] = static_cast<int>(below(300)) - 20;
      PackedModel model;
      model.add(file, o_proj, [&](const std::string& name, json& tensor, std::string& data) {
        if (name == "expected") return true;
        auto& shape = tensor["shape"];
        switch (below(10)) {
          case 0:
            return false;
          case 1:
            if (shape.size() == 2) std::swap(shape[0], shape[1]);
            break;
          case 2:
            if (!shape.empty()) {
              shape[0] = shape[0].get<std::int64_t>() / 2;
              data.resize(data.size() / 2);
            }
            break;
          case 3:
            if (tensor["dtype"] == "I32") tensor["dtype"] = "F32";
            break;
          case 4:
            for (char& byte : data) byte = static_cast<char>(below(256));
            break;
          default:
            break;
        }
        return true;
      });
      model.config(config);
      CAPTURE(file, round);
      try {
        const SavedInputs saved = model.open("linear");
        const Problem problem = model.problem(saved);
        for (const TensorSpec& spec : saved.op().tensors(problem)) {
          std::vector<std::byte> bytes(spec.bytes());
          if (spec.role == Role::input) saved.fill(spec, bytes, threads);
        }
        ++read;
      } catch (const Error& error) {
        CHECK(std::string(error.what()).find('\n') == std::string::npos);
        CHECK(std::string(error.what()) != "");
        ++refused;
      }
    }
  CHECK(read > 20);
  CHECK(refused > 50);
}
