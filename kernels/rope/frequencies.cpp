// The rules by which frequencies are computed: in float64, and then rounded to f32 once.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

/// The share of a frequency that is not divided by the factor, from 0 to 1.
using Share = double (*)(const Problem& problem, double frequency, double pair);

double none(const Problem&, double, double) {
  return 0;
}

double llama3(const Problem& problem, double frequency, double) {
  const double low = number_of(problem, "low");
  const double high = number_of(problem, "high");
  const double rotations = number_of(problem, "context") * frequency / (2 * std::numbers::pi);
  return std::clamp((rotations - low) / (high - low), 0.0, 1.0);
}

double yarn(const Problem& problem, double, double pair) {
  const auto rotary = static_cast<double>(layer_of(problem).rotary);
  // The pair, a real number, with this many rotations in the context.
  const auto pair_of = [&](double rotations) {
    return rotary * std::log(number_of(problem, "context") / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(number_of(problem, "base")));
  };
  const double first = std::max(0.0, std::floor(pair_of(number_of(problem, "beta-fast"))));
  const double last = std::min(rotary - 1, std::ceil(pair_of(number_of(problem, "beta-slow"))));
  if (first >= last) return pair <= first ? 1 : 0;
  return 1 - std::clamp((pair - first) / (last - first), 0.0, 1.0);
}

}  // namespace

double number_of(const Problem& problem, const std::string& name) {
  if (problem.options.contains(name)) return problem.number(name);
  for (const auto& field : rope_op().options())
    if (field.name == name)
      if (const auto usual = parse_number(field.choices.front())) return *usual;
  throw Error(ErrorKind::internal, "rope has no number " + name);
}

Frequencies frequencies_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  const auto& rule = problem.option("angles");
  const Share share = rule == "llama3" ? llama3 : rule == "yarn" ? yarn : none;
  const double base = number_of(problem, "base");
  const double factor = number_of(problem, "factor");
  Frequencies frequencies;
  for (std::int64_t pair = 0; pair < layer.rotary / 2; ++pair) {
    const auto j = static_cast<double>(pair);
    const double frequency =
        layer.table ? 0 : std::pow(base, -2 * j / static_cast<double>(layer.rotary));
    const double alone = share(problem, frequency, j);
    frequencies.values.push_back(
        static_cast<float>(frequency / factor * (1 - alone) + frequency * alone));
  }
  const double scale = number_of(problem, "scale");
  if (scale != 0)
    frequencies.scale = static_cast<float>(scale);
  else if (rule == "yarn" && factor > 1)
    frequencies.scale = static_cast<float>(0.1 * std::log(factor) + 1);
  return frequencies;
}

}  // namespace fftune::rope
