// The only way to the elements of a quantised weight's tensors: the reader has said which element
// types and which shape it takes, and the file has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/fail.hpp"
#include "saved/header.hpp"
#include "store/json.hpp"

namespace fftune {

template <typename T>
class CheckedTensor;

/// Reads the bytes of saved tensors, for CheckedTensor alone.
class TensorReader {
 public:
  using Read = std::function<std::vector<std::byte>(std::string_view name)>;
  explicit TensorReader(Read read) : read_(std::move(read)) {}

 private:
  template <typename T>
  friend class CheckedTensor;

  Read read_;
};

/// A saved tensor that has one of the element types and the shape that its format demands. T is
/// double for numbers of any type, which are decoded, or an integer of the element's own size.
template <typename T>
class CheckedTensor {
 public:
  /// Throws Error(invalid_input) for another element type or another shape.
  CheckedTensor(const SavedTensor& tensor, std::initializer_list<Element> elements,
                const std::vector<std::int64_t>& shape)
      : tensor_(tensor) {
    if (std::find(elements.begin(), elements.end(), tensor.element) == elements.end())
      fail("'{}' is {}, which this quantised format does not have", printable(tensor.name),
           element_name(tensor.element));
    if (tensor.shape != shape)
      fail("'{}' is {}, where the quantised weight takes {}", printable(tensor.name),
           shape_text(tensor.shape), shape_text(shape));
    if (!std::is_same_v<T, double> && element_bytes(tensor.element) != sizeof(T))
      throw Error(ErrorKind::internal, "a saved tensor is read by elements of another size");
  }

  const std::string& name() const { return tensor_.name; }
  Element element() const { return tensor_.element; }

  /// As many elements as the shape has.
  std::vector<T> read(const TensorReader& reader) const {
    const std::vector<std::byte> bytes = reader.read_(tensor_.name);
    std::vector<T> values(static_cast<std::size_t>(tensor_.elements()));
    if (bytes.size() != values.size() * element_bytes(tensor_.element))
      fail("'{}' has {} bytes, not those of its shape", printable(tensor_.name), bytes.size());
    if constexpr (std::is_same_v<T, double>)
      decode(tensor_.element, bytes.data(), values);
    else if (!bytes.empty())
      std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

 private:
  SavedTensor tensor_;
};

}  // namespace fftune
