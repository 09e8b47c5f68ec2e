// The CPU's fallback: plain loops over any sizes and types.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/masked/cpu_work.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::size_t chunk = 256;  // of a row, in float on the stack
constexpr std::size_t lanes = 8;    // partial sums, which a compiler may keep in vectors

/// Row `a_row` of a times row `b_row` of b, each `depth` elements, summed in a fixed order.
float product(DType dtype, const void* a, std::size_t a_row, const void* b, std::size_t b_row,
              std::size_t depth) {
  const auto place = [&](const void* from, std::size_t at) {
    return static_cast<const std::byte*>(from) + at * dtype_bytes(dtype);
  };
  float partial[lanes] = {};
  float first[chunk], second[chunk];
  for (std::size_t k = 0; k < depth; k += chunk) {
    const std::size_t count = std::min(chunk, depth - k);
    decode(dtype, place(a, a_row * depth + k), {first, count});
    decode(dtype, place(b, b_row * depth + k), {second, count});
    for (std::size_t i = 0; i < count; ++i) partial[i % lanes] += first[i] * second[i];
  }
  float sum = 0;
  for (const float part : partial) sum += part;
  return sum;
}

/// One stage, some columns of the output a task.
HostFunction stage_function(Stage stage, const Problem& problem) {
  const StageProduct work = product_of(stage, problem);
  const auto dtype = problem.dtype;
  const auto activation =
      work.shape.products == 2 ? parse_activation(problem.option("act")) : Activation::none;
  return [=](const HostCall& call) {
    constexpr std::size_t block = 8;
    const auto n = static_cast<std::size_t>(work.shape.n),
               k = static_cast<std::size_t>(work.shape.k);
    const Grouping groups = group(static_cast<const std::uint8_t*>(call.tensors[work.mask]),
                                  work.shape.m, reinterpret_cast<std::int64_t*>(call.scratch[0]));
    const auto tasks = static_cast<int>((n + block - 1) / block);
    call.parallel.run(tasks, call.parallel.max_threads(), [&](int task) {
      const std::size_t first = static_cast<std::size_t>(task) * block;
      const std::size_t count = std::min(block, n - first);
      for (std::int64_t row = 0; row < work.shape.m; ++row) {
        const auto& weights = work.b[row < groups.marked ? 0 : 1];
        const std::int64_t token = groups.order[row];
        const auto in = static_cast<std::size_t>(work.sorted_a ? row : token);
        const auto out = static_cast<std::size_t>(work.sorted_c ? row : token);
        float values[block];
        for (std::size_t i = 0; i < count; ++i) {
          const auto sum = [&](std::size_t index) {
            return product(dtype, call.tensors[work.a], in, call.tensors[weights[index]], first + i,
                           k);
          };
          values[i] = weights.size() == 1
                          ? sum(0)
                          : static_cast<float>(activate(activation, sum(0))) * sum(1);
        }
        encode(
            dtype, {values, count},
            static_cast<std::byte*>(call.tensors[work.c]) + (out * n + first) * dtype_bytes(dtype));
      }
    });
  };
}

class CpuPlain final : public Family {
 public:
  explicit CpuPlain(std::vector<Stage> stages) : stages_(std::move(stages)) {}

  std::string_view name() const override { return "cpu_plain"; }
  std::string_view summary() const override { return "plain loops for any sizes: the fallback"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override {
    std::vector<std::string> names;
    for (const Stage stage : stages_) names.push_back(stage_name(stage));
    return names;
  }
  bool is_fallback() const override { return true; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    return refuse_pass(stages_.front(), problem);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    Program program;
    program.host_tensors = product_of(stages_.front(), problem).c + 1;
    program.scratch = {order_scratch(problem.size("m"))};
    for (const Stage stage : stages_) {
      program.host_tensors = std::max(program.host_tensors, product_of(stage, problem).c + 1);
      program.steps.emplace_back(stage_function(stage, problem));
    }
    return program;
  }

  std::vector<std::string> sources() const override {
    return {"masked/cpu_plain.cpp", "masked/cpu_work.hpp"};
  }

 private:
  std::vector<Stage> stages_;
};

}  // namespace

const Family& linear_cpu_plain_family() {
  static const CpuPlain family({Stage::linear});
  return family;
}
const Family& ffn_cpu_plain_family() {
  static const CpuPlain family({Stage::gate_up, Stage::down});
  return family;
}

}  // namespace fftune::masked
