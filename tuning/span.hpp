// A span: consecutive stages of an op.
#pragma once

#include <compare>
#include <cstddef>

namespace fftune {

struct Span {
  std::size_t first_stage = 0;
  std::size_t stage_count = 0;
  auto operator<=>(const Span&) const = default;
};

}  // namespace fftune
