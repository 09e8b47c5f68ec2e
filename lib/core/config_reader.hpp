// Reads a whole configuration into a struct, once, where its parameters are needed many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/config.hpp"

namespace fftune {

/// Gives the parameters of a configuration by their names, which is fastest in the order that the
/// space declares them in: each is then looked for where it is. `config` has to outlive this.
class ConfigReader {
 public:
  explicit ConfigReader(const Config& config) : config_(config) {}

  /// As those of Config.
  std::int64_t at(std::string_view name) { return value(name).number(); }
  int get(std::string_view name) { return static_cast<int>(at(name)); }
  const std::string& word(std::string_view name) { return value(name).word(); }
  /// A parameter that some of the family's spaces lack.
  int get_or(std::string_view name, int otherwise) {
    const ParameterValue* const found = find(name);
    return found != nullptr ? static_cast<int>(found->number()) : otherwise;
  }

 private:
  const ParameterValue* find(std::string_view name) {
    const auto& entries = config_.entries();
    for (std::size_t tried = 0; tried < entries.size(); ++tried, ++next_) {
      if (next_ >= entries.size()) next_ = 0;
      if (entries[next_].first == name) return &entries[next_++].second;
    }
    return nullptr;
  }
  const ParameterValue& value(std::string_view name) {
    const ParameterValue* const found = find(name);
    return found != nullptr ? *found : config_.value(name);  // which throws
  }

  const Config& config_;
  std::size_t next_ = 0;  // the place behind the last one
};

}  // namespace fftune
