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
#include "support/text_file.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;
using fftune::testing::TemporaryFolder;
using fftune::testing::text_of;
using nlohmann::json;
using std::chrono::milliseconds;

namespace {

pid_t start_sweep(const std::filesystem::path& state, const std::filesystem::path& result) {
  const pid_t child = fork();
  if (child != 0) return child;
  execl(WORKER_OF_TESTS, WORKER_OF_TESTS, "sweep", "wrong", state.c_str(), result.c_str(), nullptr);
  _exit(127);
}

/// How often each variant was timed, as the journals below `state` tell.
std::map<std::string, int> timings(const std::filesystem::path& state) {
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

/// How many variants were screened so far.
struct Reached final : ProgressSink {
  void update(const Progress& progress) override {
    if (progress.phase == Phase::screen) count = progress.done;
  }
  std::atomic<int> count{0};
};

}  // namespace

TEST_CASE("a sweep that is killed at any moment and resumed ends as if it had not been") {
  constexpr int most_kills = 50;
  const TemporaryFolder folder;
  const auto undisturbed = folder.path() / "undisturbed", result = folder.path() / "result";
  int status = -1;
  waitpid(start_sweep(folder.path() / "state-0", undisturbed), &status, 0);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);
  CHECK(text_of(undisturbed) == "odd/p=77 40");
  const auto once = timings(folder.path() / "state-0");

  std::mt19937 random(7);
  // A sweep ends between its kills sooner or later: as many sweeps as it takes.
  for (int kills = 0, sweeps = 1; kills < most_kills; ++sweeps) {
    const auto state = folder.path() / ("state-" + std::to_string(sweeps));
    std::filesystem::remove(result);
    for (bool ended = false; !ended;) {
      const pid_t sweep = start_sweep(state, result);
      const int after = 30 + static_cast<int>(random() % 80);
      for (int slept = 0; !ended && (slept < after || kills == most_kills); slept += 5) {
        std::this_thread::sleep_for(milliseconds(5));
        ended = waitpid(sweep, &status, WNOHANG) == sweep;
      }
      if (ended) break;
      kill(sweep, SIGKILL);
      waitpid(sweep, &status, 0);
      ++kills;
    }
    CAPTURE(kills, sweeps);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(text_of(result) == text_of(undisturbed));
    const auto counts = timings(state);
    CHECK(counts.size() == misbehaving_variants);
    for (const auto& [id, times] : counts) {
      CAPTURE(id);
      CHECK(times <= once.at(id));
    }
  }
}

TEST_CASE("a sweep whose worker is killed at random moments ends as if it had not been") {
  constexpr int most_kills = 50;
  const MisbehavingOp op("wrong");
  const Catalog catalog{{&op}, &no_sources};
  WorkerEvaluator evaluator({WORKER_OF_TESTS, "worker", "wrong"});
  Reached reached;
  std::atomic<int> kills{0};
  std::jthread killer([&](const std::stop_token& stop) {
    std::mt19937 random(11);
    for (int before = -1; kills < most_kills && !stop.stop_requested();) {
      std::this_thread::sleep_for(milliseconds(random() % 60));
      // Repeated kills in the same variant are attributed to it: however slow the machine,
      // something is reached between two kills.
      if (reached.count == before) continue;
      before = reached.count;
      for (const pid_t child : children()) kills += kill(child, SIGKILL) == 0;
    }
  });
  TuneOptions options;
  options.budget_seconds = 3600;
  options.strategy = "exhaustive";  // the longest
  options.progress = &reached;
  const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
  killer.request_stop();
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "odd/p=77");
  CHECK(result.record->stages[0].failed == 40);
  CHECK(result.record->stages[0].measured == 160);
  CHECK(kills == most_kills);
  CHECK(evaluator.deaths() >= most_kills / 2);  // one that is dead already can be killed again
}
