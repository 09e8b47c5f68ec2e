// A space: parameters with their values, and the constraints that cut it down.
//
// A family builds its space for one problem on one device, so a constraint's predicate has both
// at hand and takes the configuration alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/config.hpp"

namespace fftune {

struct Parameter {
  std::string name;
  std::string help;  // what it means and its unit
  std::vector<std::int64_t> values;
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
  Space& parameter(std::string name, std::string help, std::vector<std::int64_t> values);
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

 private:
  std::vector<Parameter> parameters_;
  std::vector<Constraint> constraints_;
};

}  // namespace fftune
