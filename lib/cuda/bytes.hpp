// Numbers and texts in files of our own: integers of 64 bits in the machine's byte order, texts
// with their length before them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

namespace fftune::cuda {

class ByteWriter {
 public:
  void number(std::uint64_t value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
  }
  void text(std::string_view value) {
    number(value.size());
    out.append(value);
  }
  std::string out;
};

/// Takes any bytes: what is not there reads as zero or empty, and good() tells.
class ByteReader {
 public:
  explicit ByteReader(std::string_view rest) : rest_(rest) {}
  std::uint64_t number() {
    std::uint64_t value = 0;
    if (rest_.size() < sizeof value) {
      good_ = false;
      return 0;
    }
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  int small_number() {
    const auto value = number();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) good_ = false;
    return good_ ? static_cast<int>(value) : 0;
  }
  std::string text() {
    const auto size = number();
    if (size > rest_.size()) {
      good_ = false;
      return {};
    }
    std::string value(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return value;
  }
  bool good() const { return good_; }
  bool at_end() const { return good_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace fftune::cuda
