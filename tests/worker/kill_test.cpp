// SIGKILL at random moments: of the supervisor, then --resume; and of the worker.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/remote_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;
using fftune::testing::TemporaryFolder;
using nlohmann::json;
using std::chrono::milliseconds;

namespace {

const SourceSet no_sources{{}};

pid_t start_sweep(const std::filesystem::path& state, const std::filesystem::path& result) {
  const pid_t child = fork();
  if (child != 0) return child;
  execl(WORKER_OF_TESTS, WORKER_OF_TESTS, "sweep", "wrong", state.c_str(), result.c_str(), nullptr);
  _exit(127);
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// How often each variant was screened, as the journals below `state` tell.
std::map<std::string, int> screenings(const std::filesystem::path& state) {
  std::map<std::string, int> counts;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(state)) {
    if (entry.path().extension() != ".jsonl") continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      const json value = json::parse(line, nullptr, false);
      if (value.contains("kind") && !value.contains("finalist"))
        ++counts[value.at("id").get<std::string>()];
    }
  }
  return counts;
}

/// The processes that the main thread of this one has started.
std::vector<pid_t> children() {
  std::ifstream in("/proc/self/task/" + std::to_string(getpid()) + "/children");
  std::vector<pid_t> all;
  for (pid_t id = 0; in >> id;) all.push_back(id);
  return all;
}

}  // namespace

TEST_CASE("a sweep that is killed at any moment and resumed ends as if it had not been") {
  const TemporaryFolder folder;
  const auto undisturbed = folder.path() / "undisturbed", result = folder.path() / "result";
  int status = -1;
  waitpid(start_sweep(folder.path() / "state-0", undisturbed), &status, 0);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);

  std::mt19937 random(7);
  int kills = 0;
  bool ended = false;
  while (!ended && kills < 50) {
    const pid_t sweep = start_sweep(folder.path() / "state", result);
    const int after = 30 + static_cast<int>(random() % 80);
    for (int slept = 0; slept < after && !ended; slept += 5) {
      std::this_thread::sleep_for(milliseconds(5));
      ended = waitpid(sweep, &status, WNOHANG) == sweep;
    }
    if (ended) break;
    kill(sweep, SIGKILL);
    waitpid(sweep, &status, 0);
    ++kills;
  }
  if (!ended) waitpid(start_sweep(folder.path() / "state", result), &status, 0);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(kills >= 5);
  CHECK(text_of(result) == text_of(undisturbed));
  CHECK(text_of(result) == "odd/p=77 40");
  const auto counts = screenings(folder.path() / "state");
  CHECK(counts.size() == misbehaving_variants);
  for (const auto& [id, times] : counts) {
    CAPTURE(id);
    CHECK(times == 1);
  }
}

TEST_CASE("a sweep whose worker is killed at random moments ends as if it had not been") {
  const MisbehavingOp op("wrong");
  const Catalog catalog{{&op}, &no_sources};
  RemoteEvaluator evaluator({WORKER_OF_TESTS, "worker", "wrong"});
  std::atomic<bool> ended{false};
  std::jthread killer([&ended] {
    std::mt19937 random(11);
    for (int kills = 0; kills < 50 && !ended; ++kills) {
      std::this_thread::sleep_for(milliseconds(60 + random() % 200));
      if (ended) return;
      for (const pid_t child : children()) kill(child, SIGKILL);
    }
  });
  TuneOptions options;
  options.budget_seconds = 100;
  options.strategy = "exhaustive";  // the longest
  const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
  ended = true;
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "odd/p=77");
  CHECK(result.record->stages[0].failed == 40);
  CHECK(evaluator.deaths() >= 3);
}
