#include "kernels/common/part_stages.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "registry/part_family.hpp"

namespace fftune {

std::string contradiction_of_parts(const Problem& problem,
                                   std::vector<OpPart> (*parts_of)(const Problem&)) {
  try {
    parts_of(problem);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::vector<StageSpec> stages_of_parts(const std::vector<OpPart>& parts) {
  std::vector<StageSpec> stages;
  for (const OpPart& part : parts)
    for (StageSpec& stage : part.op->stages(part.problem)) {
      stage.name = part.stage(stage.name);
      for (auto* names : {&stage.inputs, &stage.outputs})
        for (std::string& name : *names) name = part.tensor(name);
      stages.push_back(std::move(stage));
    }
  return stages;
}

void reference_of_part(const OpPart& part, std::size_t stage, ReferenceTensors& tensors,
                       Parallel& parallel,
                       const std::function<std::string(const std::string&)>& name_of) {
  const StageSpec spec = part.op->stages(part.problem).at(stage);
  ReferenceTensors own;
  std::map<std::string, std::string> lent;  // by the name in `tensors`: they may be large
  for (const std::string& name : spec.inputs) {
    const std::string all = name_of(name);
    const auto known = lent.find(all);
    if (const auto first = static_cast<std::size_t>(first_of(part, name)); first > 0) {
      // The part reads nothing behind the whole's last element.
      const auto& whole = known != lent.end() ? own.at(known->second) : tensors.at(all);
      std::vector<double> behind(whole.size());
      std::copy(whole.begin() + static_cast<std::ptrdiff_t>(first), whole.end(), behind.begin());
      own[name] = std::move(behind);
      continue;
    }
    if (known != lent.end()) {
      own[name] = own.at(known->second);
      continue;
    }
    if (const auto encoded = tensors.encoded.find(all); encoded != tensors.encoded.end()) {
      own.encoded[name] = encoded->second;
      continue;
    }
    own[name] = std::move(tensors.at(all));
    lent[all] = name;
  }
  part.op->reference(part.problem, stage, own, parallel);
  for (const auto& [all, name] : lent) tensors[all] = std::move(own.at(name));
  for (const std::string& name : spec.outputs) {
    // Updated tensors were lent, and are back already.
    if (const auto known = lent.find(name_of(name)); known != lent.end()) continue;
    tensors[name_of(name)] = std::move(own.at(name));
  }
}

bool reference_of_parts(const std::vector<OpPart>& parts, std::size_t stage,
                        ReferenceTensors& tensors, Parallel& parallel) {
  for (const OpPart& part : parts) {
    const std::size_t count = part.op->stages(part.problem).size();
    if (stage < count) {
      reference_of_part(part, stage, tensors, parallel,
                        [&](const std::string& name) { return part.tensor(name); });
      return true;
    }
    stage -= count;
  }
  return false;
}

}  // namespace fftune
