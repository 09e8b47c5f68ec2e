// The value of a device's struct as a template argument of a kernel.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace fftune {

/// "fftune::sm90_config{.bm = 128, .stages = 4}" of StructText("sm90_config", "bm", 128, "stages",
/// 4). Fields are set in the order of the struct's members, as designated initialisers are.
class StructText {
 public:
  template <typename... Fields>
  explicit StructText(std::string_view type, const Fields&... fields)
      : text_(fmt::format("fftune::{}{{", type)) {
    set(fields...);
  }

  /// Names, each with its value: a number, a bool, or the text of an enumerator or of a struct.
  template <typename T, typename... Fields>
  StructText& set(std::string_view name, const T& value, const Fields&... more) {
    text_ += fmt::format("{}.{} = {}", text_.ends_with('{') ? "" : ", ", name, value);
    return set(more...);
  }
  StructText& set() { return *this; }
  /// The same for bools, without those that are false.
  template <typename... Fields>
  StructText& flags(std::string_view name, bool value, const Fields&... more) {
    if (value) set(name, true);
    return flags(more...);
  }
  StructText& flags() { return *this; }
  /// "fftune::row_norm::gemma", unless it is the default.
  template <typename Enum, typename Names>
  StructText& name(std::string_view field, std::string_view type, Enum value, Enum common,
                   const Names& names) {
    if (value == common) return *this;
    return set(field, fmt::format("fftune::{}::{}", type, names[static_cast<std::size_t>(value)]));
  }

  std::string text() const { return text_ + "}"; }
  operator std::string() const { return text(); }

 private:
  std::string text_;
};

}  // namespace fftune

template <>
struct fmt::formatter<fftune::StructText> : fmt::formatter<std::string> {
  template <typename Context>
  auto format(const fftune::StructText& value, Context& context) const {
    return fmt::formatter<std::string>::format(value.text(), context);
  }
};
