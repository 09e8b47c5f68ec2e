// The landscape that most tests of the tuner search, and what won.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "support/catch.hpp"
#include "tuning/tuner.hpp"

namespace fftune {

/// One deep valley: p=137 takes 100 µs, and a variant |p-137| away takes that many µs more.
inline double valley(const Variant& variant) {
  return 100 + std::abs(static_cast<double>(variant.config.at("p")) - 137);
}

inline std::int64_t winner(const TuneResult& result, std::size_t stage = 0) {
  REQUIRE(result.record);
  return result.record->stages.at(stage).variant.config.at("p");
}

}  // namespace fftune
