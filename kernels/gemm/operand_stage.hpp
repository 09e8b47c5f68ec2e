// A stage of an op that prepares operands of the next one: it expands packed weights, or quantises
// rows.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/stage_family.hpp"
#include "registry/op.hpp"

namespace fftune {

template <typename Operands>
struct OperandStage {
  const char* name;  // "expand"
  const Op& (*op)() = nullptr;
  /// Only called for problems that have the stage.
  Operands (*operands)(const Problem&) = nullptr;
};

/// A family of such a stage: a fallback. It has the stage's name, on the CPU with "cpu_" in front.
template <typename Operands>
class OperandFamily final : public StageFamily {
 public:
  using Prepare = Program (*)(const OperandStage<Operands>&, const Problem&, const DeviceFacts&);
  using Refuse = std::optional<std::string> (*)(const Problem&, const DeviceFacts&);
  /// `summary` is a literal. `refuse` tells problems whose operands are ready as they are.
  OperandFamily(const OperandStage<Operands>& stage, std::string_view summary, const char* source,
                DeviceKind kind, Refuse refuse, Prepare prepare)
      : StageFamily({.summary = summary,
                     .device_kind = kind,
                     .stage = stage.name,
                     .pass = "fwd",
                     .sources = {source},
                     .is_fallback = true,
                     .refusal = refuse}),
        name_(std::string(kind == DeviceKind::cpu ? "cpu_" : "") + stage.name),
        stage_(stage),
        prepare_(prepare) {}

  std::string_view name() const override { return name_; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = StageFamily::refusal(problem, facts)) return reason;
    const auto stages = stage_.op().stages(problem);
    if (std::none_of(stages.begin(), stages.end(),
                     [&](const StageSpec& stage) { return stage.name == stage_.name; }))
      return "there is no stage " + std::string(stage_.name) + " here";
    return std::nullopt;
  }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    return prepare_(stage_, problem, facts);
  }

 private:
  std::string name_;
  OperandStage<Operands> stage_;
  Prepare prepare_;
};

/// The families of stages on both kinds of devices.
template <typename Operands>
std::vector<OperandFamily<Operands>> on_both(
    OperandFamily<Operands> (*cuda)(const OperandStage<Operands>&),
    OperandFamily<Operands> (*cpu)(const OperandStage<Operands>&),
    std::initializer_list<OperandStage<Operands>> stages) {
  std::vector<OperandFamily<Operands>> families;
  for (const auto& stage : stages) {
    families.push_back(cuda(stage));
    families.push_back(cpu(stage));
  }
  return families;
}

}  // namespace fftune
