// Which records `check` takes, in which order, and what it leaves out.
#include "apps/fftune/check/check.hpp"

#include <set>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/example.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::tool;

namespace {

CheckedRecord record_of(std::int64_t d, std::vector<std::int64_t> tokens,
                        const std::string& skipped = "") {
  CheckedRecord record;
  record.problem = canonical(builtin_catalog().op("ffn"),
                             {"ffn", "fwd", DType::f32, {{"m", 64}, {"d", d}, {"h", 2 * d}}, {}},
                             DeviceKind::cpu);
  record.tokens = std::move(tokens);
  record.skipped = skipped;
  return record;
}

PresetFile file_of(const Problem& problem, const DeviceFacts& facts) {
  PresetRecord record;
  record.problem = problem;
  PresetFile file;
  file.device.name = facts.name;
  file.device.slug = facts.slug();
  file.device.kind = facts.kind;
  file.device.arch = facts.arch;
  file.records = {record};
  return file;
}

}  // namespace

TEST_CASE("a record is checked at one token, around its own number, and with other routings") {
  const Catalog& catalog = builtin_catalog();
  const Problem experts = canonical(catalog.op("moe-ffn"),
                                    {"moe-ffn",
                                     "fwd",
                                     DType::f32,
                                     {{"m", 8}, {"d", 32}, {"h", 16}, {"experts", 4}, {"top-k", 2}},
                                     {{"routing", "zipf:1"}}},
                                    DeviceKind::cpu);
  const fftune::testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "moe-ffn", {example::record(experts)});
  const auto checked = [&](double max_flops) {
    return checked_records(PresetLibrary::load({folder.path()}), catalog, DeviceKind::cpu,
                           max_flops, [](const Problem&) { return true; });
  };
  std::set<std::string> routings;
  for (const CheckedRecord& record : checked(0)) {
    routings.insert(record.problem.option("routing"));
    CHECK(record.tokens == std::vector<std::int64_t>{1, 7, 8, 9});
    CHECK_FALSE(record.capped);
  }
  CHECK(routings == std::set<std::string>{"uniform", "zipf:1", "zipf:1.5"});
  // Fewer tokens are checked where that many cost too much.
  for (const CheckedRecord& record : checked(cost_of(catalog.op("moe-ffn"), experts).flops / 2)) {
    CHECK(record.tokens == std::vector<std::int64_t>{1, 4});
    CHECK(record.capped);
  }
}

TEST_CASE("this device's own records come first, the others in their order") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  std::vector<CheckedRecord> records{record_of(32, {64}), record_of(64, {64}),
                                     record_of(128, {64})};
  put_own_first({file_of(records[1].problem, facts)}, facts, records);
  CHECK(records[0].own);
  CHECK(records[0].problem.size("d") == 64);
  CHECK_FALSE(records[1].own);
  CHECK(records[1].problem.size("d") == 32);
  CHECK(records[2].problem.size("d") == 128);
}

TEST_CASE("quick: --quick keeps the least work of each form, this device's if it has one") {
  const Catalog& catalog = builtin_catalog();
  std::vector<CheckedRecord> records{record_of(64, {1, 63, 64, 65}), record_of(32, {1, 64}),
                                     record_of(16, {}, "no such dtype")};
  auto quick = records;
  keep_quick(catalog, 0, quick);
  REQUIRE(quick.size() == 1);
  CHECK(quick[0].problem.size("d") == 32);
  CHECK(quick[0].tokens == std::vector<std::int64_t>{64});
  CHECK_FALSE(quick[0].capped);

  records[0].own = true;
  keep_quick(catalog, 1, records);
  REQUIRE(records.size() == 1);
  CHECK(records[0].problem.size("d") == 64);
  CHECK(records[0].tokens == std::vector<std::int64_t>{1});
  CHECK(records[0].capped);
}

TEST_CASE("a record of a group is checked by one rank, unless NCCL adds, which is left out") {
  const Catalog& catalog = builtin_catalog();
  for (const char* link : {"peers", "nccl"}) {
    const Problem problem = canonical(
        catalog.op("all-reduce"),
        {"all-reduce", "fwd", DType::bf16, {{"m", 8}, {"d", 64}, {"ranks", 2}}, {{"link", link}}},
        DeviceKind::cuda);
    const fftune::testing::TemporaryFolder folder;
    merge_preset_records(folder.path(), example::device(), "all-reduce",
                         {example::record(problem)});
    const auto records = checked_records(PresetLibrary::load({folder.path()}), catalog,
                                         DeviceKind::cuda, 0, [](const Problem&) { return true; });
    REQUIRE(records.size() == 1);
    CHECK((records[0].skipped.find("link=nccl needs the ranks of a group") == 0) ==
          (problem.option("link") == "nccl"));
    CHECK(records[0].tokens.empty() == !records[0].skipped.empty());
  }
}

TEST_CASE("records that are too large for the machine are named and left out") {
  const std::size_t much = std::size_t{1} << 40;
  std::vector<CheckedRecord> records{record_of(1024, {64})};
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  skip_too_large(builtin_catalog(), facts, {}, {.device = much, .host = much}, records);
  CHECK(records[0].skipped.empty());
  auto without_device = records;
  skip_too_large(builtin_catalog(), facts, {}, {.device = 1 << 20, .host = much}, without_device);
  CHECK(without_device[0].skipped.find("too large for this machine") == 0);
  CHECK(without_device[0].skipped.find("on the device, and 1 MiB are there") != std::string::npos);
  skip_too_large(builtin_catalog(), facts, {}, {.device = much, .host = 1 << 20}, records);
  CHECK(records[0].skipped.find("on the host") != std::string::npos);
}

TEST_CASE("the estimate of a check grows with the work, and compiling counts on a GPU") {
  const Op& op = builtin_catalog().op("ffn");
  const Problem small = record_of(64, {}).problem, large = record_of(4096, {}).problem;
  CHECK(estimated_seconds(op, small, DeviceKind::cpu) > 0);
  CHECK(estimated_seconds(op, large, DeviceKind::cpu) >
        10 * estimated_seconds(op, small, DeviceKind::cpu));
  CHECK(estimated_seconds(op, small, DeviceKind::cuda) >
        estimated_seconds(op, small, DeviceKind::cpu));
}
