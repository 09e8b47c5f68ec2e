#include "core/parallel_until.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "device/host_threads.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

/// Sets a flag at the end of its thread.
struct AtThreadEnd {
  ~AtThreadEnd() {
    if (flag != nullptr) *flag = true;
  }
  std::atomic<bool>* flag = nullptr;
};

thread_local AtThreadEnd at_thread_end;

}  // namespace

TEST_CASE("every task runs once, and none begins after one says no") {
  for (const std::size_t threads : {1, 2, 7}) {
    std::vector<std::atomic<int>> runs(100);
    parallel_until(100, threads, [&](std::size_t i) {
      ++runs[i];
      return true;
    });
    CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& count) { return count == 1; }));
  }
  std::atomic<int> started{0};
  parallel_until(1000, 3, [&](std::size_t) { return ++started < 5; });
  CHECK(started >= 5);
  CHECK(started <= 8);
  parallel_until(0, 3, [](std::size_t) { return true; });
}

TEST_CASE("an exception of a task on another thread is rethrown once all tasks have ended") {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> left{std::min(3, HostThreads().max_threads())};  // tasks that have not begun
  std::atomic<int> running{0};
  std::atomic<bool> thrown{false};
  std::atomic<bool> gone{false};  // the thread that threw
  const auto body = [&](int) {
    ++running;
    --left;
    while (left > 0) std::this_thread::yield();
    const bool first = std::this_thread::get_id() != caller && !thrown.exchange(true);
    if (first) {
      at_thread_end.flag = &gone;
      --running;
      throw std::runtime_error("of a helper");
    }
    while (!gone) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    --running;
  };
  SECTION("parallel_until") {
    left = 3;
    const auto task = [&](std::size_t i) {
      body(static_cast<int>(i));
      return true;
    };
    CHECK_THROWS_WITH(parallel_until(1000, 3, task), "of a helper");
  }
  SECTION("HostThreads") {
    if (left < 2) FFTUNE_SKIP("one core");
    CHECK_THROWS_WITH(HostThreads().run(1000, 3, body), "of a helper");
  }
  CHECK(running == 0);
  CHECK(left == 0);  // none began behind the one that threw
}
