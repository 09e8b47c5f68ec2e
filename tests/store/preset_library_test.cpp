#include "store/preset_library.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>

#include "core/distribution.hpp"
#include "store/example.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

DeviceFacts gpu(const std::string& name, const std::string& arch, int multiprocessors) {
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.name = name;
  facts.arch = arch;
  facts.multiprocessors = multiprocessors;
  return facts;
}

PresetDevice named(const std::string& name, const std::string& arch, int multiprocessors,
                   std::vector<std::string> aliases = {}) {
  return {slug_of(name), name, DeviceKind::cuda, arch, multiprocessors, std::move(aliases)};
}

std::string legal(const PresetRecord&, const Problem&) {
  return "";
}

const Comparison comparison{"m", {"eps"}, {"mask"}};

const auto h200 = gpu("NVIDIA H200", "sm_90a", 132);

std::optional<PresetMatch> find(const PresetLibrary& library, const Problem& problem,
                                const DeviceFacts& facts = h200, const Legality& illegal = legal) {
  return library.find(problem, facts, illegal, comparison);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a preset's device is exact, an alias, or one of the same architecture") {
  const auto preset = named("NVIDIA H200", "sm_90a", 132, {"NVIDIA H200 NVL"});
  REQUIRE(device_match(preset, h200) == DeviceMatch::exact);
  REQUIRE(device_match(preset, gpu("NVIDIA H200 NVL", "sm_90a", 132)) == DeviceMatch::alias);
  REQUIRE(device_match(preset, gpu("NVIDIA H100", "sm_90a", 132)) ==
          DeviceMatch::same_arch_and_size);
  // An alias may be written like a folder.
  REQUIRE(device_match(named("NVIDIA H200", "sm_90a", 132, {"nvidia-h200-nvl"}),
                       gpu("NVIDIA H200 NVL", "sm_90a", 132)) == DeviceMatch::alias);
  REQUIRE(device_match(preset, gpu("NVIDIA H100 PCIe", "sm_90a", 114)) == DeviceMatch::same_arch);
  REQUIRE_FALSE(device_match(preset, gpu("NVIDIA A100", "sm_80", 132)));
  auto cpu = h200;
  cpu.kind = DeviceKind::cpu;
  REQUIRE_FALSE(device_match(preset, cpu));
}

TEST_CASE("the distance of shapes counts octaves, those of the token count by half") {
  const auto problem = example::ffn(64);
  REQUIRE(distance(problem, problem, comparison) == 0);
  REQUIRE(distance(problem, example::ffn(256), comparison) == 1);
  REQUIRE(distance(problem, problem.with_size("d", 512), comparison) == 1);
  REQUIRE(distance(problem.with_size("h", 8192), example::ffn(32), comparison) == 2.5);
  REQUIRE(distance(example::ffn(256), problem, comparison) ==
          distance(problem, example::ffn(256), comparison));
  REQUIRE(std::isinf(distance(problem, problem.with_size("k", 1), comparison)));
}

TEST_CASE("the exact shape comes before the nearest, and the nearest before the rest") {
  const testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "ffn",
                       {example::record(example::ffn(16)), example::record(example::ffn(1024)),
                        example::record(example::ffn(16).with_size("d", 4096))});
  const auto library = PresetLibrary::load({folder.path()});

  const auto exact = find(library, example::ffn(1024));
  REQUIRE(exact);
  REQUIRE(exact->exact_shape);
  REQUIRE(exact->record->problem == example::ffn(1024));
  REQUIRE(exact->reason == exact->path.string() + ": exact device, exact shape");

  const auto nearest = find(library, example::ffn(900));
  REQUIRE(nearest);
  REQUIRE_FALSE(nearest->exact_shape);
  REQUIRE(nearest->distance == Approx(0.5 * std::log2(1024.0 / 900.0)));
  REQUIRE(nearest->reason == nearest->path.string() + ": exact device, nearest shape m=1024");
  REQUIRE(find(library, example::ffn(20).with_size("d", 4000))->record->problem.size("d") == 4096);
}

TEST_CASE("records are tried by their distance where roundings alone tell distances apart") {
  std::size_t near_ties = 0;
  for (std::int64_t scale = 100; scale < 160; ++scale) {
    const testing::TemporaryFolder folder;
    // The products of both ratios are one number, whose logarithm is rounded in several ways.
    std::vector<PresetRecord> records;
    for (const std::int64_t a : {10, 12, 14, 15, 20, 21, 28, 30, 35})
      records.push_back(example::record(
          example::ffn(1000).with_size("d", scale * a).with_size("h", scale * (420 / a))));
    merge_preset_records(folder.path(), example::device(), "ffn", records);
    const auto library = PresetLibrary::load({folder.path()});
    const Problem problem =
        example::ffn(1000 + scale).with_size("d", 7 * scale).with_size("h", 11 * scale);
    std::vector<double> tried;
    find(library, problem, h200, [&](const PresetRecord& record, const Problem&) {
      tried.push_back(distance(record.problem, problem, comparison));
      return "not this one";
    });
    CAPTURE(scale);
    CHECK(tried.size() == records.size());
    CHECK(std::is_sorted(tried.begin(), tried.end()));
    for (std::size_t i = 1; i < tried.size(); ++i)
      near_ties += tried[i - 1] < tried[i] && tried[i] - tried[i - 1] < 1e-12;
  }
  CHECK(near_ties > 10);
}

TEST_CASE("records of another op, pass, dtype or options never match") {
  const testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "ffn",
                       {example::record(example::ffn(16))});
  const auto library = PresetLibrary::load({folder.path()});
  REQUIRE(find(library, example::ffn(16)));
  auto problem = example::ffn(16);
  problem.op = "rope";
  REQUIRE_FALSE(find(library, problem));
  problem = example::ffn(16);
  problem.pass = "bwd";
  REQUIRE_FALSE(find(library, problem));
  problem = example::ffn(16);
  problem.options["act"] = "relu";
  REQUIRE_FALSE(find(library, problem));
  REQUIRE_FALSE(find(library, example::ffn(16, DType::fp16)));
  REQUIRE(contains(library.absence(problem, h200, legal, comparison),
                   "no preset of ffn/fwd bf16 act=relu for this device or its like"));
}

TEST_CASE("a record serves whatever number an option has, but no word in its place") {
  const testing::TemporaryFolder folder;
  auto problem = example::ffn(16);
  problem.options["eps"] = "1e-06";
  merge_preset_records(folder.path(), example::device(), "ffn", {example::record(problem)});
  const auto library = PresetLibrary::load({folder.path()});
  for (const char* eps : {"1e-06", "1e-05", "0"}) {
    problem.options["eps"] = eps;
    CHECK(find(library, problem));
  }
  for (const char* eps : {"", "small"}) {
    problem.options["eps"] = eps;
    CHECK_FALSE(find(library, problem));
  }
}

TEST_CASE("a number that is left out is no option of its own, a word is") {
  const testing::TemporaryFolder folder;
  auto record = example::record(example::ffn(16));
  merge_preset_records(folder.path(), example::device(), "ffn", {record});
  const auto library = PresetLibrary::load({folder.path()});
  Problem problem = example::ffn(16);
  problem.options["eps"] = "1e-05";
  CHECK(find(library, problem));
  problem.options["eps"] = "small";
  CHECK_FALSE(find(library, problem));
}

TEST_CASE("performance-neutral fields decide nothing about which record serves") {
  const Comparison neutral{"m", {}, {}, {"angles", "positions"}};
  const auto with = [](std::int64_t m, const char* angles) {
    auto problem = example::ffn(m);
    problem.options["angles"] = angles;
    return problem;
  };
  const testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "ffn",
                       {example::record(with(16, "llama3")),
                        example::record(with(64, "table").with_size("positions", 131072)),
                        example::record(with(128, "llama3").with_size("d", 2048))});
  const auto library = PresetLibrary::load({folder.path()});
  const auto served = [&](const Problem& problem) {
    const auto match = library.find(problem, h200, legal, neutral);
    REQUIRE(match);
    return *match;
  };
  for (const Problem& problem :
       {with(16, "llama3"), with(16, "table"), with(16, "table").with_size("positions", 4096),
        example::ffn(16)}) {
    const auto match = served(problem);
    CHECK(match.exact_shape);
    CHECK(match.distance == 0);
    CHECK(match.record->problem == with(16, "llama3"));
    CHECK(contains(match.reason, ": exact device, exact shape"));
  }
  CHECK(served(with(64, "base")).record->problem.size("positions") == 131072);
  const auto near = served(with(256, "base").with_size("positions", 1));
  CHECK(near.record->problem.size("m") == 64);
  CHECK(near.distance == 1);
  CHECK(contains(near.reason, "nearest shape m=64"));
  CHECK_FALSE(contains(near.reason, "positions"));
  CHECK(library.recorded_tokens(with(1, "yarn"), h200, neutral) == std::set<std::int64_t>{16, 64});
  CHECK(distance(with(16, "table").with_size("positions", 8), with(64, "yarn"), neutral) == 1);
  CHECK_FALSE(library.find(with(16, "base"), h200, legal, comparison));
  // The same library serves those that compare them all.
  CHECK(library.find(with(16, "llama3"), h200, legal, {"m", {}, {}, {}}));
}

TEST_CASE("a record serves whatever pattern an option has, the nearest first") {
  const auto masked = [](std::int64_t m, const char* mask) {
    auto problem = example::ffn(m);
    problem.options["mask"] = mask;
    return problem;
  };
  const testing::TemporaryFolder folder;
  merge_preset_records(
      folder.path(), example::device(), "ffn",
      {example::record(masked(64, "block:0.33")), example::record(masked(64, "random:0.5")),
       example::record(masked(1024, "block:0.33"))});
  const auto library = PresetLibrary::load({folder.path()});
  const auto served = [&](const Problem& problem) {
    const auto match = find(library, problem);
    REQUIRE(match);
    return match->record->problem.options.at("mask");
  };
  REQUIRE(served(masked(64, "block:0.33")) == "block:0.33");
  REQUIRE(served(masked(64, "block:0.9")) == "block:0.33");
  REQUIRE(served(masked(64, "even:0.5")) == "random:0.5");
  REQUIRE(served(masked(64, "random:0.9")) == "random:0.5");
  const auto other = find(library, masked(1024, "random:0.5"));
  REQUIRE(other->record->problem.size("m") == 1024);
  REQUIRE(contains(other->reason, "nearest pattern mask=block:0.33"));
  REQUIRE_FALSE(find(library, masked(64, "preact")));
}

TEST_CASE("a pattern's difference weighs half of a size's, as that of tokens does") {
  const auto masked = [](std::int64_t m, const char* mask) {
    auto problem = example::ffn(m);
    problem.options["mask"] = mask;
    return problem;
  };
  const double shape =
      pattern_distance(*parse_pattern("random:0.25"), *parse_pattern("block:0.25"));
  const double share =
      pattern_distance(*parse_pattern("random:0.25"), *parse_pattern("random:0.5"));
  REQUIRE(shape > 0);
  REQUIRE(share > 0);
  const auto from_random = [&](const Problem& other) {
    return distance(masked(64, "random:0.25"), other, comparison);
  };
  CHECK(std::abs(from_random(masked(64, "block:0.25")) - 0.5 * shape) < 1e-12);
  CHECK(std::abs(from_random(masked(256, "random:0.5")) - (1 + 0.5 * share)) < 1e-12);
}

TEST_CASE("a word is a word, though it reads like a pattern or a number") {
  const auto with = [](const char* name, const char* value) {
    auto problem = example::ffn(16);
    problem.options[name] = value;
    return problem;
  };
  const testing::TemporaryFolder folder;
  merge_preset_records(
      folder.path(), example::device(), "ffn",
      {example::record(with("save", "none")), example::record(with("level", "1"))});
  const auto library = PresetLibrary::load({folder.path()});
  CHECK(find(library, with("save", "none")));
  CHECK_FALSE(find(library, with("save", "all")));
  CHECK(find(library, with("level", "1")));
  CHECK_FALSE(find(library, with("level", "2")));
  CHECK(distance(with("save", "none"), with("save", "all"), comparison) == 0);
}

TEST_CASE("devices are tried from the exact to the like, folders in their order within each") {
  const testing::TemporaryFolder first, second;
  const auto put = [](const testing::TemporaryFolder& folder, const PresetDevice& device,
                      double median) {
    merge_preset_records(folder.path(), device, "ffn", {example::record(example::ffn(16), median)});
  };
  const auto median = [&] {
    const auto library = PresetLibrary::load({first.path(), second.path(), first.path()});
    const auto match = find(library, example::ffn(16));
    return match ? match->record->verdict.median_us : 0.0;
  };
  REQUIRE(median() == 0);
  put(first, named("NVIDIA A100", "sm_80", 108), 1);
  REQUIRE(median() == 0);
  put(first, named("NVIDIA GH200 small", "sm_90a", 78), 2);
  REQUIRE(median() == 2);
  put(first, named("NVIDIA H100 PCIe", "sm_90a", 114), 3);  // nearer in size
  REQUIRE(median() == 3);
  put(second, named("NVIDIA H100", "sm_90a", 132), 4);
  REQUIRE(median() == 4);
  put(second, named("NVIDIA GH200", "sm_90a", 144, {"NVIDIA H200"}), 5);
  REQUIRE(median() == 5);
  put(second, named("NVIDIA H200", "sm_90a", 132), 6);
  REQUIRE(median() == 6);
  put(first, named("NVIDIA H200", "sm_90a", 132), 7);
  REQUIRE(median() == 7);
}

TEST_CASE("one library serves devices of one name that differ in their number of SMs") {
  const testing::TemporaryFolder folder;
  for (const int multiprocessors : {78, 114}) {
    const std::string name = "NVIDIA H" + std::to_string(multiprocessors);
    merge_preset_records(folder.path(), named(name, "sm_90a", multiprocessors), "ffn",
                         {example::record(example::ffn(16), multiprocessors)});
  }
  const auto library = PresetLibrary::load({folder.path()});
  for (const int multiprocessors : {78, 114, 78}) {
    const auto match = find(library, example::ffn(16), gpu("MIG", "sm_90a", multiprocessors));
    REQUIRE(match);
    CHECK(match->record->verdict.median_us == multiprocessors);
  }
}

TEST_CASE("a record that is illegal here is passed over, and the reason says so") {
  const testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "ffn",
                       {example::record(example::ffn(16)), example::record(example::ffn(64))});
  const auto library = PresetLibrary::load({folder.path()});
  const auto not_16 = [](const PresetRecord& record, const Problem&) {
    return record.problem.size("m") == 16 ? "bm=128 is too tall" : "";
  };
  const auto match = find(library, example::ffn(16), h200, not_16);
  REQUIRE(match);
  REQUIRE(match->record->problem == example::ffn(64));
  REQUIRE(
      contains(match->reason, "nearest shape m=64; 1 nearer record is illegal here, the first "));
  REQUIRE(contains(match->reason, "m=16: bm=128 is too tall"));

  const auto none = [](const PresetRecord&, const Problem&) { return std::string("no"); };
  REQUIRE_FALSE(find(library, example::ffn(16), h200, none));
  const auto absence = library.absence(example::ffn(16), h200, none, comparison);
  REQUIRE(contains(absence, "all 2 presets for this are illegal here, the first "));
}

TEST_CASE("few of many records are checked for legality") {
  const testing::TemporaryFolder folder;
  std::vector<PresetRecord> records;
  for (std::int64_t m = 1; m <= 300; ++m) records.push_back(example::record(example::ffn(m)));
  merge_preset_records(folder.path(), example::device(), "ffn", records);
  const auto library = PresetLibrary::load({folder.path()});
  int asked = 0;
  const auto none = [&](const PresetRecord&, const Problem&) {
    ++asked;
    return std::string("no");
  };
  REQUIRE_FALSE(find(library, example::ffn(200), h200, none));
  CHECK(asked <= 17);  // the exact one, then the nearest
  asked = 0;
  const auto absence = library.absence(example::ffn(200), h200, none, comparison);
  CHECK(asked <= 17);
  CHECK(contains(absence, "the nearest 16 of 300 presets for this are illegal here, the first "));
  CHECK(contains(absence, "m=200: no"));
  // One that serves is found at once.
  asked = 0;
  const auto all = [&](const PresetRecord&, const Problem&) {
    ++asked;
    return std::string();
  };
  for (std::int64_t m = 1; m <= 300; ++m)
    REQUIRE(find(library, example::ffn(m), h200, all)->exact_shape);
  CHECK(asked == 300);
}

TEST_CASE("records of other shapes are tried in the order of distance") {
  const testing::TemporaryFolder folder;
  // Few different values, so that many shapes are equally far; and patterns, which no size tells.
  std::vector<PresetRecord> records;
  std::mt19937_64 random(5);
  std::set<Problem> problems;
  while (problems.size() < 400) {
    Problem problem = example::ffn(std::int64_t{1} << random() % 8);
    for (const char* size : {"d", "h"}) problem.sizes[size] = std::int64_t{3} << random() % 6;
    problem.options["mask"] = random() % 2 ? "random:0.5" : "block:0.25";
    problems.insert(problem);
  }
  for (const Problem& problem : problems) records.push_back(example::record(problem));
  merge_preset_records(folder.path(), example::device(), "ffn", records);
  const auto library = PresetLibrary::load({folder.path()});
  int compared = 0;
  for (int i = 0; i < 200; ++i) {
    Problem wanted = example::ffn(std::int64_t(1 + random() % 300));
    for (const char* size : {"d", "h"}) wanted.sizes[size] = std::int64_t(1 + random() % 300);
    wanted.options["mask"] = "random:0.3";
    std::vector<std::pair<double, Problem>> tried, all;  // equally far ones in the file's order
    const auto none = [&](const PresetRecord& record, const Problem&) {
      tried.emplace_back(distance(record.problem, wanted, comparison), record.problem);
      return std::string("no");
    };
    REQUIRE_FALSE(find(library, wanted, h200, none));
    for (const Problem& problem : problems)
      all.emplace_back(distance(problem, wanted, comparison), problem);
    std::sort(all.begin(), all.end());
    REQUIRE(tried.size() == 16);
    all.erase(all.begin() + 16, all.end());
    CHECK(tried == all);
    compared += static_cast<int>(tried.size());
  }
  CHECK(compared == 3200);
}

TEST_CASE("a library of damaged files serves the good ones and keeps the complaints") {
  const testing::TemporaryFolder folder;
  merge_preset_records(folder.path(), example::device(), "ffn",
                       {example::record(example::ffn(16))});
  example::write(folder.path() / "broken" / "ffn.json", "{\"schema\": 1");
  const auto library =
      PresetLibrary::load({folder.path() / "absent", folder.path(), folder.path()});
  REQUIRE(library.files().size() == 2);
  REQUIRE(library.complaints().size() == 1);
  REQUIRE(find(library, example::ffn(16)));
  REQUIRE(PresetLibrary::load({}).files().empty());
  REQUIRE(contains(PresetLibrary::load({}).absence(example::ffn(16), h200, legal, comparison),
                   "no preset for this device (NVIDIA H200) or another of its architecture"));
}

TEST_CASE("what serves each record is found by comparing a few problems with it") {
  // `near`: of this device; `far`: of another of its architecture, none of the same shape, so that
  // each of its problems is served by the nearest of this device's. A comparison copies problems,
  // so their number shows in the allocations.
  const auto allocations_of = [](int near, int far) {
    const testing::TemporaryFolder folder;
    std::vector<PresetRecord> own, others;
    for (int i = 0; i < near; ++i)
      own.push_back(example::record(example::ffn(1 + i % 40).with_size("d", 8 * (1 + i / 40))));
    for (int i = 0; i < far; ++i)
      others.push_back(example::record(example::ffn(1 + i % 40).with_size("d", 8 * (i / 40) + 3)));
    merge_preset_records(folder.path(), example::device(), "ffn", own);
    merge_preset_records(folder.path(), named("NVIDIA H20", "sm_90a", 78), "ffn", others);
    const auto library = PresetLibrary::load({folder.path()});
    REQUIRE(find(library, own.front().problem));  // the records are sorted once
    const std::size_t before = test::allocations();
    for (const auto& record : own) REQUIRE(find(library, record.problem)->exact_shape);
    for (const auto& record : others) {
      const auto match = find(library, record.problem);
      REQUIRE(match);
      REQUIRE(match->device == DeviceMatch::exact);
      REQUIRE(match->distance <= 2);
    }
    return static_cast<double>(test::allocations() - before);
  };
  // If all were compared with all, it were 64 times as many.
  CHECK(allocations_of(1600, 0) < 12 * allocations_of(200, 0));
  CHECK(allocations_of(1600, 1600) < 12 * allocations_of(200, 200));
}
