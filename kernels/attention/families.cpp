// The families of both passes: an engine each.
#include "kernels/attention/engine.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

class EngineFamily final : public StageFamily {
 public:
  explicit EngineFamily(const Engine& engine)
      : StageFamily({.name = engine.name,
                     .summary = engine.summary,
                     .device_kind = engine.device_kind,
                     .stage = engine.backward ? stage_backward : stage_forward,
                     .pass = engine.backward ? "bwd" : "fwd",
                     .sources = engine.sources,
                     .is_fallback = engine.is_fallback}),
        engine_(engine) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = StageFamily::refusal(problem, facts)) return reason;
    if (engine_.can_implement == nullptr) return std::nullopt;
    return engine_.can_implement(layer_of(problem), facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return engine_.space == nullptr ? Space() : engine_.space(layer_of(problem), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return engine_.default_config == nullptr ? Config()
                                             : engine_.default_config(layer_of(problem), facts);
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (engine_.estimate == nullptr) return std::nullopt;
    return engine_.estimate(layer_of(problem), facts, config);
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
  // The fastest first.
  static const EngineFamily families[] = {
      EngineFamily(decode_engine()),        EngineFamily(sm90_engine()),
      EngineFamily(sm80_engine()),          EngineFamily(simt_engine()),
      EngineFamily(sm90_backward_engine()), EngineFamily(sm80_backward_engine()),
      EngineFamily(simt_backward_engine()), EngineFamily(cpu_blas_engine()),
      EngineFamily(cpu_plain_engine()),     EngineFamily(cpu_backward_engine())};
  std::vector<const Family*> addresses;
  for (const EngineFamily& family : families) addresses.push_back(&family);
  return addresses;
}

}  // namespace fftune::attention
