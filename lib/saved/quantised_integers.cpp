#include "saved/quantised_integers.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

namespace fftune::quantised {
namespace {

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

}  // namespace

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

IntegerSettings settings_of(const Parts& parts, const IntegerSettings& settings) {
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

Weight gptq_weight(const Parts& parts, const IntegerSettings& settings, bool dynamic,
                   bool zeros_less_one) {
  return std::make_shared<GptqWeight>(parts, settings, dynamic, zeros_less_one);
}

Weight awq_weight(const Parts& parts, const IntegerSettings& settings, bool dynamic) {
  return std::make_shared<AwqWeight>(parts, settings, dynamic);
}

Weight packed_weight(const Parts& parts, const Shape& shape) {
  return std::make_shared<PackedWeight>(parts, shape);
}

}  // namespace fftune::quantised
