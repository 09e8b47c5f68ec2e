// Blocks of rows in vectors, on all threads.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::act_mul {
namespace {

std::int64_t row_bytes(const Problem& problem) {
  return problem.size("h") * static_cast<std::int64_t>(dtype_bytes(problem.dtype));
}

class CpuRows final : public StageFamily {
 public:
  explicit CpuRows(bool backward)
      : StageFamily({.name = backward ? "cpu_gradient_rows" : "cpu_rows",
                     .summary = "blocks of rows in vectors, on all threads",
                     .device_kind = DeviceKind::cpu,
                     .stage = backward ? stage_backward : stage_forward,
                     .pass = backward ? "bwd" : "fwd",
                     .sources = {"act_mul/cpu_families.cpp", activation_source,
                                 row_kernel_sources[0], row_kernel_sources[1]},
                     .is_fallback = true}),
        backward_(backward) {}
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return row_task_space(problem.size("m"), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return default_row_task(problem.size("m"), row_bytes(problem), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Places at = places_of(problem);
    const std::int64_t m = problem.size("m");
    const auto h = static_cast<std::size_t>(problem.size("h"));
    const std::int64_t bytes = row_bytes(problem);
    const bool both = packed(problem);
    const auto activation = parse_activation(problem.option("act"));
    const RowKernels& kernels = row_kernels(facts.arch, problem.dtype);
    const std::int64_t of_task = config.at("rows");
    const int threads = config.get("threads");
    const bool streams = config.at("nontemporal") != 0;
    Program program;
    program.host_tensors = at.count;
    program.steps.emplace_back(
        HostFunction([=, &kernels, backward = backward_](const HostCall& call) {
          const auto row_of = [&](std::size_t place, std::int64_t row) {
            return static_cast<std::byte*>(call.tensors[place]) + row * bytes;
          };
          // Of gate, up and their gradients, which are halves of a row that is twice as long if
          // packed.
          const auto first = [&](std::size_t place, std::int64_t row) {
            return row_of(place, both ? 2 * row : row);
          };
          const auto second = [&](std::size_t place, std::int64_t row) {
            return row_of(place, both ? 2 * row + 1 : row);
          };
          const auto tasks = static_cast<int>((m + of_task - 1) / of_task);
          call.parallel.run(tasks, threads, [&](int task) {
            const std::int64_t last = std::min(m, (task + 1) * of_task);
            for (std::int64_t row = task * of_task; row < last; ++row)
              if (backward)
                kernels.act_mul_gradient(activation, first(at.gate, row), second(at.up, row),
                                         row_of(at.dout, row), first(at.dgate, row),
                                         second(at.dup, row), h, streams);
              else
                kernels.act_mul(activation, first(at.gate, row), second(at.up, row),
                                row_of(at.out, row), h, streams);
            if (streams) kernels.fence();
          });
        }));
    return program;
  }

 private:
  bool backward_;
};

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRows forward(false), backward(true);
  return {&forward, &backward};
}

}  // namespace fftune::act_mul
