#include "apps/fftune/json.hpp"

#include <nlohmann/json.hpp>
#include <string>

namespace fftune::tool {

Json to_json(const Problem& problem) {
  Json json = {{"op", problem.op}, {"pass", problem.pass}, {"dtype", dtype_name(problem.dtype)}};
  for (const auto& [name, value] : problem.sizes) json[name] = value;
  for (const auto& [name, value] : problem.options) json[name] = value;
  return json;
}

Json to_json(const DeviceFacts& facts) {
  Json details = Json::object();
  for (const auto& [name, value] : facts.details) details[name] = value;
  return {{"kind", facts.kind == DeviceKind::cpu ? "cpu" : "cuda"},
          {"name", facts.name},
          {"slug", facts.slug()},
          {"arch", facts.arch},
          {"compute_capability", facts.compute_capability},
          {"multiprocessors", facts.multiprocessors},
          {"registers_per_multiprocessor", facts.registers_per_multiprocessor},
          {"shared_bytes_per_block", facts.shared_bytes_per_block},
          {"shared_bytes_per_multiprocessor", facts.shared_bytes_per_multiprocessor},
          {"l2_bytes", facts.l2_bytes},
          {"memory_bytes", facts.memory_bytes},
          {"memory_bandwidth", facts.memory_bandwidth},
          {"clock_hz", facts.clock_hz},
          {"driver", facts.driver},
          {"toolkit", facts.toolkit},
          {"details", details}};
}

Json to_json(const ParameterValue& value) {
  return value.is_word() ? Json(value.word()) : Json(value.number());
}

Json to_json(const Recipe& recipe) {
  Json ids = Json::array();
  for (const Variant& variant : recipe) ids.push_back(variant.id());
  return ids;
}

Json to_json(const TensorSpec& tensor) {
  return {{"name", tensor.name},
          {"role", role_name(tensor.role)},
          {"dtype", dtype_name(tensor.dtype)},
          {"shape", tensor.shape}};
}

}  // namespace fftune::tool
