#include "safetensors/quantised.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "core/fail.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

using Tensors = std::map<std::string, SavedTensor, std::less<>>;
using Shape = std::vector<std::int64_t>;
using ReadTensor = QuantisedWeight::ReadTensor;

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
  /// The tensor of this suffix; it must have this shape.
  const SavedTensor& at(std::string_view suffix, const Shape& shape) const {
    const SavedTensor& tensor = at(suffix);
    if (tensor.shape != shape)
      fail("'{}' is {}, where the quantised weight takes {}", printable(tensor.name),
           shape_text(tensor.shape), shape_text(shape));
    return tensor;
  }

 private:
  const Tensors* tensors_;
  std::string base_;
};

void expect_element(const SavedTensor& tensor, std::initializer_list<Element> elements) {
  for (const Element element : elements)
    if (tensor.element == element) return;
  fail("'{}' is {}, which this quantised format does not have", printable(tensor.name),
       element_name(tensor.element));
}

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

std::vector<double> read_numbers(const ReadTensor& read, const SavedTensor& tensor) {
  const auto bytes = read(tensor.name);
  std::vector<double> values(bytes.size() / element_bytes(tensor.element));
  decode(tensor.element, bytes.data(), values);
  return values;
}

std::vector<double> read_scales(const ReadTensor& read, const SavedTensor& tensor) {
  auto values = read_numbers(read, tensor);
  for (const double value : values)
    if (!std::isfinite(value)) fail("'{}' has a scale that is not finite", printable(tensor.name));
  return values;
}

std::vector<std::uint32_t> read_words(const ReadTensor& read, const SavedTensor& tensor) {
  const auto bytes = read(tensor.name);
  std::vector<std::uint32_t> words(bytes.size() / sizeof(std::uint32_t));
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(std::uint32_t));
  return words;
}

std::vector<std::uint8_t> read_bytes(const ReadTensor& read, const SavedTensor& tensor) {
  const auto bytes = read(tensor.name);
  std::vector<std::uint8_t> values(bytes.size());
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
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
  Groups(std::int64_t size, std::int64_t count, const SavedTensor* indices)
      : size_(index(size)), count_(count) {
    if (indices != nullptr) indices_ = *indices;
  }

  void load(const ReadTensor& read) {
    if (!indices_) return;
    of_.clear();
    for (const double group : read_numbers(read, *indices_)) {
      if (!(group >= 0 && group < static_cast<double>(count_)))
        fail("'{}' names group {}, where there are {}", printable(indices_->name), group, count_);
      of_.push_back(static_cast<std::size_t>(group));
    }
  }
  std::size_t of(std::size_t column) const { return of_.empty() ? column / size_ : of_[column]; }

  /// The format of integers in rows of k.
  CodeFormat format(const ReadTensor& read, std::string weights, std::int64_t k) const {
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
  std::optional<SavedTensor> indices_;
  std::vector<std::size_t> of_;
};

/// Group size of integers by quantization_config: 0 where there is one group for all of k.
std::int64_t group_size(const JsonValue& config) {
  const JsonValue* const field = config.find("group_size");
  const auto* const size = field ? field->get_if<std::int64_t>() : nullptr;
  if (size == nullptr || *size == -1) return 0;
  if (*size < 1) fail("quantization_config has a group_size of {}", *size);
  return *size;
}

std::string word_of(const JsonValue& config, std::string_view key) {
  const JsonValue* const field = config.find(key);
  const auto* const text = field ? field->get_if<std::string>() : nullptr;
  return text ? *text : "";
}

void expect_four_bits(const JsonValue& config, std::string_view method) {
  const JsonValue* const field = config.find("bits");
  const auto* const bits = field ? field->get_if<std::int64_t>() : nullptr;
  if (bits == nullptr || *bits != 4)
    fail("{} weights of {} bits are not known: 4 are", method,
         field ? json_brief(*field) : "unknown");
}

/// The parts that GPTQ and AWQ share: qweight and qzeros of int32, each with eight codes of 4 bits,
/// qzeros [G, n/8] packed along n; scales [G, n].
class FourBitWeight : public QuantisedWeight {
 protected:
  FourBitWeight(const Parts& parts, Shape shape, const JsonValue& config)
      : QuantisedWeight(dense_tensor(parts.base() + "weight", computing_element(parts.at("scales")),
                                     std::move(shape))),
        n_(dense_.shape[0]),
        group_(group_size(config) == 0 ? dense_.shape[1] : group_size(config)),
        count_(ceil_div(dense_.shape[1], group_)),
        words_(parts.at("qweight")),
        zero_words_(parts.at("qzeros", {count_, ceil_div(n_, 8)})),
        scale_tensor_(parts.at("scales", {count_, n_})) {
    expect_element(words_, {Element::i32});
    expect_element(zero_words_, {Element::i32});
    expect_element(scale_tensor_, {Element::f16, Element::bf16, Element::f32});
  }

  void load(const ReadTensor& read) override {
    codes_ = read_words(read, words_);
    zeros_ = read_words(read, zero_words_);
    scales_ = read_scales(read, scale_tensor_);
  }
  /// The code at `shift` in a word of qweight, with the zero at `zero_shift` and the scale of a
  /// group's row.
  Code code(std::size_t word, std::size_t shift, std::size_t group, std::size_t row,
            std::size_t zero_shift) const {
    const std::uint32_t zero_word = zeros_[group * index(ceil_div(n_, 8)) + row / 8];
    return {.bits = static_cast<int>(codes_[word] >> shift & 15),
            .zero = static_cast<int>(zero_word >> zero_shift & 15),
            .scale = scales_[group * index(n_) + row]};
  }
  double at(std::size_t row, std::size_t column) const final {
    const Code own = code_at(row, column);
    return (own.bits - own.zero) * own.scale;
  }
  /// Whether a zero point of the words is not 8, which is `eights` in all fields of a word.
  bool has_zeros(const ReadTensor& read, std::uint32_t eights) const {
    const auto words = read_words(read, zero_words_);
    const auto width = index(ceil_div(n_, 8));
    for (std::size_t i = 0; i < words.size(); ++i) {
      // Behind the last output there may be anything.
      const auto there = std::min<std::size_t>(8, index(n_) - i % width * 8);
      const std::uint32_t mask = there == 8 ? ~0u : (1u << 4 * there) - 1;
      if ((words[i] & mask) != (eights & mask)) return true;
    }
    return false;
  }

  std::int64_t n_, group_, count_;
  SavedTensor words_, zero_words_, scale_tensor_;
  std::vector<std::uint32_t> codes_, zeros_;
  std::vector<double> scales_;
};

/// qweight [k/8, n] packed along k.
class GptqWeight final : public FourBitWeight {
 public:
  GptqWeight(const Parts& parts, const JsonValue& config, bool zeros_less_one)
      : FourBitWeight(parts, dense_shape(parts), config),
        less_one_(zeros_less_one),
        groups_(group_, count_,
                parts.find("g_idx") ? &parts.at("g_idx", {dense_.shape[1]}) : nullptr) {}

 private:
  static Shape dense_shape(const Parts& parts) {
    const Shape packed = expect_matrix(parts.at("qweight"));
    const SavedTensor* const indices = parts.find("g_idx");
    std::int64_t k = packed[0] * 8;
    // The last word may have codes behind the last feature.
    if (indices != nullptr && indices->shape.size() == 1 &&
        ceil_div(indices->shape[0], 8) == packed[0])
      k = indices->shape[0];
    return {packed[1], k};
  }
  void load(const ReadTensor& read) override {
    groups_.load(read);
    FourBitWeight::load(read);
    // The first format has z - 1, subtracted from whole words: a z of 0 has borrowed from the next.
    if (less_one_)
      for (std::uint32_t& word : zeros_) word += 0x11111111u;
  }
  CodeFormat format(const ReadTensor& read) const override {
    CodeFormat format = groups_.format(read, "int4", dense_.shape[1]);
    format.zeros = has_zeros(read, less_one_ ? 0x77777777u : 0x88888888u);
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    return code(column / 8 * index(n_) + row, column % 8 * 4, groups_.of(column), row, row % 8 * 4);
  }

  bool less_one_;
  Groups groups_;
};

/// qweight [k, n/8], and qzeros, packed along n in the order 0 2 4 6 1 3 5 7.
class AwqWeight final : public FourBitWeight {
 public:
  AwqWeight(const Parts& parts, const JsonValue& config)
      : FourBitWeight(parts, dense_shape(parts), config) {}

 private:
  static Shape dense_shape(const Parts& parts) {
    const Shape packed = expect_matrix(parts.at("qweight"));
    return {packed[1] * 8, packed[0]};
  }
  CodeFormat format(const ReadTensor& read) const override {
    CodeFormat format = grouped_format("int4", group_, dense_.shape[1]);
    format.zeros = has_zeros(read, 0x88888888u);
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    constexpr std::array<std::size_t, 8> nibble{0, 4, 1, 5, 2, 6, 3, 7};
    const std::size_t shift = nibble[row % 8] * 4;
    return code(column * (index(n_) / 8) + row / 8, shift, column / index(group_), row, shift);
  }
};

/// weight_packed int32 [n, ceil(k * bits / 32)]; weight_zero_point int32 [ceil(n * bits / 32), G]
/// packed along n; weight_scale [n, G], [n, 1] or [1]; codes have 2^(bits - 1) added.
class PackedWeight final : public QuantisedWeight {
 public:
  explicit PackedWeight(const Parts& parts, const Shape& shape)
      : QuantisedWeight(dense_tensor(parts.base() + "weight",
                                     computing_element(parts.at("weight_scale")), shape)),
        words_(parts.at("weight_packed")),
        bits_(bits_of(words_, shape)),
        scale_tensor_(parts.at("weight_scale")),
        count_(count_groups(scale_tensor_, shape)),
        groups_(shape[1] / count_, count_,
                parts.find("weight_g_idx") ? &parts.at("weight_g_idx", {shape[1]}) : nullptr) {
    expect_element(words_, {Element::i32});
    expect_element(scale_tensor_, {Element::f16, Element::bf16, Element::f32});
    if (parts.find("weight_zero_point"))
      zero_words_ = parts.at("weight_zero_point", {ceil_div(shape[0] * bits_, 32), count_});
  }

 private:
  static std::int64_t bits_of(const SavedTensor& words, const Shape& shape) {
    const Shape packed = expect_matrix(words);
    for (const std::int64_t bits : {4, 8})
      if (packed == Shape{shape[0], ceil_div(shape[1] * bits, 32)}) return bits;
    fail("'{}' is {}, which is {} of neither 4 nor 8 bits", printable(words.name),
         shape_text(packed), shape_text(shape));
  }
  std::int64_t count_groups(const SavedTensor& scales, const Shape& shape) {
    if (scales.elements() == 1) {
      of_tensor_ = true;
      return 1;
    }
    if (scales.shape.size() == 2 && scales.shape[0] == shape[0] && scales.shape[1] > 0 &&
        shape[1] % scales.shape[1] == 0)
      return scales.shape[1];
    fail("'{}' is {}, which does not divide {} into groups", printable(scales.name),
         shape_text(scales.shape), shape_text(shape));
  }
  void load(const ReadTensor& read) override {
    groups_.load(read);
    codes_ = read_words(read, words_);
    if (zero_words_) zeros_ = read_words(read, *zero_words_);
    scales_ = read_scales(read, scale_tensor_);
  }
  /// Bits as they are saved, with 2^(bits - 1) added.
  Code saved_at(std::size_t row, std::size_t column) const {
    const std::size_t bits = index(bits_), in_word = 32 / bits, groups = index(count_);
    const std::size_t width = index(ceil_div(dense_.shape[1] * bits_, 32));
    const std::size_t group = groups_.of(column);
    const auto field = [&](std::uint32_t word, std::size_t place) {
      return static_cast<int>(word >> place % in_word * bits & ((1u << bits) - 1));
    };
    return {.bits = field(codes_[row * width + column / in_word], column),
            .zero = zeros_.empty() ? 1 << (bits - 1)
                                   : field(zeros_[row / in_word * groups + group], row),
            .scale = scales_[of_tensor_ ? 0 : row * groups + group]};
  }
  double at(std::size_t row, std::size_t column) const override {
    const Code saved = saved_at(row, column);
    return (saved.bits - saved.zero) * saved.scale;
  }
  CodeFormat format(const ReadTensor& read) const override {
    CodeFormat format = groups_.format(read, bits_ == 4 ? "int4" : "int8", dense_.shape[1]);
    format.zeros = zero_words_.has_value();
    if (format.zeros && bits_ == 8) format.unfit = "it has zero points of 8 bits";
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    Code code = saved_at(row, column);
    if (bits_ == 8) code.bits ^= 128;
    return code;
  }

  SavedTensor words_;
  std::int64_t bits_;
  SavedTensor scale_tensor_;
  bool of_tensor_ = false;
  std::int64_t count_;
  Groups groups_;
  std::optional<SavedTensor> zero_words_;
  std::vector<std::uint32_t> codes_, zeros_;
  std::vector<double> scales_;
};

/// int8 or fp8 [n, k] with a scale of each block, and a zero point or none; a row or the tensor is
/// a block too.
class ScaledWeight final : public QuantisedWeight {
 public:
  ScaledWeight(const SavedTensor& codes, const SavedTensor& scales, const SavedTensor* zeros,
               std::int64_t block_rows, std::int64_t block_columns, double factor)
      : QuantisedWeight(dense_tensor(codes.name, computing_element(scales), expect_matrix(codes))),
        code_tensor_(codes),
        scale_tensor_(scales),
        rows_(block_rows),
        columns_(block_columns),
        factor_(factor) {
    expect_element(codes, {Element::f8_e4m3, Element::i8});
    expect_element(scales, {Element::f16, Element::bf16, Element::f32, Element::f8_e8m0});
    const Shape blocks{ceil_div(dense_.shape[0], rows_), ceil_div(dense_.shape[1], columns_)};
    // A grid that is one row or one column of blocks may be saved without its other dimension.
    const bool is_list = scales.shape.size() < 2 && std::min(blocks[0], blocks[1]) == 1;
    if (scales.elements() != blocks[0] * blocks[1] || !(is_list || scales.shape == blocks))
      fail("'{}' is {}, where {} has {} blocks", printable(scales.name), shape_text(scales.shape),
           shape_text(dense_.shape), shape_text(blocks));
    if (zeros == nullptr) return;
    if (zeros->elements() != scales.elements())
      fail("'{}' is {}, where '{}' is {}", printable(zeros->name), shape_text(zeros->shape),
           printable(scales.name), shape_text(scales.shape));
    zero_tensor_ = *zeros;
  }

 private:
  void load(const ReadTensor& read) override {
    codes_ = read_bytes(read, code_tensor_);
    scales_ = read_scales(read, scale_tensor_);
    if (zero_tensor_) zeros_ = read_numbers(read, *zero_tensor_);
  }
  std::size_t block_at(std::size_t row, std::size_t column) const {
    const std::size_t across = index(ceil_div(dense_.shape[1], columns_));
    return row / index(rows_) * across + column / index(columns_);
  }
  double at(std::size_t row, std::size_t column) const override {
    double code = 0;
    const std::byte byte{codes_[row * index(dense_.shape[1]) + column]};
    fftune::decode(code_tensor_.element, &byte, {&code, 1});
    const std::size_t block = block_at(row, column);
    return (code - (zeros_.empty() ? 0 : zeros_[block])) * scales_[block] / factor_;
  }
  CodeFormat format(const ReadTensor& read) const override {
    CodeFormat format = grouped_format(code_tensor_.element == Element::i8 ? "int8" : "fp8",
                                       columns_, dense_.shape[1]);
    if (!zero_tensor_) return format;
    for (const double zero : read_numbers(read, *zero_tensor_))
      if (zero != 0) format.unfit = "it has zero points of 8 bits";
    return format;
  }
  Code code_at(std::size_t row, std::size_t column) const override {
    const int bits = codes_[row * index(dense_.shape[1]) + column];
    if (code_tensor_.element == Element::f8_e4m3 && (bits & 127) == 127)
      fail("'{}' has NaN, which no packed weight has", printable(code_tensor_.name));
    return {.bits = bits, .scale = scales_[block_at(row, column)] / factor_};
  }

  SavedTensor code_tensor_, scale_tensor_;
  std::optional<SavedTensor> zero_tensor_;
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
        code_tensor_(codes),
        scale_tensor_(scales),
        factor_tensor_(layout.factor ? std::optional(*layout.factor) : std::nullopt),
        group_(index(layout.group)),
        divides_(layout.divides) {
    transposed_ = layout.transposed;
    columns_ = index(dense_.shape[transposed_ ? dense_.shape.size() - 2 : dense_.shape.size() - 1]);
    expect_element(codes, {Element::u8, Element::i8});
    expect_element(scales, {Element::u8, Element::f8_e8m0, Element::f8_e4m3});
    if (columns_ % group_ != 0 || scales.elements() * layout.group != codes.elements() * 2)
      fail("'{}' is {} and '{}' is {}: they have not a scale for each {} codes",
           printable(codes.name), shape_text(codes.shape), printable(scales.name),
           shape_text(scales.shape), layout.group);
    if (layout.factor != nullptr && layout.factor->elements() != 1)
      fail("'{}' is {}, not one number", printable(layout.factor->name),
           shape_text(layout.factor->shape));
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
    return shape;
  }
  void load(const ReadTensor& read) override {
    codes_ = read_bytes(read, code_tensor_);
    // Scales of mxfp4 are bytes; as numbers they are powers of two.
    SavedTensor powers = scale_tensor_;
    if (powers.element == Element::u8) powers.element = Element::f8_e8m0;
    scales_ = read_scales(read, powers);
    scale_bytes_ = read_bytes(read, scale_tensor_);
    if (factor_tensor_) factor_ = read_scales(read, *factor_tensor_).front();
    if (divides_ && factor_ == 0) fail("'{}' is 0", printable(factor_tensor_->name));
  }
  CodeFormat format(const ReadTensor&) const override {
    const auto group = static_cast<std::int64_t>(group_);
    CodeFormat format{.weights = group == 16 ? "nvfp4" : "mxfp4", .groups = {group}};
    if ((scale_tensor_.element == Element::f8_e4m3) != (group == 16))
      format.unfit = fmt::format("it has scales of {} for groups of {}",
                                 element_name(scale_tensor_.element), group);
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

  SavedTensor code_tensor_, scale_tensor_;
  std::optional<SavedTensor> factor_tensor_;
  std::size_t group_, columns_ = 0;
  bool divides_;
  std::vector<std::uint8_t> codes_, scale_bytes_;
  std::vector<double> scales_;
  double factor_ = 1;
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

void find_gptq(const JsonValue& config, const Tensors& tensors, Found& found) {
  std::string format = word_of(config, "checkpoint_format");
  if (format.empty()) format = word_of(config, "format");
  if (!format.empty() && format != "gptq" && format != "gptq_v2")
    fail("the GPTQ layout '{}' is not known: gptq and gptq_v2 are", printable(format));
  expect_four_bits(config, "GPTQ");
  for_each_ending(tensors, "qweight", [&](const Parts& parts, const SavedTensor&) {
    found.push_back(std::make_shared<GptqWeight>(parts, config, format != "gptq_v2"));
  });
}

void find_awq(const JsonValue& config, const Tensors& tensors, Found& found) {
  std::string format = word_of(config, "format");
  if (format.empty()) format = word_of(config, "version");
  if (!format.empty() && format != "gemm" && format != "GEMM")
    fail("the AWQ layout '{}' is not known: gemm is", printable(format));
  expect_four_bits(config, "AWQ");
  for_each_ending(tensors, "qweight", [&](const Parts& parts, const SavedTensor&) {
    found.push_back(std::make_shared<AwqWeight>(parts, config));
  });
}

/// int8 and fp8: blocks of this size where the scales are a grid of them.
std::shared_ptr<const QuantisedWeight> scaled_weight(const SavedTensor& codes,
                                                     const SavedTensor& scales, const Shape& block,
                                                     double factor = 1,
                                                     const SavedTensor* zeros = nullptr) {
  const Shape shape = expect_matrix(codes);
  std::int64_t rows = shape[0], columns = shape[1];
  if (scales.elements() != 1 || !block.empty()) {
    const bool of_rows = scales.elements() == shape[0] &&
                         (scales.shape.size() == 1 || scales.shape == Shape{shape[0], 1});
    if (of_rows) {
      rows = 1;
    } else if (block.size() == 2) {
      rows = block[0];
      columns = block[1];
    }
  }
  return std::make_shared<ScaledWeight>(codes, scales, zeros, rows, columns, factor);
}

Shape block_of(const JsonValue& config, std::string_view key) {
  const JsonValue* const field = config.find(key);
  const auto* const extents = field ? field->get_if<JsonValue::Array>() : nullptr;
  Shape block;
  if (extents == nullptr) return block;
  for (const JsonValue& extent : *extents)
    if (const auto* number = extent.get_if<std::int64_t>(); number != nullptr && *number > 0)
      block.push_back(*number);
  if (block.size() != 2) fail("quantization_config has a {} of {}", key, json_brief(*field));
  return block;
}

/// weight_shape has the sizes without what the last words are filled with.
Shape packed_shape(const Parts& parts, const ReadTensor& read) {
  const SavedTensor& tensor = parts.at("weight_shape", {2});
  const auto extents = read_numbers(read, tensor);
  Shape shape;
  for (const double extent : extents) {
    if (!(extent >= 1 && extent < 1e12))
      fail("'{}' has an extent of {}", printable(tensor.name), extent);
    shape.push_back(static_cast<std::int64_t>(extent));
  }
  return shape;
}

void find_compressed(const JsonValue& config, const Tensors& tensors, const ReadTensor& read,
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
    const SavedTensor& scales = parts.at("weight_scale");
    if (codes.element == Element::i32) {
      found.push_back(std::make_shared<PackedWeight>(parts, packed_shape(parts, read)));
      return;
    }
    Fp4Weight::Layout layout{.name = parts.base() + "weight"};
    if (parts.find("weight_global_scale"))
      layout = {.name = parts.base() + "weight",
                .group = 16,
                .factor = &parts.at("weight_global_scale"),
                .divides = true};
    found.push_back(std::make_shared<Fp4Weight>(codes, scales, layout));
  });
  // Groups of layers may have blocks of other sizes: the first that has any.
  Shape block;
  if (const JsonValue* const groups = config.find("config_groups"))
    if (const auto* const all = groups->get_if<JsonValue::Object>())
      for (const auto& [name, group] : *all)
        if (const JsonValue* const weights = group.find("weights"); weights && block.empty())
          block = block_of(*weights, "block_structure");
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    const SavedTensor* const scales = parts.find("weight_scale");
    if (scales && (codes.element == Element::i8 || codes.element == Element::f8_e4m3))
      found.push_back(scaled_weight(codes, *scales, block, 1, parts.find("weight_zero_point")));
  });
}

void find_mxfp4(const Tensors& tensors, Found& found) {
  for_each_ending(tensors, "_blocks", [&](const Parts& parts, const SavedTensor& codes) {
    found.push_back(std::make_shared<Fp4Weight>(
        codes, parts.at("_scales"), Fp4Weight::Layout{.name = parts.base(), .transposed = true}));
  });
}

void find_fp8(const JsonValue& config, const Tensors& tensors, Found& found) {
  const Shape block = block_of(config, "weight_block_size");
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    // DeepSeek-V4 and Inkling have names of their own.
    for (const char* name : {"weight_scale_inv", "scale", "qscale_weight"}) {
      const SavedTensor* const scales = parts.find(name);
      if (scales == nullptr || codes.shape.size() != 2) continue;
      if (codes.element == Element::f8_e4m3)
        found.push_back(scaled_weight(codes, *scales, block));
      else if (codes.element == Element::i8 && scales->element == Element::f8_e8m0)
        found.push_back(
            std::make_shared<Fp4Weight>(codes, *scales, Fp4Weight::Layout{.name = codes.name}));
      return;
    }
  });
}

void find_modelopt(const Tensors& tensors, Found& found) {
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    const SavedTensor* const scales = parts.find("weight_scale");
    if (scales == nullptr) return;
    if (const SavedTensor* const factors = parts.find("pre_quant_scale"))
      fail("'{}' multiplies activations, which no op does", printable(factors->name));
    if (codes.element == Element::u8)
      found.push_back(std::make_shared<Fp4Weight>(
          codes, *scales,
          Fp4Weight::Layout{
              .name = codes.name, .group = 16, .factor = &parts.at("weight_scale_2")}));
    else if (codes.element == Element::f8_e4m3)
      found.push_back(scaled_weight(codes, *scales, {}));
  });
}

void find_bitsandbytes(const JsonValue& config, const Tensors& tensors, const ReadTensor& read,
                       Found& found) {
  const JsonValue* const four = config.find("load_in_4bit");
  if (const auto* const given = four ? four->get_if<bool>() : nullptr; given && *given)
    fail("bitsandbytes weights of 4 bits are not known: 8 are");
  for_each_ending(tensors, "weight", [&](const Parts& parts, const SavedTensor& codes) {
    // SCB is the largest size in a row, which 127 stands for.
    const SavedTensor* const scales = parts.find("SCB");
    if (scales == nullptr || codes.element != Element::i8) return;
    if (const SavedTensor* const order = parts.find("weight_format"))
      for (const double own : read_numbers(read, *order))
        if (own != 0)
          fail("'{}' is {}, an order of codes that is not known: 0, by rows, is",
               printable(order->name), own);
    found.push_back(scaled_weight(codes, *scales, {}, 127));
  });
}

}  // namespace

void QuantisedWeight::load_once(const ReadTensor& read) const {
  std::call_once(loaded_, [&] { const_cast<QuantisedWeight*>(this)->load(read); });
}

std::int64_t QuantisedWeight::code_columns() const {
  return dense_.shape[dense_.shape.size() - (transposed_ ? 2 : 1)];
}

void QuantisedWeight::codes(const ReadTensor& read, std::size_t row, std::span<Code> codes) const {
  load_once(read);
  for (std::size_t column = 0; column < codes.size(); ++column)
    codes[column] = code_at(row, column);
}

void QuantisedWeight::decode(const ReadTensor& read, std::size_t first,
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
                             const ReadTensor& read) {
  const JsonValue* const own = config.find("quantization_config");
  if (own == nullptr) return {};
  const std::string method = word_of(*own, "quant_method");
  Found found;
  if (method == "gptq") find_gptq(*own, tensors, found);
  if (method == "awq") find_awq(*own, tensors, found);
  if (method == "compressed-tensors") find_compressed(*own, tensors, read, found);
  if (method == "mxfp4") find_mxfp4(tensors, found);
  if (method == "fp8") find_fp8(*own, tensors, found);
  if (method == "modelopt") find_modelopt(tensors, found);
  if (method == "bitsandbytes") find_bitsandbytes(*own, tensors, read, found);
  return found;
}

}  // namespace fftune
