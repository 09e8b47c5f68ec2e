// Whatever a variant does costs that variant alone.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/process.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;
using fftune::testing::TemporaryFolder;

namespace {

WorkerCommand worker(const std::string& way) {
  return {WORKER_OF_TESTS, "worker", way};
}

/// Hangs are told from a busy machine sooner than users would want.
Watchdog impatient() {
  Watchdog watchdog;
  watchdog.multiple = 5;
  watchdog.least_seconds = 0.4;
  watchdog.most_seconds = 2;
  watchdog.compile_seconds = 2;
  return watchdog;
}

Candidate odd(int p) {
  return {0, {{"odd", {{"p", p}}}}, ""};
}

/// The word that the reason must contain.
std::string word_for(const std::string& way) {
  static const std::map<std::string, std::string> words{{"segfault", "SIGSEGV"},
                                                        {"abort", "SIGABRT"},
                                                        {"exit", "exited with code 3"},
                                                        {"killed", "memory"},
                                                        {"hang", "did not end within"},
                                                        {"beyond", "guard"},
                                                        {"sticky", "illegal memory access"},
                                                        {"crash_compile", "while it was compiled"}};
  const auto found = words.find(way);
  return found == words.end() ? "" : found->second;
}

OutcomeKind kind_for(const std::string& way) {
  const bool dies = way == "segfault" || way == "abort" || way == "exit" || way == "hang" ||
                    way == "trample" || way == "crash_compile";
  if (way == "liar") return OutcomeKind::measured;
  if (way == "killed") return OutcomeKind::killed;
  if (way == "sticky") return OutcomeKind::device_fault;
  return dies ? OutcomeKind::crashed : OutcomeKind::verify_failed;
}

TuneOptions patient() {
  TuneOptions options;
  options.budget_seconds = 3600;
  return options;
}

}  // namespace

TEST_CASE("a worker that does not end with its search is killed") {
  const int nothing = ::open("/dev/null", O_RDONLY);
  pid_t id = -1;
  {
    const WorkerProcess worker({"/bin/sleep", "600"}, nothing);
    id = worker.id();
  }
  ::close(nothing);
  CHECK(::kill(id, 0) != 0);
}

TEST_CASE("a sweep of 200 variants, 40 of which misbehave, names each and picks the best") {
  const auto way = GENERATE(from_range(ways()));
  CAPTURE(way);
  const MisbehavingOp op(way);
  const Catalog catalog{{&op}, &no_sources};
  WorkerEvaluator evaluator(worker(way), impatient());
  const auto result = tune(catalog, evaluator, misbehaving_problem(), patient());
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == odd(misbehaving_best).id());
  CHECK(result.stopped.empty());
  REQUIRE(result.outcomes.size() >= misbehaving_variants);
  for (int p = 0; p < misbehaving_variants; ++p) {
    const auto& outcome = result.outcomes[static_cast<std::size_t>(p)];
    const int place = static_cast<int>(Variant::parse(outcome.id).config.at("p"));
    INFO(outcome.id << ": " << outcome_kind_name(outcome.kind) << ": " << outcome.reason);
    CHECK(outcome.kind == (misbehaves(place) ? kind_for(way) : OutcomeKind::measured));
    if (misbehaves(place)) CHECK(outcome.reason.find(word_for(way)) != std::string::npos);
    if (misbehaves(place) && way != "liar") CHECK_FALSE(outcome.reason.empty());
  }
}

TEST_CASE("a search that is interrupted waits for no reference") {
  const std::string way = "slow_reference";
  const MisbehavingOp op(way);
  const Catalog catalog{{&op}, &no_sources};
  std::atomic<bool> cancel{false};
  const auto backend = open_quick_cpu();
  std::unique_ptr<Evaluator> evaluator;
  if (GENERATE(true, false))
    evaluator = std::make_unique<WorkerEvaluator>(worker(way), impatient(), &cancel);
  else
    evaluator = std::make_unique<LocalEvaluator>(*backend, catalog, 1, -1,
                                                 CancelFlags{.references = &cancel});
  auto options = patient();
  options.cancel = &cancel;
  const std::jthread user([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    cancel = true;
  });
  const auto began = std::chrono::steady_clock::now();
  const auto result = tune(catalog, *evaluator, misbehaving_problem(), options);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
  CHECK(result.cancelled);
  CHECK(result.stopped == "interrupted");
  CHECK_FALSE(result.record);
  for (const auto& outcome : result.outcomes) CHECK(outcome.kind == OutcomeKind::not_tried);
}

TEST_CASE("all the ways in one sweep") {
  const MisbehavingOp op("mixed");
  const Catalog catalog{{&op}, &no_sources};
  WorkerEvaluator evaluator(worker("mixed"), impatient());
  const auto result = tune(catalog, evaluator, misbehaving_problem(), patient());
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == odd(misbehaving_best).id());
  CHECK(evaluator.deaths() > 10);
}

TEST_CASE("a batch goes on without the one that died, and a new worker is there within 2 s") {
  using Clock = std::chrono::steady_clock;
  WorkerEvaluator evaluator(worker("exit"), impatient());
  evaluator.avoid({odd(0).id()});
  REQUIRE(evaluator.begin(misbehaving_problem()).refusal.empty());
  const auto began = Clock::now();
  const auto timings = evaluator.time({odd(1), odd(5), odd(2), odd(10)}, {});
  const std::chrono::duration<double> spent = Clock::now() - began;
  CHECK(timings[0].samples_us.size() == 3);
  CHECK(timings[2].samples_us.size() == 3);
  for (const int dead : {1, 3}) {
    const auto& timing = timings[static_cast<std::size_t>(dead)];
    CHECK(timing.fatal);
    CHECK(timing.samples_us.empty());
    CHECK(timing.failure.find("exited with code 3 while it was timed") != std::string::npos);
  }
  CHECK(evaluator.deaths() == 4);  // each is given a second chance
  CHECK(spent.count() < 8);
  CHECK(evaluator.lost().empty());
  // Variants that are known to kill are not run again.
  CHECK(evaluator.verify(odd(5)).fatal);
  CHECK(evaluator.deaths() == 4);
}

TEST_CASE("a lost device costs the variant that lost it, in a batch too") {
  WorkerEvaluator evaluator(worker("sticky"), impatient());
  evaluator.avoid({odd(0).id()});
  REQUIRE(evaluator.begin(misbehaving_problem()).refusal.empty());
  const auto timings = evaluator.time({odd(1), odd(5), odd(2)}, {});
  CHECK(timings[0].samples_us.size() == 3);
  CHECK(timings[1].device_fault);
  CHECK(timings[1].fatal);
  CHECK(timings[2].samples_us.size() == 3);
  CHECK(evaluator.lost().empty());
  CHECK(evaluator.deaths() == 1);
}

TEST_CASE("an untuned recipe that kills is avoided while the problem is made ready") {
  WorkerEvaluator evaluator(worker("segfault"), impatient());
  CHECK(evaluator.begin(misbehaving_problem()).refusal.empty());
  CHECK(evaluator.deaths() == 2);
  CHECK(evaluator.verify(odd(0)).failure.find("SIGSEGV") != std::string::npos);
  CHECK(evaluator.deaths() == 2);
  CHECK(evaluator.verify(odd(1)).passed);
}

TEST_CASE("a compilation that kills is found among those that ran beside it") {
  WorkerEvaluator evaluator(worker("crash_compile"), impatient());
  evaluator.avoid({odd(0).id()});
  REQUIRE(evaluator.begin(misbehaving_problem()).refusal.empty());
  std::map<std::size_t, int> told;
  const auto compiled =
      evaluator.compile({odd(1), odd(5), odd(2), odd(3)}, [&](std::size_t i, const Compiled&) {
        ++told[i];
        return true;
      });
  for (const std::size_t i : {0u, 2u, 3u}) CHECK(compiled[i].failure.empty());
  CHECK(compiled[1].fatal);
  for (const auto& [index, times] : told) CHECK(times == 1);
  CHECK(told.size() == 4);
}

TEST_CASE("a worker that is none, or speaks nonsense, is an error that says so") {
  CHECK_THROWS_AS(WorkerEvaluator({"/does/not/exist"}), Error);
  CHECK_THROWS_AS(WorkerEvaluator({WORKER_OF_TESTS, "nonsense", "none"}), Error);
  CHECK_THROWS_AS(WorkerEvaluator({"/bin/true"}), Error);
}

TEST_CASE("a variant that killed a worker is not run in later sweeps without a request") {
  const TemporaryFolder folder;
  const MisbehavingOp op("exit");
  const Catalog catalog{{&op}, &no_sources};
  for (const std::string step : {"first", "later", "retry", "cured", "after"}) {
    CAPTURE(step);
    const std::string way = step == "cured" || step == "after" ? "none" : "exit";
    WorkerEvaluator evaluator(worker(way), impatient());
    Quarantine quarantine(folder.path(), evaluator.facts());
    auto options = patient();
    options.quarantine = &quarantine;
    options.retry_quarantined = step == "retry" || step == "cured";
    const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
    REQUIRE(result.record);
    CHECK((evaluator.deaths() > 0) == (step == "first" || step == "retry"));
    int quarantined = 0;
    for (const auto& outcome : result.outcomes)
      quarantined += outcome.kind == OutcomeKind::quarantined;
    CHECK(quarantined == (step == "later" ? 40 : 0));
    CHECK(result.record->verdict.complete == (step != "later"));
    const bool told = std::any_of(result.notes.begin(), result.notes.end(), [](const auto& note) {
      return note.find("40 variants of first+second were left out") != std::string::npos &&
             note.find("--retry-quarantined") != std::string::npos;
    });
    CHECK(told == (step == "later"));
    CHECK(quarantine.of("toy").size() == (way == "none" ? 0u : 40u));
  }
}

TEST_CASE("want of memory is no variant's fault: it is named, and nothing is quarantined for it") {
  const TemporaryFolder folder;
  const MisbehavingOp op("killed");
  const Catalog catalog{{&op}, &no_sources};
  for (const std::string way : {"killed", "none"}) {
    CAPTURE(way);
    WorkerEvaluator evaluator(worker(way), impatient());
    Quarantine quarantine(folder.path(), evaluator.facts());
    Journal journal = Journal::open(folder.path(), evaluator.facts(), "toy", true);
    auto options = patient();
    options.quarantine = &quarantine;
    options.journal = &journal;
    const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
    REQUIRE(result.record);
    CHECK(quarantine.of("toy").empty());
    int killed = 0;
    for (const auto& outcome : result.outcomes) killed += outcome.kind == OutcomeKind::killed;
    CHECK(killed == (way == "none" ? 0 : 40));  // those of a resumed sweep are tried again
    CHECK(result.record->verdict.complete == (way == "none"));
    const bool told = std::any_of(result.notes.begin(), result.notes.end(), [](const auto& note) {
      return note.find("40 variants of first+second were not measured") != std::string::npos &&
             note.find("memory") != std::string::npos;
    });
    CHECK(told == (way == "killed"));
  }
}
