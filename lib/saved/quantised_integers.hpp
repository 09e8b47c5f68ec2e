// Weights of integers in words of int32, as GPTQ, AWQ and compressed-tensors save them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>

#include "saved/quantised_parts.hpp"
#include "store/json.hpp"

namespace fftune::quantised {

/// Bits of a code, and input features in a group, of one module.
struct IntegerSettings {
  std::int64_t bits = 4, group = 0;
};

/// The settings that quantization_config has for all modules.
IntegerSettings settings_in(const JsonValue& config, std::string_view method,
                            std::initializer_list<std::int64_t> known_bits);
/// The settings of a module of GPTQ by its tensors, where `dynamic` may have given it other bits.
IntegerSettings settings_of(const Parts& parts, const IntegerSettings& settings);

using Weight = std::shared_ptr<const QuantisedWeight>;
Weight gptq_weight(const Parts& parts, const IntegerSettings& settings, bool dynamic,
                   bool zeros_less_one);
Weight awq_weight(const Parts& parts, const IntegerSettings& settings, bool dynamic);
/// Of compressed-tensors.
Weight packed_weight(const Parts& parts, const Shape& shape);

}  // namespace fftune::quantised
