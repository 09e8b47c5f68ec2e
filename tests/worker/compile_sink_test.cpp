// An exception of a caller's compile sink is the caller's, wherever the device is.
#include <sys/socket.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/evaluate/multi_device_evaluator.hpp"
#include "tuning/remote/remote_evaluator.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const WorkerCommand worker_of_tests{WORKER_OF_TESTS, "worker", "none"};

Candidates candidates_from(int first, int last) {
  Candidates all;
  for (int p = first; p < last; ++p) all.push_back({0, {{"odd", {{"p", p}}}}, ""});
  return all;
}

}  // namespace

TEST_CASE("an exception of the compile sink reaches the caller, and the device serves on") {
  const std::string place = GENERATE("this process", "a worker", "another host", "several workers");
  CAPTURE(place);
  const MisbehavingOp op("none");
  const Catalog catalog{{&op}, &misbehaving_sources()};
  const auto backend = open_quick_cpu();
  const auto local = [&] { return std::make_unique<LocalEvaluator>(*backend, catalog, 1); };
  std::unique_ptr<LineChannel> rank;
  std::jthread serving;  // ends with the evaluator, whose channel it serves
  std::unique_ptr<Evaluator> evaluator;
  if (place == "this process") evaluator = local();
  if (place == "a worker") evaluator = std::make_unique<WorkerEvaluator>(worker_of_tests);
  if (place == "another host") {
    std::array<int, 2> ends;
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    rank = std::make_unique<LineChannel>(ends[1]);
    serving = std::jthread([&] { serve_remote(*rank, local); });
    evaluator = std::make_unique<RemoteEvaluator>(std::make_unique<LineChannel>(ends[0]), "rank 1");
  }
  if (place == "several workers") {
    const MultiDeviceEvaluator::Device one{
        "worker", [] { return std::make_unique<WorkerEvaluator>(worker_of_tests); }};
    evaluator = std::make_unique<MultiDeviceEvaluator>(std::vector{one, one});
  }
  REQUIRE(evaluator->begin(misbehaving_problem()).refusal.empty());

  int calls = 0;
  const auto disk_full = [&](std::size_t, const Compiled&) {
    if (++calls == 2) throw std::runtime_error("the disk is full");
    return true;
  };
  CHECK_THROWS_WITH(evaluator->compile(candidates_from(0, 20), disk_full), "the disk is full");
  CHECK(calls == 2);

  CHECK(evaluator->lost().empty());
  int compiled = 0;
  evaluator->compile(candidates_from(20, 24), [&](std::size_t, const Compiled& each) {
    compiled += each.failure.empty();
    return true;
  });
  CHECK(compiled == 4);
  CHECK(evaluator->verify(candidates_from(1, 2).front()).passed);
}

TEST_CASE("an exception of a trial's callback ends the trials of every device") {
  const MultiDeviceEvaluator::Device one{
      "worker", [] { return std::make_unique<WorkerEvaluator>(worker_of_tests); }};
  MultiDeviceEvaluator evaluator({one, one});
  REQUIRE(evaluator.begin(misbehaving_problem()).refusal.empty());
  const auto all = candidates_from(0, 200);
  int begun = 0;
  bool thrown = false;
  TrialCalls calls;
  calls.begins = [&](std::size_t) { ++begun; };
  calls.request = [] { return TimeRequest{}; };
  calls.ends = [&](std::size_t index, const Verified&, const Timing&) {
    if (index == 0) return true;  // the sentinel
    if (thrown) return true;
    thrown = true;
    throw std::runtime_error("the disk is full");
  };
  CHECK_THROWS_WITH(evaluator.try_each(all, calls), "the disk is full");
  CHECK(begun < 60);
  CHECK(evaluator.lost().empty());
}
