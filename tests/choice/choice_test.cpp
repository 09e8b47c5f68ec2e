#include "runtime/choice.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>

#include "core/error.hpp"
#include "store/example.hpp"
#include "support/catch.hpp"
#include "support/rows_op.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

/// A family of the stages it is told, with one parameter of 1 to 4 tokens a block.
class FakeFamily : public Family {
 public:
  FakeFamily(std::string name, std::vector<std::string> stages, bool fallback = false)
      : name_(std::move(name)), stages_(std::move(stages)), fallback_(fallback) {}
  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "for tests"; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return stages_; }
  bool is_fallback() const override { return fallback_; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (!fallback_ && problem.size("d") % 8 != 0) return "d must be a multiple of 8";
    return std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts&) const override {
    Space space;
    space.parameter("block", "tokens a block", {1, 2, 4});
    const auto m = problem.size("m");
    space.constraint("a block is no larger than m",
                     [m](const Config& config) { return config.at("block") <= m; });
    return space;
  }
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"block", 1}};
  }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override { return {}; }
  std::vector<std::string> sources() const override { return {name_ + ".cu"}; }
  std::optional<double> estimate(const Problem&, const DeviceFacts&,
                                 const Config& config) const override {
    if (block_us.empty()) return std::nullopt;
    return block_us.at(config.at("block")) * 1e-6;
  }

  std::map<std::int64_t, double> block_us;  // by blocks; empty: no cost model

 private:
  std::string name_;
  std::vector<std::string> stages_;
  bool fallback_;
};

class FakeOp : public test::RowsOp {
 public:
  FakeOp() : RowsOp(DType::bf16) {}
  std::string_view name() const override { return "ffn"; }
  std::string_view summary() const override { return "for tests"; }
  std::vector<SizeField> sizes() const override { return {}; }
  std::vector<TensorSpec> tensors(const Problem&) const override { return {}; }
  std::vector<StageSpec> stages(const Problem&) const override {
    std::vector<StageSpec> stages(2);
    stages[0].name = "up";
    stages[1].name = "down";
    return stages;
  }
  void reference(const Problem&, std::size_t, ReferenceTensors&, Parallel&) const override {}
  std::vector<const Family*> families() const override { return {&up, &down, &whole, &simple}; }

  FakeFamily up{"up", {"up"}}, down{"down", {"down"}}, whole{"whole", {"up", "down"}},
      simple{"simple", {"up", "down"}, true};
};

struct World {
  SourceSet sources{{{"up.cu", "u"}, {"down.cu", "d"}, {"whole.cu", "w"}, {"simple.cu", "s"}}};
  FakeOp op;
  Catalog catalog;
  DeviceFacts facts;
  testing::TemporaryFolder folder;

  World() {
    catalog.ops = {&op};
    catalog.sources = &sources;
    facts.kind = DeviceKind::cuda;
    facts.name = "NVIDIA H200";
    facts.arch = "sm_90a";
    facts.multiprocessors = 132;
  }

  PresetRecord record(std::int64_t m, const std::vector<const FakeFamily*>& families,
                      int block = 2) const {
    auto record = example::record(example::ffn(m));
    const auto pattern = record.stages.front();
    record.stages.clear();
    for (const auto* family : families) {
      auto stage = pattern;
      stage.stages = family->stages();
      stage.variant = {std::string(family->name()), {{"block", block}}};
      stage.source_hash = sources.hash(family->sources());
      record.stages.push_back(stage);
    }
    return record;
  }
  void put(const PresetRecord& record) const {
    merge_preset_records(folder.path(), preset_device(facts), "ffn", {record});
  }
  Choice choose(std::int64_t m) const {
    return fftune::choose(catalog, op, example::ffn(m), facts,
                          PresetLibrary::load({folder.path()}));
  }
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("without a preset the op's default is chosen, and the reason says why") {
  const World world;
  const auto choice = world.choose(16);
  REQUIRE_FALSE(choice.preset);
  REQUIRE(recipe_text(choice.recipe) == "up/block=1 + down/block=1");
  REQUIRE(choice.reason ==
          "no preset for this device (NVIDIA H200) or another of its architecture (sm_90a): "
          "default of the op");
}

TEST_CASE("a legal record is chosen by the lookup rules") {
  const World world;
  world.put(world.record(16, {&world.op.up, &world.op.down}));
  world.put(world.record(64, {&world.op.whole}, 4));
  REQUIRE(recipe_text(world.choose(16).recipe) == "up/block=2 + down/block=2");
  const auto nearest = world.choose(100);
  REQUIRE(recipe_text(nearest.recipe) == "whole/block=4");
  REQUIRE(nearest.preset);
  REQUIRE_FALSE(nearest.stale);
  REQUIRE(contains(nearest.reason, "exact device, nearest shape m=64"));
  // At m=1 no block of 2 is legal: the record is looked at again for the problem at hand.
  const auto none = world.choose(1);
  REQUIRE_FALSE(none.preset);
  REQUIRE(contains(none.reason, "all 2 presets for this are illegal here"));
  REQUIRE(contains(none.reason, "a block is no larger than m"));
  REQUIRE(contains(none.reason, ": default of the op"));
}

TEST_CASE("a record whose recipe is not one of the op's is illegal") {
  const World world;
  const auto& op = world.op;
  const auto why = [&](const PresetRecord& record) {
    return record_illegality(op, record.problem, world.facts, record);
  };
  REQUIRE(why(world.record(16, {&op.up, &op.down})).empty());
  REQUIRE(why(world.record(16, {&op.simple})).empty());
  REQUIRE(contains(why(world.record(16, {&op.up})), "its stages are up, where ffn has up, down"));
  REQUIRE(contains(why(world.record(16, {&op.down, &op.up})), "its stages are down, up"));
  REQUIRE(contains(why(world.record(16, {&op.up, &op.down}, 3)), "block"));
  auto record = world.record(16, {&op.whole});
  record.stages[0].stages = {"up"};
  REQUIRE(why(record) == "family 'whole' covers up and down, not up");
  record = world.record(16, {&op.whole});
  record.stages[0].variant.family = "gone";
  REQUIRE(why(record) == "there is no family 'gone'");
  record = world.record(16, {&op.whole});
  record.problem.sizes["d"] = 1001;
  REQUIRE(why(record) == "d must be a multiple of 8");
}

TEST_CASE("a record that its search timed as slower than the default does not serve") {
  const World world;
  for (const double ratio : {0.24, 0.97, 0.99, 1.5}) {
    auto record = world.record(16, {&world.op.up, &world.op.down});
    record.verdict.untuned_ratio = ratio;
    world.put(record);
    const Choice choice = world.choose(16);
    CAPTURE(ratio, choice.reason);
    CHECK(choice.preset.has_value() == (ratio > 0.98));
    CHECK(recipe_text(choice.recipe) ==
          (ratio > 0.98 ? "up/block=2 + down/block=2" : "up/block=1 + down/block=1"));
    if (ratio < 0.98) CHECK(contains(choice.reason, "timed as slower than the default"));
  }
}

TEST_CASE("a record tuned with other sources is used and called stale") {
  const World world;
  auto record = world.record(16, {&world.op.up, &world.op.down});
  record.stages[1].source_hash = "0000000000000000";
  world.put(record);
  const auto choice = world.choose(16);
  REQUIRE(choice.preset);
  REQUIRE(choice.stale);
  REQUIRE(contains(choice.reason, "; stale: the sources of down have changed since it was tuned"));
  REQUIRE(stale_families(world.catalog, world.op, record) == std::vector<std::string>{"down"});
}

TEST_CASE("a record of another device serves while its sources are those of today") {
  World world;
  auto current = world.record(16, {&world.op.up, &world.op.down});
  auto older = world.record(64, {&world.op.up, &world.op.down});
  older.stages[1].source_hash = "0000000000000000";
  world.put(current);
  world.put(older);
  REQUIRE(world.choose(64).preset);
  world.facts.name = "NVIDIA H100 80GB HBM3";  // of the same architecture and size
  const auto served = world.choose(16);
  REQUIRE(served.preset);
  REQUIRE(recipe_text(served.recipe) == "up/block=2 + down/block=2");
  const auto refused = world.choose(64);
  REQUIRE_FALSE(refused.preset);
  REQUIRE(recipe_text(refused.recipe) == "up/block=1 + down/block=1");
  REQUIRE(contains(refused.reason, "made with other sources of down: default of the op"));
}

TEST_CASE("another device's record of the shape serves if the cost model does not refuse it") {
  World world;
  world.op.up.block_us = {{1, 100}, {2, 110}, {4, 101}};
  world.op.down.block_us = {{1, 100}, {2, 100}, {4, 100}};
  world.put(world.record(16, {&world.op.up, &world.op.down}, 2));
  world.put(world.record(64, {&world.op.up, &world.op.down}, 4));
  REQUIRE(world.choose(16).preset);  // measured on this device
  world.facts.name = "NVIDIA H100 80GB HBM3";
  REQUIRE(contains(world.choose(16).reason, "1.05 times as long as the default"));
  REQUIRE(world.choose(64).preset);
}

TEST_CASE("a device that no family serves is an error") {
  World world;
  world.facts.kind = DeviceKind::cpu;
  REQUIRE_THROWS_AS(world.choose(16), Error);
}
