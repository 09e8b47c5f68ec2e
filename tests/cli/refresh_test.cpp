// Records refreshed, kept to the same bits, and refused when disturbed: on the CPU.
#include <fstream>
#include <string>

#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using nlohmann::json;

namespace {

void edit(const std::filesystem::path& path, const auto& change) {
  json file = json_of(text_of(path));
  change(file);
  std::ofstream(path) << file.dump(2);
}

}  // namespace

TEST_CASE("refresh leaves what is fresh alone, and times again what is stale") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,4");
  const auto before = text_of(path);
  const Finished fresh = sandbox.fftune("refresh --device cpu");
  INFO(fresh.err);
  CHECK(fresh.code == 0);
  CHECK(fresh.out.find("no record of it in presets is stale") != std::string::npos);
  CHECK(text_of(path) == before);

  edit(path, [](json& file) {
    file["records"][1]["stages"][0]["source_hash"] = "0000000000000000";
    file["records"][1]["stages"][0]["feasible"] = 12345;
  });
  const Finished done = sandbox.fftune("refresh --device cpu --json");
  INFO(done.err);
  CHECK(done.code == 0);
  const json records = json_of(done.out).at("records");
  REQUIRE(records.size() == 1);
  CHECK(records[0].at("because").get<std::string>().find("other sources of") == 0);
  CHECK(records[0].at("now").at("stages").at(0).at("source_hash") != "0000000000000000");
  CHECK(records[0].at("now").at("stages").at(0).at("feasible") == 12345);
  CHECK(json_of(text_of(path)).at("records").size() == 2);
  CHECK(sandbox.fftune("refresh --device cpu").out.find("is stale") != std::string::npos);
  CHECK(
      json_of(sandbox.fftune("refresh --device cpu --all --m 4 --json").out).at("records").size() ==
      1);
}

TEST_CASE("a record with nothing that is feasible any more stays, and fails the refresh") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("2");
  edit(path, [](json& file) {
    for (auto& stage : file["records"][0]["stages"]) {
      stage["family"] = "gone";
      stage["ties"] = json::array();
      stage["runners_up"] = json::array();
    }
  });
  const auto before = text_of(path);
  const Finished done = sandbox.fftune("refresh --device cpu");
  CHECK(done.code == 1);
  CHECK(done.out.find("search anew") != std::string::npos);
  CHECK(text_of(path) == before);
}

TEST_CASE("a record that lacks a field of its op is refused, and the others are refreshed") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,2");
  edit(path, [](json& file) { file["records"][0]["problem"].erase("act"); });
  const Finished done = sandbox.fftune("refresh --device cpu --all --json");
  INFO(done.err);
  CHECK(done.code == 1);
  const json records = json_of(done.out).at("records");
  REQUIRE(records.size() == 2);
  CHECK(records[0].at("verdict").get<std::string>().find("search anew") != std::string::npos);
  CHECK(records[1].at("now").is_object());
  CHECK(json_of(text_of(path)).at("records").size() == 2);
}

TEST_CASE("a damaged file of any op is found before the first is refreshed") {
  const Sandbox sandbox;
  const auto file = sandbox.tuned("1");
  fftune::testing::write_text(file.parent_path() / "rmsnorm.json", "{");
  const Finished done = sandbox.fftune("refresh --device cpu --all --wait 0s --progress plain");
  INFO(done.err);
  CHECK(done.code == 2);
  CHECK(done.err.find("rmsnorm.json") != std::string::npos);
  CHECK(done.err.find("m=1") == std::string::npos);  // nothing was timed
}

TEST_CASE("same-bits finds the record of one layer for several") {
  const Sandbox sandbox;
  const std::string search =
      "layer --d 32 --h 32 --heads 2 --dim 16 --cache 16 --batch 1 --layers 2 --device cpu "
      "--budget 3s --max-variants 1 --wait 0s";
  REQUIRE(sandbox.fftune(search).code == 0);
  const Finished again = sandbox.fftune(search + " --same-bits");
  INFO(again.err);
  CHECK(again.code == 0);
}

TEST_CASE("same-bits keeps the class of the winner on record, and needs one") {
  const Sandbox sandbox;
  const std::string command = "ffn --d 32 --h 64 --device cpu --budget 4s --max-variants 8 --m ";
  const Finished none = sandbox.fftune(command + "4 --same-bits");
  CHECK(none.code == 2);
  CHECK(none.err.find("presets has no record of ffn/fwd") != std::string::npos);

  const auto path = sandbox.tuned("4");
  const auto bits = [&] {
    std::vector<std::string> all;
    const json written = json_of(text_of(path));
    for (const auto& stage : written.at("records").at(0).at("stages"))
      all.push_back(stage.at("bits").get<std::string>());
    return all;
  };
  const auto before = bits();
  const Finished again = sandbox.fftune(command + "4 --same-bits");
  INFO(again.err);
  CHECK(again.code == 0);
  // The same stages have the same bits; other stages, as whole.
  const auto now = bits();
  if (now.size() == before.size()) CHECK(now == before);
}
