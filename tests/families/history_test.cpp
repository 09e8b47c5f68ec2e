// Every preset file that was ever committed: each record serves today, or is refused for a reason
// that docs/compatibility.md promises.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "registry/added_parameters.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "store/preset_format.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

/// The output of git; empty where there is no git, or no history here.
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

/// The contents of every version of every preset file, by git's name of it, and one place of each.
std::map<std::string, std::string> committed_presets() {
  std::map<std::string, std::string> places;
  for (const std::string& revision : lines_of(git("log --format=%H -- presets")))
    for (const std::string& line : lines_of(git("ls-tree -r " + revision + " presets"))) {
      // "100644 blob <name>\t<path>"
      const auto tab = line.find('\t');
      if (tab == line.npos || !line.ends_with(".json")) continue;
      if (line.ends_with("\tpresets/schema.json")) continue;
      places.emplace(line.substr(tab - 40, 40), line.substr(tab + 1));
    }
  return places;
}

DeviceFacts facts_of(const PresetDevice& device) {
  DeviceFacts facts;
  if (device.kind == DeviceKind::cuda) facts = facts_of_architecture(device.arch);
  facts.kind = device.kind;
  if (device.multiprocessors > 0) facts.multiprocessors = device.multiprocessors;
  return facts;
}

/// A family, a parameter or a value that is gone, or a constraint, which has words of its own: no
/// constraint says that a parameter is missing, and that is no reason that is promised.
bool is_documented(const std::string& reason) {
  return reason.find("is missing") == reason.npos && reason.find("lacks") == reason.npos;
}

}  // namespace

TEST_CASE("records of every version ever committed serve, or are refused as is promised") {
  const Catalog& catalog = builtin_catalog();
  const auto places = committed_presets();
  if (places.empty()) FFTUNE_SKIP("there is no git history here");
  int records = 0, usable = 0;
  std::map<std::string, int> reasons;
  for (const auto& [blob, place] : places) {
    CAPTURE(blob, place);
    const PresetFile file = parse_preset_text(git("cat-file blob " + blob), place);
    CHECK(file.complaints.empty());
    for (const PresetRecord& record : file.records) {
      const Op& op = catalog.op(record.problem.op);
      const DeviceFacts facts = facts_of(file.device);
      const Problem problem = canonical(op, record.problem, facts.kind);
      const std::string reason = record_illegality(op, problem, facts, record);
      CAPTURE(record.problem.text(), reason);
      ++records;
      usable += reason.empty() ? 1 : 0;
      if (!reason.empty()) ++reasons[place.substr(place.find_last_of('/') + 1) + ": " + reason];
      CHECK(is_documented(reason));
    }
  }
  std::string refused;
  for (const auto& [reason, count] : reasons) refused += fmt::format("{} x {}\n", count, reason);
  CAPTURE(records, usable, refused);
  CHECK(usable > 0.9 * records);
}

TEST_CASE("a parameter that was added later is completed, any other that is missing is not") {
  const Catalog& catalog = builtin_catalog();
  const auto facts = facts_of_architecture("sm_90a");
  int variants = 0;
  for (const Op* op : catalog.ops)
    for (const Family* family : op->families()) {
      if (family->device_kind() != facts.kind) continue;
      Problem problem{std::string(op->name()), op->passes().front(), DType::bf16, {}, {}};
      for (const SizeField& size : op->sizes())
        if (!size.rare) problem.sizes[size.name] = size.example;
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
      CAPTURE(whole.id());
      CHECK(completed(*op, problem, facts, whole) == whole);
      for (const auto& [name, value] : whole.config.entries()) {
        Variant lacking{whole.family, {}};
        for (const auto& [other, kept] : whole.config.entries())
          if (other != name) lacking.config.set(other, kept);
        const Variant result = completed(*op, problem, facts, lacking);
        // Completed in the order of the space, or left as it was.
        if (result == lacking) continue;
        ++variants;
        CHECK(result.config.contains(name));
        CHECK(result.config.entries().size() == whole.config.entries().size());
      }
    }
  CHECK(variants > 0);
  CHECK(fits_family("*_sm90", "gate_up_sm90"));
  CHECK(fits_family("*_sm90", "ffn.gate_up_sm90"));
  CHECK(fits_family("ffn_decode", "part.ffn_decode"));
  CHECK(!fits_family("*_sm90", "gate_up_sm80"));
  CHECK(!fits_family("a*a", "a"));
}
