// Running plans on the CPU: the result, and every argument that is refused.
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "api/layer.hpp"
#include "core/dtype.hpp"
#include "support/catch.hpp"
#include "support/child.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("y is what plain loops find, at any size") {
  const auto context = cpu_context();
  const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>> sizes{
      {1, 1, 1}, {1, 7, 3}, {5, 24, 40}, {61, 64, 128}, {130, 33, 65}};
  for (const auto& [m, d, h] : sizes) {
    Layer layer(m, d, h);
    const auto plan = context.plan(ffn_json(m, d, h));
    HostWorkspace workspace(plan);
    const auto buffers = layer.buffers();
    plan.run(buffers.data(), buffers.size(), workspace.data());
    INFO(plan.describe());
    CHECK(relative_error(layer.y, layer.expected()) < 1e-5);
  }
}

TEST_CASE("bf16 is within its rounding") {
  Layer layer(61, 64, 128);
  std::vector<std::vector<std::uint16_t>> halves;
  std::vector<void*> buffers;
  for (auto* values : {&layer.x, &layer.w_gate, &layer.w_up, &layer.w_down, &layer.y}) {
    auto& half = halves.emplace_back(values->size());
    encode(DType::bf16, *values, half.data());
    decode(DType::bf16, half.data(), *values);  // so that the expected y is of the same inputs
  }
  for (auto& half : halves) buffers.push_back(half.data());
  const auto plan = cpu_context().plan(ffn_json(61, 64, 128, ",\"dtype\":\"bf16\""));
  HostWorkspace workspace(plan);
  plan.run(buffers.data(), buffers.size(), workspace.data());
  decode(DType::bf16, halves.back().data(), layer.y);
  CHECK(relative_error(layer.y, layer.expected()) < 3.5e-3);
}

TEST_CASE("a tensor that is updated in place is one buffer among the inputs") {
  const auto plan = cpu_context().plan(
      "{\"op\":\"ngram-block\",\"b\":1,\"len\":5,\"vocab\":4,\"ids\":\"i64\",\"n\":\"2\"}");
  CHECK(plan.describe().find("\"role\": \"updated\"") != std::string::npos);
  std::vector<std::int64_t> ids{2, 3, 9, 1, 2};
  std::vector<float> logits{5, 6, 7, 8};
  std::int32_t invalid = -1;
  const std::vector<void*> buffers{ids.data(), logits.data(), &invalid};
  HostWorkspace workspace(plan);
  plan.run(buffers.data(), buffers.size(), workspace.data());
  CHECK(logits == std::vector<float>{5, 6, 7, -std::numeric_limits<float>::infinity()});
  CHECK(invalid == 1);
}

TEST_CASE("a plan outlives its context") {
  Layer layer(4, 16, 24);
  auto context = std::make_unique<library::Context>(-1);
  const auto plan = context->plan(ffn_json(4, 16, 24));
  context.reset();
  HostWorkspace workspace(plan);
  const auto buffers = layer.buffers();
  plan.run(buffers.data(), buffers.size(), workspace.data());
  CHECK(relative_error(layer.y, layer.expected()) < 1e-5);
}

TEST_CASE("a plan runs from several threads at once, to the same bits") {
  Layer layer(64, 48, 96);
  const auto context = cpu_context();
  const auto plan = context.plan(ffn_json(64, 48, 96));
  std::vector<std::vector<float>> results(4, std::vector<float>(layer.y.size()));
  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&] {
      HostWorkspace workspace(plan);
      auto buffers = layer.buffers();
      buffers.back() = result.data();
      for (int i = 0; i < 5; ++i) plan.run(buffers.data(), buffers.size(), workspace.data());
    });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) CHECK(result == results.front());
  CHECK(relative_error(results.front(), layer.expected()) < 1e-5);
}

TEST_CASE("a forked child runs and destroys what its parent made, as data loaders do") {
  Layer layer(61, 64, 128);
  auto context = std::make_unique<library::Context>(-1);
  auto plan = std::make_unique<library::Plan>(context->plan(ffn_json(61, 64, 128)));
  HostWorkspace workspace(*plan);
  const auto buffers = layer.buffers();
  plan->run(buffers.data(), buffers.size(), workspace.data());
  const auto expected = layer.y;
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    layer.y.assign(layer.y.size(), 0);
    plan->run(buffers.data(), buffers.size(), workspace.data());
    plan.reset();
    context.reset();
    _exit(layer.y == expected ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("a child that is forked while another thread runs a plan runs its own") {
  Layer layer(61, 64, 128);
  const auto context = cpu_context();
  const auto busy = context.plan(ffn_json(61, 64, 128)), plan = context.plan(ffn_json(61, 64, 128));
  HostWorkspace own(busy), workspace(plan);
  const auto buffers = layer.buffers();
  std::atomic<bool> stops = false;
  std::thread other([&] {
    std::vector<float> result(layer.y.size());
    auto its = layer.buffers();
    its.back() = result.data();
    while (!stops) busy.run(its.data(), its.size(), own.data());
  });
  int hung = 0;
  for (int i = 0; i < 8; ++i) {
    hung += fails_in_child([&] { plan.run(buffers.data(), buffers.size(), workspace.data()); });
    if (hung > 0) break;
  }
  stops = true;
  other.join();
  CHECK(hung == 0);
}

TEST_CASE("a child that is forked while other threads make plans makes its own") {
  const auto context = cpu_context();
  std::atomic<bool> stops = false;
  std::atomic<int> tokens = 1;
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&] {
      while (!stops) {
        context.plan(ffn_json(static_cast<std::size_t>(tokens++), 64, 128));
        library::Context(-1).plan(ffn_json(3, 64, 128));
      }
    });
  int failed = 0;
  for (int i = 0; i < 200 && failed == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 5));
    failed += fails_in_child([&] {
      Layer layer(5, 64, 128);
      const auto plan = library::Context(-1).plan(ffn_json(5, 64, 128));
      const auto another = context.plan(ffn_json(6, 64, 128));
      HostWorkspace workspace(plan);
      const auto buffers = layer.buffers();
      plan.run(buffers.data(), buffers.size(), workspace.data());
    });
  }
  stops = true;
  for (auto& other : others) other.join();
  CHECK(failed == 0);
}

TEST_CASE("a child that is forked while other threads ask about plans makes its own") {
  const auto context = cpu_context();
  const auto asked = context.plan(ffn_json(5, 64, 128));
  std::atomic<bool> stops = false;
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&] {
      while (!stops) asked.describe();
    });
  int failed = 0;
  for (int i = 0; i < 15 && failed == 0; ++i) {
    failed += fails_in_child([] { library::Context(-1).plan(ffn_json(6, 64, 128)); });
  }
  stops = true;
  for (auto& other : others) other.join();
  CHECK(failed == 0);
}

TEST_CASE("arguments that cannot be run are refused, and nothing is written") {
  Layer layer(4, 16, 24);
  const auto context = cpu_context();
  const auto owner = context.plan(ffn_json(4, 16, 24));
  const fftune_plan* const plan = owner.get();
  HostWorkspace workspace(owner);
  const auto good = layer.buffers();
  const auto run = [&](const std::vector<void*>& buffers, std::size_t count, void* scratch) {
    return fftune_plan_run(plan, buffers.data(), count, scratch, nullptr);
  };

  CHECK(fftune_plan_run(nullptr, good.data(), 5, workspace.data(), nullptr) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("plan is NULL"));
  CHECK(fftune_plan_run(plan, nullptr, 5, workspace.data(), nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("buffers is NULL"));
  for (const std::size_t count : {0U, 4U, 6U}) {
    std::vector<void*> buffers = good;
    buffers.push_back(layer.y.data());
    CHECK(run(buffers, count, workspace.data()) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says(std::to_string(count) + " buffers given, 5 needed: x, w_gate"));
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    auto buffers = good;
    buffers[i] = nullptr;
    CHECK(run(buffers, 5, workspace.data()) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says("buffer " + std::to_string(i)));
    CHECK(last_error_says("is NULL"));
    buffers[i] = static_cast<char*>(good[i]) + 1;
    CHECK(run(buffers, 5, workspace.data()) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says("is not aligned to 4 bytes"));
  }
  if (owner.workspace_bytes() > 0) {
    CHECK(run(good, 5, nullptr) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says("workspace is NULL"));
    CHECK(run(good, 5, static_cast<char*>(workspace.data()) + 128) == FFTUNE_INVALID_INPUT);
    CHECK(last_error_says("is not aligned to 256 bytes"));
  }
  CHECK(layer.y == std::vector<float>(layer.y.size(), -1));
  CHECK(run(good, 5, workspace.data()) == FFTUNE_OK);
  CHECK(relative_error(layer.y, layer.expected()) < 1e-5);
}
