// The families of the stage route.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

constexpr const char* route_file = "moe/route.cu";

/// Bytes of shared memory, as route.cu lays it out.
std::int64_t shared_bytes(const Shape& shape, std::int64_t threads) {
  const std::int64_t warps = threads / 32;
  return 4 * (shape.experts * (warps + 1) + 2 * shape.experts + 1 + warps);
}

Program route_program(const Problem& problem, const DeviceFacts& facts, int threads, int ctas) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  Program program;
  KernelLaunch& launch = append_pdl_kernel(
      program, facts, route_file,
      fmt::format("route_choices<{}>",
                  StructText("route_config", "threads", threads, "ctas", ctas)),
      {static_cast<std::uint32_t>(ctas)}, static_cast<std::uint32_t>(threads),
      {tensor_of(places, own_ids_of(problem)), tensor_of(places, "offsets"),
       tensor_of(places, "tokens"), tensor_of(places, "places"),
       tensor_or_null(has_row_weights(problem) ? places.at("weights") : absent),
       tensor_or_null(has_row_weights(problem) ? places.at("row_weights") : absent),
       static_cast<std::int32_t>(shape.m), static_cast<std::int32_t>(shape.top_k),
       static_cast<std::int32_t>(shape.experts), static_cast<std::int32_t>(shape.shared)});
  launch.cluster.x = static_cast<std::uint32_t>(ctas);
  launch.shared_bytes = static_cast<std::uint32_t>(shared_bytes(shape, threads));
  return program;
}

/// A family of a stage that both passes have.
class RouteFamily : public Family {
 public:
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_route}; }
  std::vector<std::string> sources() const override { return {route_file}; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    return refuse_cuda(problem, problem.pass, facts);
  }
};

class Route final : public RouteFamily {
 public:
  std::string_view name() const override { return "route_sort"; }
  std::string_view summary() const override {
    return "a counting sort by expert, in one block or a cluster of them";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    const Shape shape = shape_of(problem);
    return Space()
        .parameter("threads", "threads of a block", {128, 256, 512, 1024})
        .parameter("ctas", "blocks, which are a cluster", {1, 2, 4, 8})
        .constraint("clusters need compute capability 9.0",
                    [capability = facts.compute_capability](const Config& c) {
                      return c.at("ctas") == 1 || capability >= 90;
                    },
                    {"ctas"})
        .constraint(fmt::format("each warp's counts of all experts must fit in the {} bytes of "
                                "shared memory that a block can have",
                                facts.shared_bytes_per_block),
                    [shape, most = facts.shared_bytes_per_block](const Config& c) {
                      return shared_bytes(shape, c.at("threads")) <= most;
                    },
                    {"threads"})
        .constraint(
            "more than 128 threads need more than half as many choices, or in one block a quarter "
            "as many experts",
            [rows = shape.rows(), experts = shape.experts](const Config& c) {
              const std::int64_t threads = c.at("threads") * c.at("ctas");
              return threads == 128 || threads < 2 * rows ||
                     (c.at("ctas") == 1 && threads <= 4 * experts);
            },
            {"threads", "ctas"});
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return least_cost(space(problem, facts), name(),
                      [shape = shape_of(problem)](const Config& c) { return seconds(shape, c); });
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts&,
                                 const Config& config) const override {
    return seconds(shape_of(problem), config);
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    return route_program(problem, facts, config.get("threads"), config.get("ctas"));
  }

 private:
  // Fitted to the 223 variants of 54 problems on record of an H100 and an H200: 0.8% behind the
  // fastest in the mean, 8% at worst. A warp takes 32 choices in order, and finds which of them
  // have the same expert in a time that grows with the bits of an expert's number. Blocks wait for
  // each other once, longer with more threads. A thread adds up the counts of some experts over all
  // blocks, one after the other.
  static double seconds(const Shape& shape, const Config& config) {
    const std::int64_t threads = config.at("threads"), ctas = config.at("ctas");
    const double of_threads = static_cast<double>(threads) / 1024;
    const double bits = std::log2(static_cast<double>(shape.experts));
    return 1e-6 *
           (1.64 + 0.155e-3 * bits * static_cast<double>(shape.rows()) / static_cast<double>(ctas) +
            0.11 * static_cast<double>(quotient_up(shape.rows(), threads * ctas)) +
            0.48 * of_threads + (ctas > 1 ? 1.16 + 0.98 * of_threads : 0.0) +
            0.071 * static_cast<double>(quotient_up(shape.experts * ctas, threads)));
  }
};

class RouteFallback final : public RouteFamily {
 public:
  std::string_view name() const override { return "route_fallback"; }
  std::string_view summary() const override { return "a counting sort by expert, in one block"; }
  bool is_fallback() const override { return true; }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    return route_program(problem, facts, 256, 1);
  }
};

/// The sort itself on the host, as a single thread: at most some hundred thousand choices.
class CpuRoute final : public Family {
 public:
  std::string_view name() const override { return "cpu_route"; }
  std::string_view summary() const override { return "a counting sort by expert"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  std::vector<std::string> stages() const override { return {stage_route}; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> sources() const override { return {"moe/cpu_families.cpp"}; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cpu) return "it runs on the CPU";
    return std::nullopt;
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }
  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    return cpu_route_program(problem);
  }
};

}  // namespace

std::vector<const Family*> route_families() {
  static const Route sort;
  static const RouteFallback fallback;
  static const CpuRoute cpu;
  return {&sort, &fallback, &cpu};
}

}  // namespace fftune::moe
