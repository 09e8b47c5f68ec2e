#include "kernels/rmsnorm/fallback.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/rmsnorm/cuda_layer.hpp"
#include "kernels/rmsnorm/families.hpp"

namespace fftune::rmsnorm {
namespace {

constexpr std::uint32_t threads = 256;  // of every kernel here but the last sum
constexpr const char* backward_file = "rmsnorm/backward_fallback.cu";

/// The parts that the family of either pass has in common.
class Fallback : public Family {
 public:
  explicit Fallback(bool backward) : backward_(backward) {}
  std::string_view name() const override {
    return backward_ ? "backward_fallback" : "forward_fallback";
  }
  std::string_view summary() const override {
    return "plain loops for any width and alignment: the fallback";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override {
    return {backward_ ? stage_backward : stage_forward};
  }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    return refuse_cuda(problem, backward_ ? "bwd" : "fwd", facts);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const Layer layer = layer_of(problem);
    return backward_ ? backward_fallback_program(layer, facts) : forward_fallback_program(layer);
  }
  std::vector<std::string> sources() const override {
    return {backward_ ? backward_file : "rmsnorm/forward_fallback.cu"};
  }

 private:
  bool backward_;
};

}  // namespace

Program forward_fallback_program(const Layer& layer) {
  Program program;
  program.kernels.push_back(
      {"rmsnorm/forward_fallback.cu",
       fmt::format("fftune::forward_fallback<{}, {}>", template_arguments(layer),
                   element_type(layer.out_dtype))});
  KernelLaunch launch;
  launch.grid.x = static_cast<std::uint32_t>(layer.m);
  launch.block.x = threads;
  launch.arguments = forward_arguments(layer);
  program.steps.emplace_back(std::move(launch));
  return program;
}

Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts) {
  // Chunks of rows enough for four blocks an SM, and few enough for their sum to be little work.
  const std::int64_t column_blocks = quotient_up(layer.d, threads);
  const std::int64_t wanted = quotient_up(4 * facts.multiprocessors, column_blocks);
  const std::int64_t chunk = quotient_up(layer.m, std::min(wanted, layer.m));
  const std::int64_t chunks = quotient_up(layer.m, chunk);
  const auto floats = [](std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(float);
  };
  const Places at = places_of(layer);

  Program program;
  program.scratch = {{floats(layer.m), false}, {floats(chunks * layer.d), false}};
  program.kernels.push_back(
      {backward_file, fmt::format("fftune::backward_fallback<{}>", template_arguments(layer))});
  KernelLaunch rows;
  rows.grid.x = static_cast<std::uint32_t>(layer.m);
  rows.block.x = threads;
  rows.arguments = backward_arguments(layer, ScratchArgument{0});
  program.steps.emplace_back(std::move(rows));

  program.kernels.push_back({backward_file, fmt::format("fftune::backward_fallback_columns<{}>",
                                                        element_type(layer.dtype))});
  KernelLaunch columns;
  columns.kernel = 1;
  columns.grid = {static_cast<std::uint32_t>(column_blocks), static_cast<std::uint32_t>(chunks), 1};
  columns.block.x = threads;
  columns.arguments = {TensorArgument{at.x},
                       TensorArgument{at.dy},
                       ScratchArgument{0},
                       ScratchArgument{1},
                       layer.m,
                       static_cast<std::int32_t>(layer.d),
                       chunk};
  program.steps.emplace_back(std::move(columns));
  append_column_sum(program, facts, backward_file, "backward_fallback_weight", layer.weight_dtype,
                    ScratchArgument{1}, TensorArgument{at.dw}, chunks, layer.d);
  return program;
}

const Family& forward_fallback_family() {
  static const Fallback family(false);
  return family;
}

const Family& backward_fallback_family() {
  static const Fallback family(true);
  return family;
}

}  // namespace fftune::rmsnorm
