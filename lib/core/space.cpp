#include "core/space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fftune {

std::vector<std::int64_t> Parameter::numbers() const {
  std::vector<std::int64_t> numbers;
  for (const auto& value : values) numbers.push_back(value.number());
  return numbers;
}

std::string Parameter::values_text(std::string_view separator) const {
  std::string text;
  for (const auto& value : values)
    text += fmt::format("{}{}", text.empty() ? std::string_view() : separator, value.text());
  return text;
}

Space& Space::parameter(std::string name, std::string help, std::vector<std::int64_t> values) {
  return parameter({.name = std::move(name),
                    .help = std::move(help),
                    .values = std::vector<ParameterValue>(values.begin(), values.end())});
}

Space& Space::parameter(std::string name, std::string help, std::vector<std::string> words) {
  return parameter(
      {.name = std::move(name), .help = std::move(help), .values = {words.begin(), words.end()}});
}

Space& Space::parameter(Parameter parameter) {
  parameters_.push_back(std::move(parameter));
  return *this;
}

Space& Space::when_absent(ParameterValue value) {
  return when_absent_by([value = std::move(value)] { return value; });
}

Space& Space::when_absent_by(std::function<ParameterValue()> value) {
  parameters_.back().when_absent = std::move(value);
  return *this;
}

Space& Space::constraint(std::string reason, std::function<bool(const Config&)> holds,
                         std::vector<std::string> reads) {
  constraints_.push_back({std::move(reason), std::move(holds), std::move(reads)});
  return *this;
}

std::size_t Space::size() const {
  std::size_t size = 1;
  for (const auto& parameter : parameters_) size *= parameter.values.size();
  return size;
}

void Space::for_each(const std::function<void(const Config&)>& visit) const {
  std::vector<std::size_t> digits(parameters_.size(), 0);
  Config config;
  for (const auto& parameter : parameters_) {
    if (parameter.values.empty()) return;
    config.set(parameter.name, parameter.values.front());
  }
  while (true) {
    visit(config);
    std::size_t place = parameters_.size();
    while (place > 0) {
      --place;
      const auto& parameter = parameters_[place];
      digits[place] = (digits[place] + 1) % parameter.values.size();
      config.set(parameter.name, parameter.values[digits[place]]);
      if (digits[place] != 0) break;
      if (place == 0) return;
    }
    if (parameters_.empty()) return;
  }
}

std::vector<Config> Space::feasible() const {
  // decided[i]: the constraints that can be judged once the first i parameters have their values.
  std::vector<std::vector<const Constraint*>> decided(parameters_.size() + 1);
  for (const auto& constraint : constraints_) {
    std::size_t needed = constraint.reads.empty() ? parameters_.size() : 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      for (const auto& name : constraint.reads)
        if (parameters_[i].name == name) needed = i + 1;
    decided[needed].push_back(&constraint);
  }
  Config config;
  // A predicate may compute with what it does not depend on, so each parameter has a value of it.
  for (const auto& parameter : parameters_)
    if (!parameter.values.empty()) config.set(parameter.name, parameter.values.front());
  std::vector<Config> feasible;
  const std::function<void(std::size_t)> descend = [&](std::size_t place) {
    for (const Constraint* constraint : decided[place])
      if (!constraint->holds(config)) return;
    if (place == parameters_.size()) {
      feasible.push_back(config);
      return;
    }
    for (const auto& value : parameters_[place].values) {
      config.set(parameters_[place].name, value);
      descend(place + 1);
    }
  };
  descend(0);
  return feasible;
}

std::vector<std::string> Space::violations(const Config& config) const {
  std::vector<std::string> violations;
  for (const auto& parameter : parameters_) {
    if (!config.contains(parameter.name)) {
      violations.push_back(fmt::format("parameter '{}' is missing", parameter.name));
      continue;
    }
    const auto& value = config.value(parameter.name);
    if (std::find(parameter.values.begin(), parameter.values.end(), value) ==
        parameter.values.end())
      violations.push_back(fmt::format("{}={} is not one of {}", parameter.name, value.text(),
                                       parameter.values_text(", ")));
  }
  for (const auto& entry : config.entries()) {
    const std::string& name = entry.first;  // clang 14 captures no structured binding
    const bool known = std::any_of(parameters_.begin(), parameters_.end(),
                                   [&](const Parameter& p) { return p.name == name; });
    if (!known) violations.push_back(fmt::format("there is no parameter '{}'", name));
  }
  if (!violations.empty()) return violations;  // A predicate may read only what the space names.
  for (const auto& constraint : constraints_)
    if (!constraint.holds(config)) violations.push_back(constraint.reason);
  return violations;
}

Config Space::completed(const Config& config) const {
  Config whole;
  for (const auto& parameter : parameters_) {
    const bool present = config.contains(parameter.name);
    if (!present && !parameter.when_absent) return config;
    whole.set(parameter.name, present ? config.value(parameter.name) : parameter.when_absent());
  }
  // Parameters that the space does not know stay, for violations() to name.
  for (const auto& [name, value] : config.entries()) whole.set(name, value);
  return whole;
}

}  // namespace fftune
