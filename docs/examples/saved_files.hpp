// The tensors of a folder of safetensors files, and their numbers. Part of the example
// run_model.cpp.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

using nlohmann::json;
using Shape = std::vector<std::int64_t>;
using Bytes = std::vector<char>;

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error(what);
}

inline json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) fail(path.string() + " cannot be read");
  json value = json::parse(stream, nullptr, false);
  if (!value.is_object()) fail(path.string() + " is no JSON object");
  return value;
}

// ---- numbers ------------------------------------------------------------------------------------

/// A type of numbers, as the library and as safetensors call it.
struct Dtype {
  enum class Kind { f32, bf16, fp16 } kind = Kind::f32;
  std::string name, saved;
  std::size_t bytes = 0;
};

inline const Dtype& dtype_of(std::string_view saved) {
  static const std::vector<Dtype> all{{Dtype::Kind::f32, "f32", "F32", 4},
                                      {Dtype::Kind::bf16, "bf16", "BF16", 2},
                                      {Dtype::Kind::fp16, "fp16", "F16", 2}};
  for (const Dtype& dtype : all)
    if (dtype.saved == saved) return dtype;
  fail("the weights are " + std::string(saved) + ": this example runs F32, BF16 and F16");
}

/// Bytes of an element of a saved tensor: codes and indices are integers.
inline std::size_t bytes_of(const std::string& saved) {
  if (saved == "F8_E4M3" || saved == "I8") return 1;
  return saved == "I32" ? 4 : saved == "I64" ? 8 : dtype_of(saved).bytes;
}

inline float f32_of_half(std::uint32_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : exponent == 31
                          ? (fraction ? NAN : INFINITY)
                          : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits & 0x8000 ? -value : value;
}

inline std::vector<float> numbers_of(const Dtype& dtype, const char* elements, std::size_t count) {
  std::vector<float> numbers(count);
  if (dtype.kind == Dtype::Kind::f32) {
    std::memcpy(numbers.data(), elements, count * 4);
    return numbers;
  }
  std::vector<std::uint16_t> halves(count);
  std::memcpy(halves.data(), elements, count * 2);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = std::uint32_t{halves[i]} << 16;  // bf16: the upper half of an f32
    if (dtype.kind == Dtype::Kind::fp16)
      numbers[i] = f32_of_half(halves[i]);
    else
      std::memcpy(&numbers[i], &bits, sizeof bits);
  }
  return numbers;
}

/// Rounds to the nearest, of two to the even one.
inline void write_number(const Dtype& dtype, float value, char* element) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype.kind == Dtype::Kind::bf16) {
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  } else if (dtype.kind == Dtype::Kind::fp16) {
    int exponent = 0;
    std::frexp(value, &exponent);
    exponent = std::max(exponent, -13);  // below, numbers have the same step
    const float steps = std::nearbyint(std::ldexp(std::fabs(value), 11 - exponent));
    const auto units = static_cast<std::uint32_t>(exponent + 13) * 1024 +
                       static_cast<std::uint32_t>(std::isfinite(value) ? steps : 0);
    bits = (bits >> 16 & 0x8000) | (std::fabs(value) < 65520 ? units : 0x7c00);
  }
  std::memcpy(element, &bits, dtype.bytes);
}

// ---- files --------------------------------------------------------------------------------------

/// A regular file, read where it is asked for: mapped into memory it would end the process where
/// another one cuts it short.
class File {
 public:
  explicit File(std::filesystem::path path) : path_(std::move(path)) {
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat status {};
    if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode))
      fail(path_.string() + " cannot be read");
    size_ = static_cast<std::size_t>(status.st_size);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::size_t size() const { return size_; }
  Bytes read(std::size_t begin, std::size_t bytes) const {
    Bytes content(bytes);
    for (std::size_t done = 0; done < bytes;) {
      const auto got = ::pread(descriptor_, content.data() + done, bytes - done,
                               static_cast<off_t>(begin + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) fail(path_.string() + " is cut short");
      done += static_cast<std::size_t>(got);
    }
    return content;
  }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::size_t size_ = 0;
};

struct Tensor {
  std::string dtype;
  Shape shape;
  std::shared_ptr<const File> file = {};
  std::size_t begin = 0;  // in the file
  std::size_t bytes = 0;

  /// Some of its bytes, from `from` on.
  Bytes read(std::size_t from, std::size_t count) const { return file->read(begin + from, count); }
};

/// The tensors of a folder's safetensors files.
class Files {
 public:
  explicit Files(const std::filesystem::path& folder) {
    std::set<std::string> files{"model.safetensors"};
    const auto index = folder / "model.safetensors.index.json";
    if (std::filesystem::exists(index)) {
      files.clear();
      const json map = read_json(index).at("weight_map");
      for (const auto& [name, file] : map.items()) files.insert(file.get<std::string>());
    }
    for (const std::string& file : files) add(folder / file);
  }

  const std::map<std::string, Tensor>& all() const { return tensors_; }
  const Tensor* find(const std::string& name) const {
    const auto entry = tensors_.find(name);
    return entry == tensors_.end() ? nullptr : &entry->second;
  }
  const Tensor& at(const std::string& name) const {
    const Tensor* const tensor = find(name);
    return tensor ? *tensor : (fail("the model has no tensor " + name), *tensor);
  }

 private:
  void add(const std::filesystem::path& path) {
    const auto file = std::make_shared<const File>(path);
    const std::size_t size = file->size();
    std::uint64_t length = 0;
    if (size < sizeof length) fail(path.string() + " is no safetensors file");
    std::memcpy(&length, file->read(0, sizeof length).data(), sizeof length);
    if (length > size - sizeof length) fail(path.string() + " is cut short");
    const Bytes text = file->read(sizeof length, length);
    const json header = json::parse(text.begin(), text.end(), nullptr, false);
    if (!header.is_object()) fail(path.string() + " has no header");
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const auto offsets = entry.at("data_offsets").get<std::vector<std::size_t>>();
      if (offsets.size() != 2 || offsets[0] > offsets[1] ||
          offsets[1] > size - sizeof length - length)
        fail(path.string() + " is cut short at " + name);
      Tensor tensor{entry.at("dtype"), entry.at("shape"), file, sizeof length + length + offsets[0],
                    offsets[1] - offsets[0]};
      std::size_t bytes = bytes_of(tensor.dtype);
      for (const std::int64_t extent : tensor.shape) bytes *= static_cast<std::size_t>(extent);
      if (bytes != tensor.bytes)
        fail(path.string() + ": the shape of " + name + " has other bytes");
      tensors_[name] = std::move(tensor);
    }
  }

  std::map<std::string, Tensor> tensors_;
};
