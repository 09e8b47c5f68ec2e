// Test data that says where the tokens of sequences with caches are.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "registry/op.hpp"

namespace fftune::layer {

/// Pages of a layer's cache, of a problem with `page`.
std::int64_t pages_of(const Problem& problem);
/// Rows of a layer's cache in memory.
std::int64_t cache_rows(const Problem& problem);

/// Why a cache does not go with the new tokens: asked before a layer's parts are made, and after.
std::string contradiction_of_cache(const Problem& problem);
std::string contradiction_of_pages(const Problem& problem);

/// How many keys the sequences have, and where: what the tensors positions, slots, lengths and
/// pages agree on.
class Sequences {
 public:
  explicit Sequences(const Problem& problem);

  /// Pages with new tokens of all sequences, at most.
  static std::int64_t written_pages(const Problem& problem);
  /// Sets the draw of a tensor that is one of these.
  static void set_draw(const Problem& problem, TensorSpec& tensor);

 private:
  void draw_lengths(std::span<double> values) const;
  void draw_positions(std::span<double> values) const;
  void draw_slots(std::span<double> values) const;
  void draw_pages(std::span<double> values) const;
  template <typename ValueOf>
  void for_each_token(std::span<double> values, const ValueOf& value_of) const;
  std::size_t width() const;
  void deal_pages(std::int64_t count, std::mt19937_64& random);

  std::int64_t s_, cache_, page_;
  std::vector<std::int64_t> lengths_, pages_;
};

}  // namespace fftune::layer
