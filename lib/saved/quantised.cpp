#include "saved/quantised.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "core/fail.hpp"
#include "saved/model_config.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

using Tensors = std::map<std::string, SavedTensor, std::less<>>;
using Shape = std::vector<std::int64_t>;
using Numbers = CheckedTensor<double>;
using Words = CheckedTensor<std::uint32_t>;
using ByteCodes = CheckedTensor<std::uint8_t>;

constexpr std::initializer_list<Element> scale_elements{Element::f16, Element::bf16, Element::f32};
constexpr std::initializer_list<Element> index_elements{Element::i32, Element::i64};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}

std::size_t index(std::int64_t value) {
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

bool is_matrix(const SavedTensor& tensor, std::size_t dimensions = 2) {
  return tensor.shape.size() == dimensions && tensor.elements() > 0;
}

Shape expect_matrix(const SavedTensor& tensor) {
  if (!is_matrix(tensor))
    fail("'{}' is {}, not a matrix", printable(tensor.name), shape_text(tensor.shape));
  return tensor.shape;
}

/// The type that a model computes in: that of 16-bit scales, else bf16.
Element computing_element(const SavedTensor& scales) {
  return scales.element == Element::f16 ? Element::f16 : Element::bf16;
}

SavedTensor dense_tensor(std::string name, Element element, Shape shape) {
  return {.name = std::move(name), .element = element, .shape = std::move(shape)};
}

void expect_finite(const std::vector<double>& values, const std::string& name) {
  for (const double value : values)
    if (!std::isfinite(value)) fail("'{}' has a scale that is not finite", printable(name));
}

std::vector<double> read_scales(const TensorReader& read, const Numbers& tensor) {
  auto values = tensor.read(read);
  expect_finite(values, tensor.name());
  return values;
}

/// A tensor of one number, whatever its dimensions are.
Numbers one_number(const SavedTensor& tensor, std::initializer_list<Element> elements) {
  return {tensor, elements, tensor.elements() == 1 ? tensor.shape : Shape{1}};
}

/// A format of groups of `size` neighbours of k. Kernels have groups of 128, 64 and 32, and rows.
CodeFormat grouped_format(std::string weights, std::int64_t size, std::int64_t k) {
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

/// Groups of input features: `size` neighbours each, or those that a tensor of indices names.
class Groups {
 public:
  Groups(std::int64_t size, std::int64_t count, std::int64_t k, const SavedTensor* indices)
      : size_(index(size)), count_(count) {
    if (indices != nullptr) indices_.emplace(*indices, index_elements, Shape{k});
  }

  void load(const TensorReader& read) {
    if (!indices_) return;
    of_.clear();
    for (const double group : indices_->read(read)) {
      if (!(group >= 0 && group < static_cast<double>(count_)))
        fail("'{}' names group {}, where there are {}", printable(indices_->name()), group, count_);
      of_.push_back(static_cast<std::size_t>(group));
    }
  }
  std::size_t of(std::size_t column) const { return of_.empty() ? column / size_ : of_[column]; }

  /// The format of integers in rows of k.
  CodeFormat format(const TensorReader& read, std::string weights, std::int64_t k) const {
    Groups own = *this;
    own.load(read);
    CodeFormat format = grouped_format(std::move(weights), count_ == 1 ? k : own.stride(), k);
    if (own.stride() == 0)
      format.unfit = "its inputs are in the order of activations (desc_act), not of their groups";
    return format;
  }

 private:
  /// Neighbours in a group; 0: groups are no neighbours.
  std::int64_t stride() const {
    if (of_.empty() || count_ == 1) return static_cast<std::int64_t>(size_);
    const auto size = static_cast<std::size_t>(
        std::find_if(of_.begin(), of_.end(), [&](std::size_t group) { return group != of_[0]; }) -
        of_.begin());
    for (std::size_t i = 0; i < of_.size(); ++i)
      if (of_[i] != i / size) return 0;
    return static_cast<std::int64_t>(size);
  }

  std::size_t size_;
  std::int64_t count_;
  std::optional<Numbers> indices_;
  std::vector<std::size_t> of_;
};

std::string word_of(const JsonValue& config, std::string_view key) {
  const JsonValue* const field = config.find(key);
  const auto* const text = field ? field->get_if<std::string>() : nullptr;
  return text ? *text : "";
}

/// The same value in each field of `bits` of a word.
std::uint32_t in_all_fields(std::int64_t bits, std::uint32_t value) {
  std::uint32_t word = 0;
  for (std::int64_t shift = 0; shift < 32; shift += bits) word |= value << shift;
  return word;
}

/// Integers of 4 or 8 bits in words of int32: the value is (code - zero) * scale.
class IntegerWeight : public QuantisedWeight {
 protected:
  IntegerWeight(SavedTensor dense, std::int64_t bits)
      : QuantisedWeight(std::move(dense)), bits_(bits) {}

  /// The code and the zero point as they are saved, from 0 on.
  virtual Code saved_at(std::size_t row, std::size_t column) const = 0;

  std::int64_t words_for(std::int64_t codes) const { return ceil_div(codes * bits_, 32); }
  std::size_t fields() const { return index(32 / bits_); }
  /// The field at `place` of a word.
  int field(std::uint32_t word, std::size_t place) const {
    return static_cast<int>(word >> place * index(bits_) & ((1u << bits_) - 1));
  }
  double at(std::size_t row, std::size_t column) const final {
    const Code own = saved_at(row, column);
    return (own.bits - own.zero) * own.scale;
  }
  Code code_at(std::size_t row, std::size_t column) const final {
    Code code = saved_at(row, column);
    if (bits_ == 8) code.bits ^= 128;
    return code;
  }
  CodeFormat with_zeros(CodeFormat format, bool zeros) const {
    format.zeros = zeros;
    if (zeros && bits_ == 8) format.unfit = "it has zero points of 8 bits";
    return format;
  }
  const char* format_name() const { return bits_ == 4 ? "int4" : "int8"; }

  std::int64_t bits_;
};

/// Bits of a code, and input features in a group, of one module.
struct IntegerSettings {
  std::int64_t bits = 4, group = 0;
};

/// The settings that quantization_config has for all modules.
IntegerSettings settings_in(const JsonValue& config, std::string_view method,
                            std::initializer_list<std::int64_t> known_bits) {
  const auto whole = [&](std::string_view key) {
    const JsonValue* const field = config.find(key);
    return field ? field->get_if<std::int64_t>() : nullptr;
  };
  const auto* const field_of_bits = whole("bits");
  const std::int64_t bits = field_of_bits ? *field_of_bits : 0;
  const auto* const group = whole("group_size");
  if (group != nullptr && *group != -1 && *group < 1)
    fail("quantization_config has a group_size of {}", *group);
  if (std::find(known_bits.begin(), known_bits.end(), bits) == known_bits.end())
    fail("{} weights of {} bits are not known: {} are", method,
         config.find("bits") ? json_brief(*config.find("bits")) : "unknown",
         fmt::join(known_bits, " and "));
  return {bits, group == nullptr || *group == -1 ? 0 : *group};
}

/// Group size of a module of `count` groups: its own where `dynamic` may give one.
std::int64_t group_of(std::int64_t given, std::int64_t count, std::int64_t k, bool dynamic) {
  if (given == 0) given = k;
  const bool fits = ceil_div(k, given) == count && (k % given == 0 || !dynamic || k % count != 0);
  return !fits && dynamic && count > 0 && k % count == 0 ? k / count : given;
}

/// The parts that GPTQ and AWQ share: qweight, and qzeros [G, n * bits / 32] packed along n;
/// scales [G, n].
class ZeroPackedWeight : public IntegerWeight {
 protected:
  ZeroPackedWeight(const Parts& parts, const Shape& shape, const IntegerSettings& settings,
                   bool dynamic)
      : IntegerWeight(
            dense_tensor(parts.base() + "weight", computing_element(parts.at("scales")), shape),
            settings.bits),
        n_(shape[0]),
        group_(group_of(settings.group, expect_matrix(parts.at("scales"))[0], shape[1], dynamic)),
        count_(ceil_div(shape[1], group_)),
        words_(parts.at("qweight"), {Element::i32}, parts.at("qweight").shape),
        zero_words_(parts.at("qzeros"), {Element::i32}, {count_, words_for(n_)}),
        scale_tensor_(parts.at("scales"), scale_elements, {count_, n_}) {}

  void load(const TensorReader& read) override {
    codes_ = words_.read(read);
    zeros_ = zero_words_.read(read);
    scales_ = read_scales(read, scale_tensor_);
  }
  /// A code of qweight, with the zero at `zero_place` in its word and the scale of a group's row.
  Code code(std::size_t word, std::size_t place, std::size_t group, std::size_t row,
            std::size_t zero_place) const {
    const std::uint32_t zero_word = zeros_[group * index(words_for(n_)) + row / fields()];
    return {.bits = field(codes_[word], place),
            .zero = field(zero_word, zero_place),
            .scale = scales_[group * index(n_) + row]};
  }
  /// Whether a zero point of the words is another than `middle`.
  bool has_zeros(const TensorReader& read, std::uint32_t middle) const {
    const auto words = zero_words_.read(read);
    const std::size_t width = index(words_for(n_));
    for (std::size_t i = 0; i < words.size(); ++i)
      // Behind the last output there may be anything.
      for (std::size_t place = 0; place < fields() && i % width * fields() + place < index(n_);
           ++place)
        if (field(words[i], place) != static_cast<int>(middle)) return true;
    return false;
  }

  std::int64_t n_, group_, count_;
  Words words_, zero_words_;
  Numbers scale_tensor_;
  std::vector<std::uint32_t> codes_, zeros_;
  std::vector<double> scales_;
};

/// qweight [k * bits / 32, n] packed along k.
class GptqWeight final : public ZeroPackedWeight {
 public:
  GptqWeight(const Parts& parts, const IntegerSettings& settings, bool dynamic, bool zeros_less_one)
      : ZeroPackedWeight(parts, dense_shape(parts, settings.bits), settings, dynamic),
        less_one_(zeros_less_one),
        groups_(group_, count_, dense_.shape[1], parts.find("g_idx")) {}

  /// The settings of a module by its tensors, where `dynamic` may have given it other bits.
  static IntegerSettings settings_of(const Parts& parts, IntegerSettings settings) {
    const Shape words = expect_matrix(parts.at("qweight"));
    const Shape zeros = expect_matrix(parts.at("qzeros"));
    const SavedTensor* const indices = parts.find("g_idx");
    for (const std::int64_t bits : {settings.bits, std::int64_t{4}, std::int64_t{8}})
      if (zeros[1] == ceil_div(words[1] * bits, 32) &&
          (indices == nullptr || indices->shape.size() != 1 ||
           ceil_div(indices->shape[0] * bits, 32) == words[0]))
        return {bits, settings.group};
    fail("'{}qweight' is {} and '{}qzeros' is {}: its codes have neither 4 nor 8 bits",
         printable(parts.base()), shape_text(words), printable(parts.base()), shape_text(zeros));
  }

 private:
  static Shape dense_shape(const Parts& parts, std::int64_t bits) {
    const Shape packed = expect_matrix(parts.at("qweight"));
    const SavedTensor* const indices = parts.find("g_idx");
    std::int64_t k = packed[0] * (32 / bits);
    // The last word may have codes behind the last feature.
    if (indices != nullptr && is_matrix(*indices, 1) &&
        ceil_div(indices->shape[0] * bits, 32) == packed[0])
      k = indices->shape[0];
    return {packed[1], k};
  }
  std::uint32_t middle() const { return 1u << (bits_ - 1); }
  void load(const TensorReader& read) override {
    groups_.load(read);
    ZeroPackedWeight::load(read);
    // The first format has z - 1, subtracted from whole words: a z of 0 has borrowed from the next.
    if (less_one_)
      for (std::uint32_t& word : zeros_) word += in_all_fields(bits_, 1);
  }
  CodeFormat format(const TensorReader& read) const override {
    return with_zeros(groups_.format(read, format_name(), dense_.shape[1]),
                      has_zeros(read, middle() - (less_one_ ? 1 : 0)));
  }
  Code saved_at(std::size_t row, std::size_t column) const override {
    return code(column / fields() * index(n_) + row, column % fields(), groups_.of(column), row,
                row % fields());
  }

  bool less_one_;
  Groups groups_;
};

/// qweight [k, n/8], and qzeros, packed along n in the order 0 2 4 6 1 3 5 7.
class AwqWeight final : public ZeroPackedWeight {
 public:
  AwqWeight(const Parts& parts, const IntegerSettings& settings, bool dynamic)
      : ZeroPackedWeight(parts, dense_shape(parts), settings, dynamic) {}

 private:
  static Shape dense_shape(const Parts& parts) {
    const Shape packed = expect_matrix(parts.at("qweight"));
    return {packed[1] * 8, packed[0]};
  }
  CodeFormat format(const TensorReader& read) const override {
    return with_zeros(grouped_format(format_name(), group_, dense_.shape[1]), has_zeros(read, 8));
  }
  Code saved_at(std::size_t row, std::size_t column) const override {
    constexpr std::array<std::size_t, 8> places{0, 4, 1, 5, 2, 6, 3, 7};
    const std::size_t place = places[row % 8];
    return code(column * (index(n_) / 8) + row / 8, place, column / index(group_), row, place);
  }
};

/// weight_packed int32 [n, ceil(k * bits / 32)], whose codes have 2^(bits - 1) added; weight_scale
/// [n, G], [n, 1] or [1]. weight_zero_point is int32 [ceil(n * bits / 32), G], packed along n. For
/// a scale of the whole tensor it may be one int8.
class PackedWeight final : public IntegerWeight {
 public:
  explicit PackedWeight(const Parts& parts, const Shape& shape)
      : IntegerWeight(dense_tensor(parts.base() + "weight",
                                   computing_element(parts.at("weight_scale")), shape),
                      bits_of(parts.at("weight_packed"), shape)),
        words_(parts.at("weight_packed"), {Element::i32}, {shape[0], words_for(shape[1])}),
        of_tensor_(parts.at("weight_scale").elements() == 1),
        count_(of_tensor_ ? 1 : count_groups(parts.at("weight_scale"), shape)),
        scale_tensor_(of_tensor_
                          ? one_number(parts.at("weight_scale"), scale_elements)
                          : Numbers(parts.at("weight_scale"), scale_elements, {shape[0], count_})),
        groups_(shape[1] / count_, count_, shape[1], parts.find("weight_g_idx")) {
    const SavedTensor* const zeros = parts.find("weight_zero_point");
    if (zeros == nullptr) return;
    if (of_tensor_ && zeros->element == Element::i8)
      zero_of_tensor_ = one_number(*zeros, {Element::i8});
    else
      zero_words_.emplace(*zeros, std::initializer_list<Element>{Element::i32},
                          Shape{words_for(shape[0]), count_});
  }

 private:
  static std::int64_t bits_of(const SavedTensor& words, const Shape& shape) {
    const Shape packed = expect_matrix(words);
    for (const std::int64_t bits : {4, 8})
      if (packed == Shape{shape[0], ceil_div(shape[1] * bits, 32)}) return bits;
    fail("'{}' is {}, which is {} of neither 4 nor 8 bits", printable(words.name),
         shape_text(packed), shape_text(shape));
  }
  static std::int64_t count_groups(const SavedTensor& scales, const Shape& shape) {
    if (scales.shape.size() == 2 && scales.shape[0] == shape[0] && scales.shape[1] > 0 &&
        shape[1] % scales.shape[1] == 0)
      return scales.shape[1];
    fail("'{}' is {}, which does not divide {} into groups", printable(scales.name),
         shape_text(scales.shape), shape_text(shape));
  }
  void load(const TensorReader& read) override {
    groups_.load(read);
    codes_ = words_.read(read);
    if (zero_words_) zeros_ = zero_words_->read(read);
    if (zero_of_tensor_) zero_ += static_cast<int>(zero_of_tensor_->read(read).front());
    scales_ = read_scales(read, scale_tensor_);
  }
  Code saved_at(std::size_t row, std::size_t column) const override {
    const std::size_t groups = index(count_), group = groups_.of(column);
    const std::size_t width = index(words_for(dense_.shape[1]));
    return {.bits = field(codes_[row * width + column / fields()], column % fields()),
            .zero = zeros_.empty() ? zero_ + (1 << (bits_ - 1))
                                   : field(zeros_[row / fields() * groups + group], row % fields()),
            .scale = scales_[of_tensor_ ? 0 : row * groups + group]};
  }
  CodeFormat format(const TensorReader& read) const override {
    return with_zeros(groups_.format(read, format_name(), dense_.shape[1]),
                      zero_words_ || zero_of_tensor_);
  }

  Words words_;
  bool of_tensor_;
  std::int64_t count_;
  Numbers scale_tensor_;
  Groups groups_;
  std::optional<Words> zero_words_;
  std::optional<Numbers> zero_of_tensor_;
  std::vector<std::uint32_t> codes_, zeros_;
  std::vector<double> scales_;
  int zero_ = 0;  // of the whole tensor
};

/// int8 or fp8 [n, k] with a scale of each block, and a zero point or none; a row or the tensor is
/// a block too.
class ScaledWeight final : public QuantisedWeight {
 public:
  ScaledWeight(const SavedTensor& codes, const SavedTensor& scales, const SavedTensor* zeros,
               std::int64_t block_rows, std::int64_t block_columns, double factor)
      : QuantisedWeight(dense_tensor(codes.name, computing_element(scales), expect_matrix(codes))),
        code_tensor_(codes, {Element::f8_e4m3, Element::i8}, codes.shape),
        scale_tensor_(scales, {Element::f16, Element::bf16, Element::f32, Element::f8_e8m0},
                      expected_shape(scales, codes.shape, block_rows, block_columns)),
        rows_(block_rows),
        columns_(block_columns),
        factor_(factor) {
    if (zeros != nullptr)
      zero_tensor_.emplace(
          *zeros,
          std::initializer_list<Element>{Element::i8, Element::f8_e4m3, Element::i32, Element::i64},
          zeros->elements() == scales.elements() ? zeros->shape : scales.shape);
  }

 private:
  static Shape expected_shape(const SavedTensor& scales, const Shape& shape,
                              std::int64_t block_rows, std::int64_t block_columns) {
    const Shape blocks{ceil_div(shape[0], block_rows), ceil_div(shape[1], block_columns)};
    // A grid that is one row or one column of blocks may be saved without its other dimension.
    const bool is_list = scales.shape.size() < 2 && std::min(blocks[0], blocks[1]) == 1;
    if (scales.elements() != blocks[0] * blocks[1] || !(is_list || scales.shape == blocks))
      fail("'{}' is {}, where {} has {} blocks", printable(scales.name), shape_text(scales.shape),
           shape_text(shape), shape_text(blocks));
    return scales.shape;
  }
  void load(const TensorReader& read) override {
    codes_ = code_tensor_.read(read);
    scales_ = read_scales(read, scale_tensor_);
    if (zero_tensor_) zeros_ = zero_tensor_->read(read);
  }
  std::size_t block_at(std::size_t row, std::size_t column) const {
    const std::size_t across = index(ceil_div(dense_.shape[1], columns_));
    return row / index(rows_) * across + column / index(columns_);
  }
  double at(std::size_t row, std::size_t column) const override {
    double code = 0;
    const std::byte byte{codes_[row * index(dense_.shape[1]) + column]};
    fftune::decode(code_tensor_.element(), &byte, {&code, 1});
    const std::size_t block = block_at(row, column);
    return (code - (zeros_.empty() ? 0 : zeros_[block])) * scales_[block] / factor_;
  }
  CodeFormat format(const TensorReader& read) const override {
    CodeFormat format = grouped_format(code_tensor_.element() == Element::i8 ? "int8" : "fp8",
                                       columns_, dense_.shape[1]);
    if (!zero_tensor_) return format;
    for (const double zero : zero_tensor_->read(read))
      if (zero != 0) format.unfit = "it has zero points of 8 bits";
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    const int bits = codes_[row * index(dense_.shape[1]) + column];
    if (code_tensor_.element() == Element::f8_e4m3 && (bits & 127) == 127)
      fail("'{}' has NaN, which no packed weight has", printable(code_tensor_.name()));
    return {.bits = bits, .scale = scales_[block_at(row, column)] / factor_};
  }

  ByteCodes code_tensor_;
  Numbers scale_tensor_;
  std::optional<Numbers> zero_tensor_;
  std::int64_t rows_, columns_;
  double factor_;
  std::vector<std::uint8_t> codes_;
  std::vector<double> scales_, zeros_;
};

/// Pairs of e2m1 in bytes, the low nibble first, with a scale of each `group` of neighbours and one
/// of the tensor by which they are multiplied or divided.
class Fp4Weight final : public QuantisedWeight {
 public:
  struct Layout {
    std::string name;
    std::int64_t group = 32;
    const SavedTensor* factor = nullptr;
    bool divides = false;
    bool transposed = false;  // the dense weight is [experts, k, n]
  };
  /// `codes` is [..., n, k / 2] or, by blocks, [..., n, k / 32, 16].
  Fp4Weight(const SavedTensor& codes, const SavedTensor& scales, const Layout& layout)
      : QuantisedWeight(dense_tensor(layout.name, Element::bf16, dense_shape(codes, layout))),
        code_tensor_(codes, {Element::u8, Element::i8}, codes.shape),
        scale_tensor_(scales, {Element::u8, Element::f8_e8m0, Element::f8_e4m3},
                      scale_shape(codes, layout)),
        group_(index(layout.group)),
        divides_(layout.divides) {
    transposed_ = layout.transposed;
    columns_ = index(dense_.shape[transposed_ ? dense_.shape.size() - 2 : dense_.shape.size() - 1]);
    if (layout.factor != nullptr) factor_tensor_ = one_number(*layout.factor, scale_elements);
  }

 private:
  static Shape dense_shape(const SavedTensor& codes, const Layout& layout) {
    if (layout.transposed) {
      if (!is_matrix(codes, 4) || codes.shape[3] * 2 != layout.group)
        fail("'{}' is {}, not [experts, rows, blocks, 16]", printable(codes.name),
             shape_text(codes.shape));
      return {codes.shape[0], codes.shape[2] * layout.group, codes.shape[1]};
    }
    Shape shape = is_matrix(codes, 3) ? codes.shape : expect_matrix(codes);
    shape.back() *= 2;
    if (shape.back() % layout.group != 0)
      fail("'{}' is {}, which has no whole groups of {} codes", printable(codes.name),
           shape_text(codes.shape), layout.group);
    return shape;
  }
  static Shape scale_shape(const SavedTensor& codes, const Layout& layout) {
    Shape shape = codes.shape;
    if (layout.transposed)
      shape.pop_back();
    else
      shape.back() = shape.back() * 2 / layout.group;
    return shape;
  }
  void load(const TensorReader& read) override {
    codes_ = code_tensor_.read(read);
    scale_bytes_ = scale_tensor_.read(read);
    scales_.resize(scale_bytes_.size());
    // Scales of mxfp4 are bytes; as numbers they are powers of two.
    fftune::decode(
        scale_tensor_.element() == Element::u8 ? Element::f8_e8m0 : scale_tensor_.element(),
        std::as_bytes(std::span(scale_bytes_)).data(), scales_);
    expect_finite(scales_, scale_tensor_.name());
    if (factor_tensor_) factor_ = read_scales(read, *factor_tensor_).front();
    if (divides_ && factor_ == 0) fail("'{}' is 0", printable(factor_tensor_->name()));
  }
  CodeFormat format(const TensorReader&) const override {
    const auto group = static_cast<std::int64_t>(group_);
    CodeFormat format{.weights = group == 16 ? "nvfp4" : "mxfp4", .groups = {group}};
    if ((scale_tensor_.element() == Element::f8_e4m3) != (group == 16))
      format.unfit = fmt::format("it has scales of {} for groups of {}",
                                 element_name(scale_tensor_.element()), group);
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    const std::size_t place = row * columns_ + column;
    return {.bits = codes_[place / 2] >> place % 2 * 4 & 15,
            .scale = static_cast<double>(scale_bytes_[place / group_]),
            .row_scale = divides_ ? 1 / factor_ : factor_};
  }
  double at(std::size_t row, std::size_t column) const override {
    constexpr std::array<double, 8> sizes{0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const std::size_t place = row * columns_ + column;
    const int code = codes_[place / 2] >> place % 2 * 4 & 15;
    const double size = sizes[static_cast<std::size_t>(code & 7)] * scales_[place / group_];
    const double value = code & 8 ? -size : size;
    return divides_ ? value / factor_ : value * factor_;
  }

  ByteCodes code_tensor_, scale_tensor_;
  std::optional<Numbers> factor_tensor_;
  std::size_t group_, columns_ = 0;
  bool divides_;
  std::vector<std::uint8_t> codes_, scale_bytes_;
  std::vector<double> scales_;
  double factor_ = 1;
};

/// A weight with codes that cannot be read.
class UnreadableWeight final : public QuantisedWeight {
 public:
  UnreadableWeight(std::string name, std::string why)
      : QuantisedWeight(dense_tensor(std::move(name), Element::bf16, {})), why_(std::move(why)) {}

  std::string unreadable() const override { return why_; }

 private:
  [[noreturn]] void refuse() const { fail("{}", why_); }
  void load(const TensorReader&) override { refuse(); }
  CodeFormat format(const TensorReader&) const override { refuse(); }
  Code code_at(std::size_t, std::size_t) const override { refuse(); }
  double at(std::size_t, std::size_t) const override { refuse(); }

  std::string why_;
};

using Found = std::vector<std::shared_ptr<const QuantisedWeight>>;

/// Calls each(parts) for every tensor whose name ends so.
template <typename Each>
void for_each_ending(const Tensors& tensors, std::string_view suffix, const Each& each) {
  for (const auto& [name, tensor] : tensors)
    if (name.ends_with(suffix) &&
        (name.size() == suffix.size() || name[name.size() - suffix.size() - 1] == '.' ||
         suffix.front() == '_'))
      each(Parts(tensors, name.substr(0, name.size() - suffix.size())), tensor);
}

/// Adds the weight that make() gives; null is none. If make() fails, the weight of that name is one
/// that cannot be read.
template <typename Make>
void add_weight(Found& found, std::string name, const Make& make) {
  try {
    if (std::shared_ptr<const QuantisedWeight> weight = make()) found.push_back(std::move(weight));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_input) throw;
    found.push_back(std::make_shared<UnreadableWeight>(std::move(name), error.what()));
  }
}

/// Every weight that has codes is one that cannot be read.
void add_unreadable(const Tensors& tensors, const std::string& why, Found& found) {
  const auto add = [&](std::string name) {
    found.push_back(std::make_shared<UnreadableWeight>(
        name, fmt::format("'{}' cannot be read: {}", printable(name), why)));
  };
  for (const char* suffix : {"qweight", "weight_packed"})
    for_each_ending(tensors, suffix,
                    [&](const Parts& parts, const SavedTensor&) { add(parts.base() + "weight"); });
  for_each_ending(tensors, "_blocks",
                  [&](const Parts& parts, const SavedTensor&) { add(parts.base()); });
  for_each_ending(tensors, "weight", [&](const Parts&, const SavedTensor& tensor) {
    if (element_bytes(tensor.element) == 1) add(tensor.name);
  });
}

/// Whether modules may have settings of their own.
bool is_dynamic(const JsonValue& config) {
  const JsonValue* const dynamic = config.find("dynamic");
  return dynamic != nullptr && dynamic->size() > 0;
}

void find_gptq(const JsonValue& config, const Tensors& tensors, Found& found) {
  std::string format = word_of(config, "checkpoint_format");
  if (format.empty()) format = word_of(config, "format");
  if (!format.empty() && format != "gptq" && format != "gptq_v2")
    fail("the GPTQ layout '{}' is not known: gptq and gptq_v2 are", printable(format));
  const bool dynamic = is_dynamic(config);
  const IntegerSettings all = settings_in(config, "GPTQ",
                                          dynamic ? std::initializer_list<std::int64_t>{2, 3, 4, 8}
                                                  : std::initializer_list<std::int64_t>{4, 8});
  for_each_ending(tensors, "qweight", [&](const Parts& parts, const SavedTensor&) {
    add_weight(found, parts.base() + "weight", [&] {
      return std::make_shared<GptqWeight>(
          parts, dynamic ? GptqWeight::settings_of(parts, all) : all, dynamic, format != "gptq_v2");
    });
  });
}

void find_awq(const JsonValue& config, const Tensors& tensors, Found& found) {
  std::string format = word_of(config, "format");
  if (format.empty()) format = word_of(config, "version");
  if (!format.empty() && format != "gemm" && format != "GEMM")
    fail("the AWQ layout '{}' is not known: gemm is", printable(format));
  const IntegerSettings all = settings_in(config, "AWQ", {4});
  for_each_ending(tensors, "qweight", [&](const Parts& parts, const SavedTensor&) {
    add_weight(found, parts.base() + "weight",
               [&] { return std::make_shared<AwqWeight>(parts, all, is_dynamic(config)); });
  });
}

/// int8 and fp8: one scale, one of each row, or a grid of them in blocks of one of these sizes.
std::shared_ptr<const QuantisedWeight> scaled_weight(const SavedTensor& codes,
                                                     const SavedTensor& scales,
                                                     const std::vector<Shape>& blocks,
                                                     double factor = 1,
                                                     const SavedTensor* zeros = nullptr) {
  const Shape shape = expect_matrix(codes);
  Shape block = shape;
  const bool of_rows = scales.elements() == shape[0] &&
                       (scales.shape.size() == 1 || scales.shape == Shape{shape[0], 1});
  if (of_rows && scales.elements() != 1) {
    block = {1, shape[1]};
  } else if (scales.elements() != 1 && !blocks.empty()) {
    std::vector<Shape> fitting;
    for (const Shape& each : blocks)
      if (scales.shape == Shape{ceil_div(shape[0], each[0]), ceil_div(shape[1], each[1])} &&
          std::find(fitting.begin(), fitting.end(), each) == fitting.end())
        fitting.push_back(each);
    if (fitting.size() > 1)
      fail("'{}' is {}: blocks of {} and of {} have as many", printable(scales.name),
           shape_text(scales.shape), shape_text(fitting[0]), shape_text(fitting[1]));
    block = fitting.empty() ? blocks.front() : fitting.front();
  }
  return std::make_shared<ScaledWeight>(codes, scales, zeros, block[0], block[1], factor);
}

/// The sizes of blocks that an object of the configuration has by this name: none or one. Older
/// versions of compressed-tensors write them as "128x128".
std::vector<Shape> blocks_of(const JsonValue& config, std::string_view key) {
  const JsonValue* const field = config.find(key);
  if (field == nullptr || field->get_if<std::nullptr_t>()) return {};
  Shape block;
  if (const auto* extents = field->get_if<JsonValue::Array>()) {
    for (const JsonValue& extent : *extents)
      if (const auto* number = extent.get_if<std::int64_t>(); number != nullptr && *number > 0)
        block.push_back(*number);
  } else if (const auto* text = field->get_if<std::string>()) {
    int height = 0, width = 0, end = 0;
    if (std::sscanf(text->c_str(), "%9dx%9d%n", &height, &width, &end) == 2 &&
        text->c_str()[end] == 0 && height > 0 && width > 0)
      block = {height, width};
  }
  if (block.size() != 2) fail("quantization_config has a {} of {}", key, json_brief(*field));
  return {block};
}

/// weight_shape has the sizes without what the last words are filled with.
Shape packed_shape(const Parts& parts, const TensorReader& read) {
  const Numbers tensor(parts.at("weight_shape"), index_elements, {2});
  Shape shape;
  for (const double extent : tensor.read(read)) {
    if (!(extent >= 1 && extent < 1e12))
      fail("'{}' has an extent of {}", printable(tensor.name()), extent);
    shape.push_back(static_cast<std::int64_t>(extent));
  }
  return shape;
}

void find_compressed(const JsonValue& config, const Tensors& tensors, const TensorReader& read,
                     Found& found) {
  const std::string format = word_of(config, "format");
  for (const char* other : {"marlin", "sparse"})
    if (format.find(other) != format.npos)
      fail("the compressed-tensors format '{}' is not known", printable(format));
  if (const JsonValue* const transform = config.find("transform_config"))
    if (const JsonValue* const groups = transform->find("config_groups"))
      if (const auto* const all = groups->get_if<JsonValue::Object>(); all && !all->empty())
        fail("compressed-tensors' transform_config turns activations, which no op does");
  for_each_ending(tensors, "weight_packed", [&](const Parts& parts, const SavedTensor& codes) {
    const std::string name = parts.base() + "weight";
    add_weight(found, name, [&]() -> std::shared_ptr<const QuantisedWeight> {
      const SavedTensor& scales = parts.at("weight_scale");
      if (codes.element == Element::i32)
        return std::make_shared<PackedWeight>(parts, packed_shape(parts, read));
      Fp4Weight::Layout layout{.name = name};
      if (parts.find("weight_global_scale"))
        layout = {
            .name = name, .group = 16, .factor = &parts.at("weight_global_scale"), .divides = true};
      return std::make_shared<Fp4Weight>(codes, scales, layout);
    });
  });
  // Groups of layers may have blocks of several sizes.
  std::vector<Shape> blocks;
  if (const JsonValue* const groups = config.find("config_groups"))
    if (const auto* const all = groups->get_if<JsonValue::Object>())
      for (const auto& [name, group] : *all)
        if (const JsonValue* const weights = group.find("weights"))
          for (const Shape& block : blocks_of(*weights, "block_structure")) blocks.push_back(block);
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    const SavedTensor* const scales = parts.find("weight_scale");
    if (scales && (codes.element == Element::i8 || codes.element == Element::f8_e4m3))
      add_weight(found, codes.name, [&] {
        return scaled_weight(codes, *scales, blocks, 1, parts.find("weight_zero_point"));
      });
  });
}

void find_mxfp4(const Tensors& tensors, Found& found) {
  for_each_ending(tensors, "_blocks", [&](const Parts& parts, const SavedTensor& codes) {
    add_weight(found, parts.base(), [&] {
      return std::make_shared<Fp4Weight>(
          codes, parts.at("_scales"), Fp4Weight::Layout{.name = parts.base(), .transposed = true});
    });
  });
}

void find_fp8(const JsonValue& config, const Tensors& tensors, Found& found) {
  const auto blocks = blocks_of(config, "weight_block_size");
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    add_weight(found, codes.name, [&]() -> std::shared_ptr<const QuantisedWeight> {
      // DeepSeek-V4 and Inkling have names of their own.
      for (const char* name : {"weight_scale_inv", "scale", "qscale_weight"}) {
        const SavedTensor* const scales = parts.find(name);
        if (scales == nullptr || codes.shape.size() != 2) continue;
        if (codes.element == Element::f8_e4m3) return scaled_weight(codes, *scales, blocks);
        if (codes.element == Element::i8 && scales->element == Element::f8_e8m0)
          return std::make_shared<Fp4Weight>(codes, *scales, Fp4Weight::Layout{.name = codes.name});
        break;
      }
      return nullptr;
    });
  });
}

void find_modelopt(const Tensors& tensors, Found& found) {
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    const SavedTensor* const scales = parts.find("weight_scale");
    if (scales == nullptr) return;
    add_weight(found, codes.name, [&]() -> std::shared_ptr<const QuantisedWeight> {
      if (const SavedTensor* const factors = parts.find("pre_quant_scale"))
        fail("'{}' multiplies activations, which no op does", printable(factors->name));
      if (codes.element == Element::u8)
        return std::make_shared<Fp4Weight>(
            codes, *scales,
            Fp4Weight::Layout{
                .name = codes.name, .group = 16, .factor = &parts.at("weight_scale_2")});
      if (codes.element == Element::f8_e4m3) return scaled_weight(codes, *scales, {});
      return nullptr;
    });
  });
}

void find_bitsandbytes(const JsonValue& config, const Tensors& tensors, const TensorReader& read,
                       Found& found) {
  const JsonValue* const four = config.find("load_in_4bit");
  if (const auto* const given = four ? four->get_if<bool>() : nullptr; given && *given)
    fail("bitsandbytes weights of 4 bits are not known: 8 are");
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    // SCB is the largest size in a row, which 127 stands for.
    const SavedTensor* const scales = parts.find("SCB");
    if (scales == nullptr || codes.element != Element::i8) return;
    add_weight(found, codes.name, [&] {
      if (const SavedTensor* const order = parts.find("weight_format")) {
        const double own =
            one_number(*order, {Element::u8, Element::i8, Element::i32, Element::i64})
                .read(read)
                .front();
        if (own != 0)
          fail("'{}' is {}, an order of codes that is not known: 0, by rows, is",
               printable(order->name), own);
      }
      return scaled_weight(codes, *scales, {}, 127);
    });
  });
}

void find_all(const JsonValue& config, const Tensors& tensors, const TensorReader& read,
              Found& found) {
  const std::string method = word_of(config, "quant_method");
  if (method == "gptq") find_gptq(config, tensors, found);
  if (method == "awq") find_awq(config, tensors, found);
  if (method == "compressed-tensors") find_compressed(config, tensors, read, found);
  if (method == "mxfp4") find_mxfp4(tensors, found);
  if (method == "fp8") find_fp8(config, tensors, found);
  if (method == "modelopt") find_modelopt(tensors, found);
  if (method == "bitsandbytes") find_bitsandbytes(config, tensors, read, found);
}

}  // namespace

void QuantisedWeight::load_once(const TensorReader& read) const {
  std::call_once(loaded_, [&] { const_cast<QuantisedWeight*>(this)->load(read); });
}

std::int64_t QuantisedWeight::code_columns() const {
  if (const std::string why = unreadable(); !why.empty()) fail("{}", why);
  return dense_.shape[dense_.shape.size() - (transposed_ ? 2 : 1)];
}

void QuantisedWeight::codes(const TensorReader& read, std::size_t row,
                            std::span<Code> codes) const {
  load_once(read);
  for (std::size_t column = 0; column < codes.size(); ++column)
    codes[column] = code_at(row, column);
}

void QuantisedWeight::decode(const TensorReader& read, std::size_t first,
                             std::span<double> values) const {
  load_once(read);
  const std::size_t dimensions = dense_.shape.size();
  const std::size_t width = index(dense_.shape[dimensions - 1]);
  const std::size_t height = index(dense_.shape[dimensions - 2]);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t row = (first + i) / width, column = (first + i) % width;
    values[i] = transposed_ ? at(row / height * width + column, row % height) : at(row, column);
  }
}

Found find_quantised_weights(const JsonValue& config, const Tensors& tensors,
                             const TensorReader& read) {
  const JsonValue* const own = quantisation_config(config);
  if (own == nullptr) return {};
  Found found;
  try {
    find_all(*own, tensors, read, found);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_input) throw;
    found.clear();
    add_unreadable(tensors, error.what(), found);
    if (found.empty()) throw;
  }
  return found;
}

}  // namespace fftune
