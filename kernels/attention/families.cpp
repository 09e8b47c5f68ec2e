// The families of both passes: an engine each.
#include "kernels/attention/cpu/host_attention.hpp"
#include "kernels/attention/engine.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune::attention {
namespace {

std::vector<std::string> sources_of(const Engine& engine) {
  return engine.device_kind == DeviceKind::cpu ? host_sources(engine.sources[0])
                                               : listed(engine.sources);
}

/// Seconds of a fallback on CUDA. Each lane reads a row of its own, so a load of k takes 32 lines
/// of L1, and an SM has some 3 FLOPs a clock. On an H200 16 heads of 64 features took 9.85 ms for
/// 2,048 causal tokens.
std::optional<double> fallback_seconds(const Problem& problem, const DeviceFacts& facts) {
  if (facts.multiprocessors == 0 || facts.clock_hz == 0) return std::nullopt;
  constexpr double flops_per_clock = 3.3, start = 3e-6;
  const double flops = attention_op().stages(problem).front().flops;
  return start + flops / (flops_per_clock * facts.multiprocessors * facts.clock_hz);
}

class EngineFamily final : public StageFamily {
 public:
  explicit EngineFamily(const Engine& engine)
      : StageFamily({.name = engine.name,
                     .summary = engine.summary,
                     .device_kind = engine.device_kind,
                     .pass = engine.backward ? "bwd" : "fwd",
                     .sources = sources_of(engine),
                     .is_fallback = engine.is_fallback}),
        engine_(engine) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = StageFamily::refusal(problem, facts)) return reason;
    if (is_batch_invariant(problem) && !engine_.batch_invariant)
      return std::string(order_depends_on_rows);
    if (engine_.can_implement == nullptr) return std::nullopt;
    return engine_.can_implement(layer_of(problem), facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return engine_.search.space == nullptr ? Space()
                                           : engine_.search.space(layer_of(problem), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return engine_.search.default_config == nullptr
               ? Config()
               : engine_.search.default_config(layer_of(problem), facts);
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (engine_.search.estimate != nullptr)
      return engine_.search.estimate(layer_of(problem), facts, config);
    if (engine_.is_fallback && engine_.device_kind == DeviceKind::cuda)
      return fallback_seconds(problem, facts);
    return std::nullopt;
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    return engine_.program(problem, facts, config);
  }

 private:
  const Engine& engine_;
};

}  // namespace

std::vector<const Family*> families() {
  // The fastest first; no GPU has timed the one of copies, which a search may find.
  static const std::vector<EngineFamily> families{
      EngineFamily(decode_engine),        EngineFamily(sm90_engine),
      EngineFamily(sm90_wide_engine),     EngineFamily(sm80_engine),
      EngineFamily(sm80_wide_engine),     EngineFamily(simt_engine),
      EngineFamily(sm90_backward_engine), EngineFamily(sm80_backward_engine),
      EngineFamily(simt_backward_engine), EngineFamily(sm90_backward_copies_engine),
      EngineFamily(cpu_blas_engine),      EngineFamily(cpu_plain_engine),
      EngineFamily(cpu_backward_engine)};
  return addresses_of(families);
}

}  // namespace fftune::attention
