#include "apps/fftune/explain.hpp"

namespace fftune::tool {

namespace {

// The space with one constraint left out.
Space without(const Space& space, std::size_t left_out) {
  Space other;
  for (const Parameter& parameter : space.parameters()) other.parameter(parameter);
  for (std::size_t i = 0; i < space.constraints().size(); ++i) {
    const Constraint& constraint = space.constraints()[i];
    if (i != left_out) other.constraint(constraint.reason, constraint.holds, constraint.reads);
  }
  return other;
}

}  // namespace

FamilyView view_of(const Family& family, const Problem& problem, const DeviceFacts& facts,
                   bool with_effects) {
  FamilyView view;
  view.family = &family;
  if (const auto refusal = family.refusal(problem, facts)) {
    view.refusal = *refusal;
    return view;
  }
  const Space space = family.space(problem, facts);
  view.parameters = space.parameters();
  view.size = space.size();
  view.feasible = space.feasible();
  view.untuned = family.default_config(problem, facts);
  // A configuration that breaks this constraint and no other is feasible without it: counting
  // those needs no walk over the whole product of the parameters.
  for (std::size_t i = 0; with_effects && i < space.constraints().size(); ++i)
    view.effects.push_back({space.constraints()[i].reason,
                            without(space, i).feasible().size() - view.feasible.size()});
  return view;
}

}  // namespace fftune::tool
