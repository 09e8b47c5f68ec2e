// A family of a memory-bound op, described by data.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/family.hpp"

namespace fftune {

struct StageFamilyFacts {
  std::string_view name, summary;  // literals
  DeviceKind device_kind = DeviceKind::cuda;
  const char* stage = nullptr;           // null: stage_of_pass(pass)
  std::string_view pass = {};            // the only one that it computes; any, if empty
  const char *option = "", *value = "";  // the value that an option must have, if any
  std::vector<std::string> sources = {};
  bool is_fallback = false;
  /// Whether a recipe without measurements takes the family where it serves; null: it does.
  bool (*is_preferred)(const Problem&) = nullptr;
  /// These serve a family without a class of its own: a further reason to refuse, the parameters
  /// and their defaults (each may be null), and the program.
  std::optional<std::string> (*refusal)(const Problem&, const DeviceFacts&) = nullptr;
  Space (*space)(const Problem&, const DeviceFacts&) = nullptr;
  Config (*default_config)(const Problem&, const DeviceFacts&) = nullptr;
  Program (*program)(const Problem&, const DeviceFacts&, const Config&) = nullptr;
};

/// Serves one stage in one pass.
class StageFamily : public Family {
 public:
  explicit StageFamily(StageFamilyFacts facts) : facts_(std::move(facts)) {}

  std::string_view name() const override { return facts_.name; }
  std::string_view summary() const override { return facts_.summary; }
  DeviceKind device_kind() const override { return facts_.device_kind; }
  std::vector<std::string> stages() const override {
    return {facts_.stage == nullptr ? stage_of_pass(facts_.pass) : facts_.stage};
  }
  std::vector<std::string> sources() const override { return facts_.sources; }
  bool is_fallback() const override { return facts_.is_fallback; }
  bool is_preferred(const Problem& problem, const DeviceFacts&) const override {
    return facts_.is_preferred == nullptr || facts_.is_preferred(problem);
  }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    const std::string_view pass = facts_.pass.empty() ? problem.pass : facts_.pass;
    if (facts_.device_kind == DeviceKind::cuda) {
      if (auto refusal = refuse_cuda(problem, pass, facts)) return refusal;
    } else {
      if (facts.kind != DeviceKind::cpu) return "it runs on the CPU";
      if (problem.pass != pass)
        return "it computes the pass " + std::string(pass) + ", not " + problem.pass;
    }
    if (*facts_.option != 0 && !problem.has(facts_.option, facts_.value))
      return std::string("it is for ") + facts_.option + "=" + facts_.value;
    return facts_.refusal == nullptr ? std::nullopt : facts_.refusal(problem, facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return facts_.space == nullptr ? Space() : facts_.space(problem, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return facts_.default_config == nullptr ? Config() : facts_.default_config(problem, facts);
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    return facts_.program(problem, facts, config);
  }

 private:
  StageFamilyFacts facts_;
};

}  // namespace fftune
