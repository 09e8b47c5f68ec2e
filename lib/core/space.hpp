// A space: parameters with their values, and the constraints that cut it down.
//
// A family builds its space for one problem on one device, so a constraint's predicate has both
// at hand and takes the configuration alone.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config.hpp"

namespace fftune {

struct Parameter {
  std::string name;
  std::string help;                    // what it means and its unit
  std::vector<ParameterValue> values;  // all numbers or all words
  /// Set where the family gained the parameter after records of it had been written: the value that
  /// stands for what the family did without the parameter.
  std::function<ParameterValue()> when_absent = {};

  /// The values of a parameter of numbers; throws Error(internal) for words.
  std::vector<std::int64_t> numbers() const;
  /// "16, 32, 64" with the separator ", ".
  std::string values_text(std::string_view separator) const;
};

struct Constraint {
  std::string reason;  // one line: what the hardware or the problem forbids
  std::function<bool(const Config&)> holds;
  /// The parameters that `holds` reads; empty: it may read any. A large space is enumerated fast
  /// where they are named, because whole branches then fall with their first parameters.
  std::vector<std::string> reads;
};

class Space {
 public:
  /// A parameter whose values are numbers.
  Space& parameter(std::string name, std::string help, std::vector<std::int64_t> values);
  /// A parameter whose values are words: alternatives that have no order.
  Space& parameter(std::string name, std::string help, std::vector<std::string> words);
  /// Either, written in place. Without this overload {0} and {"a", "b"} would be ambiguous, since 0
  /// converts to a string and two pointers are a range of numbers.
  template <typename T>
  Space& parameter(std::string name, std::string help, std::initializer_list<T> values) {
    using Value = std::conditional_t<std::is_integral_v<T>, std::int64_t, std::string>;
    return parameter(std::move(name), std::move(help),
                     std::vector<Value>(values.begin(), values.end()));
  }
  Space& parameter(Parameter parameter);
  /// Parameter::when_absent of the parameter that was declared last.
  Space& when_absent(ParameterValue value);
  /// The same, for a value that takes some time to compute and that few configurations need.
  Space& when_absent_by(std::function<ParameterValue()> value);
  Space& constraint(std::string reason, std::function<bool(const Config&)> holds,
                    std::vector<std::string> reads = {});

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Constraint>& constraints() const { return constraints_; }

  /// How many configurations there are before the constraints.
  std::size_t size() const;
  /// Calls `visit` for every configuration, feasible or not, the last parameter varying fastest.
  void for_each(const std::function<void(const Config&)>& visit) const;
  /// Every configuration that holds all constraints, in the order of for_each.
  std::vector<Config> feasible() const;
  /// Why `config` is not in the space, in the space's own words: parameters that are missing,
  /// unknown or at a value that is not listed, else the constraints it breaks; empty if feasible.
  std::vector<std::string> violations(const Config& config) const;
  /// A configuration on record in the order of the space, whatever order its file has, with the
  /// parameters that it lacks because they were added later. It stays as it is where another
  /// parameter is missing: violations() then names that one.
  Config completed(const Config& config) const;

 private:
  std::vector<Parameter> parameters_;
  std::vector<Constraint> constraints_;
};

}  // namespace fftune
