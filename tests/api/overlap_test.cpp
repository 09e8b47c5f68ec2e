// Which buffers of a run may overlap.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/layer.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

fftune_status run(const library::Plan& plan, const std::vector<float*>& buffers) {
  const std::vector<void*> all(buffers.begin(), buffers.end());
  HostWorkspace workspace(plan);
  return fftune_plan_run(plan.get(), all.data(), all.size(), workspace.data(), nullptr);
}

}  // namespace

TEST_CASE("an output that overlaps another buffer is refused, and nothing is written") {
  // x, w_gate, w_up [24, 16] and w_down, then y: x and y are [4, 16].
  const auto plan = cpu_context().plan(ffn_json(4, 16, 24));
  std::vector<float> memory(64 + 3 * 384 + 64, 0.25F);
  float* const x = memory.data();
  float* const gate = x + 64;
  float* const up = gate + 384;
  float* const down = up + 384;
  float* const y = down + 384;
  const auto refused = [&](float* output) {
    const auto status = run(plan, {x, gate, up, down, output});
    return status == FFTUNE_INVALID_INPUT && last_error_says("output 4 (y) overlaps buffer");
  };
  CHECK(refused(x));
  CHECK(last_error_says("buffer 0 (x): give it memory of its own"));
  CHECK(refused(gate));
  CHECK(last_error_says("buffer 1 (w_gate)"));
  CHECK(refused(x + 63));  // the last element of x, and the first ones of w_gate
  CHECK(refused(down + 383));
  CHECK(last_error_says("buffer 3 (w_down)"));
  CHECK(memory == std::vector<float>(memory.size(), 0.25F));
  CHECK(run(plan, {x, gate, up, down, y}) == FFTUNE_OK);    // next to each other
  CHECK(run(plan, {x, gate, gate, down, y}) == FFTUNE_OK);  // inputs in one place
}

TEST_CASE("a workspace that overlaps a buffer is refused, and nothing is written") {
  const auto plan = cpu_context().plan(ffn_json(4, 16, 24));
  const std::size_t bytes = fftune_plan_workspace_bytes(plan.get());
  REQUIRE(bytes > 0);
  constexpr std::size_t of_inputs = 64 + 3 * 384;
  std::vector<float> memory(of_inputs + 64 + bytes / sizeof(float) + 192, 0.25F);
  float* const x = memory.data();
  float* const down = x + 64 + 2 * 384;
  // Behind the output, at a multiple of 256 bytes.
  const auto place =
      (reinterpret_cast<std::uintptr_t>(memory.data() + of_inputs + 64) + 255) / 256 * 256;
  void* buffers[]{x, x + 64, x + 64 + 384, down, down + 384};
  const auto run_with = [&](std::uintptr_t workspace) {
    return fftune_plan_run(plan.get(), buffers, 5, reinterpret_cast<void*>(workspace), nullptr);
  };
  buffers[4] = reinterpret_cast<float*>(place) - 63;  // the last element is the workspace's first
  CHECK(run_with(place) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("overlaps buffer 4 (y): give it memory of its own"));
  CHECK(memory == std::vector<float>(memory.size(), 0.25F));
  buffers[4] = reinterpret_cast<float*>(place) - 64;
  CHECK(run_with(place) == FFTUNE_OK);
  buffers[0] = reinterpret_cast<float*>(place + bytes) - 1;
  CHECK(run_with(place) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("overlaps buffer 0 (x)"));
}

TEST_CASE("two outputs in the same memory are refused") {
  const auto plan = cpu_context().plan("{\"op\":\"moe-route\",\"m\":4,\"experts\":8,\"top-k\":2}");
  std::vector<float> scores(32, 0), first(64), second(64);
  REQUIRE(plan.buffer_count() == 3);
  CHECK(run(plan, {scores.data(), first.data(), second.data()}) == FFTUNE_OK);
  CHECK(run(plan, {scores.data(), first.data(), first.data()}) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("overlaps buffer"));
  CHECK(run(plan, {scores.data(), first.data(), first.data() + 7}) == FFTUNE_INVALID_INPUT);
  CHECK(run(plan, {scores.data(), first.data() + 7, first.data()}) == FFTUNE_INVALID_INPUT);
  CHECK(run(plan, {scores.data(), first.data() + 8, first.data()}) == FFTUNE_OK);
}

TEST_CASE("a gradient that is added to another may be in its place, and nowhere else") {
  const auto plan = cpu_context().plan(
      "{\"op\":\"linear\",\"pass\":\"bwd\",\"m\":3,\"k\":8,\"n\":8,\"accumulate\":\"yes\"}");
  // dy, x, w, dw_before, dx, dw
  std::vector<float> dy(24, 1), x(24, 2), w(64, 3), dw(128, 4), dx(24);
  REQUIRE(run(plan, {dy.data(), x.data(), w.data(), dw.data(), dx.data(), dw.data()}) == FFTUNE_OK);
  CHECK(dw[0] == 4 + 3 * 2);
  CHECK(run(plan, {dy.data(), x.data(), dw.data(), dw.data() + 64, dx.data(), dw.data()}) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("overlaps buffer 2 (w)"));
  CHECK(run(plan, {dy.data(), x.data(), w.data(), dw.data(), dy.data(), dw.data()}) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 4 (dx) overlaps buffer 0 (dy)"));
  CHECK(run(plan, {dy.data(), x.data(), w.data(), dw.data(), dx.data(), dw.data() + 8}) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 5 (dw) overlaps buffer 3 (dw_before)"));
}

TEST_CASE("a residual may be the sum that it is part of, and no part of it") {
  const auto plan = cpu_context().plan(
      "{\"op\":\"rmsnorm\",\"m\":2,\"d\":8,\"residual\":\"yes\",\"save\":\"nothing\"}");
  REQUIRE(plan.buffer_count() == 5);
  std::vector<float> x(16, 1), sum(32, 2), w(8, 1), y(16);  // x, residual, w, y, sum
  CHECK(run(plan, {x.data(), sum.data(), w.data(), y.data(), sum.data()}) == FFTUNE_OK);
  CHECK(sum[15] == 3);
  CHECK(run(plan, {x.data(), sum.data(), w.data(), y.data(), sum.data() + 8}) ==
        FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 4 (sum) overlaps buffer 1 (residual)"));
  CHECK(run(plan, {x.data(), sum.data(), w.data(), sum.data(), y.data()}) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 3 (y) overlaps buffer 1 (residual)"));
}

TEST_CASE("an op may write its updated buffer in place, and no output over it") {
  const auto plan = cpu_context().plan("{\"op\":\"scale\",\"m\":2,\"h\":8}");
  std::vector<float> x(16, 2), factor(8, 3);
  REQUIRE(plan.buffer_count() == 2);
  CHECK(run(plan, {x.data(), factor.data()}) == FFTUNE_OK);
  CHECK(x.back() == 6);
  // q, slots and caches: q is the one output of role output.
  const auto qkv = cpu_context().plan(
      "{\"op\":\"qkv\",\"m\":1,\"d\":8,\"heads\":1,\"dim\":8,\"cache\":\"yes\",\"cache-slots\":4,"
      "\"cache-head\":16}");
  REQUIRE(qkv.buffer_count() == 8);  // x, w_q, w_k, w_v, k_cache, v_cache, slots, q
  std::vector<float> caches(4 * 16 + 8, 5), weights(64, 1), row(8, 1);
  std::int32_t slot = 0;
  const auto status = [&](float* q) {
    return run(qkv, {row.data(), weights.data(), weights.data(), weights.data(), caches.data(),
                     caches.data() + 8, reinterpret_cast<float*>(&slot), q});
  };
  CHECK(status(caches.data() + 48) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 7 (q) overlaps buffer 4 (k_cache)"));
  // Rows of k and v lie beside each other, and q begins behind the last one of v.
  CHECK(status(caches.data() + 64) == FFTUNE_OK);
  CHECK(caches.back() == 8);
}

TEST_CASE("a launch refuses an output over an input, for any number of tokens") {
  const auto plan =
      cpu_context().plan("{\"op\":\"ffn\",\"dtype\":\"f32\",\"m\":{\"max\":70},\"d\":16,\"h\":24}");
  std::vector<float> x(70 * 16, 1), weights(384, 1);
  HostWorkspace workspace(plan);
  const void* const inputs[]{x.data(), weights.data(), weights.data(), weights.data()};
  void* outputs[]{x.data()};
  const fftune_run one = run_of(inputs, outputs, workspace, 3);
  CHECK(fftune_plan_launch(plan.get(), &one) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("fftune_plan_launch: output 4 (y) overlaps buffer 0 (x)"));
  outputs[0] = x.data() + std::ptrdiff_t{3 * 16 - 1};
  CHECK(fftune_plan_launch(plan.get(), &one) == FFTUNE_INVALID_INPUT);
  // With 3 tokens, memory behind theirs is free.
  outputs[0] = x.data() + std::ptrdiff_t{3 * 16};
  CHECK(fftune_plan_launch(plan.get(), &one) == FFTUNE_OK);
}

TEST_CASE("an output may begin right behind views of packed rows") {
  // One head of q, k and v beside each other in rows of 24 elements; a row's rest is no view's.
  const auto plan = cpu_context().plan(
      "{\"op\":\"attention\",\"dtype\":\"f32\",\"b\":1,\"s\":4,\"heads\":1,\"dim\":8,\"q-row\":24,"
      "\"k-row\":24,\"v-row\":24}");
  REQUIRE(plan.buffer_count() == 4);
  std::vector<float> memory(4 * 24 + 4 * 8, 1);
  float* const rows = memory.data();
  CHECK(run(plan, {rows, rows + 8, rows + 16, rows + 96}) == FFTUNE_OK);
  CHECK(memory.back() == 1);  // the mean of ones
}

TEST_CASE("rows of heads may end with their tensor, and an output begin there") {
  const auto plan = cpu_context().plan(
      "{\"op\":\"head-linear\",\"m\":1,\"heads\":2,\"n\":2,\"k\":4,\"w-rows\":5}");
  REQUIRE(plan.buffer_count() == 3);
  // Two heads of five rows, whose last two rows are read; then y.
  std::vector<float> x(8, 1), w(2 * 5 * 4 + 4, 2);
  const auto status = [&](std::size_t first, std::size_t y) {
    return run(plan, {x.data(), w.data() + first, w.data() + y});
  };
  CHECK(status(12, 40) == FFTUNE_OK);
  CHECK(w[40] == 8);
  CHECK(status(12, 36) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("output 2 (y) overlaps buffer 1 (w)"));
  CHECK(status(0, 28) == FFTUNE_OK);
  CHECK(status(0, 27) == FFTUNE_INVALID_INPUT);
}
