#include "tuning/decide/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"

namespace fftune {

void require_bits_of(const Recipe& recipe, Session& session) {
  std::vector<std::size_t> first_stages{0};
  for (const auto& variant : recipe)
    first_stages.push_back(first_stages.back() +
                           family_of(session.op(), variant.family).stages().size());
  for (std::size_t begin = 0; begin < recipe.size(); ++begin)
    for (std::size_t end = begin + 1; end <= recipe.size(); ++end) {
      const auto at = [&](std::size_t i) {
        return recipe.begin() + static_cast<std::ptrdiff_t>(i);
      };
      const Candidate part{first_stages[begin], Recipe(at(begin), at(end)), ""};
      session.launch({part});
      const auto verified = session.evaluator().verify(part);
      if (!verified.passed)
        throw Error(ErrorKind::unavailable,
                    fmt::format("the bits of the present winner cannot be told, as {} fails: {}",
                                part.id(), verified.failure));
      session.require_bits({first_stages[begin], first_stages[end] - first_stages[begin]},
                           verified.bits);
    }
}

std::optional<Combination> combination_of(const Recipe& recipe,
                                          const std::vector<Searched>& groups) {
  Combination combination;
  for (const auto& variant : recipe)
    for (std::size_t place = 0; place < groups.size(); ++place) {
      const auto& variants = groups[place].group->variants();
      const auto found = std::find(variants.begin(), variants.end(), variant);
      if (found == variants.end()) continue;
      const auto index = static_cast<std::size_t>(found - variants.begin());
      const double median_us = groups[place].group->median_us(index);
      combination.parts.push_back({place, index, median_us});
      combination.sum_us += median_us;
    }
  if (combination.parts.size() != recipe.size()) return {};
  return combination;
}

}  // namespace fftune
