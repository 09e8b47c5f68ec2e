#include "support/safetensors.hpp"

namespace fftune::testing {

void SafetensorsWriter::add(const std::string& name, std::string_view dtype,
                            const std::vector<std::int64_t>& shape, const std::string& bytes) {
  std::string extents;
  for (const std::int64_t extent : shape)
    extents += (extents.empty() ? "" : ",") + std::to_string(extent);
  header_ += (header_.empty() ? "" : ",") + ("\"" + name + "\":{\"dtype\":\"") +
             std::string(dtype) + "\",\"shape\":[" + extents + "],\"data_offsets\":[" +
             std::to_string(data_.size()) + "," + std::to_string(data_.size() + bytes.size()) +
             "]}";
  data_ += bytes;
}

void SafetensorsWriter::add(const std::string& name, std::string_view dtype,
                            const std::vector<std::int64_t>& shape,
                            const std::vector<float>& values) {
  const DType type = dtype == "BF16" ? DType::bf16 : dtype == "F16" ? DType::fp16 : DType::f32;
  std::string bytes(values.size() * dtype_bytes(type), '\0');
  encode(type, std::span<const float>(values), bytes.data());
  add(name, dtype, shape, bytes);
}

void SafetensorsWriter::write(const std::filesystem::path& path) const {
  std::ofstream(path, std::ios::binary) << bytes();
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

}  // namespace fftune::testing
