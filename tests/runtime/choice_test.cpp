#include "runtime/choice.hpp"

#include <string>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"
#include "registry/catalog.hpp"
#include "registry/op.hpp"
#include "store/example.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

Problem problem_of(std::int64_t d, std::int64_t h, std::int64_t m) {
  return {"ffn", "fwd", DType::bf16, {{"m", m}, {"d", d}, {"h", h}}, {{"act", "silu"}}};
}

/// A record of the shape with the tiles that are right for 1024 tokens of a small layer.
PresetRecord record_of(const Problem& problem) {
  auto record = example::record(problem);
  record.stages[0].variant = Variant::parse(
      "gate_up_sm90/bm=128,bn=128,schedule=cooperative,mma_warpgroups=2,cluster_m=1,cluster_n=2,"
      "split_k=1,stages=4,epilogue_stages=1,group_m=8");
  record.stages[1].variant = Variant::parse(
      "down_sm90/bm=128,bn=64,schedule=cooperative,mma_warpgroups=1,cluster_m=1,cluster_n=1,"
      "split_k=1,stages=8,epilogue_stages=1,group_m=8");
  return record;
}

Choice choice_of(const PresetRecord& record, const Problem& asked) {
  const testing::TemporaryFolder folder;
  const auto facts = facts_of_architecture("sm_90a");
  const PresetDevice device{facts.slug(),          facts.name, facts.kind, facts.arch,
                            facts.multiprocessors, {}};
  merge_preset_records(folder.path(), device, "ffn", {record});
  return choose(builtin_catalog(), ffn_op(), asked, facts, PresetLibrary::load({folder.path()}));
}

}  // namespace

TEST_CASE("a record of a shape like it serves a problem") {
  const auto recorded = problem_of(1024, 2048, 1024);
  auto record = record_of(recorded);
  const Recipe usual = default_recipe(ffn_op(), recorded, facts_of_architecture("sm_90a"));
  // The model's tiles, with fewer pipeline stages than it would choose.
  for (std::size_t i = 0; i < usual.size(); ++i) record.stages[i].variant = usual[i];
  record.stages[1].variant.config.set("stages", 6);
  REQUIRE(record.recipe() != usual);
  for (const auto& asked : {recorded, problem_of(1024, 2048, 1023)}) {
    const Choice choice = choice_of(record, asked);
    CAPTURE(asked.text(), choice.reason);
    REQUIRE(choice.preset);
    CHECK(choice.recipe == record.recipe());
  }
}

TEST_CASE("tiles of another shape that fit a problem badly give way to the default") {
  // A wide layer reads each weight 6 times through tiles of 128 x 64.
  const auto asked = problem_of(4096, 11008, 700);
  const Choice choice = choice_of(record_of(problem_of(1024, 2048, 1024)), asked);
  CAPTURE(choice.reason);
  CHECK_FALSE(choice.preset);
  CHECK(choice.recipe == default_recipe(ffn_op(), asked, facts_of_architecture("sm_90a")));
  CHECK(choice.reason.find("nearest shape d=1024 h=2048 m=1024, which should take") !=
        std::string::npos);
  CHECK(choice.reason.find("times as long as the default: default of the op") != std::string::npos);
}

TEST_CASE("a record of the whole comes before those of its parts, unless it does not serve") {
  const Catalog catalog = builtin_catalog();
  const Op& layer = catalog.op("layer");
  const auto facts = facts_of_architecture("sm_90a");
  const Problem whole = canonical(
      layer,
      {"layer",
       "fwd",
       DType::bf16,
       {{"batch", 64}, {"d", 4096}, {"h", 14336}, {"heads", 32}, {"dim", 128}, {"cache", 2048}},
       {}},
      facts.kind);
  const Recipe usual = default_recipe(layer, whole, facts);
  REQUIRE(usual.size() > 1);
  OpPart norm;
  for (const OpPart& part : layer.parts(whole))
    if (part.name == "attn_norm") norm = part;
  REQUIRE(norm.op != nullptr);
  // Neither is the default.
  const auto other = [&](const Op& op, const Problem& problem, const Variant& variant) {
    for (const Config& config : family_of(op, variant.family).space(problem, facts).feasible())
      if (config != variant.config) return Variant{variant.family, config};
    return variant;
  };
  Recipe of_whole = usual, of_norm = default_recipe(*norm.op, norm.problem, facts);
  of_whole.back() = other(layer, whole, of_whole.back());
  of_norm.front() = other(*norm.op, norm.problem, of_norm.front());
  REQUIRE(of_whole != usual);

  // The whole's record is of this device, or of another one whose kernels have changed since.
  for (const bool of_this_device : {true, false}) {
    const testing::TemporaryFolder folder;
    PresetDevice device = preset_device(facts);
    merge_preset_records(folder.path(), device, norm.problem.op,
                         {example::record(catalog, *norm.op, norm.problem, of_norm)});
    PresetRecord recorded = example::record(catalog, layer, whole, of_whole);
    if (!of_this_device) {
      device.slug = "another";
      device.name = "Another";
      recorded.stages.front().source_hash = "0123456789abcdef";
    }
    merge_preset_records(folder.path(), device, "layer", {recorded});
    const Choice choice =
        choose(catalog, layer, whole, facts, PresetLibrary::load({folder.path()}));
    CAPTURE(of_this_device, choice.reason);
    CHECK(choice.preset.has_value() == of_this_device);
    if (of_this_device) {
      CHECK(choice.recipe == of_whole);
      continue;
    }
    CHECK(choice.reason.find("made with other sources") != std::string::npos);
    CHECK(choice.reason.find(": records of attn_norm") != std::string::npos);
    CHECK(choice.recipe.front().config == of_norm.front().config);
  }
}

TEST_CASE("a record of the shape itself serves, whatever an estimate says") {
  const auto asked = problem_of(4096, 11008, 700);
  const Choice choice = choice_of(record_of(asked), asked);
  REQUIRE(choice.preset);
  CHECK(choice.recipe == record_of(asked).recipe());
}
