// A family of a memory-bound op, described by data.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "registry/family.hpp"

namespace fftune {

struct StageFamilyFacts {
  std::string_view name, summary;  // literals
  DeviceKind device_kind = DeviceKind::cuda;
  const char* stage = nullptr;
  std::string_view pass = {};            // the only one that it computes
  const char *option = "", *value = "";  // the value that an option must have, if any
  std::vector<std::string> sources = {};
  bool is_fallback = false;
};

/// Serves one stage in one pass. Without parameters, unless a derived family has some.
class StageFamily : public Family {
 public:
  explicit StageFamily(StageFamilyFacts facts) : facts_(std::move(facts)) {}

  std::string_view name() const override { return facts_.name; }
  std::string_view summary() const override { return facts_.summary; }
  DeviceKind device_kind() const override { return facts_.device_kind; }
  std::vector<std::string> stages() const override { return {facts_.stage}; }
  std::vector<std::string> sources() const override { return facts_.sources; }
  bool is_fallback() const override { return facts_.is_fallback; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts_.device_kind == DeviceKind::cuda) {
      if (auto refusal = refuse_cuda(problem, facts_.pass, facts)) return refusal;
    } else {
      if (facts.kind != DeviceKind::cpu) return "it runs on the CPU";
      if (problem.pass != facts_.pass)
        return "it computes the pass " + std::string(facts_.pass) + ", not " + problem.pass;
    }
    if (*facts_.option == 0 || problem.has(facts_.option, facts_.value)) return std::nullopt;
    return std::string("it is for ") + facts_.option + "=" + facts_.value;
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

 private:
  StageFamilyFacts facts_;
};

}  // namespace fftune
