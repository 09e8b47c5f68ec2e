// Saved models as files: one, several with an index, and what may be wrong with them.
#include "saved/model.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "core/error.hpp"
#include "store/json.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_file.hpp"

using namespace fftune;
using namespace fftune::testing;

namespace {

namespace fs = std::filesystem;

void write_shard(const fs::path& path, const std::string& name, float value) {
  SafetensorsWriter writer;
  writer.add(name, "F32", {1}, std::vector<float>{value});
  writer.write(path);
}

double first_value(const SavedModel& model, const std::string& name) {
  float value = 0;
  model.read(model.at(name), 0, DType::f32, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

std::string model_complaint(const fs::path& path) {
  return test::error_of([&] { const SavedModel model(path); });
}

}  // namespace

TEST_CASE("a model is a file, a folder, or an index of several files") {
  const TemporaryFolder folder;
  write_shard(folder.path() / "a.safetensors", "one", 1);
  CHECK(first_value(SavedModel(folder.path() / "a.safetensors"), "one") == 1);
  CHECK(first_value(SavedModel(folder.path()), "one") == 1);
  write_shard(folder.path() / "b.safetensors", "two", 2);
  CHECK(first_value(SavedModel(folder.path()), "two") == 2);
  CHECK(SavedModel(folder.path() / "a.safetensors").find("two") == nullptr);

  const fs::path index = folder.path() / "model.safetensors.index.json";
  write_text(index,
             R"({"metadata":{},"weight_map":{"one":"a.safetensors","two":"b.safetensors"}})");
  for (const fs::path& path : {folder.path(), index}) {
    const SavedModel model(path);
    CHECK(model.tensors().size() == 2);
    CHECK(first_value(model, "one") == 1);
    CHECK(first_value(model, "two") == 2);
    CHECK(model.folder() == folder.path());
    CHECK(model.config() == nullptr);
  }
  write_text(folder.path() / "config.json", R"({"hidden_size": 8})");
  const SavedModel model(index);
  REQUIRE(model.config() != nullptr);
  CHECK(model.config()->find("hidden_size") != nullptr);
}

TEST_CASE("a file that is cut short while it is open is an error that names it") {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "a.safetensors";
  write_shard(path, "one", 1);
  const SavedModel model(path);
  const auto whole = fs::file_size(path);
  for (const std::uintmax_t left : {whole - 1, std::uintmax_t{0}}) {
    fs::resize_file(path, left);
    CHECK_THROWS_WITH(first_value(model, "one"),
                      ContainsSubstring(path.string()) && ContainsSubstring("cut short"));
  }
}

TEST_CASE("a missing tensor is named with the nearest") {
  const TemporaryFolder folder;
  write_shard(folder.path() / "a.safetensors", "model.layers.0.mlp.gate_proj.weight", 1);
  const SavedModel model(folder.path());
  CHECK_THROWS_WITH(model.at("model.layers.0.mlp.gateproj.weight"),
                    ContainsSubstring("did you mean model.layers.0.mlp.gate_proj.weight?"));
  CHECK_THROWS_WITH(model.at("zzz"), ContainsSubstring("there is no tensor 'zzz'"));
}

TEST_CASE("an error in a model's files is one line that names the file") {
  const TemporaryFolder folder;
  const auto check = [&](const fs::path& path, const std::string& what) {
    const std::string said = model_complaint(path);
    CAPTURE(path, said);
    CHECK(said.find(what) != said.npos);
    CHECK(said.find(folder.path().string()) != said.npos);
    CHECK(said.find('\n') == said.npos);
  };
  check(folder.path(), "has no .safetensors file");
  check(folder.path() / "none.safetensors", "this path does not exist");
  fs::create_directory(folder.path() / "sub.safetensors");
  check(folder.path() / "sub.safetensors", "has no .safetensors file");
  ::mkfifo((folder.path() / "pipe.safetensors").c_str(), 0600);
  check(folder.path() / "pipe.safetensors", "cannot be read");
  write_text(folder.path() / "empty.safetensors", "");
  check(folder.path() / "empty.safetensors", "it has 0 bytes");

  write_shard(folder.path() / "a.safetensors", "one", 1);
  write_shard(folder.path() / "b.safetensors", "one", 2);
  const fs::path index = folder.path() / "model.safetensors.index.json";
  const auto check_index = [&](const std::string& text, const std::string& what) {
    write_text(index, text);
    check(folder.path(), what);
  };
  check_index("", "not JSON");
  check_index("[]", "no weight_map");
  check_index(R"({"weight_map":{}})", "no weight_map");
  check_index(R"({"weight_map":{"one":3}})", "'one' is said to be in 3");
  check_index(R"({"weight_map":{"one":"../a.safetensors"}})", "should be the name of a file");
  check_index(R"({"weight_map":{"one":"c.safetensors"}})", "c.safetensors, which is missing");
  check_index(R"({"weight_map":{"two":"a.safetensors"}})", "'two' is not in a.safetensors");
  check_index(R"({"weight_map":{"one":"a.safetensors","one":"a.safetensors"}})",
              "'one' is in weight_map twice");
  check_index(R"({"weight_map":{"one":"a.safetensors","two":"b.safetensors"}})",
              "'one' is in another file");
}
