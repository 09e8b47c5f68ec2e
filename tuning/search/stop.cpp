#include "tuning/search/options.hpp"

#include <fmt/format.h>

#include <utility>

namespace fftune {

StopRule stop_after_seconds(double seconds, double all) {
  auto reason = all > seconds ? fmt::format("its part of the budget, {:.3g} of {:.3g} s, is spent",
                                            seconds, all)
                              : fmt::format("the budget of {:.3g} s is spent", seconds);
  return [seconds, reason = std::move(reason)](const Spent& spent) {
    return spent.seconds < seconds ? "" : reason;
  };
}

StopRule stop_after_variants(int variants) {
  return [variants](const Spent& spent) {
    return spent.tried < variants ? "" : fmt::format("{} variants were tried", variants);
  };
}

StopRule stop_when(const std::atomic<bool>& flag, std::string reason) {
  return [&flag, reason = std::move(reason)](const Spent&) { return flag ? reason : ""; };
}

StopRule any_of(std::vector<StopRule> rules) {
  return [rules = std::move(rules)](const Spent& spent) {
    for (const auto& rule : rules)
      if (auto reason = rule(spent); !reason.empty()) return reason;
    return std::string();
  };
}

}  // namespace fftune
