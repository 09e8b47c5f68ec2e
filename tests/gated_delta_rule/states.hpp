// Cases of ops with a state for each head: gated-delta-rule and ssd.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/fuzz.hpp"
#include "support/gradients.hpp"
#include "support/op_reference.hpp"

namespace fftune::test {

/// Draws sequences of `tokens` in all, and where the states are: the sequences' own, or those of a
/// cache of states of `elements`.
inline void draw_states(Draw& draw, const std::string& pass, bool is_cached, std::int64_t tokens,
                        std::int64_t elements, std::map<std::string, std::int64_t>& sizes,
                        std::map<std::string, std::string>& options) {
  sizes["b"] = 1 + draw.below(std::min<std::int64_t>(tokens, 5));
  sizes["s"] = options["layout"] == "thd" ? tokens : std::max<std::int64_t>(1, tokens / sizes["b"]);
  if (is_cached) {
    options["indices"] = "yes";
    options["null-index"] = draw.of({"0", "-1"});
    sizes["states"] = 1 + draw.below(2 * sizes["b"] + 1);
    if (draw.below(2)) sizes["state-block"] = elements + draw.below(3) * 4 + draw.below(2);
  } else {
    options["initial-state"] = draw.of({"no", "yes"});
    options["final-state"] = draw.of({"no", "yes"});
  }
  if (pass == "fwd" && (is_cached || options["initial-state"] == "yes"))
    options["has-state"] = draw.of({"no", "yes"});
}

/// A problem of one token of each sequence, among those that `draw_problem` draws.
template <const Op& (*op)(), DrawProblem draw_problem>
Problem single_tokens(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  for (;;) {
    Problem problem = draw_problem(kind, draw, most_elements);
    if (problem.pass != "fwd" || problem.has("layout", "thd") || problem.sizes.contains("slots"))
      continue;
    problem.sizes["s"] = 1;
    return canonical(op(), problem, kind);
  }
}

/// A small problem with slots, likewise.
template <DrawProblem draw_problem>
Problem with_slots(DeviceKind kind, Draw& draw, std::int64_t) {
  for (;;)
    if (Problem problem = draw_problem(kind, draw, std::int64_t{1} << 12);
        problem.sizes.contains("slots"))
      return problem;
}

/// Every gradient {input, gradient} of the sum of d_out ⊙ out and d_final_state ⊙ final_state.
inline void check_differences(const Op& op, const Problem& forward, const Problem& backward,
                              const std::vector<std::pair<std::string, std::string>>& gradients,
                              std::mt19937_64& random, ReferenceTensors inputs) {
  constexpr double step = 1e-5;
  draw_inputs(op, backward, random, inputs);
  const auto found = run_reference(backward, inputs);
  const auto objective = [&](const ReferenceTensors& at) {
    const auto out = run_reference(forward, at);
    double sum = 0;
    for (const char* name : {"out", "final_state"})
      for (std::size_t i = 0; i < out.at(name).size(); ++i)
        sum += at.at("d_" + std::string(name))[i] * out.at(name)[i];
    return sum;
  };
  for (const auto& [input, gradient] : gradients)
    for (std::size_t i = 0; i < found.at(gradient).size(); ++i) {
      ReferenceTensors above = inputs, below = inputs;
      above[input][i] += step;
      below[input][i] -= step;
      const double numeric = (objective(above) - objective(below)) / (2 * step);
      CAPTURE(backward.text(), gradient, i);
      REQUIRE(found.at(gradient)[i] == Approx(numeric).epsilon(1e-5).margin(1e-7));
    }
}

}  // namespace fftune::test
