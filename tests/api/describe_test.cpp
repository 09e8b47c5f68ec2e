// A plan's description, and that presets are obeyed.
#include <string>

#include "api/layer.hpp"
#include "cpu/open.hpp"
#include "registry/catalog.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::test;
using Json = nlohmann::json;
using fftune::testing::json_of;

namespace {

/// A preset of this CPU whose variant is not the default one, and its id.
std::string write_preset(const testing::TemporaryFolder& folder, const Problem& problem,
                         bool stale) {
  const DeviceFacts facts = cpu_facts();
  const Catalog& catalog = builtin_catalog();
  const Op& op = catalog.op(problem.op);
  const Recipe usual = default_recipe(op, problem, facts);
  PresetRecord record;
  record.problem = problem;
  for (const Variant& variant : usual) {
    const Family& family = family_of(op, variant.family);
    Variant other = variant;
    for (const Config& config : family.space(problem, facts).feasible())
      if (config != variant.config) other.config = config;
    StageRecord stage;
    stage.stages = family.stages();
    stage.variant = other;
    stage.source_hash = stale ? "0123456789abcdef" : catalog.sources->hash(family.sources());
    stage.median_us = 10;
    stage.feasible = 2;
    stage.measured = 2;
    record.stages.push_back(stage);
  }
  record.verdict.median_us = 10;
  record.verdict.interval_low_us = 9;
  record.verdict.interval_high_us = 11;
  record.verdict.noise = 0.01;
  record.verdict.roofline_fraction = 0.5;
  record.verdict.limit = "compute";
  record.verdict.strategy = "exhaustive";
  record.error = 1e-7;
  record.tolerance = 1e-5;
  record.provenance = {fftune_version(),       facts.name, "", facts.toolkit, 0,
                       "2026-11-21T14:03:22Z", 1};
  merge_preset_records(folder.path(), preset_device(facts), problem.op, {record});
  return record.recipe().front().id();
}

Problem layer_problem(std::int64_t m) {
  const Op& op = builtin_catalog().op("ffn");
  return canonical(op, {"ffn", "fwd", DType::f32, {{"m", m}, {"d", 64}, {"h", 96}}, {}},
                   DeviceKind::cpu);
}

Json description_of(const testing::TemporaryFolder& folder, const std::string& problem) {
  const library::Context context(-1, folder.path().c_str());
  return json_of(context.plan(problem).describe());
}

}  // namespace

TEST_CASE("a plan describes its problem, its variants and its buffers") {
  const auto context = cpu_context();
  const auto plan = context.plan(ffn_json(3, 8, 20, ",\"act\":\"relu\""));
  const auto described = json_of(plan.describe());
  CHECK(described.at("problem").at("op") == "ffn");
  CHECK(described.at("problem").at("pass") == "fwd");
  CHECK(described.at("problem").at("dtype") == "f32");
  CHECK(described.at("problem").at("act") == "relu");
  CHECK(described.at("problem").at("h") == 20);
  CHECK(!described.at("variants").empty());
  CHECK(!described.at("reason").get<std::string>().empty());
  CHECK(described.at("workspace_bytes") == plan.workspace_bytes());
  const auto& buffers = described.at("buffers");
  REQUIRE(buffers.size() == 5);
  CHECK(buffers[0].at("name") == "x");
  CHECK(buffers[0].at("shape") == Json({3, 8}));
  CHECK(buffers[1].at("role") == "input");
  CHECK(buffers[4].at("name") == "y");
  CHECK(buffers[4].at("role") == "output");
  CHECK(buffers[4].at("bytes") == 96);
  CHECK(buffers[4].at("alignment") == 4);
}

TEST_CASE("a preset of this device decides, exactly or by the nearest shape") {
  const testing::TemporaryFolder folder;
  const auto id = write_preset(folder, layer_problem(200), false);
  const auto exact = description_of(folder, ffn_json(200, 64, 96));
  CHECK(exact.at("variants")[0].at("id") == id);
  CHECK(exact.at("preset").at("device_match") == "exact");
  CHECK(exact.at("preset").at("exact_shape") == true);
  CHECK(exact.at("stale") == false);

  const auto nearest = description_of(folder, ffn_json(210, 64, 96));
  CHECK(nearest.at("preset").at("exact_shape") == false);
  CHECK(nearest.at("preset").at("problem").at("m") == 200);
  CHECK(nearest.at("preset").at("distance") > 0);
}

TEST_CASE("a preset of other kernel sources is used and called stale") {
  const testing::TemporaryFolder folder;
  const auto id = write_preset(folder, layer_problem(200), true);
  const auto described = description_of(folder, ffn_json(200, 64, 96));
  CHECK(described.at("variants")[0].at("id") == id);
  CHECK(described.at("stale") == true);
}
