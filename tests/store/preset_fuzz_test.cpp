// Damaged files: whatever happens to one, nothing throws, every record that is still read is a
// sound one, and a loss is never silent.
#include <random>
#include <string>

#include "store/damage.hpp"
#include "store/example.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

constexpr std::size_t record_count = 2;

std::string good_text() {
  return preset_text(example::device(), "ffn",
                     {example::record(example::ffn(16)), example::record(example::ffn(32))});
}

std::string one_record() {
  return preset_text(example::device(), "ffn", {example::record(example::ffn(16))});
}

/// Sound: read, written and read again it is the same, and nothing in it is out of its range.
void require_sound(const PresetFile& file) {
  for (const auto& complaint : file.complaints)
    if (complaint.find('\n') != std::string::npos) FAIL("two lines: " << complaint);
  if (file.records.size() < record_count && file.complaints.empty()) FAIL("a silent loss");
  if (file.records.empty()) return;
  const auto text = preset_text(file.device, file.op, file.records);
  const auto again = parse_preset_text(text, "again.json");
  if (!again.complaints.empty()) FAIL(again.complaints.front());
  if (preset_text(again.device, again.op, again.records) != text) FAIL("not the same again");
  for (const auto& record : file.records) {
    if (record.problem.op != file.op || record.stages.empty()) FAIL("no sound record");
    if (!(record.verdict.median_us > 0) || record.error > record.tolerance) FAIL("out of range");
    for (const auto& [name, size] : record.problem.sizes)
      if (size < 1) FAIL(name << " is " << size);
  }
}

}  // namespace

TEST_CASE("a file cut short anywhere is one complaint and no record") {
  const auto text = json_line(
      parse_json(preset_text(example::device(), "ffn", {example::record(example::ffn(16))})));
  for (std::size_t length = 0; length < text.size(); ++length) {
    const auto file = parse_preset_text(text.substr(0, length), "cut.json");
    if (file.complaints.size() != 1 || !file.records.empty()) FAIL("cut at " << length);
  }
}

TEST_CASE("random bytes in a file never do harm") {
  const auto text = good_text();
  std::mt19937 random(20261121);
  const std::string interesting("\"{}[]:,0-9.eE+ \n\\\xff\xc3tfnu", 24);  // and the final zero
  for (int round = 0; round < 500; ++round) {
    auto damaged = text;
    for (auto changes = random() % 3 + 1; changes > 0; --changes) {
      const auto place = random() % damaged.size();
      const char byte = random() % 2 ? interesting[random() % interesting.size()]
                                     : static_cast<char>(random() % 256);
      switch (random() % 3) {
        case 0:
          damaged[place] = byte;
          break;
        case 1:
          damaged.insert(place, 1, byte);
          break;
        default:
          damaged.erase(place, random() % 20 + 1);
      }
    }
    require_sound(parse_preset_text(damaged, "damaged.json"));
  }
}

TEST_CASE("a value of another type is a complaint wherever it stands") {
  int changes = 0;
  example::for_each_other_type(
      parse_json(one_record()),
      [&](const JsonValue& root, const JsonValue& before, const JsonValue& now) {
        ++changes;
        const auto file = parse_preset_text(json_line(root), "other.json");
        // A large integer is a good time, and a small real no good seed, but that is another test.
        // A parameter may be a word or an integer: which of them, its family knows.
        const auto* word = before.get_if<std::string>();
        const bool may_serve = (before.get_if<double>() && now.get_if<std::uint64_t>()) ||
                               (word && *word == "pingpong" && now.get_if<std::int64_t>());
        if (file.complaints.empty() && !may_serve)
          FAIL(json_line(before) << " as " << json_line(now) << " passes unseen");
      });
  REQUIRE(changes > 600);
}

TEST_CASE("a field left out, or there twice, is a complaint") {
  const auto good = parse_json(one_record());
  int changes = 0;
  example::for_each_missing_member(
      good, [&](const JsonValue& root, const std::string& key, const JsonValue& value) {
        ++changes;
        // A problem may have any sizes and options, a variant any parameters: the op knows better.
        const bool open = key == "m" || key == "d" || key == "h" || key == "act" || key == "bm" ||
                          key == "bn" || key == "schedule" ||
                          (key == "stages" && value.get_if<std::int64_t>());
        // Version 1 had them not.
        const bool later =
            key == "bits" || key == "decided" || key == "disturbances" || key == "untuned_ratio";
        if (!open && !later && parse_preset_text(json_line(root), "less.json").complaints.empty())
          FAIL(key << " left out passes unseen");
      });
  example::for_each_repeated_member(good, [&](const JsonValue& root, const std::string& key) {
    ++changes;
    if (parse_preset_text(json_line(root), "twice.json").complaints.empty())
      FAIL(key << " twice passes unseen");
  });
  REQUIRE(changes > 120);
}
