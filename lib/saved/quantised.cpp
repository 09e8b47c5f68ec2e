#include "saved/quantised.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "saved/model_config.hpp"
#include "saved/quantised_integers.hpp"
#include "saved/quantised_parts.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

using namespace quantised;

std::string word_of(const JsonValue& config, std::string_view key) {
  const JsonValue* const field = config.find(key);
  const auto* const text = field ? field->get_if<std::string>() : nullptr;
  return text ? *text : "";
}

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
      return gptq_weight(parts, dynamic ? settings_of(parts, all) : all, dynamic,
                         format != "gptq_v2");
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
               [&] { return awq_weight(parts, all, is_dynamic(config)); });
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
      if (codes.element == Element::i32) return packed_weight(parts, packed_shape(parts, read));
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
