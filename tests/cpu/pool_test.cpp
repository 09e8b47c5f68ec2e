#include "cpu/pool.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a pool runs every task once, whatever the numbers of tasks and threads") {
  for (const int size : {1, 2, 5}) {
    Pool pool(size);
    REQUIRE(pool.max_threads() == size);
    for (const int tasks : {0, 1, 2, 3, 17, 1000})
      for (const int threads : {1, 2, 3, 100}) {
        std::vector<std::atomic<int>> calls(static_cast<std::size_t>(tasks));
        pool.run(tasks, threads, [&](int task) { ++calls[static_cast<std::size_t>(task)]; });
        for (const auto& count : calls) REQUIRE(count == 1);
      }
  }
}

TEST_CASE("a pool uses no more threads than asked for") {
  Pool pool(4);
  for (const int threads : {1, 2, 3}) {
    std::atomic<int> now{0}, most{0};
    pool.run(50, threads, [&](int) {
      const int running = ++now;
      int seen = most;
      while (running > seen && !most.compare_exchange_weak(seen, running)) {
      }
      std::this_thread::yield();
      --now;
    });
    REQUIRE(most <= threads);
  }
}

TEST_CASE("a task's exception reaches the caller and the pool goes on") {
  Pool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> calls{0};
    REQUIRE_THROWS_AS(pool.run(1000, 3,
                               [&](int task) {
                                 ++calls;
                                 if (task == 5) throw std::runtime_error("five");
                               }),
                      std::runtime_error);
    REQUIRE(calls >= 6);
    calls = 0;
    pool.run(100, 3, [&](int) { ++calls; });
    REQUIRE(calls == 100);
  }
}

TEST_CASE("a run inside a task runs in place") {
  Pool pool(3);
  std::atomic<int> inner{0};
  pool.run(6, 3, [&](int) {
    const auto self = std::this_thread::get_id();
    pool.run(7, 3, [&](int) {
      if (std::this_thread::get_id() == self) ++inner;
    });
  });
  REQUIRE(inner == 42);
}

TEST_CASE("callers from several threads take turns") {
  Pool pool(2);
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) pool.run(3, 2, [&](int) { ++total; });
    });
  for (auto& caller : callers) caller.join();
  REQUIRE(total == 4 * 200 * 3);
}

TEST_CASE("idle workers wake for a run after they have gone to sleep") {
  Pool pool(2);
  std::atomic<int> total{0};
  for (int round = 0; round < 10; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    pool.run(2, 2, [&](int) { ++total; });
  }
  REQUIRE(total == 20);
}

namespace {

std::atomic<bool> held{false}, released{false};

/// Holds the thread that takes the signal, as a scheduler does that has no core for it.
void hold(int) {
  held = true;
  while (!released) usleep(100);
}

}  // namespace

TEST_CASE("a job waits for no thread that has not begun") {
  Pool pool(2);
  std::atomic<pthread_t> worker{};
  std::atomic<int> inside{0};
  const pthread_t caller = pthread_self();
  pool.run(2, 2, [&](int) {  // both threads are in it at once
    ++inside;
    while (inside < 2) std::this_thread::yield();
    if (!pthread_equal(pthread_self(), caller)) worker = pthread_self();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the worker goes to sleep

  struct sigaction action = {}, before = {};
  action.sa_handler = hold;
  sigaction(SIGUSR1, &action, &before);
  held = released = false;
  pthread_kill(worker, SIGUSR1);
  while (!held) usleep(100);
  std::atomic<int> calls{0};
  auto all = std::async(std::launch::async, [&] {
    for (int round = 0; round < 100; ++round) pool.run(4, 2, [&](int) { ++calls; });
  });
  const auto status = all.wait_for(std::chrono::seconds(20));
  released = true;
  all.get();
  sigaction(SIGUSR1, &before, nullptr);
  CHECK(status == std::future_status::ready);
  CHECK(calls == 400);
  pool.run(4, 2, [&](int) { ++calls; });  // the worker that was held serves again, or sleeps
  CHECK(calls == 404);
}

TEST_CASE("a pool serves in a forked child, whoever was running, and ends there") {
  for (int i = 0; i < 20; ++i) {
    Pool pool(4);
    std::atomic<bool> stop{false};
    // Another thread holds the pool's locks at the fork, most likely.
    std::thread busy([&] {
      while (!stop) pool.run(64, 4, [](int) {});
    });
    pool.run(64, 4, [](int) {});
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      std::atomic<int> sum{0};
      {
        Pool own(3);
        own.run(10, 3, [&](int task) { sum += task; });
      }
      for (int again = 0; again < 10; ++again) pool.run(100, 4, [&](int task) { sum += task; });
      pool.~Pool();
      _exit(sum == 45 + 10 * 4950 ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    stop = true;
    busy.join();
    REQUIRE(status == 0);
  }
}

TEST_CASE("a pool whose threads cannot all be started is an error, and ends those that were") {
#ifdef __SANITIZE_ADDRESS__  // it maps memory of its own for every thread
  FFTUNE_SKIP("a sanitizer needs addresses of its own");
#endif
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);
    // Every thread's stack takes 8 MB of addresses: some fit, 10,000 do not.
    const rlimit addresses{1 << 30, 1 << 30};
    ::setrlimit(RLIMIT_AS, &addresses);
    constexpr std::size_t too_many = std::size_t{2} << 30;
    if (::mmap(nullptr, too_many, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
      ::_exit(2);
    try {
      Pool pool(10000);
    } catch (const std::system_error&) {
      ::_exit(0);
    }
    ::_exit(1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2)
    FFTUNE_SKIP("no limit of addresses holds here, as under qemu-user");
  CHECK(status == 0);
}
