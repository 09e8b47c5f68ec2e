// presets/schema.json says what the reader accepts: both take the same files and refuse the same.
#include <set>
#include <string>

#include "store/damage.hpp"
#include "store/example.hpp"
#include "store/json_schema.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

JsonValue schema() {
  return parse_json(example::text(FFTUNE_SOURCE_DIR "/presets/schema.json"));
}

JsonValue good_file() {
  return parse_json(preset_text(example::device(), "ffn", {example::record(example::ffn(16))}));
}

/// The names of all properties in the schema, or of all keys in a document.
std::set<std::string> keys(const JsonValue& value, bool of_schema) {
  std::set<std::string> names;
  auto copy = value;
  example::for_each_value(copy, [&](JsonValue& item) {
    const auto* object = of_schema ? nullptr : &item;
    if (of_schema) object = item.find("properties");
    if (!object || !object->get_if<JsonValue::Object>()) return;
    for (const auto& [key, member] : *object->get_if<JsonValue::Object>()) names.insert(key);
  });
  return names;
}

}  // namespace

TEST_CASE("written files fit the schema") {
  const auto root = schema();
  REQUIRE(example::misfit(root, root, good_file()).empty());
  REQUIRE(
      example::misfit(root, root, parse_json(preset_text(example::device(), "ffn", {}))).empty());
}

TEST_CASE("the schema and the written file name the same fields") {
  auto written = keys(good_file(), false);
  for (const char* free : {"m", "d", "h", "act", "bm", "bn", "schedule"})
    REQUIRE(written.erase(free) == 1);
  REQUIRE(keys(schema(), true) == written);
}

TEST_CASE("the page on presets explains every field") {
  const auto page = example::text(FFTUNE_SOURCE_DIR "/docs/presets.md");
  for (const auto& key : keys(schema(), true)) {
    CAPTURE(key);
    // In the example, in the tables or in the text; an entry of a list of ties needs no row.
    REQUIRE(page.find('"' + key + '"') != std::string::npos);
    if (key == "id" || key == "device" || key == "op" || key == "pass" || key == "dtype") continue;
    const bool explained = page.find("`" + key) != std::string::npos ||
                           page.find("." + key + "`") != std::string::npos;
    REQUIRE(explained);
  }
}

TEST_CASE("every field of the schema is required, but for those that came after version 1") {
  auto root = schema();
  const std::set<std::string> later{"bits", "decided", "disturbances", "untuned_ratio"};
  example::for_each_value(root, [&](JsonValue& value) {
    const auto* properties = value.find("properties");
    const auto* required = value.find("required");
    if (!required || !required->get_if<JsonValue::Array>()) return;
    std::set<std::string> names;
    for (const auto& name : *required->get_if<JsonValue::Array>())
      names.insert(std::get<std::string>(name.data));
    REQUIRE(properties);
    for (const auto& [key, member] : *properties->get_if<JsonValue::Object>()) {
      CAPTURE(key);
      REQUIRE(names.erase(key) == (later.contains(key) ? 0 : 1));
    }
    REQUIRE(names.empty());
  });
}

TEST_CASE("the schema refuses what the reader refuses, and the reader what the schema does") {
  const auto root = schema();
  const auto agree = [&](const JsonValue& document, const std::string& what) {
    const auto file = parse_preset_text(json_line(document), "a.json");
    const auto reason = example::misfit(root, root, document);
    if (reason.empty() != file.complaints.empty())
      FAIL(what << ": the schema says '" << reason << "', the reader '"
                << (file.complaints.empty() ? "" : file.complaints.front()) << "'");
  };
  agree(good_file(), "the good file");
  example::for_each_other_type(
      good_file(), [&](const JsonValue& document, const JsonValue& before, const JsonValue& now) {
        // Rules that no schema can express: interval_low_us <= interval_high_us, error <=
        // tolerance.
        const bool order = before.get_if<double>() && now.get_if<std::uint64_t>();
        if (!order) agree(document, json_line(before) + " as " + json_line(now));
      });
  example::for_each_missing_member(
      good_file(), [&](const JsonValue& document, const std::string& key, const JsonValue&) {
        agree(document, key + " left out");
      });
}
