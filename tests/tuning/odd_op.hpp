// The toy op with one family, each of whose variants behaves in its own way.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "support/toy_op.hpp"

namespace fftune::test {

enum OddBehaviour : int {
  odd_right,
  odd_wrong,
  odd_unwritten,
  odd_throws,
  odd_faults,
  odd_no_program,
  odd_not_compiled,
  odd_slow,
  odd_count,
};

class OddFamily final : public WholeToyFamily {
 public:
  OddFamily() : WholeToyFamily("odd", "each variant in its own way") {}
  Space space(const Problem&, const DeviceFacts&) const override {
    std::vector<std::int64_t> values;
    for (int value = 0; value < odd_count; ++value) values.push_back(value);
    return Space().parameter("way", "how it behaves", values);
  }
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"way", odd_slow}};
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const int way = config.get("way");
    Program program;
    if (way == odd_no_program) throw std::runtime_error("no program can be made");
    if (way == odd_not_compiled) {
      program.steps.emplace_back(KernelLaunch{});
      return program;
    }
    program.host_tensors = 5;
    program.steps.emplace_back(HostFunction([problem, way](const HostCall& call) {
      const auto m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
      if (way == odd_throws) throw std::runtime_error("a function gave up");
      if (way == odd_faults) throw Error(ErrorKind::device_fault, "misaligned address");
      if (way == odd_slow) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (way == odd_unwritten) return;
      toy_product(problem.dtype, m, h, d, call.tensors[0], call.tensors[1], call.tensors[4]);
      toy_product(problem.dtype, m, d, h, call.tensors[4], call.tensors[2], call.tensors[3]);
      if (way == odd_wrong) static_cast<float*>(call.tensors[3])[1] += 1;
    }));
    return program;
  }
};

class OddOp final : public ToyOp {
 public:
  std::vector<const Family*> families() const override { return {&family_}; }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    Baseline right{"unfused", "the same", {}, {}}, broken{"broken", "gives up", {}, {}};
    right.program = family_.program(problem, facts, {{"way", odd_right}});
    broken.program = family_.program(problem, facts, {{"way", odd_throws}});
    // Behind the op's tensors; the program writes where it should not if there is no room for it.
    right.extra = {{"more", DType::f32, {1000}, Role::intermediate, 1}};
    right.program.host_tensors = 6;
    right.program.steps.emplace_back(
        HostFunction([](const HostCall& call) { static_cast<float*>(call.tensors[5])[999] = 1; }));
    return {right, broken};
  }

 private:
  OddFamily family_;
};

}  // namespace fftune::test
