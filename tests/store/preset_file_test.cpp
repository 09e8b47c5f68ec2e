#include <sys/stat.h>

#include <string>

#include "store/example.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

/// A good file of three records with one change to the second.
std::string changed(const std::string& from, const std::string& to, std::size_t records = 3) {
  std::vector<PresetRecord> all;
  for (std::size_t i = 0; i < records; ++i)
    all.push_back(example::record(example::ffn(std::int64_t{16} << i)));
  auto text = preset_text(example::device(), "ffn", all);
  const auto second = records > 1 ? text.find("\"problem\"", text.find("\"problem\"") + 1) : 0;
  const auto place = text.find(from, second);
  REQUIRE(place != std::string::npos);
  return text.replace(place, from.size(), to);
}

void require_one_line(const std::vector<std::string>& complaints) {
  for (const auto& complaint : complaints) REQUIRE(complaint.find('\n') == std::string::npos);
}

}  // namespace

TEST_CASE("a bad record is named and skipped, and the good ones are kept") {
  const auto [from, to, expected] = GENERATE(table<std::string, std::string, std::string>({
      {"\"problem\"", "\"porblem\"", "problem: is missing"},
      {"\"m\": 32", "\"m\": 16",
       "problem: ffn/fwd bf16 act=silu d=1024 h=2048 m=16 is there twice, in records[0] too"},
      {"\"m\": 32", "\"m\": 0", "problem.m: expected an integer of at least 1, found 0"},
      {"\"m\": 32", "\"m\": 32.5", "problem.m: expected a size"},
      {"\"m\": 32", "\"m\": 32, \"m\": 33", "problem.m: is there twice"},
      {"\"op\": \"ffn\"", "\"op\": \"rope\"", "problem.op: expected \"ffn\", the file's op"},
      {"\"pass\": \"fwd\", ", "", "problem.pass: is missing"},
      {"\"bf16\"", "\"bf17\"", "problem.dtype: expected \"f32\", \"bf16\", \"fp16\" or \"fp8\""},
      {"[\"gate_up\"]", "[]", "stages[0].stages: expected at least one stage"},
      {"[\"gate_up\"]", "[7]", "stages[0].stages[0]: expected a string"},
      {"[\"down\"]", "[\"gate_up\"]", "stages: \"gate_up\" is covered twice"},
      {"\"gate_up_sm90\"", "\"\"", "stages[0].family: expected a name"},
      {"\"bn\": 64", "\"bn\": 64.5",
       "stages[0].parameters.bn: expected an integer, or a word such as \"pingpong\", found 64.5"},
      {"\"bn\": 64", "\"bn\": 1e400", ""},
      {"\"bn\": 64", "\"b n\": 64", "stages[0].parameters.b n: the key is not a name"},
      {"0123456789abcdef", "0123456789ABCDEF",
       "stages[0].source_hash: expected 16 lower-case hexadecimal digits"},
      {"\"median_us\": 12.35", "\"median_us\": 0",
       "stages[0].median_us: expected a number above 0, found 0"},
      {"\"median_us\": 13.0", "\"median_us\": -13.0",
       "stages[0].runners_up[0].median_us: expected a number above 0, found -13.0"},
      {"\"feasible\": 187", "\"feasible\": 3000000000",
       "stages[0].feasible: expected an integer from 0 to 2147483647"},
      {"\"failed\": 2", "\"failed\": 2, \"note\": \"\"",
       "stages[0].note: is not a field of this format"},
      {"\"interval_low_us\": 20.07", "\"interval_low_us\": 21",
       "verdict.interval_low_us: expected a number no larger than interval_high_us"},
      {"\"limit\": \"memory\"", "\"limit\": \"disk\"",
       "verdict.limit: expected \"compute\" or \"memory\", found \"disk\""},
      {"\"complete\": true", "\"complete\": 1",
       "verdict.complete: expected true or false, found 1"},
      {"\"error\": 0.00209", "\"error\": 0.01", "error: expected a number no larger than"},
      {"2026-11-21T14:03:22Z", "21.11.2026", "provenance.date: expected a UTC time such as"},
      {"18364758544493064720", "18446744073709551616", "provenance.seed: expected an integer from"},
      {"\"device\": \"NVIDIA H200\"", "\"device\": \"\\u001b[31m\\n\"", ""},
  }));
  CAPTURE(from, to);
  const auto file = parse_preset_text(changed(from, to), "presets/ffn.json");
  CAPTURE(file.complaints);
  require_one_line(file.complaints);
  if (to.find("1e400") != std::string::npos) {  // the parser's own refusal: no number at all
    REQUIRE(file.records.empty());
    REQUIRE(file.complaints.size() == 1);
  } else if (expected.empty()) {
    REQUIRE(file.records.size() == 3);
  } else {
    REQUIRE(file.records.size() == 2);
    REQUIRE(file.complaints.size() == 1);
    REQUIRE(file.complaints[0].find("presets/ffn.json:records[1]: " + expected) == 0);
  }
}

TEST_CASE("a file that is no preset is a complaint") {
  const auto [text, expected] = GENERATE(table<std::string, std::string>({
      {"", "not JSON: there is no text at all"},
      {" \n", "not JSON: there is no text at all"},
      {"{\"schema\": 1,", "cut short"},
      {"hello", "not JSON at line 1, column"},
      {"{\n  \"schema\": 1,\n  oops\n}", "not JSON at line 3, column"},
      {"\xff\xfe{}", "not JSON at line 1"},
      {"[]", "expected an object, found an array"},
      {"null", "expected an object, found null"},
      {"{}", "schema: is missing"},
      {"{\"schema\": \"1\"}", "schema: expected an integer of at least 1, found \"1\""},
      {"{\"schema\": 4, \"new\": {}}", "schema: 4 is newer than 3, the newest"},
      {"{\"schema\": 1, \"schema\": 1}", "schema: is there twice"},
      {"{\"schema\": 1}", "device: is missing"},
      {changed("\"kind\": \"cuda\"", "\"kind\": \"tpu\"", 1), "device.kind: expected \"cuda\""},
      {changed("\"multiprocessors\": 132", "\"multiprocessors\": -1", 1),
       "device.multiprocessors: expected an integer from 1"},
      {changed("[\"NVIDIA H200 NVL\"]", "[\"a\", \"a\"]", 1),
       "device.aliases[1]: \"a\" is there twice"},
      {changed("\"nvidia-h200\"", "\"../h200\"", 1), "device.slug: expected a name"},
      {changed("\"records\"", "\"recodrs\"", 1), "records: is missing"},
      {std::string(1000000, '['), "nested deeper than 32"},
  }));
  const auto file = parse_preset_text(text, "p.json");
  CAPTURE(file.complaints);
  REQUIRE(file.records.empty());
  REQUIRE(file.complaints.size() == 1);
  REQUIRE(file.complaints[0].find("p.json: ") == 0);
  REQUIRE(file.complaints[0].find(expected) != std::string::npos);
  require_one_line(file.complaints);
}

TEST_CASE("files that cannot be read are complaints") {
  const testing::TemporaryFolder folder;
  const auto pipe = folder.path() / "pipe.json";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE(read_preset_file(pipe).complaints.at(0).find("not a regular file") != std::string::npos);
  REQUIRE(read_preset_file(folder.path()).complaints.at(0).find("not a regular file") !=
          std::string::npos);
  REQUIRE(read_preset_file(folder.path() / "no.json").complaints.at(0).find("No such file") !=
          std::string::npos);
}

TEST_CASE("a folder of presets is read in order, whatever is in it") {
  const testing::TemporaryFolder folder;
  REQUIRE(read_preset_folder(folder.path() / "absent").empty());
  REQUIRE(read_preset_folder(folder.path()).empty());

  const auto record = example::record(example::ffn(16));
  merge_preset_records(folder.path(), example::device(), "ffn", {record});
  example::write(folder.path() / "b" / "ffn.json", "{");
  example::write(folder.path() / "a" / "ffn.json", preset_text(example::device(), "ffn", {record}));
  example::write(folder.path() / "b" / ".hidden.json", "{");
  example::write(folder.path() / "b" / "notes.txt", "{");
  example::write(folder.path() / "schema.json", "{");
  std::filesystem::create_directories(folder.path() / "c" / "folder.json");

  const auto files = read_preset_folder(folder.path());
  REQUIRE(files.size() == 4);
  REQUIRE(files[0].path == folder.path() / "a" / "ffn.json");
  REQUIRE(files[0].records.size() == 1);
  REQUIRE(files[0].complaints.empty());
  REQUIRE(files[0].misplaced.find("is the file of nvidia-h200/ffn.json") != std::string::npos);
  REQUIRE(files[1].complaints.at(0).find("cut short") != std::string::npos);
  REQUIRE(files[2].complaints.at(0).find("not a regular file") != std::string::npos);
  REQUIRE(files[3].complaints.empty());
  REQUIRE(files[3].misplaced.empty());
  // A path to a file is that file.
  REQUIRE(read_preset_folder(files[3].path).at(0).records.size() == 1);
}

TEST_CASE("a device's folder is read, and written, as the one of presets above it") {
  const testing::TemporaryFolder folder;
  const auto record = example::record(example::ffn(16));
  const auto path = merge_preset_records(folder.path(), example::device(), "ffn", {record});
  const auto place = path.parent_path();
  example::write(place / "linear.json", "{");
  for (const auto& name : {place, place / "", place / "."}) {
    INFO(name);
    const auto files = read_preset_folder(name);
    REQUIRE(files.size() == 2);
    REQUIRE(files[0].records.size() == 1);
    REQUIRE(files[0].misplaced.empty());
    REQUIRE(files[1].complaints.at(0).find("linear.json") != std::string::npos);
    REQUIRE(std::filesystem::equivalent(
        merge_preset_records(name, example::device(), "ffn", {record}), path));
    require_mergeable(name, example::device(), "ffn");
    REQUIRE_FALSE(std::filesystem::exists(place / example::device().slug));
  }
  // Other JSON files make no folder a device's, nor does a file of another device.
  example::write(folder.path() / "other" / "ffn.json",
                 preset_text(example::device(), "ffn", {record}));
  REQUIRE(read_preset_folder(folder.path() / "other").empty());
}
