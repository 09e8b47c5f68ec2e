#include "saved/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/nearest.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

constexpr const char* index_name = "model.safetensors.index.json";

[[noreturn]] void fail_in(const fs::path& file, const std::string& why) {
  throw Error(ErrorKind::invalid_input, fmt::format("{}: {}", file.string(), why));
}

bool is_integer(Element element) {
  constexpr Element integers[] = {Element::i64, Element::i32, Element::i16, Element::i8,
                                  Element::u64, Element::u32, Element::u16, Element::u8};
  return std::find(std::begin(integers), std::end(integers), element) != std::end(integers);
}

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

std::vector<fs::path> safetensors_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error))
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
  if (error)
    throw Error(ErrorKind::io,
                fmt::format("{}: cannot be read: {}", folder.string(), error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

SavedModel::SavedModel(const fs::path& path) : path_(path) {
  std::error_code error;
  if (!fs::exists(path, error))
    throw Error(
        ErrorKind::io,
        fmt::format("{}: this path does not exist: give the folder of a saved model, with its "
                    "config.json and .safetensors files, or one of these files",
                    path.string()));
  if (path.extension() == ".json") {
    add_index(path);
  } else if (!fs::is_directory(path, error)) {
    add(path);
  } else if (fs::exists(path / index_name, error)) {
    add_index(path / index_name);
  } else {
    const auto files = safetensors_in(path);
    if (files.empty())
      fail_in(path, fmt::format("it has no .safetensors file and no {}: give a saved model, the "
                                "folder with its config.json and these files",
                                index_name));
    for (const fs::path& file : files) add(file);
  }
  add_quantised();
}

fs::path SavedModel::folder() const {
  std::error_code error;
  return fs::is_directory(path_, error) ? path_ : path_.parent_path();
}

void SavedModel::add(const fs::path& path) {
  std::vector<SavedTensor> tensors;
  try {
    InputFile file(path);
    // The file's own size counts, not how much of it could be read before it was cut short.
    std::vector<std::byte> start(8);
    start.resize(file.read_at(0, start));
    start.resize(safetensors_header_end(start, file.size()));
    start.resize(file.read_at(0, start));
    tensors = read_safetensors_header(start, file.size());
    files_.push_back({path, std::move(file)});
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", path.string(), error.what()));
  }
  for (SavedTensor& tensor : tensors) {
    if (find(tensor.name) != nullptr)
      fail_in(path,
              fmt::format("'{}' is in another file of the model too", printable(tensor.name)));
    const std::string name = tensor.name;
    tensors_.emplace(name, Tensor{.saved = std::move(tensor), .file = files_.size() - 1});
  }
}

void SavedModel::add_index(const fs::path& index) {
  JsonValue root;
  try {
    root = parse_json(read_whole_file(index));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", index.string(), error.what()));
  }
  const JsonValue* map = root.find("weight_map");
  const auto* names = map ? map->get_if<JsonValue::Object>() : nullptr;
  if (names == nullptr || names->empty())
    fail_in(index, "it has no weight_map: it is not the index of a saved model");
  std::set<std::string> shards;
  for (const auto& [name, value] : *names) {
    const auto* file = value.get_if<std::string>();
    if (file == nullptr || !is_plain_file_name(*file))
      fail_in(index, fmt::format("'{}' is said to be in {}: it should be the name of a file here",
                                 printable(name), json_brief(value)));
    shards.insert(*file);
  }
  for (const std::string& shard : shards) {
    std::error_code error;
    if (!fs::exists(index.parent_path() / shard, error))
      fail_in(index, fmt::format("it names {}, which is missing", printable(shard)));
    add(index.parent_path() / shard);
  }
  std::set<std::string_view> seen;
  for (const auto& [name, value] : *names) {
    if (!seen.insert(name).second)
      fail_in(index, fmt::format("'{}' is in weight_map twice", printable(name)));
    if (find(name) == nullptr)
      fail_in(index, fmt::format("'{}' is not in {}, as it says", printable(name),
                                 printable(*value.get_if<std::string>())));
  }
}

void SavedModel::add_quantised() {
  const fs::path path = folder() / "config.json";
  std::error_code missing;
  if (!fs::exists(path, missing)) return;
  try {
    config_ = std::make_shared<JsonValue>(parse_json(read_whole_file(path)));
    if (config_->get_if<JsonValue::Object>() == nullptr)
      throw Error(ErrorKind::invalid_input, "it is no JSON object");
    std::map<std::string, SavedTensor, std::less<>> saved;
    for (const auto& [name, tensor] : tensors_) saved.emplace(name, tensor.saved);
    packed_ = tensors_;
    const auto weights = find_quantised_weights(*config_, saved, packed_reader());
    if (weights.empty()) packed_.clear();
    for (const auto& weight : weights) {
      Tensor& tensor = tensors_[weight->dense().name];
      // One number an element stays as it is saved, so that an op that knows scales can take it.
      const bool is_saved = tensor.saved.shape == weight->dense().shape;
      if (!is_saved || !weight->unreadable().empty()) tensor.saved = weight->dense();
      tensor.quantised = weight;
    }
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", path.string(), error.what()));
  }
}

/// Calls call(read) with what reads saved tensors; errors are named by the file.
template <typename Call>
auto SavedModel::of_quantised(const Call& call) const {
  try {
    return call(packed_reader());
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", path_.string(), error.what()));
  }
}

void SavedModel::read(const Tensor& tensor, std::size_t first, DType dtype, std::byte* out,
                      std::size_t count) const {
  require_readable(tensor);
  const auto elements = static_cast<std::size_t>(tensor.saved.elements());
  if (first > elements || count > elements - first)
    throw Error(ErrorKind::internal, "elements behind a saved tensor's last are read");
  const Element element = tensor.saved.element;
  const bool is_packed = tensor.saved.end == tensor.saved.begin;
  if (!tensor.quantised || (!is_packed && dtype_of(element) == dtype)) {
    if (dtype_of(element) != dtype) expect_no_codes(tensor.saved);
    std::vector<std::byte> saved(count * element_bytes(element));
    read_bytes(tensor, first, saved);
    convert(element, saved.data(), dtype, out, count);
    return;
  }
  std::vector<double> values(count);
  of_quantised([&](const auto& read) { tensor.quantised->decode(read, first, values); });
  encode(dtype, std::span<const double>(values), out);
}

/// Codes are not the weight: integers, and fp8 where scales belong to it. They must not be taken
/// for it.
void SavedModel::expect_no_codes(const SavedTensor& tensor) const {
  constexpr std::string_view what =
      "the quantization_config of config.json names no format that reads them: dequantise the "
      "weight";
  const auto scales = scales_of(tensor.name);
  if (scales != tensors_.end() && element_bytes(tensor.element) == 1)
    fail_in(path_,
            fmt::format("'{}' has codes of {} with scales in '{}', and {}", printable(tensor.name),
                        element_name(tensor.element), printable(scales->first), what));
  if (is_integer(tensor.element))
    fail_in(path_, fmt::format("'{}' has integers, {}, and {}", printable(tensor.name),
                               element_name(tensor.element), what));
}

/// The scales beside a weight: packages name them weight_scale, weight_scale_inv, weight_scales,
/// scale, scale_weight, qscale_weight or SCB, and those of stacked experts gate_up_proj_scale_inv.
SavedModel::Tensors::const_iterator SavedModel::scales_of(const std::string& name) const {
  const std::size_t leaf = name.rfind('.') + 1;
  const std::string owner = name.substr(0, leaf), own = name.substr(leaf);
  for (auto each = tensors_.lower_bound(owner);
       each != tensors_.end() && each->first.starts_with(owner); ++each) {
    const std::string_view other = std::string_view(each->first).substr(leaf);
    if (other.find('.') != other.npos || (own != "weight" && !other.starts_with(own + "_")))
      continue;
    if (other == "SCB" || (other != "input_scale" && other.find("scale") != other.npos))
      return each;
  }
  return tensors_.end();
}

CodeFormat SavedModel::code_format(const Tensor& tensor) const {
  return of_quantised([&](const auto& read) { return tensor.quantised->format(read); });
}

void SavedModel::read_codes(const Tensor& tensor, std::size_t row, std::span<Code> codes) const {
  of_quantised([&](const auto& read) { tensor.quantised->codes(read, row, codes); });
}

TensorReader SavedModel::packed_reader() const {
  return TensorReader([this](std::string_view name) {
    const Tensor& tensor = packed_.find(name)->second;
    std::vector<std::byte> bytes(tensor.saved.end - tensor.saved.begin);
    read_bytes(tensor, 0, bytes);
    return bytes;
  });
}

void SavedModel::require_readable(const Tensor& tensor) const {
  if (!tensor.quantised) return;
  if (const std::string why = tensor.quantised->unreadable(); !why.empty()) fail_in(path_, why);
}

void SavedModel::read_bytes(const Tensor& tensor, std::size_t first,
                            std::span<std::byte> out) const {
  const File& file = files_.at(tensor.file);
  const std::size_t begin = tensor.saved.begin + first * element_bytes(tensor.saved.element);
  try {
    if (file.content.read_at(begin, out) == out.size()) return;
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", file.path.string(), error.what()));
  }
  throw Error(ErrorKind::io, fmt::format("{}: it was cut short while it was in use: '{}' is no "
                                         "longer whole in it",
                                         file.path.string(), printable(tensor.saved.name)));
}

const SavedModel::Tensor* SavedModel::find(std::string_view name) const {
  const auto entry = tensors_.find(name);
  return entry == tensors_.end() ? nullptr : &entry->second;
}

const SavedModel::Tensor& SavedModel::at(std::string_view name) const {
  if (const Tensor* tensor = find(name)) return *tensor;
  std::vector<std::string> names;
  for (const auto& entry : tensors_) names.push_back(entry.first);
  const std::string near = nearest(name, names);
  fail_in(path_,
          fmt::format("there is no tensor '{}'{}", printable(name),
                      near.empty() ? "" : fmt::format(": did you mean {}?", printable(near))));
}

}  // namespace fftune
