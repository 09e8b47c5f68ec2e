#include "kernels/layer/fused_parts.hpp"

#include <utility>

#include "kernels/layer/layer.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {

std::optional<std::string> FusedParts::refuse_parts(const std::vector<OpPart>& all) const {
  const OpPart* const first = part_named(all, of_.first.part);
  const OpPart* const second = part_named(all, of_.second.part);
  if (!first || !second) return "the layer has no " + (first ? of_.second.part : of_.first.part);
  if (first->tensor("y") != second->tensor("x"))
    return "the result of " + of_.first.part + " is not what " + of_.second.part + " reads";
  if (first->op->stages(first->problem).back().name != of_.first.stage)
    return "there is no stage " + first->stage(of_.first.stage);
  if (second->op->stages(second->problem).front().name != of_.second.stage)
    return "there is no stage " + second->stage(of_.second.stage);
  return std::nullopt;
}

FusedParts::Parts FusedParts::parts(const Problem& problem) const {
  const auto all = parts_of(problem);
  return {*part_named(all, of_.first.part), *part_named(all, of_.second.part)};
}

void append_in_layer(Program& program, Program from, const Problem& problem,
                     const std::vector<std::string>& names) {
  const auto whole = layer_op().tensors(unrepeated(layer_op(), problem));
  std::vector<std::size_t> places;
  for (const std::string& name : names) places.push_back(tensor_index(whole, name));
  append_moved(program, std::move(from), places, whole.size());
}

}  // namespace fftune::layer
