// The options of a context: threads, a pool of the caller's, and counters.
#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api/layer.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Counts what it is asked to run, on threads of its own or in place.
struct CountingPool {
  std::atomic<int> calls{0};
  std::atomic<int> most_tasks{0};
  bool threads = false;
  bool forgets = false;  // the last task

  static void run(void* self, int tasks, void (*task)(void*, int), void* state) {
    auto& pool = *static_cast<CountingPool*>(self);
    ++pool.calls;
    if (tasks > pool.most_tasks) pool.most_tasks = tasks;
    if (pool.forgets) return;
    std::vector<std::thread> threads;
    for (int i = 0; i < tasks; ++i)
      if (pool.threads)
        threads.emplace_back([=] { task(state, i); });
      else
        task(state, i);
    for (auto& thread : threads) thread.join();
  }

  fftune_context_options options(int most) {
    fftune_context_options options{};
    options.threads = most;
    options.parallel_for = &CountingPool::run;
    options.pool = this;
    return options;
  }
};

double run_and_error(const library::Context& context) {
  Layer layer(64, 64, 96);
  const auto plan = context.plan(ffn_json(64, 64, 96));
  HostWorkspace workspace(plan);
  const auto buffers = layer.buffers();
  plan.run(buffers.data(), buffers.size(), workspace.data());
  return relative_error(layer.y, layer.expected());
}

}  // namespace

TEST_CASE("a caller's pool runs the tasks of plans") {
  for (const bool threads : {false, true}) {
    CountingPool pool;
    pool.threads = threads;
    const library::Context context(-1, pool.options(2));
    CHECK(run_and_error(context) < 1e-5);
    if (std::thread::hardware_concurrency() > 1) CHECK(pool.calls > 0);
    CHECK(pool.most_tasks <= 2);
  }
}

TEST_CASE("a caller's pool that forgets tasks is an error") {
  if (std::thread::hardware_concurrency() < 2) return;
  CountingPool pool;
  pool.forgets = true;
  const library::Context context(-1, pool.options(2));
  CHECK_THROWS_AS(run_and_error(context), library::Exception);
  CHECK(last_error_says("parallel_for returned before all tasks were done"));
}

TEST_CASE("one thread is enough, by the option and by the environment") {
  CountingPool pool;
  const library::Context context(-1, pool.options(1));
  CHECK(run_and_error(context) < 1e-5);
  CHECK(pool.calls == 0);  // what one thread does is done in place

  ::setenv("FFTUNE_THREADS", "1", 1);
  CountingPool other;
  CHECK(run_and_error(library::Context(-1, other.options(0))) < 1e-5);
  CHECK(other.calls == 0);
  for (const char* wrong : {"0", "two", "-1", "1.5", "1 "}) {
    ::setenv("FFTUNE_THREADS", wrong, 1);
    fftune_context* opened = nullptr;
    CHECK(fftune_context_create(-1, nullptr, &opened) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says(std::string("FFTUNE_THREADS is '") + wrong + "'"));
  }
  ::unsetenv("FFTUNE_THREADS");
}

TEST_CASE("options say what is wrong with them") {
  fftune_context* context = nullptr;
  fftune_context_options options{};
  CHECK(fftune_context_create_with(-1, &options, &context) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("fftune_context_options.struct_size is 0"));
  options.struct_size = sizeof options;
  options.threads = -1;
  CHECK(fftune_context_create_with(-1, &options, &context) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("threads is -1"));
  options.threads = 0;
  options.preset_path = "/no/such\x1b[31m/folder";
  CHECK(fftune_context_create_with(-1, &options, &context) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("preset_path '/no/such?[31m/folder' is not a folder"));
  CHECK(context == nullptr);
  REQUIRE(fftune_context_create_with(-1, nullptr, &context) == FFTUNE_OK);
  fftune_context_destroy(context);
}

TEST_CASE("counters count plans, and write no more than the caller's struct has") {
  const auto context = cpu_context();
  CHECK(context.counters().plans == 0);
  context.plan(ffn_json(4, 16, 24));
  const auto counters = context.counters();
  CHECK(counters.plans == 1);
  CHECK(counters.plan_nanoseconds > 0);
  CHECK(counters.compilations == 0);

  fftune_context* raw = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &raw) == FFTUNE_OK);
  fftune_counters shorter{};
  shorter.struct_size = offsetof(fftune_counters, plans);
  shorter.plans = 77;
  CHECK(fftune_context_counters(raw, &shorter) == FFTUNE_OK);
  CHECK(shorter.plans == 77);
  shorter.struct_size = 0;
  CHECK(fftune_context_counters(raw, &shorter) == FFTUNE_INVALID_INPUT);
  CHECK(fftune_context_counters(nullptr, &shorter) == FFTUNE_INVALID_INPUT);
  CHECK(fftune_context_counters(raw, nullptr) == FFTUNE_INVALID_INPUT);
  fftune_context_destroy(raw);
}
