#include "saved/header.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "core/error.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

constexpr std::size_t length_bytes = 8;
/// The longest header that the format's own library reads.
constexpr std::uint64_t longest_header = 100'000'000;
constexpr std::size_t most_dimensions = 16;

template <typename... Args>
Error invalid(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorKind::invalid_input, fmt::format(format, std::forward<Args>(args)...));
}

std::string in_quotes(std::string_view name) {
  return "'" + printable(name) + "'";
}

/// A number of elements or bytes; `what` says of what.
std::size_t count_in(const JsonValue& value, const std::string& tensor, std::string_view what) {
  const auto* number = value.get_if<std::int64_t>();
  if (number == nullptr || *number < 0)
    throw invalid("{} has {} {}: it should be a whole number from 0 on", in_quotes(tensor), what,
                  json_brief(value));
  return static_cast<std::size_t>(*number);
}

std::size_t product(std::size_t a, std::size_t b, const std::string& tensor) {
  if (b != 0 && a > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) / b)
    throw invalid("{} has a shape of more bytes than there are addresses", in_quotes(tensor));
  return a * b;
}

struct Fields {
  const JsonValue* dtype = nullptr;
  const JsonValue* shape = nullptr;
  const JsonValue* offsets = nullptr;
};

Fields fields_of(const std::string& tensor, const JsonValue& value) {
  const auto* object = value.get_if<JsonValue::Object>();
  if (object == nullptr)
    throw invalid("{} is {}: it should be an object with dtype, shape and data_offsets",
                  in_quotes(tensor), json_brief(value));
  Fields fields;
  for (const auto& [key, field] : *object) {
    const JsonValue** const place = key == "dtype"          ? &fields.dtype
                                    : key == "shape"        ? &fields.shape
                                    : key == "data_offsets" ? &fields.offsets
                                                            : nullptr;
    if (place == nullptr)
      throw invalid("{} has a field {}: there are dtype, shape and data_offsets alone",
                    in_quotes(tensor), in_quotes(key));
    if (*place != nullptr)
      throw invalid("{} has the field {} twice", in_quotes(tensor), in_quotes(key));
    *place = &field;
  }
  for (const auto& [field, name] : {std::pair(fields.dtype, "dtype"),
                                    {fields.shape, "shape"},
                                    {fields.offsets, "data_offsets"}})
    if (field == nullptr) throw invalid("{} lacks the field '{}'", in_quotes(tensor), name);
  return fields;
}

Element element_in(const JsonValue& value, const std::string& tensor) {
  const auto* name = value.get_if<std::string>();
  const auto element = name ? parse_element(*name) : std::nullopt;
  if (!element)
    throw invalid("{} has the unknown dtype {}: known are {}", in_quotes(tensor), json_brief(value),
                  element_names());
  return *element;
}

/// One tensor, with `data` bytes of tensors behind the header, which ends at `data_begin`.
SavedTensor tensor_in(const std::string& name, const JsonValue& value, std::size_t data_begin,
                      std::size_t data) {
  const Fields fields = fields_of(name, value);
  SavedTensor tensor;
  tensor.name = name;
  tensor.element = element_in(*fields.dtype, name);

  const auto* shape = fields.shape->get_if<JsonValue::Array>();
  if (shape == nullptr)
    throw invalid("{} has the shape {}: it should be an array", in_quotes(name),
                  json_brief(*fields.shape));
  if (shape->size() > most_dimensions)
    throw invalid("{} has {} dimensions: {} are the most", in_quotes(name), shape->size(),
                  most_dimensions);
  std::size_t bytes = element_bytes(tensor.element);
  for (const JsonValue& extent : *shape) {
    const std::size_t count = count_in(extent, name, "an extent");
    bytes = product(bytes, count, name);
    tensor.shape.push_back(static_cast<std::int64_t>(count));
  }

  const auto* offsets = fields.offsets->get_if<JsonValue::Array>();
  if (offsets == nullptr || offsets->size() != 2)
    throw invalid("{} has the data_offsets {}: they should be two numbers", in_quotes(name),
                  json_brief(*fields.offsets));
  const std::size_t begin = count_in((*offsets)[0], name, "a data offset");
  const std::size_t end = count_in((*offsets)[1], name, "a data offset");
  if (begin > end || end > data)
    throw invalid("{} lies at bytes {} to {} of {}: the file is cut short or damaged",
                  in_quotes(name), begin, end, data);
  if (end - begin != bytes)
    throw invalid("{} has {} bytes, but {} of shape {} takes {}", in_quotes(name), end - begin,
                  element_name(tensor.element), shape_text(tensor.shape), bytes);
  tensor.begin = data_begin + begin;
  tensor.end = data_begin + end;
  return tensor;
}

void check_metadata(const JsonValue& value) {
  const auto* object = value.get_if<JsonValue::Object>();
  if (object == nullptr)
    throw invalid("__metadata__ is {}: it should be an object", json_brief(value));
  std::set<std::string_view> keys;
  for (const auto& [key, text] : *object) {
    if (text.get_if<std::string>() == nullptr)
      throw invalid("__metadata__ has {} for {}: it should be text", json_brief(text),
                    in_quotes(key));
    if (!keys.insert(key).second) throw invalid("__metadata__ has {} twice", in_quotes(key));
  }
}

/// Every byte belongs to one tensor.
void check_places(const std::vector<SavedTensor>& tensors, std::size_t data_begin,
                  std::size_t file_end) {
  std::size_t done = data_begin;
  for (const SavedTensor& tensor : tensors) {
    if (tensor.begin < done)
      throw invalid("{} begins at byte {} of the data, within another tensor",
                    in_quotes(tensor.name), tensor.begin - data_begin);
    if (tensor.begin > done)
      throw invalid("{} bytes ahead of {} belong to no tensor", tensor.begin - done,
                    in_quotes(tensor.name));
    done = tensor.end;
  }
  if (done < file_end) throw invalid("the last {} bytes belong to no tensor", file_end - done);
}

}  // namespace

std::int64_t SavedTensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::size_t safetensors_header_end(std::span<const std::byte> start, std::uint64_t file_bytes) {
  // A file that grows while it is read has more bytes to read than it had.
  if (const auto bytes = std::min<std::uint64_t>(start.size(), file_bytes); bytes < length_bytes)
    throw invalid("it has {} bytes: a safetensors file begins with the 8 of its header's length",
                  bytes);
  std::uint64_t length = 0;
  std::memcpy(&length, start.data(), sizeof length);
  const std::uint64_t behind = file_bytes - length_bytes;
  if (length > longest_header)
    throw invalid(
        "its header would have {} bytes, beyond the format's {}: it is not a safetensors file",
        length, longest_header);
  if (length > behind)
    throw invalid("its header has {} bytes, but the file ends after {}: it is cut short", length,
                  behind);
  return length_bytes + static_cast<std::size_t>(length);
}

std::vector<SavedTensor> read_safetensors_header(std::span<const std::byte> start,
                                                 std::uint64_t file_bytes) {
  const std::size_t data_begin = safetensors_header_end(start, file_bytes);
  if (start.size() < data_begin)
    throw invalid("its header has {} bytes, but the file ends after {}: it is cut short",
                  data_begin - length_bytes, start.size() - length_bytes);
  const std::string_view text(reinterpret_cast<const char*>(start.data()) + length_bytes,
                              data_begin - length_bytes);
  if (!text.starts_with('{'))
    throw invalid("its header does not begin with '{{': it is not a safetensors file");
  const JsonValue header = [&] {
    try {
      return parse_json(text);
    } catch (const Error& error) {
      throw invalid("its header is {}", error.what());
    }
  }();

  std::vector<SavedTensor> tensors;
  std::set<std::string_view> names;
  for (const auto& [name, value] : *header.get_if<JsonValue::Object>()) {
    if (!names.insert(name).second) throw invalid("{} is in the header twice", in_quotes(name));
    if (name == "__metadata__")
      check_metadata(value);
    else
      tensors.push_back(tensor_in(name, value, data_begin, file_bytes - data_begin));
  }
  // Empty tensors lie ahead of what begins where they are.
  std::sort(tensors.begin(), tensors.end(), [](const SavedTensor& a, const SavedTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_places(tensors, data_begin, file_bytes);
  return tensors;
}

}  // namespace fftune
