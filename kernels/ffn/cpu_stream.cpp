// For few tokens: streams every weight from memory once, over all threads.
//
// A step multiplies a few rows of weights with up to four tokens, in vectors along the rows, so
// nothing is packed or transposed: the weights' way from memory is all that such problems cost.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/ffn/cpu_work.hpp"
#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr std::int64_t most_tokens = 8;
constexpr std::int64_t token_group = 4;  // what VectorKernels::dot takes at once
constexpr std::int64_t most_rows = 4;

struct Stream {
  Shape shape;
  Places places;
  DType dtype = DType::f32;
  Activation activation = Activation::silu;
  std::int64_t rows = 1;        // weight rows of a step
  std::int64_t task_rows = 16;  // weight rows of a task
  int threads = 1;
  const VectorKernels* vector = nullptr;

  /// out[row * tokens + token] for `count` rows of weights from `row` on, with `tokens` rows of x.
  void dot(const void* weights, std::int64_t row, std::int64_t count, const float* x,
           std::int64_t tokens, std::int64_t depth, float* out) const {
    const auto n = [](std::int64_t value) { return static_cast<std::size_t>(value); };
    const std::int64_t at = row * depth;
    if (dtype == DType::f32)
      vector->dot(static_cast<const float*>(weights) + at, n(depth), x, n(depth), n(depth),
                  n(count), n(tokens), out);
    else
      vector->dot_bf16(static_cast<const std::uint16_t*>(weights) + at, n(depth), x, n(depth),
                       n(depth), n(count), n(tokens), out);
  }
  float rounded(float value) const {
    return dtype == DType::f32 ? value : float_from_bf16(bf16_from_float(value));
  }
};

/// Calls body(row, count, token, tokens) for every group of weight rows and tokens, in parallel
/// over tasks of rows.
template <typename Body>
void for_groups(const Stream& stream, Parallel& parallel, std::int64_t rows, const Body& body) {
  const std::int64_t tasks = ceil_of(rows, stream.task_rows);
  deal(parallel, stream.threads, tasks, [&](std::size_t, std::int64_t task) {
    const std::int64_t last = std::min(rows, (task + 1) * stream.task_rows);
    for (std::int64_t row = task * stream.task_rows; row < last; row += stream.rows)
      for (std::int64_t token = 0; token < stream.shape.m; token += token_group)
        body(row, std::min(stream.rows, last - row), token,
             std::min(token_group, stream.shape.m - token));
  });
}

/// hidden [m, h] in float, rounded to the dtype.
void gate_up(const Stream& stream, const HostCall& call, const float* x, float* hidden) {
  const auto [m, d, h] = stream.shape;
  for_groups(stream, call.parallel, h,
             [&, d = d, h = h](std::int64_t row, std::int64_t count, std::int64_t token,
                               std::int64_t tokens) {
               float gate[most_rows * token_group], up[most_rows * token_group];
               stream.dot(call.tensors[tensor::w_gate], row, count, x + token * d, tokens, d, gate);
               stream.dot(call.tensors[tensor::w_up], row, count, x + token * d, tokens, d, up);
               stream.vector->gated(stream.activation, gate, up, gate,
                                    static_cast<std::size_t>(count * tokens));
               for (std::int64_t r = 0; r < count; ++r)
                 for (std::int64_t t = 0; t < tokens; ++t)
                   hidden[(token + t) * h + row + r] = stream.rounded(gate[r * tokens + t]);
             });
}

void down(const Stream& stream, const HostCall& call, const float* hidden) {
  const auto [m, d, h] = stream.shape;
  void* y = call.tensors[stream.places.y];
  for_groups(stream, call.parallel, d,
             [&, d = d, h = h](std::int64_t row, std::int64_t count, std::int64_t token,
                               std::int64_t tokens) {
               float sums[most_rows * token_group];
               stream.dot(call.tensors[tensor::w_down], row, count, hidden + token * h, tokens, h,
                          sums);
               for (std::int64_t r = 0; r < count; ++r)
                 for (std::int64_t t = 0; t < tokens; ++t) {
                   const std::int64_t at = (token + t) * d + row + r;
                   const float value = sums[r * tokens + t];
                   if (stream.dtype == DType::f32)
                     static_cast<float*>(y)[at] = value;
                   else
                     static_cast<std::uint16_t*>(y)[at] = bf16_from_float(value);
                 }
             });
}

class CpuStream final : public Family {
 public:
  std::string_view name() const override { return "cpu_stream"; }
  std::string_view summary() const override {
    return "few tokens: every weight read from memory once";
  }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_gate_up, stage_down}; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (problem.pass != "fwd") return forward_alone;
    if (is_quantised(problem)) return no_fp8;
    if (!form_of(problem).plain()) return plain_alone;
    if (problem.size("m") <= most_tokens) return std::nullopt;
    return "it is for at most 8 tokens: more of them reuse a weight that tiles keep in registers";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return Space()
        .parameter("rows", "weight rows that share the loads of a token", {1, 2, 4})
        .parameter("task_rows", "weight rows of a task", {16, 64, 256})
        .parameter("threads", "threads", thread_counts(shape_of(problem), facts));
  }
  Config default_config(const Problem&, const DeviceFacts& facts) const override {
    return {{"rows", 4}, {"task_rows", 64}, {"threads", facts.multiprocessors}};
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Stream stream{.shape = shape_of(problem),
                        .places = places_of(problem),
                        .dtype = problem.dtype,
                        .activation = parse_activation(problem.option("act")),
                        .rows = config.at("rows"),
                        .task_rows = config.at("task_rows"),
                        .threads = config.get("threads"),
                        .vector = &vector_kernels(facts.arch)};
    const auto tokens = static_cast<std::size_t>(stream.shape.m);
    const auto x_floats = tokens * static_cast<std::size_t>(stream.shape.d);
    const auto hidden_floats = tokens * static_cast<std::size_t>(stream.shape.h);
    const bool wide = stream.dtype == DType::f32;
    Program program;
    program.host_tensors = stream.places.count;
    program.scratch = {{wide ? 0 : x_floats * sizeof(float), false},
                       {hidden_floats * sizeof(float), false}};
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const void* x = call.tensors[stream.places.gate_up_x];
      auto* widened = reinterpret_cast<float*>(call.scratch[0]);
      auto* hidden = reinterpret_cast<float*>(call.scratch[1]);
      if (!wide) stream.vector->widen(static_cast<const std::uint16_t*>(x), widened, x_floats);
      gate_up(stream, call, wide ? static_cast<const float*>(x) : widened, hidden);
      down(stream, call, hidden);
    }));
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"ffn/cpu_stream.cpp", vector_kernel_source};
  }
};

}  // namespace

const Family& cpu_stream_family() {
  static const CpuStream family;
  return family;
}

}  // namespace fftune::ffn
