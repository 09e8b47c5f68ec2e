// The tensor maps that a launch is passed.
#pragma once

#include <variant>
#include <vector>

#include "device/program.hpp"

namespace fftune::test {

/// In the order of the kernel's parameters, or of the fields of its only one.
inline std::vector<TensorMapArgument> tensor_maps_of(const KernelLaunch& launch) {
  std::vector<TensorMapArgument> maps;
  const auto add = [&](const Argument& argument) {
    if (const auto* map = std::get_if<TensorMapArgument>(&argument)) maps.push_back(*map);
  };
  for (const Argument& argument : launch.arguments) add(argument);
  if (launch.parameters)
    for (const ParameterStruct::Field& field : launch.parameters->fields) add(field.value);
  return maps;
}

}  // namespace fftune::test
