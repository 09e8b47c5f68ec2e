// Damaged files: whatever happens to one, nothing throws, every record that is still read is a
// sound one, and a loss is never silent.
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "store/example.hpp"
#include "store/json_value.hpp"
#include "store/preset_format.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

constexpr std::size_t record_count = 2;

std::string good_text() {
  return preset_text(example::device(), "ffn",
                     {example::record(example::ffn(16)), example::record(example::ffn(32))});
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

/// Calls `visit` with every value in the tree, the outermost first.
void for_each_value(JsonValue& value, const std::function<void(JsonValue&)>& visit) {
  visit(value);
  if (auto* array = std::get_if<JsonValue::Array>(&value.data))
    for (auto& item : *array) for_each_value(item, visit);
  if (auto* object = std::get_if<JsonValue::Object>(&value.data))
    for (auto& member : *object) for_each_value(member.second, visit);
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
  auto root =
      parse_json(preset_text(example::device(), "ffn", {example::record(example::ffn(16))}));
  std::vector<JsonValue*> places;
  for_each_value(root, [&](JsonValue& value) { places.push_back(&value); });
  REQUIRE(places.size() > 70);
  const std::vector<JsonValue> others{{nullptr},
                                      {true},
                                      {std::int64_t{-1}},
                                      {std::uint64_t{1} << 63},
                                      {-0.5},
                                      {std::string()},
                                      {std::string("\n\x1b")},
                                      {JsonValue::Array{}},
                                      {JsonValue::Object{}},
                                      {JsonValue::Array{{nullptr}}}};
  for (std::size_t i = 0; i < places.size(); ++i) {
    for (const auto& other : others) {
      // Of the same type it may well be good: an empty string as the driver, no ties.
      if (places[i]->data.index() == other.data.index()) continue;
      // Swapped, not assigned: what lies deeper must keep its place in memory.
      JsonValue kept = other;
      std::swap(*places[i], kept);
      const auto file = parse_preset_text(json_line(root), "other.json");
      const bool number = kept.get_if<double>() || kept.get_if<std::int64_t>();
      const bool may_serve =
          (number && other.get_if<std::uint64_t>()) || kept.get_if<std::uint64_t>();
      if (file.complaints.empty() && !may_serve)
        FAIL("value " << i << " as " << json_line(other) << " passes unseen");
      std::swap(*places[i], kept);
    }
  }
}

TEST_CASE("a field left out, or there twice, is a complaint") {
  const auto text = good_text();
  const auto with_change = [&](std::size_t object, const auto& change) {
    auto root = parse_json(text);
    for_each_value(root, [&, place = std::size_t{0}](JsonValue& value) mutable {
      auto* members = std::get_if<JsonValue::Object>(&value.data);
      if (members && place++ == object) change(*members);
    });
    return parse_preset_text(json_line(root), "changed.json");
  };
  std::size_t changes = 0;
  // The file, its device, and all of the first record.
  for (std::size_t object = 0; object < 12; ++object) {
    for (std::size_t i = 0, keys = 1; i < keys; ++i, ++changes) {
      std::pair<std::string, JsonValue> member;
      const auto less = with_change(object, [&](JsonValue::Object& members) {
        keys = members.size();
        if (i == keys) return;
        member = members[i];
        members.erase(members.begin() + static_cast<std::ptrdiff_t>(i));
      });
      if (keys == 0) break;
      const auto& [key, value] = member;
      // A problem may have any sizes and options, a variant any parameters: the op knows better.
      const bool open = key == "m" || key == "d" || key == "h" || key == "act" || key == "bm" ||
                        key == "bn" || (key == "stages" && value.get_if<std::int64_t>());
      if (less.complaints.empty() && !open) FAIL(key << " left out passes unseen");
      const auto twice =
          with_change(object, [&](JsonValue::Object& members) { members.push_back(members[i]); });
      if (twice.complaints.empty()) FAIL(key << " twice passes unseen");
    }
  }
  REQUIRE(changes > 50);
}
