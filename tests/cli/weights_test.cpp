// check, bench and a search on the weights of a saved model.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"
#include "support/safetensors.hpp"

using namespace fftune::testing;
using nlohmann::json;

namespace {

std::vector<float> wave(std::size_t count, float scale) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = scale * std::sin(static_cast<float>(i) * 1.7f + static_cast<float>(i % 13));
  return values;
}

/// Two layers with d = 16 and h = 24, the second with weights that are `scale` times as large.
void write_model(const std::filesystem::path& folder, float scale = 1) {
  std::filesystem::create_directory(folder);
  SafetensorsWriter writer;
  for (const std::string layer : {"0", "1"}) {
    const std::string start = "model.layers." + layer + ".";
    const float size = 0.25f * (layer == "1" ? scale : 1);
    writer.add(start + "mlp.gate_proj.weight", "F32", {24, 16}, wave(24 * 16, size));
    writer.add(start + "mlp.up_proj.weight", "F32", {24, 16}, wave(24 * 16, size));
    writer.add(start + "mlp.down_proj.weight", "F32", {16, 24}, wave(24 * 16, size));
    writer.add(start + "input_layernorm.weight", "F32", {16}, wave(16, 1));
  }
  writer.write(folder / "model.safetensors");
}

}  // namespace

TEST_CASE("check runs the ops of a saved layer beside random values") {
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model");
  const Finished done =
      sandbox.fftune("check --weights model --layer 1 --device cpu --m 5 --json --seeds 1");
  INFO(done.err);
  REQUIRE(done.code == 0);
  const json checks = json_of(done.out).at("checks");
  REQUIRE(checks.size() == 4);  // ffn and rmsnorm, each twice
  for (const json& check : checks) {
    CHECK(check.at("state") == "passed");
    CHECK(check.at("median_us") > 0);
    CHECK(check.at("error") <= check.at("tolerance"));
  }
  CHECK(checks[0].at("values") == "random");
  CHECK(checks[1].at("values") == "layer 1 of model");
  CHECK(checks[0].at("error") != checks[1].at("error"));
}

TEST_CASE("ops whose weights cannot be read are named, and the others are checked") {
  const Sandbox sandbox;
  std::filesystem::create_directory(sandbox.folder() / "model");
  SafetensorsWriter writer;
  const std::string start = "model.layers.0.";
  // 4 bits in groups of 32, and as `dynamic` says 8 bits, or 3 bits.
  const auto add = [&](const std::string& name, std::int64_t bits) {
    const auto bytes = [](std::int64_t words) {
      return std::string(static_cast<std::size_t>(4 * words), '\x57');
    };
    writer.add(start + name + ".qweight", "I32", {2 * bits, 64}, bytes(128 * bits));
    writer.add(start + name + ".qzeros", "I32", {2, 2 * bits}, bytes(4 * bits));
    writer.add(start + name + ".scales", "F16", {2, 64}, std::vector<float>(128, 0.01f));
  };
  add("self_attn.o_proj", 8);
  add("mlp.gate_proj", 4);
  add("mlp.up_proj", 3);
  add("mlp.down_proj", 4);
  writer.add(start + "input_layernorm.weight", "F32", {64}, wave(64, 1));
  writer.write(sandbox.folder() / "model/model.safetensors");
  write_text(sandbox.folder() / "model/config.json",
             R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":32,
                 "dynamic":{".*o_proj":{"bits":8},".*up_proj":{"bits":3}}}})");
  const Finished done = sandbox.fftune("check --weights model --device cpu --m 3 --json --seeds 1");
  INFO(done.err);
  REQUIRE(done.code == 0);
  const json document = json_of(done.out);
  std::vector<std::string> ops;
  for (const json& check : document.at("checks")) {
    CHECK(check.at("state") == "passed");
    if (check.at("values") != "random") ops.push_back(check.at("problem").at("op"));
  }
  CHECK(ops == std::vector<std::string>{"linear", "rmsnorm"});
  REQUIRE(document.at("left_out").size() == 1);
  const std::string left_out = document.at("left_out").at(0);
  CHECK(left_out.find("ffn is not checked: ") == 0);
  CHECK(left_out.find("up_proj.qweight' is [6, 64]") != std::string::npos);
  CHECK(done.err.find(left_out) != std::string::npos);
  const Finished named = sandbox.fftune("check --weights model --op ffn --device cpu");
  CHECK(named.code == 2);
  CHECK(named.err.find("neither 4 nor 8 bits") != std::string::npos);
  CHECK(lines_in(named.err) == 1);
}

TEST_CASE("a plan is wrong on values that overflow it, and check says so") {
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model", 1e20f);
  const Finished done = sandbox.fftune(
      "check --weights model --layer 1 --op ffn --device cpu --m 1 --report report.xml");
  CHECK(done.code == 1);
  CHECK(done.out.find("leaves the range of f32") != std::string::npos);
  CHECK(text_of(sandbox.folder() / "report.xml").find("leaves the range") != std::string::npos);
}

TEST_CASE("bench times both kinds of values") {
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model");
  const Finished done = sandbox.fftune(
      "bench ffn --weights model --device cpu --m 3 --samples 3 --budget 100ms --json");
  INFO(done.err);
  REQUIRE(done.code == 0);
  const json problems = json_of(done.out).at("problems");
  REQUIRE(problems.size() == 2);
  CHECK(problems[0].at("values") == "random");
  CHECK(problems[1].at("values") == "saved");
  CHECK(problems[1].at("problem") == problems[0].at("problem"));
  CHECK(problems[1].at("entries").at(0).at("error") > 0);
}

TEST_CASE("a search takes its data from a saved model, in its own process or a worker") {
  for (const std::string process : {"", " --in-process"}) {
    const Sandbox sandbox;
    write_model(sandbox.folder() / "model");
    const Finished done = sandbox.fftune(
        "ffn --saved-weights model --device cpu --m 4 --budget 2s --max-variants 3" + process);
    INFO(done.err);
    CHECK(done.code == 0);
    CHECK_FALSE(sandbox.preset_file().empty());
  }
  // Values that overflow are refused, so the worker has them.
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model", 1e20f);
  const Finished done = sandbox.fftune(
      "ffn --weights model --layer 1 --device cpu --m 4 --budget 2s --max-variants 3");
  CHECK(done.code != 0);
  CHECK(sandbox.preset_file().empty());
  // A failure on these inputs says nothing about others.
  const Finished resumed =
      sandbox.fftune("ffn --d 16 --h 24 --device cpu --m 4 --budget 2s --max-variants 3 --resume");
  INFO(resumed.out);
  CHECK(resumed.code == 0);
}

TEST_CASE("check, bench and a search take recorded inputs, with a model's weights or without") {
  const auto write_inputs = [](const std::filesystem::path& path, float scale) {
    SafetensorsWriter writer;
    writer.add("x", "F32", {3, 16}, wave(3 * 16, scale));
    writer.write(path);
  };
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model");
  write_inputs(sandbox.folder() / "x.safetensors", 1);
  // Results that are not finite in f32 show that these values were used.
  write_inputs(sandbox.folder() / "large.safetensors", 1e30f);
  const std::string check = "check --weights model --op ffn --device cpu --m 4 --seeds 1 --json";
  const auto errors = [&](const std::string& words) {
    const Finished done = sandbox.fftune(words);
    INFO(done.err);
    REQUIRE(done.code == 0);
    const json checks = json_of(done.out).at("checks");
    REQUIRE(checks.size() == 2);
    return std::pair{checks[0].at("error"), checks[1].at("error")};
  };
  const auto with = errors(check + " --input x.safetensors"), without = errors(check);
  CHECK(with.first == without.first);
  CHECK(with.second != without.second);
  CHECK(sandbox.fftune(check + " --input large.safetensors").code == 1);

  const std::string bench = "bench ffn --device cpu --m 4 --samples 3 --budget 100ms --json ";
  for (const std::string words :
       {"--weights model --input x.safetensors", "--d 16 --h 24 --input x.safetensors"}) {
    const Finished done = sandbox.fftune(bench + words);
    INFO(done.err);
    REQUIRE(done.code == 0);
    const json problems = json_of(done.out).at("problems");
    REQUIRE(problems.size() == 2);
    CHECK(problems[1].at("values") == "saved");
  }

  const std::string search = "ffn --d 16 --h 24 --device cpu --m 4 --budget 2s --max-variants 3 ";
  CHECK(sandbox.fftune(search + "--input large.safetensors").code != 0);
  CHECK(sandbox.preset_file().empty());
  const Finished done = sandbox.fftune(search + "--input x.safetensors");
  INFO(done.err);
  CHECK(done.code == 0);
  CHECK_FALSE(sandbox.preset_file().empty());
}

TEST_CASE("wrong saved values are one line") {
  const Sandbox sandbox;
  write_model(sandbox.folder() / "model");
  write_text(sandbox.folder() / "cut.safetensors",
             text_of(sandbox.folder() / "model/model.safetensors").substr(0, 1000));
  struct Wrong {
    std::string words;
    std::string named;
  };
  for (const auto& [words, named] :
       {Wrong{"check --weights none --device cpu",
              "none: this path does not exist: give the folder of a saved model"},
        {"check --weights cut.safetensors --device cpu", "the file is cut short"},
        {"check --weights model --layer 2 --device cpu", "give --layer from 0 to 1"},
        {"check --layer 2 --device cpu", "give --saved-weights too"},
        {"check --weights model --map w=x --device cpu", "give it by --op"},
        {"check --weights model --op qkv --device cpu", "has no model.layers.0.self_attn.q_proj"},
        {"bench ffn --weights model --d 17 --device cpu", "[24, 16]"},
        {"bench ffn --weights int5 --d 16 --h 24 --device cpu",
         "'int5' is neither one of dense, int4, mxfp4, fp8, int8, nvfp4 nor the path of a saved "
         "model"},
        {"ffn --weights no/model --device cpu",
         "'no/model' is neither one of dense, int4, mxfp4, fp8, int8, nvfp4 nor"},
        {"rmsnorm --weights no --device cpu", "'no' is neither one of same, f32 nor"},
        {"ffn --weights model --saved-weights cut.safetensors --device cpu", "two saved models"},
        {"bench qkv --saved-weights cut.safetensors --device cpu", "the file is cut short"},
        {"ffn --map w=x --d 8 --h 8 --device cpu", "give --saved-weights or --input too"},
        {"ffn --weights model --layer x --device cpu", "--layer 'x' is not a whole number"},
        {"ffn --weights model --layer -1 --device cpu", "--layer -1 is out of range"}}) {
    const Finished done = sandbox.fftune(words);
    INFO("fftune " << words << "\n" << done.err);
    CHECK(done.code >= 2);
    CHECK(lines_in(done.err) == 1);
    CHECK(done.err.find(named) != std::string::npos);
    CHECK(done.out.empty());
  }
}

TEST_CASE("bench times a layer of packed weights, and says so of a size that it lacks") {
  const Sandbox sandbox;
  const std::string sizes =
      "bench layer --d 128 --h 128 --heads 2 --dim 64 --device cpu --budget 0.05s --samples 3 ";
  for (const std::string weights : {"int4", "mxfp4", "fp8", "int8"}) {
    const Finished done =
        sandbox.fftune(sizes + "--batch 1 --cache 16 --layers 2 --json --weights " + weights);
    INFO(done.err);
    REQUIRE(done.code == 0);
    const json problem = json_of(done.out).at("problems").at(0);
    CHECK(problem.at("problem").dump().find(weights) != std::string::npos);
    CHECK(problem.at("entries").at(0).at("median_us") > 0);
  }
  const Finished lacks = sandbox.fftune(sizes + "--weights int4");
  CHECK(lacks.code == 2);
  CHECK(lacks.err.find("layer needs --cache") != std::string::npos);
}
