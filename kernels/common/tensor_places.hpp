// Where an op's tensors are, for ops whose options leave some of them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "device/program.hpp"
#include "registry/op.hpp"

namespace fftune {

/// No tensor: one that the options leave out.
constexpr std::size_t absent = static_cast<std::size_t>(-1);

/// The places of tensors by their names.
class TensorPlaces {
 public:
  explicit TensorPlaces(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {}
  /// The op's tensors and then those that a baseline has for itself.
  TensorPlaces(std::vector<TensorSpec> tensors, const std::vector<TensorSpec>& extra)
      : tensors_(std::move(tensors)) {
    tensors_.insert(tensors_.end(), extra.begin(), extra.end());
  }

  /// The place of a tensor, or `absent`.
  std::size_t at(std::string_view name) const {
    return find_tensor(tensors_, name).value_or(absent);
  }
  std::size_t count() const { return tensors_.size(); }

 private:
  std::vector<TensorSpec> tensors_;
};

/// A tensor's address as a kernel's argument, or a null pointer for one that is absent.
inline Argument tensor_or_null(std::size_t place) {
  if (place == absent) return std::int64_t{0};
  return TensorArgument{place};
}

}  // namespace fftune
