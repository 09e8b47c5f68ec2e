// Launches: const inputs, plans for any number of tokens, and what is refused.
#include <string>
#include <vector>

#include "api/layer.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune;
using namespace fftune::test;
using Json = nlohmann::json;
using fftune::testing::json_of;

namespace {

std::string any_tokens_json(std::int64_t most, std::size_t d, std::size_t h) {
  return "{\"op\":\"ffn\",\"m\":{\"max\":" + std::to_string(most) + "},\"d\":" + std::to_string(d) +
         ",\"h\":" + std::to_string(h) + "}";
}

/// A launch of the layer.
struct Launch {
  Launch(Layer& layer, HostWorkspace& workspace, std::int64_t tokens)
      : inputs{layer.x.data(), layer.w_gate.data(), layer.w_up.data(), layer.w_down.data()},
        outputs{layer.y.data()},
        run(run_of(inputs, outputs, workspace, tokens)) {}
  const void* inputs[4];
  void* outputs[1];
  fftune_run run;
};

}  // namespace

TEST_CASE("a plan for any number of tokens computes each of them") {
  const std::size_t most = 70;
  const auto plan = cpu_context().plan(any_tokens_json(most, 32, 48));
  CHECK(plan.max_tokens() == 70);
  CHECK(plan.buffer_bytes(0) == most * 32 * sizeof(float));
  HostWorkspace workspace(plan);
  for (const std::size_t m : {1, 2, 3, 16, 17, 33, 64, 69, 70, 3}) {
    Layer layer(m, 32, 48);
    const Launch launch(layer, workspace, static_cast<std::int64_t>(m));
    REQUIRE(fftune_plan_launch(plan.get(), &launch.run) == FFTUNE_OK);
    CAPTURE(m);
    CHECK(relative_error(layer.y, layer.expected()) < 1e-5);
  }
}

TEST_CASE("a number of tokens that is prepared or was run allocates nothing but its CPU call") {
  const auto plan = cpu_context().plan(any_tokens_json(8, 16, 24));
  HostWorkspace workspace(plan);
  Layer layer(8, 16, 24);
  const Launch launch(layer, workspace, 8);
  plan.prepare(8);
  const auto before_first = allocations();
  REQUIRE(fftune_plan_launch(plan.get(), &launch.run) == FFTUNE_OK);
  const auto of_first = allocations() - before_first;
  const auto before_second = allocations();
  REQUIRE(fftune_plan_launch(plan.get(), &launch.run) == FFTUNE_OK);
  CHECK(allocations() - before_second == of_first);
}

TEST_CASE("a plan for any number of tokens says which variants serve which") {
  const auto plan = cpu_context().plan(any_tokens_json(5000, 64, 96));
  const auto described = json_of(plan.describe());
  CHECK(described.at("problem").at("m") == Json({{"max", 5000}}));
  const auto& segments = described.at("segments");
  REQUIRE(!segments.empty());
  std::int64_t next = 1;
  for (const auto& segment : segments) {
    CHECK(segment.at("first") == next);
    CHECK(segment.at("last") >= segment.at("first"));
    CHECK(!segment.at("variants").empty());
    next = segment.at("last").get<std::int64_t>() + 1;
  }
  CHECK(next == 5001);
  CHECK(described.at("workspace_bytes") == plan.workspace_bytes());
  const auto one = json_of(std::string(cpu_context().plan(ffn_json(4, 16, 24)).describe()));
  CHECK(!one.contains("segments"));
}

TEST_CASE("the size of the tokens alone may be a limit, and says what it takes") {
  const auto context = cpu_context();
  const auto refused = [&](const std::string& problem, const std::string& words) {
    try {
      const auto plan = context.plan(problem);
    } catch (const library::Exception& error) {
      return error.status() == FFTUNE_INVALID_INPUT && last_error_says(words);
    }
    return false;
  };
  CHECK(refused(R"({"op":"ffn","m":4,"d":{"max":8},"h":8})",
                "d: expected an integer, found an object: {\"max\": N} is for m alone"));
  CHECK(refused(R"({"op":"ffn","m":{"max":"8"},"d":8,"h":8})", "{\"max\": N} with the largest"));
  CHECK(refused(R"({"op":"ffn","m":{"max":8,"min":1},"d":8,"h":8})", "m: expected an integer"));
  CHECK(refused(R"({"op":"ffn","m":{},"d":8,"h":8})", "m: expected an integer"));
  CHECK(refused(R"({"op":"ffn","m":{"max":0},"d":8,"h":8})", "m=0"));
}

TEST_CASE("a launch with the wrong number of tokens, buffers or size is refused by name") {
  const auto context = cpu_context();
  const auto any = context.plan(any_tokens_json(8, 16, 24));
  HostWorkspace workspace(any);
  Layer layer(8, 16, 24);
  const auto says = [&](const fftune_plan* plan, auto change, const char* words) {
    Launch launch(layer, workspace, 8);
    change(launch.run);
    return fftune_plan_launch(plan, &launch.run) == FFTUNE_INVALID_INPUT && last_error_says(words);
  };
  CHECK(says(
      any.get(), [](auto& run) { run.tokens = 0; }, "m=0 is out of range"));
  CHECK(says(
      any.get(), [](auto& run) { run.tokens = 9; }, "this plan is for 1 to 8"));
  CHECK(says(
      any.get(), [](auto& run) { run.input_count = 3; },
      "3 inputs given, 4 needed: x, w_gate, w_up, w_down"));
  CHECK(says(
      any.get(), [](auto& run) { run.outputs = nullptr; }, "outputs is NULL"));
  CHECK(says(
      any.get(), [](auto& run) { run.struct_size = 4; },
      "fftune_run.struct_size is 4: set it to sizeof(fftune_run)"));
  if (any.workspace_bytes() > 0)
    CHECK(says(
        any.get(), [](auto& run) { run.workspace = nullptr; }, "workspace is NULL"));
  CHECK(fftune_plan_launch(any.get(), nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(fftune_plan_prepare(any.get(), 9) == FFTUNE_INVALID_INPUT);
  CHECK(fftune_plan_prepare(nullptr, 1) == FFTUNE_INVALID_INPUT);

  void* buffers[5] = {};
  CHECK(fftune_plan_run(any.get(), buffers, 5, nullptr, nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("use fftune_plan_launch"));

  const auto eight = context.plan(ffn_json(8, 16, 24));
  CHECK(eight.max_tokens() == 0);
  CHECK(says(
      eight.get(), [](auto& run) { run.tokens = 7; }, "this plan is for m=8, not 7"));
}

TEST_CASE("a launch of a plan for one number of tokens reads its inputs alone") {
  Layer layer(8, 16, 24);
  const auto plan = cpu_context().plan(ffn_json(8, 16, 24));
  HostWorkspace workspace(plan);
  for (const std::int64_t tokens : {0, 8}) {
    layer.y.assign(layer.y.size(), -1);
    const Layer& read = layer;
    plan.launch({read.x.data(), read.w_gate.data(), read.w_up.data(), read.w_down.data()},
                {layer.y.data()},
                {.workspace = workspace.data(), .stream = nullptr, .tokens = tokens});
    CHECK(relative_error(layer.y, layer.expected()) < 1e-5);
  }
}

TEST_CASE("a struct of a newer header is taken where its new fields are zero") {
  struct Newer {
    fftune_run run;
    std::uint64_t more;
  } newer{};
  Layer layer(8, 16, 24);
  const auto plan = cpu_context().plan(ffn_json(8, 16, 24));
  HostWorkspace workspace(plan);
  const Launch launch(layer, workspace, 0);
  newer.run = launch.run;
  newer.run.struct_size = sizeof newer;
  CHECK(fftune_plan_launch(plan.get(), &newer.run) == FFTUNE_OK);
  newer.more = 1;
  CHECK(fftune_plan_launch(plan.get(), &newer.run) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("update the library"));
}
