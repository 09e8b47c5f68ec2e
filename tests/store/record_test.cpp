#include <map>
#include <string>

#include "core/error.hpp"
#include "store/example.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/fake_op.hpp"

using namespace fftune;

TEST_CASE("a preset file is laid out for people to review") {
  // The whole text: a change here is a change of the format that every preset then shows in a diff.
  const std::string expected = R"({
  "schema": 3,
  "device": {
    "slug": "nvidia-h200",
    "name": "NVIDIA H200",
    "kind": "cuda",
    "arch": "sm_90a",
    "multiprocessors": 132,
    "aliases": ["NVIDIA H200 NVL"]
  },
  "op": "ffn",
  "records": [
    {
      "problem": {"op": "ffn", "pass": "fwd", "dtype": "bf16", "d": 1024, "h": 2048, "m": 16, "act": "silu"},
      "stages": [
        {
          "stages": ["gate_up"],
          "family": "gate_up_sm90",
          "parameters": {"bm": 128, "bn": 64, "schedule": "pingpong", "stages": 4},
          "source_hash": "0123456789abcdef",
          "median_us": 12.35,
          "bits": "00000000000000b1",
          "ties": [
            {"id": "gate_up_sm90/bm=64,schedule=pingpong,stages=4", "median_us": 12.4, "bits": "00000000000000b1"}
          ],
          "runners_up": [
            {"id": "gate_up_sm90/bm=64,schedule=cooperative,stages=3", "median_us": 13.0},
            {"id": "gate_up_simple", "median_us": 100.0}
          ],
          "feasible": 187,
          "measured": 140,
          "failed": 2
        },
        {
          "stages": ["down"],
          "family": "down_simple",
          "parameters": {},
          "source_hash": "fedcba9876543210",
          "median_us": 7.5,
          "ties": [],
          "runners_up": [],
          "feasible": 1,
          "measured": 1,
          "failed": 0
        }
      ],
      "verdict": {
        "median_us": 20.12,
        "interval_low_us": 20.07,
        "interval_high_us": 20.22,
        "noise": 0.00812,
        "roofline_fraction": 0.612,
        "limit": "memory",
        "unfused_ratio": 1.234,
        "untuned_ratio": 1.05,
        "strategy": "halving",
        "complete": true,
        "decided": true,
        "disturbances": ["2 other processes run on the device"]
      },
      "error": 0.00209,
      "tolerance": 0.0035,
      "provenance": {
        "fftune": "0.1.0",
        "device": "NVIDIA H200",
        "driver": "580.159",
        "toolkit": "13.0",
        "clock_mhz": 1980.0,
        "date": "2026-11-21T14:03:22Z",
        "seed": 18364758544493064720
      }
    }
  ]
}
)";
  REQUIRE(preset_text(example::device(), "ffn", {example::record(example::ffn(16))}) == expected);
}

TEST_CASE("records are read as they were written") {
  const auto written = example::record(example::ffn(16));
  const auto text = preset_text(example::device(), "ffn", {written});
  const auto file = parse_preset_text(text, "a.json");
  REQUIRE(file.complaints.empty());
  REQUIRE(file.records.size() == 1);
  const auto& read = file.records[0];
  REQUIRE(read.problem == written.problem);
  REQUIRE(recipe_text(read.recipe()) ==
          "gate_up_sm90/bm=128,bn=64,schedule=pingpong,stages=4 + down_simple");
  REQUIRE(read.stages[0].ties[0].id == written.stages[0].ties[0].id);
  REQUIRE(read.verdict.median_us == 20.12);
  REQUIRE(read.provenance.seed == written.provenance.seed);
  REQUIRE(file.device.aliases == example::device().aliases);
  REQUIRE(preset_text(file.device, file.op, file.records) == text);
}

TEST_CASE("a file of version 1, which says less, is read; nothing is made up for it") {
  auto record = example::record(example::ffn(16));
  for (auto& stage : record.stages) {
    stage.bits.clear();
    for (auto& tie : stage.ties) tie.bits.clear();
  }
  record.verdict.decided.reset();
  record.verdict.untuned_ratio.reset();
  record.verdict.disturbances.clear();
  auto text = preset_text(example::device(), "ffn", {record});
  REQUIRE(text.find("\"schema\": 3") != std::string::npos);
  text.replace(text.find("\"schema\": 3"), 11, "\"schema\": 1");
  const auto file = parse_preset_text(text, "a.json");
  CAPTURE(file.complaints);
  REQUIRE(file.complaints.empty());
  REQUIRE(file.records.size() == 1);
  REQUIRE_FALSE(file.records[0].verdict.decided.has_value());
  REQUIRE(file.records[0].stages[0].bits.empty());
  for (const char* key : {"bits", "decided", "disturbances", "untuned_ratio"})
    REQUIRE(preset_text(file.device, file.op, file.records).find(key) == std::string::npos);
}

TEST_CASE("rounding a number that is rounded changes nothing") {
  for (double median = 0.000123; median < 1e7; median *= 2.37) {
    const auto text =
        preset_text(example::device(), "ffn", {example::record(example::ffn(1), median + 0.06)});
    const auto file = parse_preset_text(text, "a.json");
    CAPTURE(text, file.complaints);
    REQUIRE(file.records.size() == 1);
    REQUIRE(file.records[0].verdict.median_us == Approx(median + 0.06).epsilon(0.006));
    REQUIRE(preset_text(file.device, file.op, file.records) == text);
  }
}

TEST_CASE("an error may be as large as the tolerance, and no larger") {
  auto record = example::record(example::ffn(16));
  record.error = record.tolerance;
  CHECK(
      parse_preset_text(preset_text(example::device(), "ffn", {record}), "a.json").records.size() ==
      1);
  record.error = record.tolerance * 1.01;
  const auto file = parse_preset_text(preset_text(example::device(), "ffn", {record}), "a.json");
  CHECK(file.records.empty());
  REQUIRE(file.complaints.size() == 1);
  CHECK_THAT(file.complaints.front(), ContainsSubstring("no larger than the tolerance"));
}

TEST_CASE("records are sorted by their problem") {
  const auto a = example::record(example::ffn(16));
  const auto b = example::record(example::ffn(256));
  const auto c = example::record(example::ffn(1, DType::fp16));
  const auto text = preset_text(example::device(), "ffn", {a, b, c});
  REQUIRE(preset_text(example::device(), "ffn", {c, b, a}) == text);
}

TEST_CASE("a problem is written and read as one line of JSON") {
  const auto problem = example::ffn(4096);
  const auto json = problem_json(problem);
  REQUIRE(json ==
          R"({"op":"ffn","pass":"fwd","dtype":"bf16","d":1024,"h":2048,"m":4096,"act":"silu"})");
  REQUIRE(problem_from_json(json).problem == problem);
  REQUIRE(problem_from_json(json).dtype_given);
  const auto short_form = problem_from_json(R"({"op": "ffn", "m": 1, "d": 2, "h": 3})");
  REQUIRE(short_form.problem.pass == "fwd");
  REQUIRE_FALSE(short_form.dtype_given);
  REQUIRE(record_json(example::record(problem)).find('\n') == std::string::npos);
}

TEST_CASE("options that are numbers may be JSON numbers where people write them") {
  const testing::FakeOp op({"scale"});
  const Catalog catalog{{&op}, nullptr};
  const auto [json, text] = GENERATE(table<std::string, std::string>({
      {"1e-6", "1e-06"},
      {"0.5", "0.5"},
      {"0", "0"},
      {"1", "1"},
      {"-1", "-1"},
      {"1e20", "1e+20"},
      {"18446744073709551615", "18446744073709551615"},
      {"\"1e-6\"", "1e-6"},
  }));
  CAPTURE(json);
  const auto problem =
      problem_from_json(R"({"op": "quadruple", "m": 4, "n": 8, "eps": )" + json + "}", catalog)
          .problem;
  CHECK(problem.option("eps") == text);
  CHECK(problem.sizes == std::map<std::string, std::int64_t>{{"m", 4}, {"n", 8}});
}

TEST_CASE("a number of any form is read from a problem and from a record") {
  const auto text = GENERATE(as<std::string>(), "-5", "-1", "1e+06", "-2.5e-7", ".5", "3");
  CAPTURE(text);
  auto problem = example::ffn(16);
  problem.options["padding"] = text;
  CHECK(problem_from_json(problem_json(problem)).problem == problem);
  const auto file = parse_preset_text(
      preset_text(example::device(), "ffn", {example::record(problem)}), "a.json");
  CHECK(file.complaints.empty());
  REQUIRE(file.records.size() == 1);
  CHECK(file.records[0].problem == problem);
}

TEST_CASE("a value may follow the name of an option, a path too") {
  auto problem = example::ffn(16);
  for (const char* text :
       {"zipf:1.5", "file:ids.txt", "file:/data/of one/ids,2.txt", "file:..", "file:a:b"}) {
    CAPTURE(text);
    problem.options["routing"] = text;
    CHECK(problem_from_json(problem_json(problem)).problem == problem);
    const auto file = parse_preset_text(
        preset_text(example::device(), "ffn", {example::record(problem)}), "a.json");
    CHECK(file.complaints.empty());
  }
  for (const char* text : {"file:", ":ids.txt", "a b:ids.txt", "two words", "file:a\tb"}) {
    CAPTURE(text);
    problem.options["routing"] = text;
    CHECK_THROWS_WITH(problem_from_json(problem_json(problem)),
                      ContainsSubstring("routing: expected a name"));
  }
}

TEST_CASE("a field of the wrong type is named with what its op expects") {
  const testing::FakeOp op({"scale"});
  const Catalog catalog{{&op}, nullptr};
  const auto [field, expected] = GENERATE(table<std::string, std::string>({
      {R"("m": "1")",
       "m: expected a size, which is an integer, found \"1\", a string: leave out the quotes"},
      {R"("m": 8.0)",
       "m: expected a size, which is an integer, found 8.0: leave out the decimal point or the "
       "exponent"},
      {R"("m": 9223372036854775808)",
       "m: expected a size, which is an integer, found 9223372036854775808, which is more than any "
       "size"},
      {R"("m": 18446744073709551616)",
       "m: expected a size, which is an integer, found 1.8446744073709552e+19, which is more than "
       "any size"},
      {R"("m": true)",
       "m: expected a size, which is an integer, or an option, which is a string, found true"},
      {R"("bias": 1)", "bias: expected a string, found 1: put it in quotes"},
      {R"("bias": 0.5)", "bias: expected a string, found 0.5: put it in quotes"},
      {R"("eps": [1])",
       "eps: expected a size, which is an integer, or an option, which is a string, found an "
       "array"},
      {R"("eps": 0.5, "eps": 0.25)", "eps: is there twice: keep one"},
  }));
  CAPTURE(field);
  REQUIRE_THROWS_WITH(problem_from_json(R"({"op": "quadruple", )" + field + "}", catalog),
                      "problem JSON: " + expected);
}

TEST_CASE("a parameter that is no integer and no word is named") {
  const auto good = preset_text(example::device(), "ffn", {example::record(example::ffn(16))});
  const std::string there = R"("schedule": "pingpong")";
  for (const auto& [value, found] : {std::pair{"\"\"", "\"\""},
                                     {"\"4x\"", "\"4x\""},
                                     {"\"128\"", "\"128\""},
                                     {"\"a b\"", "\"a b\""},
                                     {"1.5", "1.5"},
                                     {"true", "true"},
                                     {"[1]", "an array"}}) {
    auto text = good;
    text.replace(text.find(there), there.size(), std::string(R"("schedule": )") + value);
    const auto file = parse_preset_text(text, "a.json");
    CAPTURE(value, file.complaints);
    REQUIRE(file.records.empty());
    REQUIRE(file.complaints ==
            std::vector<std::string>{
                std::string("a.json:records[0]: stages[0].parameters.schedule: expected an "
                            "integer, or a word such as \"pingpong\", found ") +
                found});
  }
}

TEST_CASE("a problem that is wrong is refused by the name of its field") {
  const auto [json, expected] = GENERATE(table<std::string, std::string>({
      {"", "there is no text at all"},
      {"{\"op\": \"ffn\", \"m\": 1", "cut short"},
      {"[]", "expected an object, found an array"},
      {"{}", "op: is missing"},
      {R"({"op": 3})", "op: expected a string, found 3"},
      {R"({"op": "ffn", "pass": null})", "pass: expected a string, found null"},
      {R"({"op": "ffn", "dtype": "int8"})",
       R"(dtype: expected "f32", "bf16", "fp16" or "fp8", found "int8")"},
      {R"({"op": "ffn", "dtype": 16})", "dtype: expected"},
      {R"({"op": "ffn", "m": 1.5})", "m: expected a size, which is an integer"},
      {R"({"op": "ffn", "m": true})", "m: expected a size, which is an integer"},
      {R"({"op": "ffn", "m": 9223372036854775808})", "m: expected a size"},
      {R"({"op": "ffn", "m": [1]})", "m: expected a size, which is an integer, or an option"},
      {R"({"op": "ffn", "m": 1, "m": 2})", "m: is there twice"},
      {R"({"op": "ffn", "act": "../etc"})", "act: expected a name"},
      {R"({"op": "ffn"} x)", "line 1, column 15"},
  }));
  CAPTURE(json);
  const auto said = test::error_of(ErrorKind::invalid_input, [&] { problem_from_json(json); });
  CAPTURE(said);
  REQUIRE(said.find(expected) != std::string::npos);
  REQUIRE(said.find('\n') == std::string::npos);
}
