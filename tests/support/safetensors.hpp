// Small safetensors files, as other programs write them.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"

namespace fftune::testing {

/// A file's bytes of a header's text and the data behind it.
std::string safetensors_bytes(const std::string& header, const std::string& data);

/// Collects tensors and gives the file's bytes.
class SafetensorsWriter {
 public:
  void add(const std::string& name, std::string_view dtype, const std::vector<std::int64_t>& shape,
           const std::string& bytes);
  /// Rounded to `dtype`: "F32", "BF16" or "F16".
  void add(const std::string& name, std::string_view dtype, const std::vector<std::int64_t>& shape,
           const std::vector<float>& values);

  std::string bytes() const { return safetensors_bytes("{" + header_ + "}", data_); }
  void write(const std::filesystem::path& path) const;

 private:
  std::string header_;
  std::string data_;
};

}  // namespace fftune::testing
