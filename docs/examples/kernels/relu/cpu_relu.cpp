// relu on the CPU: blocks of rows, shared out among threads.
#include <algorithm>

#include "kernels/relu/relu.hpp"

namespace fftune::relu {
namespace {

class CpuRelu : public Family {
 public:
  std::string_view name() const override { return "cpu_relu"; }
  std::string_view summary() const override { return "blocks of rows on several threads"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {"relu"}; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> sources() const override { return {"relu/cpu_relu.cpp"}; }

  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override {
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    Space space;
    space.parameter("rows", "rows of a task", {1, 8, 64, 512})
        .parameter("threads", "threads at most", {1, 2, 4, 8, 16, 32, 64})
        .constraint("a task has no more rows than there are",
                    [m = problem.size("m")](const Config& c) {
                      return c.get("rows") == 1 || c.at("rows") <= m;
                    },
                    {"rows"})
        .constraint("no more threads than cores",
                    [cores = facts.multiprocessors](const Config& c) {
                      return c.get("threads") == 1 || c.get("threads") <= cores;
                    },
                    {"threads"});
    return space;
  }

  // One thread: memory bound, and a few rows stay in the L1 cache.
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"rows", 1}, {"threads", 1}};
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const std::int64_t m = problem.size("m");
    const std::int64_t d = problem.size("d");
    const std::int64_t rows = config.at("rows");
    const int threads = config.get("threads");
    Program program;
    program.host_tensors = 2;  // x and y
    program.steps.emplace_back([=](const HostCall& call) {
      const auto* x = static_cast<const float*>(call.tensors[0]);
      auto* y = static_cast<float*>(call.tensors[1]);
      const auto tasks = static_cast<int>((m + rows - 1) / rows);
      call.parallel.run(tasks, threads, [=](int task) {
        const std::int64_t begin = task * rows * d;
        const std::int64_t end = std::min(m * d, begin + rows * d);
        for (std::int64_t i = begin; i < end; ++i) y[i] = std::max(x[i], 0.0f);
      });
    });
    return program;
  }
};

}  // namespace

const Family& cpu_relu_family() {
  static const CpuRelu family;
  return family;
}

}  // namespace fftune::relu
