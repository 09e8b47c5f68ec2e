// Every preset file that was ever committed: each record serves today, or is refused for a reason
// that docs/compatibility.md promises.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The output of git; empty without git, or without a history here.
std::string git(const std::string& words) {
  const std::string command = "git -C '" FFTUNE_SOURCE_DIR "' " + words + " 2>/dev/null";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"),
                                                             ::pclose);
  std::string text;
  char block[4096];
  while (pipe) {
    const std::size_t got = std::fread(block, 1, sizeof block, pipe.get());
    if (got == 0) break;
    text.append(block, got);
  }
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

struct PresetText {
  std::string place, text;
};

/// Every version of every preset file in the history; none without a history.
std::vector<PresetText> committed_presets() {
  std::map<std::string, std::string> places;  // of each version, by git's name of it
  for (const std::string& revision : lines_of(git("log --format=%H -- presets")))
    for (const std::string& line : lines_of(git("ls-tree -r " + revision + " presets"))) {
      // "100644 blob <name>\t<path>"
      const auto tab = line.find('\t');
      if (tab == line.npos || !line.ends_with(".json")) continue;
      if (line.ends_with("\tpresets/schema.json")) continue;
      places.emplace(line.substr(tab - 40, 40), line.substr(tab + 1));
    }
  std::vector<PresetText> presets;
  for (const auto& [blob, place] : places)
    presets.push_back({place + " as " + blob, git("cat-file blob " + blob)});
  return presets;
}

/// A record of every shape in the history up to 2026-11-26: schema, fields, families and their
/// parameters.
std::vector<PresetText> sampled_presets() {
  std::vector<PresetText> presets;
  for (const auto& entry :
       std::filesystem::directory_iterator(FFTUNE_SOURCE_DIR "/tests/data/preset-history")) {
    std::ifstream file(entry.path());
    presets.push_back({entry.path().filename().string(),
                       {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}});
  }
  std::sort(presets.begin(), presets.end(),
            [](const PresetText& a, const PresetText& b) { return a.place < b.place; });
  return presets;
}

DeviceFacts facts_of(const PresetDevice& device) {
  DeviceFacts facts;
  if (device.kind == DeviceKind::cuda) facts = facts_of_architecture(device.arch);
  facts.kind = device.kind;
  if (device.multiprocessors > 0) facts.multiprocessors = device.multiprocessors;
  return facts;
}

/// Parameters that families had once.
const std::set<std::string> gone{"polynomial_of_8", "staged", "digits"};

/// The ways in which docs/compatibility.md says that a variant may become illegal: its family, a
/// parameter or a value is gone, or there is a new constraint, which the family or its space has in
/// words of its own.
bool is_documented(const Op& op, const Problem& problem, const DeviceFacts& facts,
                   const Variant& variant) {
  const Family* const family = family_if_any(op, variant.family);
  if (family == nullptr || family->refusal(problem, facts)) return true;
  const Space space = family->space(problem, facts);
  const Config config = space.completed(variant.config);
  for (const auto& [name, value] : config.entries())
    if (gone.contains(name)) return true;
  for (const Parameter& parameter : space.parameters()) {
    if (!config.contains(parameter.name)) return false;
    const auto& values = parameter.values;
    if (std::find(values.begin(), values.end(), config.value(parameter.name)) == values.end())
      return true;
  }
  const std::vector<std::string> violations = space.violations(config);
  return !violations.empty() &&
         std::any_of(space.constraints().begin(), space.constraints().end(),
                     [&](const Constraint& limit) { return limit.reason == violations.front(); });
}

struct Checked {
  int records = 0, usable = 0;
  std::string refused;  // a line for each reason
};

Checked check_records(const std::vector<PresetText>& presets) {
  const Catalog& catalog = builtin_catalog();
  Checked checked;
  std::map<std::string, int> reasons;
  for (const auto& [place, text] : presets) {
    CAPTURE(place);
    const PresetFile file = parse_preset_text(text, place);
    CHECK(file.complaints.empty());
    for (const PresetRecord& record : file.records) {
      const Op& op = catalog.op(record.problem.op);
      const DeviceFacts facts = facts_of(file.device);
      const Problem problem = canonical(op, record.problem, facts.kind);
      const std::string reason = record_illegality(op, problem, facts, record);
      CAPTURE(record.problem.text(), reason);
      ++checked.records;
      checked.usable += reason.empty() ? 1 : 0;
      if (reason.empty()) continue;
      ++reasons[record.problem.op + ": " + reason];
      CHECK(std::any_of(record.stages.begin(), record.stages.end(), [&](const StageRecord& stage) {
        return !illegality(op, problem, facts, completed(op, problem, facts, stage.variant))
                    .empty() &&
               is_documented(op, problem, facts, stage.variant);
      }));
    }
  }
  for (const auto& [reason, count] : reasons)
    checked.refused += fmt::format("{} x {}\n", count, reason);
  return checked;
}

}  // namespace

TEST_CASE("records of every version ever committed serve, or are refused as is promised") {
  const auto presets = committed_presets();
  if (presets.empty()) FFTUNE_SKIP("there is no git history here");
  const auto [records, usable, refused] = check_records(presets);
  INFO(refused);
  CHECK(records > 0);
  CHECK(usable > 0.9 * records);
}

TEST_CASE("a record of every shape of the history serves, or is refused as is promised") {
  const auto [records, usable, refused] = check_records(sampled_presets());
  INFO(refused);
  CHECK(records == 80);
  CHECK(usable >= 72);
}

TEST_CASE("how a record is read does not depend on the number of its schema") {
  for (const auto& [place, text] : sampled_presets()) {
    CAPTURE(place);
    const std::string field = "\"schema\": ";
    const auto at = text.find(field);
    REQUIRE(at != text.npos);
    const PresetFile own = parse_preset_text(text, place);
    REQUIRE(!own.records.empty());
    for (const char* schema : {"1", "2", "3"}) {
      std::string other = text;
      other.replace(at + field.size(), 1, schema);
      const PresetFile file = parse_preset_text(other, place);
      CHECK(file.complaints.empty());
      REQUIRE(file.records.size() == own.records.size());
      for (std::size_t i = 0; i < own.records.size(); ++i)
        CHECK(file.records[i].recipe() == own.records[i].recipe());
    }
  }
}

TEST_CASE("a parameter that was added later is completed, any other that is missing is not") {
  const Catalog& catalog = builtin_catalog();
  const auto facts = facts_of_architecture("sm_90a");
  std::set<std::string> added;  // parameters
  const auto check = [&](const Op* op, const std::string& pass) {
    for (const Family* family : op->families()) {
      if (family->device_kind() != facts.kind) continue;
      Problem problem = example_problem(*op, pass, DType::bf16);
      try {
        problem = canonical(*op, problem, facts.kind);
      } catch (const Error&) {
        continue;  // not of this element type
      }
      if (family->refusal(problem, facts)) continue;
      const std::vector<std::string> stages = family->stages();
      const auto own = op->stages(problem);
      if (std::none_of(own.begin(), own.end(),
                       [&](const StageSpec& stage) { return stage.name == stages.front(); }))
        continue;
      const Variant whole{std::string(family->name()), family->default_config(problem, facts)};
      const Space space = family->space(problem, facts);
      CAPTURE(whole.id());
      CHECK(completed(*op, problem, facts, whole) == whole);
      for (const auto& [name, value] : whole.config.entries()) {
        Variant lacking{whole.family, {}};
        for (const auto& [other, kept] : whole.config.entries())
          if (other != name) lacking.config.set(other, kept);
        const Variant result = completed(*op, problem, facts, lacking);
        // Completed in the order of the space, or left as it was.
        if (result == lacking) continue;
        added.insert(name);
        REQUIRE(result.config.entries().size() == space.parameters().size());
        for (std::size_t i = 0; i < space.parameters().size(); ++i)
          CHECK(result.config.entries()[i].first == space.parameters()[i].name);
      }
      for (const Parameter& parameter : space.parameters()) {
        if (!parameter.when_absent) continue;
        CAPTURE(parameter.name);
        const auto& values = parameter.values;
        CHECK(std::find(values.begin(), values.end(), parameter.when_absent()) != values.end());
      }
    }
  };
  for (const Op* op : catalog.ops)
    for (const std::string& pass : op->passes()) check(op, pass);
  CHECK(added == std::set<std::string>{"a_reuse", "ahead_kb", "around", "cluster", "divided",
                                       "gather_warps", "group", "head_groups", "held", "keep",
                                       "l2_prefetch", "l2_prefetch_rows", "pack_heads",
                                       "pre_permute", "prefetch", "split_keys", "vector"});
}

TEST_CASE("a default configuration has the order of its space, as what is enumerated has") {
  std::vector<DeviceFacts> devices{
      open_device("cpu", *builtin_catalog().sources, read_environment())->facts()};
  for (const char* const arch : {"sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"})
    devices.push_back(facts_of_architecture(arch));
  const auto check = [](const Family& family, const Problem& problem, const DeviceFacts& facts) {
    if (family.refusal(problem, facts)) return;
    const Config config = family.default_config(problem, facts);
    CAPTURE(problem.text(), facts.arch, family.name(), config.text());
    CHECK(family.space(problem, facts).completed(config).text() == config.text());
  };
  const auto check_op = [&](const Op& op, const std::string& pass, const DeviceFacts& facts) {
    for (const DType dtype : op.dtypes_of_pass(facts.kind, pass))
      for (const Options& form : forms_of(op, pass)) {
        std::optional<Problem> problem;
        try {
          problem = canonical(op, example_problem(op, pass, dtype, form), facts.kind);
        } catch (const Error&) {
          continue;  // of another element type, or a form that asks for others
        }
        for (const Family* family : op.families())
          if (family->device_kind() == facts.kind) check(*family, *problem, facts);
      }
  };
  for (const Op* op : builtin_catalog().ops)
    for (const std::string& pass : op->passes())
      for (const DeviceFacts& facts : devices) check_op(*op, pass, facts);
}
