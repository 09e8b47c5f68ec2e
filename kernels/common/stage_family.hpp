// A family of one stage: what differs between two stages of an engine is the name, and what the
// stage computes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "registry/family.hpp"

namespace fftune {

/// `Stage` says what the stage is; stage_name() of it, what it is called.
template <typename Stage, DeviceKind kind>
class StageFamily : public Family {
 public:
  /// `name` and `summary` are string literals.
  StageFamily(const Stage& stage, std::string_view name, std::string_view summary)
      : stage_(stage), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return kind; }
  std::vector<std::string> stages() const override { return {stage_name(stage_)}; }

 protected:
  const Stage& stage() const { return stage_; }

 private:
  Stage stage_;
  std::string_view name_;
  std::string_view summary_;
};

}  // namespace fftune
