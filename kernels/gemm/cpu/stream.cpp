// For few tokens: streams every weight from memory once, over all threads.
//
// A step multiplies a few rows of weights with up to four tokens, in vectors along the rows, so
// nothing is packed or transposed: such problems are bound by reading the weights.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu_vector.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/cpu/work.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune {
namespace {

using namespace gemm_cpu;

constexpr std::int64_t most_tokens = 8;
constexpr std::int64_t token_group = 4;  // what VectorKernels::dot takes at once
constexpr std::int64_t most_rows = 4;

struct Stream {
  GatedChain layer;
  std::int64_t rows = 1;        // weight rows of a step
  std::int64_t task_rows = 16;  // weight rows of a task
  int threads = 1;
  const VectorKernels* vector = nullptr;

  /// out[row * tokens + token] for `count` rows of weights from `row` on, with `tokens` rows of x.
  void dot(const void* weights, std::int64_t row, std::int64_t count, const float* x,
           std::int64_t tokens, std::int64_t depth, float* out) const {
    const auto n = [](std::int64_t value) { return static_cast<std::size_t>(value); };
    const std::int64_t at = row * depth;
    if (layer.dtype == DType::f32)
      vector->dot(static_cast<const float*>(weights) + at, n(depth), x, n(depth), n(depth),
                  n(count), n(tokens), out);
    else
      vector->dot_bf16(static_cast<const std::uint16_t*>(weights) + at, n(depth), x, n(depth),
                       n(depth), n(count), n(tokens), out);
  }
  float rounded(float value) const {
    return layer.dtype == DType::f32 ? value : float_from_bf16(bf16_from_float(value));
  }
};

/// Calls body(row, count, token, tokens) for every group of weight rows and tokens, in parallel
/// over tasks of rows.
template <typename Body>
void for_groups(const Stream& stream, Parallel& parallel, std::int64_t rows, const Body& body) {
  const std::int64_t tasks = ceil_div(rows, stream.task_rows);
  deal(parallel, stream.threads, tasks, [&](std::size_t, std::int64_t task) {
    const std::int64_t last = std::min(rows, (task + 1) * stream.task_rows);
    for (std::int64_t row = task * stream.task_rows; row < last; row += stream.rows)
      for (std::int64_t token = 0; token < stream.layer.m; token += token_group)
        body(row, std::min(stream.rows, last - row), token,
             std::min(token_group, stream.layer.m - token));
  });
}

/// hidden [m, h] in float, rounded to the dtype.
void gate_up(const Stream& stream, const HostCall& call, const float* x, float* hidden) {
  const std::int64_t d = stream.layer.d, h = stream.layer.h;
  for_groups(
      stream, call.parallel, h,
      [&](std::int64_t row, std::int64_t count, std::int64_t token, std::int64_t tokens) {
        float gate[most_rows * token_group], up[most_rows * token_group];
        stream.dot(call.tensors[stream.layer.w_gate], row, count, x + token * d, tokens, d, gate);
        stream.dot(call.tensors[stream.layer.w_up], row, count, x + token * d, tokens, d, up);
        stream.vector->gated(stream.layer.activation, gate, up, gate,
                             static_cast<std::size_t>(count * tokens));
        for (std::int64_t r = 0; r < count; ++r)
          for (std::int64_t t = 0; t < tokens; ++t)
            hidden[(token + t) * h + row + r] = stream.rounded(gate[r * tokens + t]);
      });
}

void down(const Stream& stream, const HostCall& call, const float* hidden) {
  const std::int64_t d = stream.layer.d, h = stream.layer.h;
  void* y = call.tensors[stream.layer.y];
  for_groups(stream, call.parallel, d,
             [&](std::int64_t row, std::int64_t count, std::int64_t token, std::int64_t tokens) {
               float sums[most_rows * token_group];
               stream.dot(call.tensors[stream.layer.w_down], row, count, hidden + token * h, tokens,
                          h, sums);
               for (std::int64_t r = 0; r < count; ++r)
                 for (std::int64_t t = 0; t < tokens; ++t) {
                   const std::int64_t at = (token + t) * d + row + r;
                   const float value = sums[r * tokens + t];
                   if (stream.layer.dtype == DType::f32)
                     static_cast<float*>(y)[at] = value;
                   else
                     static_cast<std::uint16_t*>(y)[at] = bf16_from_float(value);
                 }
             });
}

std::optional<std::string> can_implement(const GemmChain& chain, const DeviceFacts&) {
  if (auto reason = refuse_gated_chain(chain)) return reason;
  if (chain[0].m <= most_tokens) return std::nullopt;
  return "it is for at most 8 tokens: more of them reuse a weight that tiles keep in registers";
}

Space space(const GemmChain& chain, const DeviceFacts& facts) {
  return Space()
      .parameter("rows", "weight rows that share the loads of a token", {1, 2, 4})
      .parameter("task_rows", "weight rows of a task", {16, 64, 256})
      .parameter("threads", "threads", thread_counts(chain, facts));
}

Config default_config(const GemmChain& chain, const DeviceFacts& facts) {
  return {{"rows", 4}, {"task_rows", 64}, {"threads", default_threads(chain, facts)}};
}

void append(Program& program, const GemmChain& chain, const TensorPlaces& places,
            const DeviceFacts& facts, const Config& config) {
  const Stream stream{.layer = gated_chain(chain, places),
                      .rows = config.at("rows"),
                      .task_rows = config.at("task_rows"),
                      .threads = config.get("threads"),
                      .vector = &vector_kernels(facts.arch)};
  const std::int64_t x_floats = stream.layer.m * stream.layer.d;
  const bool is_f32 = stream.layer.dtype == DType::f32;
  const std::size_t first = program.scratch.size();
  program.scratch.push_back({bytes_of_floats(is_f32 ? 0 : x_floats), false});
  program.scratch.push_back({bytes_of_floats(stream.layer.m * stream.layer.h), false});
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const void* x = call.tensors[stream.layer.x];
    auto* widened = reinterpret_cast<float*>(call.scratch[first]);
    auto* hidden = reinterpret_cast<float*>(call.scratch[first + 1]);
    if (!is_f32)
      stream.vector->widen(static_cast<const std::uint16_t*>(x), widened,
                           static_cast<std::size_t>(x_floats));
    gate_up(stream, call, is_f32 ? static_cast<const float*>(x) : widened, hidden);
    down(stream, call, hidden);
  }));
}

}  // namespace

constinit const Engine cpu_stream_engine{.name = "cpu_stream",
                                         .device_kind = DeviceKind::cpu,
                                         .can_implement = can_implement,
                                         .search = {space, default_config},
                                         .append = append,
                                         .sources = {"gemm/cpu/stream.cpp"}};

}  // namespace fftune
