// A layer is tuned in place.
#include <string>
#include <vector>

#include "cpu/open.hpp"
#include "layer/problems.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "store/example.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/tuner.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem two_layers() {
  return layer_problem(DeviceKind::cpu, DType::f32,
                       {{"batch", 2},
                        {"d", 64},
                        {"h", 96},
                        {"heads", 4},
                        {"kv-heads", 2},
                        {"dim", 16},
                        {"cache", 24},
                        {"layers", 2}});
}

}  // namespace

TEST_CASE("a layer is tuned in place on the CPU; of several layers the record is that of one") {
  const Catalog& catalog = builtin_catalog();
  const auto backend = open_cpu();
  LocalEvaluator evaluator(*backend, catalog, 1);
  const Problem problem = two_layers();
  TuneOptions options;
  options.budget_seconds = 6;
  options.patience_seconds = 0;
  const auto result = tune(catalog, evaluator, problem, options);
  REQUIRE(result.record);
  CHECK(result.record->problem == unrepeated(layer_op(), problem));
  Recipe recipe;
  std::vector<std::string> stages;
  for (const StageRecord& stage : result.record->stages) {
    recipe.push_back(stage.variant);
    stages.insert(stages.end(), stage.stages.begin(), stage.stages.end());
  }
  CHECK(stages == std::vector<std::string>{"attn_norm.forward", "qkv.product", "attention.forward",
                                           "out.product", "ffn_norm.forward", "ffn.gate_up",
                                           "ffn.down"});
  const Plan plan(*backend, layer_op(), problem, recipe);
  Verifier verifier(*backend, layer_op(), problem, 2);
  const auto verified = verifier.verify(0, layer_op().stages(problem).size(), plan.executables());
  CAPTURE(verified.failure);
  CHECK(verified.passed);
}

TEST_CASE("a layer's search begins with what records of its parts name") {
  const Catalog& catalog = builtin_catalog();
  const DeviceFacts facts = open_cpu()->facts();
  const Problem problem = two_layers();
  const fftune::testing::TemporaryFolder folder;
  const auto recorded = [&] {
    return recorded_in_parts(catalog, layer_op(), problem, facts,
                             PresetLibrary::load({folder.path()}));
  };
  CHECK(recorded().empty());
  Recipe expected;
  for (const OpPart& part : layer_op().parts(unrepeated(layer_op(), problem))) {
    if (part.name != "out" && part.name != "ffn") continue;
    const PresetRecord record = example::record(catalog, *part.op, part.problem,
                                                default_recipe(*part.op, part.problem, facts));
    merge_preset_records(folder.path(), preset_device(facts), std::string(part.op->name()),
                         {record});
    for (const StageRecord& stage : record.stages)
      expected.push_back({part.name + "." + stage.variant.family, stage.variant.config});
  }
  CHECK(recorded() == expected);
  CHECK(recorded_in_parts(catalog, catalog.op("ffn"), layer_op().parts(problem).back().problem,
                          facts, PresetLibrary::load({folder.path()}))
            .empty());
}

TEST_CASE("a record of a layer serves whatever its angles come from") {
  const Catalog& catalog = builtin_catalog();
  const DeviceFacts facts = open_cpu()->facts();
  Problem searched = unrepeated(layer_op(), two_layers());
  searched.options["angles"] = "llama3";
  searched.options["base"] = "500000";
  searched = canonical(layer_op(), searched, facts.kind);
  const PresetRecord record =
      example::record(catalog, layer_op(), searched, default_recipe(layer_op(), searched, facts));
  const fftune::testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), preset_device(facts), "layer", {record});
  const auto presets = PresetLibrary::load({folder.path()});

  Problem with_table = two_layers();
  with_table.options["angles"] = "table";
  with_table.sizes["positions"] = 1 << 17;
  with_table = canonical(layer_op(), with_table, facts.kind);
  const Choice choice = choose(catalog, layer_op(), with_table, facts, presets);
  CAPTURE(choice.reason);
  REQUIRE(choice.preset);
  CHECK(choice.preset->exact_shape);
  CHECK(choice.far.empty());
  CHECK(far_words(layer_op(), with_table, searched.with_size("positions", 64)).empty());
  CHECK(choice.recipe == record.recipe());
}
