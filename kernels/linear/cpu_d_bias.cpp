// The gradient of a linear layer's bias on the CPU: blocks of columns on all threads.
#include <algorithm>
#include <cstddef>

#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

constexpr ProductStage stage{stage_d_bias, "bwd", nullptr};

class CpuDBias final : public Family {
 public:
  std::string_view name() const override { return "cpu_d_bias"; }
  std::string_view summary() const override { return "column sums of dy, by blocks of columns"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override { return {stage_d_bias}; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage, problem, facts, DeviceKind::cpu)) return refusal;
    if (!form_of(problem).bias) return "there is no bias to have a gradient";
    return std::nullopt;
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const std::int64_t m = problem.size("m"), n = problem.size("n");
    const Places at = places_of(problem);
    const bool adds = form_of(problem).accumulates;
    Program program;
    program.host_tensors = at.count;
    program.steps.emplace_back(HostFunction([=, dtype = problem.dtype](const HostCall& call) {
      constexpr std::int64_t columns = 256;
      const auto place = [&](std::size_t tensor, std::int64_t element) {
        return static_cast<std::byte*>(call.tensors[tensor]) +
               static_cast<std::size_t>(element) * dtype_bytes(dtype);
      };
      call.parallel.run(static_cast<int>(ceil_div(n, columns)), call.parallel.max_threads(),
                        [&](int task) {
                          const std::int64_t first = task * columns;
                          const auto count = static_cast<std::size_t>(std::min(columns, n - first));
                          float sum[columns] = {}, row[columns];
                          if (adds) decode(dtype, place(at.dbias_before, first), {sum, count});
                          for (std::int64_t i = 0; i < m; ++i) {
                            decode(dtype, place(at.dy, i * n + first), {row, count});
                            for (std::size_t j = 0; j < count; ++j) sum[j] += row[j];
                          }
                          encode(dtype, {sum, count}, place(at.dbias, first));
                        });
    }));
    return program;
  }

  std::vector<std::string> sources() const override { return {"linear/cpu_d_bias.cpp"}; }
};

}  // namespace

const Family& cpu_d_bias_family() {
  static const CpuDBias family;
  return family;
}

}  // namespace fftune::linear
