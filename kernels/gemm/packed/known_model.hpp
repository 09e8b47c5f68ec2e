// Models whose weights are published in a packed format.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "registry/op.hpp"

namespace fftune {

/// The model with weights of `format`, which its name ends with: gate and up have one each.
inline KnownModel packed_model(KnownModel model, std::string_view format) {
  model.name += fmt::format("-{}", format);
  model.options.erase("gate-up");
  model.options.emplace("weights", format);
  return model;
}

}  // namespace fftune
