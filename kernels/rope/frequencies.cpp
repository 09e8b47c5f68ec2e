// The rules by which frequencies are computed: in float64, and then rounded to f32 once.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "kernels/rope/rope.hpp"

namespace fftune::rope {

Frequencies frequencies_of(const Problem& problem) {
  const auto number = [&](const char* name) { return number_or_default(rope_op(), problem, name); };
  const Layer layer = layer_of(problem);
  const auto& rule = problem.option("angles");
  const double base = number("base"), factor = number("factor");
  const double context = number("context");
  const auto rotary = static_cast<double>(layer.rotary);
  // The share of a frequency that is not divided by the factor, from 0 to 1.
  std::function<double(double frequency, double pair)> share = [](double, double) { return 0.0; };
  if (rule == "llama3")
    share = [=, low = number("low"), high = number("high")](double frequency, double) {
      const double rotations = context * frequency / (2 * std::numbers::pi);
      return std::clamp((rotations - low) / (high - low), 0.0, 1.0);
    };
  if (rule == "yarn") {
    // The pair, a real number, with this many rotations in the context.
    const auto pair_of = [=](double rotations) {
      return rotary * std::log(context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
    };
    const double first = std::max(0.0, std::floor(pair_of(number("beta-fast"))));
    const double last = std::min(rotary - 1, std::ceil(pair_of(number("beta-slow"))));
    share = [=](double, double pair) {
      if (first >= last) return pair <= first ? 1.0 : 0.0;
      return 1 - std::clamp((pair - first) / (last - first), 0.0, 1.0);
    };
  }
  Frequencies frequencies;
  for (std::int64_t pair = 0; pair < layer.rotary / 2; ++pair) {
    const auto j = static_cast<double>(pair);
    const double frequency = layer.table ? 0 : std::pow(base, -2 * j / rotary);
    const double alone = share(frequency, j);
    frequencies.values.push_back(
        static_cast<float>(frequency / factor * (1 - alone) + frequency * alone));
  }
  const double scale = number("scale");
  if (scale != 0)
    frequencies.scale = static_cast<float>(scale);
  else if (rule == "yarn" && factor > 1)
    frequencies.scale = static_cast<float>(0.1 * std::log(factor) + 1);
  return frequencies;
}

}  // namespace fftune::rope
