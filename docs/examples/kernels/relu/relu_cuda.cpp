// The host side of relu_cuda.cu.
#include "kernels/relu/relu.hpp"

namespace fftune::relu {
namespace {

class ReluCuda : public Family {
 public:
  std::string_view name() const override { return "relu_cuda"; }
  std::string_view summary() const override { return "one 32-bit pair of elements at a time"; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {"relu"}; }
  std::vector<std::string> sources() const override { return {"relu/relu_cuda.cu"}; }

  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if (problem.size("d") % 2 == 0) return std::nullopt;
    return "d=" + std::to_string(problem.size("d")) + " is odd: pairs need an even d";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const std::int64_t pairs = problem.size("m") * problem.size("d") / 2;
    Space space;
    space.parameter("threads", "threads of a block", {64, 128, 256, 512, 1024})
        .parameter("pairs", "pairs of elements a thread", {1, 2, 4, 8})
        .constraint("several pairs a thread must leave a block for every multiprocessor",
                    [pairs, blocks = facts.multiprocessors](const Config& c) {
                      return c.at("pairs") == 1 ||
                             c.at("threads") * c.at("pairs") * blocks <= pairs;
                    });
    return space;
  }

  // One pair a thread is feasible for every size and spreads the work widest.
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"threads", 256}, {"pairs", 1}};
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const std::int64_t pairs = problem.size("m") * problem.size("d") / 2;
    const std::int64_t per_block = config.at("threads") * config.at("pairs");
    Program program;
    program.kernels.push_back(
        {"relu/relu_cuda.cu", "fftune::relu_cuda<" + std::to_string(config.get("threads")) + ", " +
                                  std::to_string(config.get("pairs")) + ">"});
    KernelLaunch launch;
    launch.grid.x = static_cast<std::uint32_t>((pairs + per_block - 1) / per_block);
    launch.block.x = static_cast<std::uint32_t>(config.get("threads"));
    launch.arguments = {TensorArgument{0}, TensorArgument{1}, pairs};
    program.steps.emplace_back(launch);
    return program;
  }
};

}  // namespace

const Family& relu_cuda_family() {
  static const ReluCuda family;
  return family;
}

}  // namespace fftune::relu
