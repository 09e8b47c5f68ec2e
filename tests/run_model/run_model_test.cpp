// The example gives the ids that plain loops in float64 give.
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "process.hpp"
#include "small_model.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune::testing;

namespace {

Finished run(const std::filesystem::path& folder, const std::string& words) {
  std::vector<std::string> command{RUN_MODEL};
  std::istringstream stream(words);
  for (std::string word; stream >> word;) command.push_back(word);
  return Process(command,
                 {"HOME=" + folder.string(), "FFTUNE_CACHE=" + (folder / "cache").string(),
                  "PATH=/usr/bin:/bin", "ASAN_OPTIONS=detect_leaks=0"},
                 folder)
      .wait();
}

std::vector<int> ids_in(const std::string& out) {
  std::istringstream line(out.substr(0, out.find('\n')));
  std::vector<int> ids;
  for (int id = 0; line >> id;) ids.push_back(id);
  return ids;
}

struct Case {
  std::string name;
  ModelShape shape;
};

std::vector<Case> cases() {
  std::vector<Case> all{{"llama", {}},  {"qwen2", {}},  {"qwen3", {}},      {"tied", {}},
                        {"llama3", {}}, {"window", {}}, {"heads alike", {}}};
  all[1].shape.qkv_bias = true;
  all[2].shape.qk_norm = true;
  all[3].shape.tied = true;
  all[4].shape.llama3 = true;
  all[5].shape.window = 4;
  all[6].shape.kv_heads = all[6].shape.heads;
  return all;
}

const std::vector<int> prompt{3, 1, 4, 15, 9, 26, 5};
constexpr const char* prompt_text = "3,1,4,15,9,26,5";

void require_same_ids(const std::string& device) {
  std::set<std::vector<int>> seen;
  const TemporaryFolder folder;
  for (const auto& [name, shape] : cases()) {
    CAPTURE(name);
    const SmallModel model(shape);
    const std::string own = "model-" + std::to_string(seen.size());
    model.write(folder.path() / own);
    const Finished done = run(
        folder.path(), own + " --prompt-ids " + prompt_text + " --tokens 12 --device " + device);
    INFO(done.err);
    REQUIRE(done.code == 0);
    const auto ids = ids_in(done.out);
    CHECK(ids == model.greedy(prompt, 12));
    CHECK(done.out.find("tokens/s") != std::string::npos);
    seen.insert(ids);
  }
  // Were they all the same, the options would not have been looked at.
  CHECK(seen.size() == cases().size());
}

}  // namespace

TEST_CASE("the ids of each kind of model are those of float64") {
  require_same_ids("cpu");
}

TEST_CASE("the ids are those of float64 on a GPU too", "[gpu]") {
  const TemporaryFolder folder;
  SmallModel({}).write(folder.path() / "model");
  const Finished probe = run(folder.path(), "model --prompt-ids 1 --tokens 1 --device 0");
  if (probe.code != 0 && (probe.err.find("there is no CUDA driver") != std::string::npos ||
                          probe.err.find("cuInit") != std::string::npos))
    FFTUNE_SKIP("there is no CUDA device here");
  require_same_ids("0");
}

TEST_CASE("a prompt of one token, and a model in several files") {
  const TemporaryFolder folder;
  const SmallModel model({});
  model.write(folder.path() / "model", 3);
  const Finished one = run(folder.path(), "model --prompt-ids 7 --tokens 70");
  INFO(one.err);
  REQUIRE(one.code == 0);
  CHECK(ids_in(one.out) == model.greedy({7}, 70));
}

TEST_CASE("a model in bf16 runs") {
  const TemporaryFolder folder;
  SmallModel({}).write(folder.path() / "model", 1, "BF16");
  const Finished done = run(folder.path(), "model --prompt-ids 7,8 --tokens 4");
  INFO(done.err);
  CHECK(done.code == 0);
  CHECK(ids_in(done.out).size() == 4);
}

TEST_CASE("an error in a model is one line") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& words, const std::string& named) {
    const Finished done = run(folder.path(), words);
    CAPTURE(words, done.err, named);
    CHECK(done.code == 1);
    CHECK(done.err.find(named) != std::string::npos);
    CHECK(std::count(done.err.begin(), done.err.end(), '\n') == 1);
    CHECK(done.out.empty());
  };
  const std::string ids = " --prompt-ids 1,2 --tokens 2";
  check("", "usage:");
  check("model --prompt-ids", "usage:");
  check("none" + ids, "none: this path does not exist");
  std::filesystem::create_directory(folder.path() / "pipe");
  REQUIRE(mkfifo((folder.path() / "pipe/model.safetensors").c_str(), 0600) == 0);
  check("pipe" + ids, "pipe/model.safetensors: ");
  const auto model = folder.path() / "model";
  SmallModel({}).write(model);
  check("model --prompt-ids 1,61 --tokens 2", "there is no id 61");
  const std::string config = text_of(model / "config.json");
  write_text(model / "config.json", "[]");
  check("model" + ids, "config.json: it is no JSON object");
  std::string other = config;
  other.replace(other.find("\"llama\""), 7, "\"bloom\"");
  write_text(model / "config.json", other);
  check("model" + ids, "model_type bloom, whose layers are not known: llama, ");
  other = config;
  other.replace(other.find("\"head_dim\":8"), 12, "\"head_dim\":10");
  write_text(model / "config.json", other);
  check("model" + ids, "w_q of layer is [40, 32], but model.layers.0.self_attn.q_proj.weight");
  write_text(model / "config.json", config);
  const std::string whole = text_of(model / "model.safetensors");
  write_text(model / "model.safetensors", whole.substr(0, whole.size() - 8));
  check("model" + ids, "is cut short");
  write_text(model / "model.safetensors", whole.substr(0, 100));
  check("model" + ids, "is cut short");
  std::string renamed = whole;
  renamed.replace(renamed.find("0.mlp.up_proj"), 13, "0.mlp.xx_proj");
  write_text(model / "model.safetensors", renamed);
  check("model" + ids, "has no model.layers.0.mlp.up_proj.weight");
}
