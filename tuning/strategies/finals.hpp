// Parts that strategies share: batches, the survivors within a band of the best, and the finals.
#pragma once

#include <cstddef>
#include <vector>

#include "tuning/strategies/search.hpp"

namespace fftune {

/// A variant this much slower than the best, when briefly timed, is not timed further.
inline constexpr double screening_band = 1.5;

/// Those of `indices` with a median within `band` times the best of them, fastest first, at most
/// `count`. Equal medians keep the order of the indices.
std::vector<std::size_t> within(const Search& search, std::vector<std::size_t> indices, double band,
                                std::size_t count);

/// The first of `indices` (fastest first) that take about `seconds` for one sample each; at least
/// three. A round is always finished, and must not take the time that the finals need.
std::vector<std::size_t> affordable(const Search& search, std::vector<std::size_t> indices,
                                    double seconds);

/// The fastest of `indices` again, with fresh samples, interleaved; returns them.
std::vector<std::size_t> finals(Search& search, const std::vector<std::size_t>& indices);

/// Those of `order` that have no time yet, and the warm starts: what is about to be screened rather
/// than known from a journal.
std::vector<std::size_t> about_to_be_timed(const Search& search,
                                           const std::vector<std::size_t>& order);

/// Takes a fresh sample, in turn, of those of `indices` that are more than `band` times slower than
/// the best but within reach: something else may have kept the device busy while they were
/// screened. The farthest are left out where there is no time for all.
void look_again(Search& search, const std::vector<std::size_t>& indices, double band);

/// Compiles `order` batch by batch and screens each, up to `band` times the best, with `samples`
/// samples, until the search is stopped or less than `reserve` (a part of 1) of its time is left;
/// returns those that were reached.
std::vector<std::size_t> in_batches(Search& search, const std::vector<std::size_t>& order,
                                    double reserve, double band, int samples = 3);

/// Takes `samples` samples of each of `order`.
std::vector<std::size_t> measure_fully(Search& search, const std::vector<std::size_t>& order,
                                       int samples);

}  // namespace fftune
