// Saved models through the C API: what is in the files, and the inputs of plans.
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fftune/fftune.hpp"
#include "support/catch.hpp"
#include "support/child.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_file.hpp"

namespace fftune::saved_models {

using library::Context;
using library::Plan;
using library::SavedModel;
using nlohmann::json;
using namespace testing;

namespace {

constexpr const char* layer_0 = "model.layers.0.";

/// Layer 0 of a Llama with d = 32, h = 64, 2 heads of 16 and a vocabulary of 5. Its weights are
/// row + column / 64, which each type has; o is GPTQ with groups of 32 where `quantised`.
class Files {
 public:
  explicit Files(bool quantised = false) {
    add("model.embed_tokens.weight", 5, 32);
    add("model.norm.weight", 32, 1);
    for (const char* name : {"input_layernorm", "post_attention_layernorm"})
      add(std::string(layer_0) + name + ".weight", 32, 1);
    for (const char* name : {"q", "k", "v"})
      add(std::string(layer_0) + "self_attn." + name + "_proj.weight", 32, 32);
    add(std::string(layer_0) + "mlp.gate_proj.weight", 64, 32);
    add(std::string(layer_0) + "mlp.up_proj.weight", 64, 32);
    add(std::string(layer_0) + "mlp.down_proj.weight", 32, 64);
    config_ = {{"model_type", "llama"},  {"hidden_size", 32},    {"num_attention_heads", 2},
               {"num_hidden_layers", 1}, {"rms_norm_eps", 1e-5}, {"quantization_config", nullptr}};
    const std::string o = std::string(layer_0) + "self_attn.o_proj.";
    if (!quantised) {
      add(o + "weight", 32, 32);
      return;
    }
    config_["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}};
    // Codes of output n: n % 16 for each input; zero points of 8, kept as 7.
    std::vector<std::uint32_t> words(4 * 32), zeros(4, 0x77777777);
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = 0x11111111u * static_cast<std::uint32_t>(i % 16);
    writer_.add(o + "qweight", "I32", {4, 32}, bytes_of(words));
    writer_.add(o + "qzeros", "I32", {1, 4}, bytes_of(zeros));
    writer_.add(o + "scales", "F16", {1, 32}, std::vector<float>(32, 0.5f));
  }

  void add(const std::string& name, std::int64_t rows, std::int64_t columns) {
    std::vector<float> values;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t column = 0; column < columns; ++column)
        values.push_back(static_cast<float>(row) + static_cast<float>(column) / 64);
    if (columns == 1)
      writer_.add(name, "F32", {rows}, values);
    else
      writer_.add(name, "F32", {rows, columns}, values);
  }
  json& config() { return config_; }
  std::string path() const {
    writer_.write(folder_.path() / "model.safetensors");
    write_text(folder_.path() / "config.json", config_.dump());
    return folder_.path().string();
  }

 private:
  static std::string bytes_of(const std::vector<std::uint32_t>& words) {
    return {reinterpret_cast<const char*>(words.data()), words.size() * 4};
  }

  TemporaryFolder folder_;
  SafetensorsWriter writer_;
  json config_;
};

std::size_t index_of(const Plan& plan, const std::string& name) {
  const json buffers = json::parse(plan.describe()).at("buffers");
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].at("name") == name) return i;
  FAIL("no buffer " + name);
  return 0;
}

template <typename T>
std::vector<T> input(const SavedModel& model, const Plan& plan, const std::string& name,
                     const char* map = nullptr) {
  const std::size_t index = index_of(plan, name);
  std::vector<T> values(plan.buffer_bytes(index) / sizeof(T));
  model.input(plan, index, values.data(), 0, map);
  return values;
}

template <typename Call>
void check_fails(fftune_status status, const std::string& named, const Call& call) {
  CAPTURE(named);
  CHECK(call() == status);
  CHECK(std::string(fftune_last_error()).find(named) != std::string::npos);
}

}  // namespace

TEST_CASE("a model is described by its tensors, layers and configuration") {
  const Files files(true);
  const SavedModel model(files.path());
  const json described = json::parse(model.describe());
  CHECK(described.at("layers") == 1);
  CHECK(described.at("vocab") == 5);
  CHECK(described.at("d") == 32);
  CHECK(described.at("dtype") == "f32");
  CHECK(described.at("learned_positions") == false);
  CHECK(described.at("config").at("model_type") == "llama");
  json o, up;
  for (const json& tensor : described.at("tensors")) {
    if (tensor.at("name") == std::string(layer_0) + "self_attn.o_proj.weight") o = tensor;
    if (tensor.at("name") == std::string(layer_0) + "mlp.up_proj.weight") up = tensor;
  }
  CHECK(o.at("shape") == json({32, 32}));
  CHECK(o.at("quantised") == true);
  CHECK(up.at("shape") == json({64, 32}));
  CHECK(up.at("dtype") == "F32");
  CHECK(up.at("quantised") == false);
}

TEST_CASE("elements of a tensor are read in any type, those of quantised weights decoded") {
  const Files files(true);
  const SavedModel model(files.path());
  std::array<float, 3> some{};
  model.read("model.layers.0.mlp.up_proj.weight", "f32", 32 + 30, 3, some.data());
  CHECK(some == std::array<float, 3>{1 + 30.f / 64, 1 + 31.f / 64, 2});
  std::vector<float> whole(32 * 32);
  model.read("model.layers.0.self_attn.o_proj.weight", "f32", 0, whole.size(), whole.data());
  for (std::size_t i = 0; i < whole.size(); ++i)
    REQUIRE(whole[i] == (static_cast<float>(i / 32 % 16) - 8) / 2);
  std::array<std::uint16_t, 2> narrow{};
  model.read("model.norm.weight", "bf16", 1, 2, narrow.data());
  CHECK(narrow == std::array<std::uint16_t, 2>{0x3f80, 0x4000});
}

TEST_CASE("a problem is completed by the model, and its plan's inputs are read") {
  const Files files;
  const SavedModel model(files.path());
  const Context context(-1);
  const json problem = json::parse(model.problem(context, R"({"op":"ffn","m":{"max":4}})"));
  CHECK(problem.at("m") == json({{"max", 4}}));
  CHECK(problem.at("d") == 32);
  CHECK(problem.at("h") == 64);
  CHECK(problem.at("dtype") == "f32");
  const Plan plan = context.plan(problem.dump());
  const auto up = input<float>(model, plan, "w_up");
  REQUIRE(up.size() == 64 * 32);
  CHECK(up[33] == 1 + 1.f / 64);
  CHECK(model.source(plan, index_of(plan, "x")).empty());
  const std::string gate = model.source(plan, index_of(plan, "w_gate"));
  CHECK(gate.find("mlp.gate_proj.weight") != std::string::npos);
  CHECK(gate != model.source(plan, index_of(plan, "w_up")));
}

TEST_CASE("a quantised weight is packed as the op takes it") {
  const Files files(true);
  const SavedModel model(files.path());
  const Context context(-1);
  const char* const map = "w=self_attn.o_proj.weight";
  const json problem =
      json::parse(model.problem(context, R"({"op":"linear","m":2,"dtype":"f32"})", 0, map));
  CHECK(problem.at("weights") == "int4");
  CHECK(problem.at("n") == 32);
  CHECK(problem.at("k") == 32);
  const Plan plan = context.plan(problem.dump());
  auto w = input<std::uint8_t>(model, plan, "w", map);
  auto scale = input<float>(model, plan, "w_scale", map);
  CHECK(scale == std::vector<float>(32, 0.5f));
  // y = x W^T with x of ones: each output is 32 times its weight.
  std::vector<float> x(2 * 32, 1), y(2 * 32);
  alignas(256) std::array<char, 8192> workspace{};
  REQUIRE(plan.workspace_bytes() <= workspace.size());
  plan.run({x.data(), w.data(), scale.data(), y.data()}, workspace.data());
  for (std::size_t n = 0; n < 32; ++n) CHECK(y[n] == 16 * (static_cast<float>(n % 16) - 8));
}

TEST_CASE("a child that is forked while other threads complete problems completes its own") {
  const Files files;
  const SavedModel model(files.path());
  const Context context(-1);
  const Plan token =
      context.plan(model.problem(context, R"({"op":"decode","batch":1,"cache":64})"));
  const auto completes = [&] {
    model.problem(context, R"({"op":"decode","batch":1,"cache":64})");
    model.source(token, index_of(token, "embedding"));
    input<float>(model, token, "final_norm");
  };
  std::atomic<bool> stops = false;
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&] {
      while (!stops) completes();
    });
  int failed = 0;
  for (int i = 0; i < 600 && failed == 0; ++i) failed += test::fails_in_child(completes);
  stops = true;
  for (auto& other : others) other.join();
  CHECK(failed == 0);
}

TEST_CASE("the head and a whole token take the tensors around the layers") {
  Files files;
  SECTION("the embedding is the head's weight where there is no other") {
    const SavedModel model(files.path());
    const Context context(-1);
    const Plan head = context.plan(model.problem(context, R"({"op":"head","m":1})"));
    const Plan token =
        context.plan(model.problem(context, R"({"op":"decode","batch":1,"cache":64})"));
    CHECK(model.source(head, index_of(head, "w")) ==
          model.source(token, index_of(token, "embedding")));
    CHECK(input<float>(model, token, "final_norm")[3] == 3);
    std::array<float, 64> rows{};
    const std::array<std::int32_t, 2> ids{4, 1};
    model.embed(ids.data(), ids.size(), 7, "f32", rows.data(), sizeof rows);
    CHECK(rows[2] == 4 + 2.f / 64);
    CHECK(rows[32] == 1);
  }
  SECTION("Gemma's rows have a factor, rounded to their type") {
    files.config().update({{"model_type", "gemma"}, {"head_dim", 16}});
    const SavedModel model(files.path());
    const Context context(-1);
    const std::int32_t id = 1;
    std::array<float, 32> row{};
    model.embed(&id, 1, 0, "f32", row.data(), sizeof row);
    CHECK(row[0] == std::sqrt(32.f));
    const json problem = json::parse(
        model.problem(context, R"({"op":"decode","batch":1,"cache":64,"dtype":"bf16"})"));
    CHECK(std::stod(problem.at("embed-scale").get<std::string>()) == 5.65625);
  }
  SECTION("learned positions are added") {
    files.add("model.wpe.weight", 9, 32);
    const SavedModel model(files.path());
    const std::int32_t id = 2;
    std::array<float, 32> row{};
    model.embed(&id, 1, 8, "f32", row.data(), sizeof row);
    CHECK(row[1] == 10 + 2.f / 64);
    CHECK(json::parse(model.describe()).at("learned_positions") == true);
    const Context context(-1);
    CHECK_THROWS_WITH(model.problem(context, R"({"op":"decode","batch":1,"cache":64})"),
                      ContainsSubstring("learns its positions"));
  }
}

TEST_CASE("wrong calls on a model are named") {
  Files files;
  files.add(std::string(layer_0) + "self_attn.sinks", 2, 1);
  const std::string path = files.path();
  fftune_model* model = nullptr;
  const char* text = nullptr;
  std::array<float, 64> out{};
  check_fails(FFTUNE_INVALID_INPUT, "out is NULL",
              [&] { return fftune_model_open(path.c_str(), nullptr); });
  check_fails(FFTUNE_IO_ERROR, "this path does not exist",
              [&] { return fftune_model_open("/none", &model); });
  CHECK(model == nullptr);
  REQUIRE(fftune_model_open(path.c_str(), &model) == FFTUNE_OK);
  const Context context(-1);
  const auto problem = [&](const char* given, std::int64_t layer = 0, const char* map = nullptr) {
    return fftune_model_problem(model, context.get(), layer, map, given, &text);
  };
  check_fails(FFTUNE_INVALID_INPUT, "self_attn.sinks is not of a layer that is known",
              [&] { return problem(R"({"op":"layer","batch":1,"s":1,"cache":64})"); });
  check_fails(FFTUNE_INVALID_INPUT, "has no layer 1: give layer from 0 to 0",
              [&] { return problem(R"({"op":"ffn","m":1})", 1); });
  check_fails(FFTUNE_INVALID_INPUT, "layer -1 is none",
              [&] { return problem(R"({"op":"ffn","m":1})", -1); });
  check_fails(FFTUNE_INVALID_INPUT, "map 'w' is not a pair",
              [&] { return problem(R"({"op":"linear","m":1})", 0, "w"); });
  check_fails(FFTUNE_INVALID_INPUT, "give other sizes",
              [&] { return problem(R"({"op":"ffn","m":1,"h":48})"); });
  check_fails(FFTUNE_INVALID_INPUT, "did you mean model.norm.weight?", [&] {
    return fftune_model_read(model, "model.norm.weigh", "f32", 0, 1, out.data());
  });
  check_fails(FFTUNE_INVALID_INPUT, "has 32 elements, not 2 from 31 on", [&] {
    return fftune_model_read(model, "model.norm.weight", "f32", 31, 2, out.data());
  });
  const std::int32_t id = 5;
  check_fails(FFTUNE_INVALID_INPUT, "there is no id 5", [&] {
    return fftune_model_embed(model, &id, 1, 0, "f32", out.data(), 32 * sizeof(float));
  });
  REQUIRE(problem(R"({"op":"rmsnorm","m":1})") == FFTUNE_OK);
  const Plan plan = context.plan(text);
  check_fails(FFTUNE_INVALID_INPUT, "w has 128 bytes, not 4", [&] {
    return fftune_model_input(model, 0, nullptr, plan.get(), index_of(plan, "w"), out.data(), 4);
  });
  check_fails(FFTUNE_INVALID_INPUT, "the model has no x", [&] {
    return fftune_model_input(model, 0, nullptr, plan.get(), index_of(plan, "x"), out.data(), 128);
  });
  check_fails(FFTUNE_INVALID_INPUT, "index 9 is none",
              [&] { return fftune_model_source(model, 0, nullptr, plan.get(), 9, &text); });
  fftune_model_close(model);
  fftune_model_close(nullptr);
}

}  // namespace fftune::saved_models
