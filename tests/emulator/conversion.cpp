// mov and cvt: between registers, and between types.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "emulator/decoder.hpp"
#include "emulator/numerics.hpp"

namespace fftune::emulator {
namespace {

template <class F>
Execute for_bytes(std::size_t bytes, F f) {
  if (bytes == 1) return f(std::uint8_t());
  if (bytes == 2) return f(std::uint16_t());
  if (bytes == 4) return f(std::uint32_t());
  if (bytes == 8) return f(std::uint64_t());
  if (bytes == 16) return f(std::array<std::uint64_t, 2>());
  return {};
}

Execute decode_mov(Decoder& decoder) {
  const std::size_t bytes = type_bytes(decoder.type());
  const Operand &to = decoder.operand(0), &from = decoder.operand(1);
  if (from.text == "%clock64" || from.text == "%clock" || from.text == "%globaltimer") {
    const std::uint32_t d = decoder.target(to, bytes);
    return [d, bytes](Warp& warp, Mask mask) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      const auto value = static_cast<std::uint64_t>(std::chrono::nanoseconds(now).count());
      for_lanes(mask, [&](int lane) {
        std::memcpy(warp.at<std::byte>(d) + bytes * static_cast<unsigned>(lane), &value, bytes);
      });
      return Outcome::yield;
    };
  }
  if (from.kind == Operand::Kind::vector || to.kind == Operand::Kind::vector) {
    // Registers of a few bytes as one, or one as several.
    const bool packs = from.kind == Operand::Kind::vector;
    const Operand& parts = packs ? from : to;
    const std::size_t part = bytes / parts.elements.size();
    std::vector<std::uint32_t> slots;
    for (const Operand& each : parts.elements)
      slots.push_back(packs ? decoder.source(each, part) : decoder.target(each, part));
    const std::uint32_t whole = packs ? decoder.target(to, bytes) : decoder.source(from, bytes);
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        std::byte* const at = warp.at<std::byte>(whole) + bytes * static_cast<unsigned>(lane);
        std::array<std::byte, 16> copy;
        std::memcpy(copy.data(), at, bytes);
        for (std::size_t i = 0; i < slots.size(); ++i) {
          std::byte* const one = warp.at<std::byte>(slots[i]) + part * static_cast<unsigned>(lane);
          if (packs)
            std::memcpy(at + i * part, one, part);
          else
            std::memcpy(one, copy.data() + i * part, part);
        }
      });
      return Outcome::next;
    };
  }
  return for_bytes(bytes, [&](auto element) -> Execute {
    using T = decltype(element);
    return lanewise<T, T>(decoder.target(to, bytes), {decoder.source(from, bytes)},
                          [](T value) { return value; });
  });
}

template <class D, class S>
D clamped_integer(S value) {
  using limits = std::numeric_limits<D>;
  if (std::cmp_less(value, limits::min())) return limits::min();
  return std::cmp_greater(value, limits::max()) ? limits::max() : static_cast<D>(value);
}

/// A register's integer of a type, which may be narrower than the register.
template <class S>
Execute of_integer(Decoder& decoder, std::string_view to) {
  const Operand &d = decoder.operand(0), &a = decoder.operand(1);
  const std::size_t own = decoder.width(a) == 0 ? sizeof(S) : decoder.width(a);
  const std::uint32_t from = decoder.source(a, own);
  const bool saturates = decoder.has("sat");
  const auto convert = [&](auto element, auto register_element) -> Execute {
    using D = decltype(element);
    using R = decltype(register_element);
    return for_bytes(own, [&](auto raw) -> Execute {
      using Raw = decltype(raw);
      if constexpr (!std::is_integral_v<Raw>)
        return {};
      else
        return lanewise<R, Raw>(decoder.target(d, sizeof(R)), {from}, [saturates](Raw bits) {
          const S value = static_cast<S>(bits);
          if constexpr (!std::is_integral_v<D>)
            return D(value);
          else if (saturates)
            return static_cast<R>(clamped_integer<D>(value));
          else
            return static_cast<R>(static_cast<D>(value));
        });
    });
  };
  // Eight bits have no registers of their own.
  const auto narrow = [&](auto element) -> Execute {
    if (decoder.width(d) == 2) return convert(element, std::int16_t());
    if (decoder.width(d) == 4) return convert(element, std::int32_t());
    return {};
  };
  if (to == "u8") return narrow(std::uint8_t());
  if (to == "s8") return narrow(std::int8_t());
  if (to == "u16" && decoder.width(d) == 4) return convert(std::uint16_t(), std::uint32_t());
  if (to == "s16" && decoder.width(d) == 4) return convert(std::int16_t(), std::int32_t());
  if (to == "u16") return convert(std::uint16_t(), std::uint16_t());
  if (to == "s16") return convert(std::int16_t(), std::int16_t());
  if (to == "u32") return convert(std::uint32_t(), std::uint32_t());
  if (to == "s32") return convert(std::int32_t(), std::int32_t());
  if (to == "u64") return convert(std::uint64_t(), std::uint64_t());
  if (to == "s64") return convert(std::int64_t(), std::int64_t());
  if (to == "f32") return convert(float(), float());
  if (to == "f64") return convert(double(), double());
  if (to == "f16") return convert(half(), half());
  if (to == "bf16") return convert(bfloat(), bfloat());
  return {};
}

enum class Rounding { nearest, zero, down, up };

Rounding rounding_of(const Decoder& decoder) {
  const auto any = [&](std::initializer_list<const char*> words) {
    return std::any_of(words.begin(), words.end(),
                       [&](const char* word) { return decoder.has(word); });
  };
  return any({"rz", "rzi"})   ? Rounding::zero
         : any({"rm", "rmi"}) ? Rounding::down
         : any({"rp", "rpi"}) ? Rounding::up
                              : Rounding::nearest;
}

double integral(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::zero:
      return std::trunc(value);
    case Rounding::down:
      return std::floor(value);
    case Rounding::up:
      return std::ceil(value);
    case Rounding::nearest:
      break;
  }
  return std::nearbyint(value);
}

/// The nearest integer in range; 0 for NaN.
template <class D>
D clamped(double value) {
  if (std::isnan(value)) return 0;
  if (value <= static_cast<double>(std::numeric_limits<D>::min()))
    return std::numeric_limits<D>::min();
  if (value >= static_cast<double>(std::numeric_limits<D>::max()))
    return std::numeric_limits<D>::max();
  return static_cast<D>(value);
}

template <class S>
Execute of_float(Decoder& decoder, std::string_view to) {
  const Operand& d = decoder.operand(0);
  const std::uint32_t from = decoder.source(1, sizeof(S));
  const Rounding rounding = rounding_of(decoder);
  const auto to_integer = [&](auto element) -> Execute {
    using D = decltype(element);
    if (decoder.width(d) != sizeof(D)) return {};
    return lanewise<D, S>(decoder.target(d, sizeof(D)), {from}, [rounding](S value) {
      return clamped<D>(integral(static_cast<double>(value), rounding));
    });
  };
  if (to == "u16") return to_integer(std::uint16_t());
  if (to == "s16") return to_integer(std::int16_t());
  if (to == "u32") return to_integer(std::uint32_t());
  if (to == "s32") return to_integer(std::int32_t());
  if (to == "u64") return to_integer(std::uint64_t());
  if (to == "s64") return to_integer(std::int64_t());
  const bool is_integral =
      decoder.has("rni") || decoder.has("rzi") || decoder.has("rmi") || decoder.has("rpi");
  const bool saturates = decoder.has("sat"), relu = decoder.has("relu");
  const auto to_float = [&](auto element) -> Execute {
    using D = decltype(element);
    if (!is_integral && sizeof(D) < sizeof(S) && rounding != Rounding::nearest) return {};
    return lanewise<D, S>(decoder.target(d, sizeof(D)), {from}, [=](S value) {
      if (is_integral) value = S(integral(static_cast<double>(value), rounding));
      if (saturates) value = S(value > 0 ? std::min<double>(value, 1) : 0.0);
      if (relu && !(value > 0)) value = S(0.0f);
      return D(value);
    });
  };
  if (to == "f32") return to_float(float());
  if (to == "f64") return to_float(double());
  if (to == "f16") return to_float(half());
  if (to == "bf16") return to_float(bfloat());
  if constexpr (std::is_same_v<S, float>)
    if (to == "tf32") return lanewise<std::uint32_t, float>(decoder.target(d, 4), {from}, tf32_of);
  return {};
}

/// Two values of 32 bits to a pair: the first operand is the upper one.
template <class T, class F>
Execute to_pair(Decoder& decoder, F f) {
  return lanewise<two<T>, float, float>(decoder.target(0, 2 * sizeof(T)),
                                        {decoder.source(1, 4), decoder.source(2, 4)},
                                        [f](float high, float low) {
                                          return two<T>{f(low), f(high)};
                                        });
}

Execute decode_cvt(Decoder& decoder) {
  const auto& opcode = decoder.statement().opcode;
  const std::string &to = opcode.at(opcode.size() - 2), &from = opcode.back();
  const bool relu = decoder.has("relu");
  const auto positive = [relu](float value) { return relu && !(value > 0) ? 0.0f : value; };
  if (to == "bf16x2" && from == "f32" && decoder.has("rn"))
    return to_pair<bfloat>(decoder, [positive](float value) { return bfloat(positive(value)); });
  if (to == "f16x2" && from == "f32" && decoder.has("rn"))
    return to_pair<half>(decoder, [positive](float value) { return half(positive(value)); });
  if (to == "e4m3x2" && from == "f32")
    return to_pair<std::uint8_t>(decoder,
                                 [positive](float value) { return e4m3_of(positive(value)); });
  if (to == "f16x2" && from == "e4m3x2")
    return lanewise<two<half>, two<std::uint8_t>>(
        decoder.target(0, 4), {decoder.source(1, 2)}, [](two<std::uint8_t> a) {
          return two<half>{half(float_of_e4m3(a.low)), half(float_of_e4m3(a.high))};
        });
  if (from == "u8") return of_integer<std::uint8_t>(decoder, to);
  if (from == "s8") return of_integer<std::int8_t>(decoder, to);
  if (from == "u16") return of_integer<std::uint16_t>(decoder, to);
  if (from == "s16") return of_integer<std::int16_t>(decoder, to);
  if (from == "u32") return of_integer<std::uint32_t>(decoder, to);
  if (from == "s32") return of_integer<std::int32_t>(decoder, to);
  if (from == "u64") return of_integer<std::uint64_t>(decoder, to);
  if (from == "s64") return of_integer<std::int64_t>(decoder, to);
  if (from == "f32") return of_float<float>(decoder, to);
  if (from == "f64") return of_float<double>(decoder, to);
  if (from == "f16") return of_float<half>(decoder, to);
  if (from == "bf16") return of_float<bfloat>(decoder, to);
  return {};
}

}  // namespace

Execute decode_conversion(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  if (name == "mov") return decode_mov(decoder);
  if (name == "cvt") return decode_cvt(decoder);
  return {};
}

}  // namespace fftune::emulator
