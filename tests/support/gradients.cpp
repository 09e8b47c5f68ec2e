#include "support/gradients.hpp"

namespace fftune::test {

void draw_inputs(const Op& op, const Problem& problem, std::mt19937_64& random,
                 ReferenceTensors& tensors) {
  std::normal_distribution<double> normal;
  for (const auto& spec : op.tensors(problem)) {
    if (spec.role != Role::input || tensors.contains(spec.name)) continue;
    auto& values = tensors[spec.name];
    for (std::int64_t i = 0; i < spec.elements(); ++i)
      values.push_back(normal(random) * spec.scale);
  }
}

void run_stages(const Op& op, const Problem& problem, ReferenceTensors& tensors) {
  Pool pool(1);
  const std::size_t stages = op.stages(problem).size();
  for (std::size_t stage = 0; stage < stages; ++stage) op.reference(problem, stage, tensors, pool);
}

void check_gradients(const Op& op, const Problem& forward, const Problem& backward,
                     const std::vector<std::pair<std::string, std::string>>& gradients,
                     std::mt19937_64& random, const ReferenceTensors& given) {
  constexpr double step = 1e-5;
  ReferenceTensors inputs = given;
  draw_inputs(op, forward, random, inputs);
  ReferenceTensors tensors = inputs;
  run_stages(op, forward, tensors);
  draw_inputs(op, backward, random, tensors);
  const auto dy = tensors.at("dy");
  run_stages(op, backward, tensors);
  const auto objective = [&](const ReferenceTensors& at) {
    ReferenceTensors values = at;
    run_stages(op, forward, values);
    double sum = 0;
    for (std::size_t i = 0; i < dy.size(); ++i) sum += dy[i] * values.at("y")[i];
    return sum;
  };
  for (const auto& [input, gradient] : gradients) {
    const auto& analytic = tensors.at(gradient);
    REQUIRE(analytic.size() == inputs.at(input).size());
    for (std::size_t i = 0; i < analytic.size(); ++i) {
      ReferenceTensors above = inputs, below = inputs;
      above[input][i] += step;
      below[input][i] -= step;
      const double numeric = (objective(above) - objective(below)) / (2 * step);
      CAPTURE(backward.text(), gradient, i);
      REQUIRE(analytic[i] == Approx(numeric).epsilon(1e-5).margin(1e-7));
    }
  }
}

}  // namespace fftune::test
