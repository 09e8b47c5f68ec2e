// The tensors that belong to one quantised weight, in all layouts.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fail.hpp"
#include "saved/quantised.hpp"

namespace fftune::quantised {

using Tensors = std::map<std::string, SavedTensor, std::less<>>;
using Shape = std::vector<std::int64_t>;
using Numbers = CheckedTensor<double>;
using Words = CheckedTensor<std::uint32_t>;
using ByteCodes = CheckedTensor<std::uint8_t>;

inline constexpr std::initializer_list<Element> scale_elements{Element::f16, Element::bf16,
                                                               Element::f32};
inline constexpr std::initializer_list<Element> index_elements{Element::i32, Element::i64};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}

inline std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// The tensors that belong to one weight: their names are `base` and a suffix.
class Parts {
 public:
  Parts(const Tensors& tensors, std::string base) : tensors_(&tensors), base_(std::move(base)) {}

  const std::string& base() const { return base_; }
  const SavedTensor* find(std::string_view suffix) const {
    const auto entry = tensors_->find(base_ + std::string(suffix));
    return entry == tensors_->end() ? nullptr : &entry->second;
  }
  const SavedTensor& at(std::string_view suffix) const {
    if (const SavedTensor* tensor = find(suffix)) return *tensor;
    fail("'{}{}' is missing beside the other tensors of this quantised weight", printable(base_),
         suffix);
  }

 private:
  const Tensors* tensors_;
  std::string base_;
};

inline bool is_matrix(const SavedTensor& tensor, std::size_t dimensions = 2) {
  return tensor.shape.size() == dimensions && tensor.elements() > 0;
}

inline Shape expect_matrix(const SavedTensor& tensor) {
  if (!is_matrix(tensor))
    fail("'{}' is {}, not a matrix", printable(tensor.name), shape_text(tensor.shape));
  return tensor.shape;
}

/// The type that a model computes in: that of 16-bit scales, else bf16.
inline Element computing_element(const SavedTensor& scales) {
  return scales.element == Element::f16 ? Element::f16 : Element::bf16;
}

inline SavedTensor dense_tensor(std::string name, Element element, Shape shape) {
  return {.name = std::move(name), .element = element, .shape = std::move(shape)};
}

inline void expect_finite(const std::vector<double>& values, const std::string& name) {
  for (const double value : values)
    if (!std::isfinite(value)) fail("'{}' has a scale that is not finite", printable(name));
}

inline std::vector<double> read_scales(const TensorReader& read, const Numbers& tensor) {
  auto values = tensor.read(read);
  expect_finite(values, tensor.name());
  return values;
}

/// A tensor of one number, whatever its dimensions are.
inline Numbers one_number(const SavedTensor& tensor, std::initializer_list<Element> elements) {
  return {tensor, elements, tensor.elements() == 1 ? tensor.shape : Shape{1}};
}

/// A format of groups of `size` neighbours of k. Kernels have groups of 128, 64 and 32, and rows.
inline CodeFormat grouped_format(std::string weights, std::int64_t size, std::int64_t k) {
  CodeFormat format{.weights = std::move(weights)};
  if (size >= k) format.groups.push_back(0);
  for (const std::int64_t own : {128, 64, 32})
    if (k % own == 0 && (size >= k || size % own == 0)) format.groups.push_back(own);
  if (format.groups.empty())
    format.unfit = fmt::format(
        "it has groups of {} in rows of {}, and kernels have those of 32, 64, 128 or a row", size,
        k);
  return format;
}

}  // namespace fftune::quantised
