// A family of one stage, described by data.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/search_side.hpp"
#include "registry/family.hpp"

namespace fftune {

/// The value that an option must have.
struct OptionValue {
  const char *option = "", *value = "";
};

struct StageFamilyFacts {
  std::string_view name = {}, summary = {};  // literals
  DeviceKind device_kind = DeviceKind::cuda;
  const char* stage = nullptr;  // null: stage_of_pass(pass)
  std::string_view pass = {};   // the only one that it computes; any, if empty
  OptionValue needs = {};       // of the option that it serves alone, if any
  std::vector<std::string> sources = {};
  bool is_fallback = false;
  /// Whether a recipe without measurements takes the family where it serves; null: it does.
  bool (*is_preferred)(const Problem&) = nullptr;
  /// These serve a family without a class of its own: a further reason to refuse, if any, the
  /// parameters, and the program.
  std::optional<std::string> (*refusal)(const Problem&, const DeviceFacts&) = nullptr;
  SearchSide<Problem> search = {};
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
    if (*facts_.needs.option != 0 && !problem.has(facts_.needs.option, facts_.needs.value))
      return std::string("it is for ") + facts_.needs.option + "=" + facts_.needs.value;
    return facts_.refusal == nullptr ? std::nullopt : facts_.refusal(problem, facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return facts_.search.space == nullptr ? Space() : facts_.search.space(problem, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return facts_.search.default_config == nullptr ? Config()
                                                   : facts_.search.default_config(problem, facts);
  }
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts_.search.estimate == nullptr) return std::nullopt;
    return facts_.search.estimate(problem, facts, config);
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    return facts_.program(problem, facts, config);
  }

 private:
  StageFamilyFacts facts_;
};

/// A forward and a backward one: names, or stages.
struct OfPasses {
  const char *forward, *backward;
};

/// A family of each pass, which differ in the name alone.
template <class Kind = StageFamily, class... More>
std::vector<Kind> of_passes(OfPasses names, StageFamilyFacts facts, More... more) {
  std::vector<Kind> families;
  const auto add = [&](const char* name, const char* pass) {
    facts.name = name;
    facts.pass = pass;
    families.emplace_back(facts, more...);
  };
  add(names.forward, "fwd");
  add(names.backward, "bwd");
  return families;
}

/// The fallbacks of both passes on GPUs, of one source file.
inline std::vector<StageFamily> cuda_fallbacks(std::string_view summary, const char* source,
                                               decltype(StageFamilyFacts::program) program) {
  return of_passes(
      {"forward_fallback", "backward_fallback"},
      {.summary = summary, .sources = {source}, .is_fallback = true, .program = program});
}

/// A family of the CPU that serves all problems of its stage and pass.
inline StageFamily cpu_fallback(StageFamilyFacts facts) {
  facts.device_kind = DeviceKind::cpu;
  facts.is_fallback = true;
  return StageFamily(std::move(facts));
}

}  // namespace fftune
