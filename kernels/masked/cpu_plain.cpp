// The CPU's fallback: plain loops over any sizes and types.
#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::int64_t chunk = 256;  // columns of a row of sums, on the stack
constexpr std::size_t lanes = 8;     // partial sums, which a compiler may keep in vectors

/// Row `a_row` of a times row `b_row` of b, each `depth` elements, summed in a fixed order.
float dot(const CpuTensors& by, const void* a, std::int64_t a_row, const void* b,
          std::int64_t b_row, std::int64_t depth) {
  float partial[lanes] = {};
  float first[chunk], second[chunk];
  for (std::int64_t k = 0; k < depth; k += chunk) {
    const std::int64_t count = std::min(chunk, depth - k);
    by.load(a, a_row * depth + k, first, count);
    by.load(b, b_row * depth + k, second, count);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
      partial[i % lanes] += first[i] * second[i];
  }
  float sum = 0;
  for (const float part : partial) sum += part;
  return sum;
}

/// sums [count] += row `a_row` of a [m, k] times columns [first, first + count) of b: [n, k], or
/// [k, n] where it is transposed.
void add_products(const CpuTensors& by, const GemmShape& shape, const void* a, std::int64_t a_row,
                  const void* b, std::int64_t first, std::int64_t count, float* sums) {
  if (!shape.b_transposed) {
    for (std::int64_t i = 0; i < count; ++i) sums[i] += dot(by, a, a_row, b, first + i, shape.k);
    return;
  }
  float row[chunk];
  for (std::int64_t k = 0; k < shape.k; ++k) {
    float factor = 0;
    by.load(a, a_row * shape.k + k, &factor, 1);
    by.load(b, k * shape.n + first, row, count);
    for (std::int64_t i = 0; i < count; ++i) sums[i] += factor * row[i];
  }
}

/// One stage, a row a task.
HostFunction product_function(const StageProduct& work, const CpuTensors& by) {
  return [=](const HostCall& call) {
    const Grouping groups = group(static_cast<const std::uint8_t*>(call.tensors[work.mask]),
                                  work.shape.m, reinterpret_cast<std::int64_t*>(call.scratch[0]));
    const auto tasks = static_cast<int>(work.shape.m);
    call.parallel.run(tasks, call.parallel.max_threads(), [&](int row) {
      const auto& weights = work.b[row < groups.marked ? 0 : 1];
      const std::int64_t token = groups.order[row];
      const std::int64_t in = work.sorted_a ? row : token, out = work.sorted_c ? row : token;
      for (std::int64_t first = 0; first < work.shape.n; first += chunk) {
        const std::int64_t count = std::min(chunk, work.shape.n - first);
        float sums[2][chunk] = {};
        for (std::size_t i = 0; i < weights.size(); ++i)
          add_products(by, work.shape, call.tensors[work.a[work.a.size() == 2 ? i : 0]], in,
                       call.tensors[weights[i]], first, count,
                       sums[work.shape.products == 2 ? i : 0]);
        by.finish(work, call, out * work.shape.n + first, sums[0], sums[1], count);
      }
    });
  };
}

/// One stage, a row of every output a task: the tokens of either expert in their order.
HostFunction sum_function(const StageSum& work, const CpuTensors& by) {
  return [=](const HostCall& call) {
    const GemmShape& shape = work.shape;
    const Grouping groups = group(static_cast<const std::uint8_t*>(call.tensors[work.mask]),
                                  shape.k, reinterpret_cast<std::int64_t*>(call.scratch[0]));
    const auto add_tokens = [&](std::size_t expert, std::size_t result, std::int64_t row,
                                std::int64_t first, std::int64_t count, float* sums) {
      float values[chunk];
      const std::int64_t end = expert == 0 ? groups.marked : shape.k;
      for (std::int64_t place = expert == 0 ? 0 : groups.marked; place < end; ++place) {
        const std::int64_t token = groups.order[place];
        float factor = 0;
        by.load(call.tensors[work.a[result]], (work.sorted_a ? place : token) * shape.m + row,
                &factor, 1);
        by.load(call.tensors[work.b], (work.sorted_b ? place : token) * shape.n + first, values,
                count);
        for (std::int64_t i = 0; i < count; ++i) sums[i] += factor * values[i];
      }
    };
    call.parallel.run(static_cast<int>(shape.m), call.parallel.max_threads(), [&](int row) {
      for (const std::size_t expert : {0, 1})
        for (std::size_t result = 0; result < work.a.size(); ++result)
          for (std::int64_t first = 0; first < shape.n; first += chunk) {
            const std::int64_t count = std::min(chunk, shape.n - first);
            float sums[chunk] = {};
            add_tokens(expert, result, row, first, count, sums);
            by.finish(work, call, expert, result, row * shape.n + first, sums, count);
          }
    });
  };
}

class CpuPlain final : public Family {
 public:
  /// `name` is a string literal.
  CpuPlain(std::string_view name, std::vector<Stage> stages)
      : name_(name), stages_(std::move(stages)) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return "plain loops for any sizes: the fallback"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    std::vector<std::string> names;
    for (const Stage stage : stages_) names.push_back(stage_name(stage));
    return names;
  }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return refuse_host(stages_, problem);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const CpuTensors by(problem, facts);
    Program program;
    program.scratch = {order_scratch(problem.size("m"))};
    for (const Stage stage : stages_) {
      program.host_tensors = std::max(program.host_tensors, host_tensors(stage, problem));
      if (sums_over_tokens(stage))
        program.steps.emplace_back(sum_function(sum_of(stage, problem), by));
      else
        program.steps.emplace_back(product_function(product_of(stage, problem), by));
    }
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"masked/cpu_plain.cpp", "masked/cpu_work.cpp", activation_source,
            row_kernel_sources[0],  row_kernel_sources[1], vector_kernel_source};
  }

 private:
  std::string_view name_;
  std::vector<Stage> stages_;
};

}  // namespace

std::vector<const Family*> linear_cpu_plain_families() {
  static const CpuPlain forward("cpu_plain", {Stage::linear}), dx("cpu_dx_plain", {Stage::dx}),
      dw("cpu_dw_plain", {Stage::dw});
  return {&forward, &dx, &dw};
}
std::vector<const Family*> ffn_cpu_plain_families() {
  static const CpuPlain forward("cpu_plain", {Stage::gate_up, Stage::down}),
      gate_up("cpu_gate_up_plain", {Stage::gate_up}),
      d_hidden("cpu_d_hidden_plain", {Stage::d_hidden}), d_x("cpu_d_x_plain", {Stage::d_x}),
      d_gate_up("cpu_d_gate_up_plain", {Stage::d_gate_up}),
      d_down("cpu_d_down_plain", {Stage::d_down});
  return {&forward, &gate_up, &d_hidden, &d_x, &d_gate_up, &d_down};
}

}  // namespace fftune::masked
