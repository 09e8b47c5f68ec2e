// Equality up to a relative error, the same for Catch2 2 and 3.
#pragma once

#include <cmath>
#include <ostream>

namespace fftune {

struct Near {
  double value;
  double tolerance;
};

inline Near near(double value, double tolerance = 1e-9) {
  return {value, tolerance};
}
inline bool operator==(double value, const Near& expected) {
  return std::abs(value - expected.value) <= expected.tolerance * std::abs(expected.value);
}
inline std::ostream& operator<<(std::ostream& out, const Near& expected) {
  return out << expected.value << " ± " << 100 * expected.tolerance << "%";
}

}  // namespace fftune
