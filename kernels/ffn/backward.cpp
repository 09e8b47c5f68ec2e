#include "kernels/ffn/backward.hpp"

#include <cmath>
#include <string>

namespace fftune::ffn {

std::vector<TensorSpec> backward_tensors(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const auto dtype = problem.dtype;
  const double by_d = 1 / std::sqrt(static_cast<double>(d));
  const double by_h = 1 / std::sqrt(static_cast<double>(h));
  const bool again = recomputes(problem);
  const auto inner = [&, m = m, h = h](const char* name, Role role) {
    return TensorSpec{name, dtype, {m, h}, role, 1};
  };
  std::vector<TensorSpec> tensors{{"dy", dtype, {m, d}, Role::input, 1},
                                  {"x", dtype, {m, d}, Role::input, 1}};
  if (!again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::input));
  for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = true;
  tensors.push_back({"w_gate", dtype, {h, d}, Role::input, by_d});
  tensors.push_back({"w_up", dtype, {h, d}, Role::input, by_d});
  tensors.push_back({"w_down", dtype, {d, h}, Role::input, by_h});
  const auto of_weights = [&, d = d, h = h](const std::string& suffix, Role role) {
    for (const char* name : {"dw_gate", "dw_up"})
      tensors.push_back({name + suffix, dtype, {h, d}, role, 1});
    tensors.push_back({"dw_down" + suffix, dtype, {d, h}, role, 1});
    for (auto gradient = tensors.end() - 3; gradient != tensors.end(); ++gradient)
      (role == Role::input ? gradient->begins_sum : gradient->sums_tokens) = true;
  };
  if (form_of(problem).accumulates) of_weights("_before", Role::input);
  tensors.push_back({"dx", dtype, {m, d}, Role::output, 1});
  of_weights("", Role::output);
  if (again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::intermediate));
  for (const char* name : {"hidden", "d_gate", "d_up"})
    tensors.push_back(inner(name, Role::intermediate));
  return tensors;
}

Places backward_places(const Problem& problem) {
  Places places;
  places.count = 0;
  const auto next = [&](std::size_t& place) { place = places.count++; };
  const bool again = recomputes(problem);
  places.y = Places::none;
  next(places.dy);
  next(places.x);
  places.gate_up_x = places.x;
  if (!again)
    for (std::size_t* place : {&places.gate, &places.up}) next(*place);
  for (std::size_t* place : {&places.w_gate, &places.w_up, &places.w_down}) next(*place);
  if (form_of(problem).accumulates)
    for (std::size_t* place :
         {&places.dw_gate_before, &places.dw_up_before, &places.dw_down_before})
      next(*place);
  for (std::size_t* place : {&places.dx, &places.dw_gate, &places.dw_up, &places.dw_down})
    next(*place);
  if (again)
    for (std::size_t* place : {&places.gate, &places.up}) next(*place);
  for (std::size_t* place : {&places.hidden, &places.d_gate, &places.d_up}) next(*place);
  return places;
}

}  // namespace fftune::ffn
