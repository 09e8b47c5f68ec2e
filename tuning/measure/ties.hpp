// Deciding among times with noise: a tie band, and a tie-break that does not depend on the times.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fftune {

struct Finalist {
  std::string id;
  double median_us = 0;
  int registers = 0;
  double low_us = 0;  // 95% confidence interval of the median; 0 and 0: none is known
  double high_us = 0;
};

/// The places of the finalists, most wanted first. First come those within the tie band of the
/// fastest, by fewer registers (more blocks can be resident beside other work), then by id. Then
/// come those that the measurement cannot tell from the fastest, because their intervals meet; then
/// the rest; both by median, then id. So the same device gives the same answer twice, while the
/// answer costs at most the band.
std::vector<std::size_t> by_preference(const std::vector<Finalist>& finalists, double tie_band);

/// How many of them, from the front of by_preference(), are tied with the fastest.
struct TieSet {
  std::size_t within_band = 0;
  std::size_t unresolved = 0;  // beyond the band, but their interval meets that of the fastest

  std::size_t size() const { return within_band + unresolved; }
};
TieSet tied(const std::vector<Finalist>& finalists, double tie_band);

}  // namespace fftune
