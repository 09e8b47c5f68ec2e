// Integers, floating point, comparison and bits: d = f(a, b, c) in each lane.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "emulator/decoder.hpp"
#include "emulator/numerics.hpp"

namespace fftune::emulator {
namespace {

template <class T>
constexpr bool is_16bit_float = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
constexpr bool is_float = std::is_floating_point_v<T> || is_16bit_float<T>;
template <class T>
using unsigned_of = std::make_unsigned_t<T>;

template <class F>
Execute for_integer(std::string_view type, F f) {
  if (type == "u16" || type == "b16") return f(std::uint16_t());
  if (type == "s16") return f(std::int16_t());
  if (type == "u32" || type == "b32") return f(std::uint32_t());
  if (type == "s32") return f(std::int32_t());
  if (type == "u64" || type == "b64") return f(std::uint64_t());
  if (type == "s64") return f(std::int64_t());
  return {};
}

template <class F>
Execute for_float(std::string_view type, F f) {
  if (type == "f32") return f(float());
  if (type == "f64") return f(double());
  if (type == "f16") return f(half());
  if (type == "bf16") return f(bfloat());
  return {};
}

/// Arithmetic of 16-bit floats is exact in double but for the last rounding.
template <class T>
using wide_of = std::conditional_t<std::is_same_v<T, float>, float, double>;
template <class T>
T narrow(wide_of<T> value) {
  if constexpr (std::is_same_v<T, bfloat>)
    return static_cast<float>(value);  // the sum of two roundings differs in no case that matters
  else
    return value;
}

struct Modifiers {
  bool ftz = false, saturate = false;
  int rounding = FE_TONEAREST;
};

Modifiers modifiers_of(const Decoder& decoder) {
  Modifiers modifiers;
  modifiers.ftz = decoder.has("ftz");
  modifiers.saturate = decoder.has("sat");
  if (decoder.has("rz")) modifiers.rounding = FE_TOWARDZERO;
  if (decoder.has("rm")) modifiers.rounding = FE_DOWNWARD;
  if (decoder.has("rp")) modifiers.rounding = FE_UPWARD;
  return modifiers;
}

float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}
double flushed(double value) {
  return value;
}

/// f in the rounding that the instruction names, with subnormal numbers flushed and the result
/// saturated where it says so.
template <class T, class... S, class F>
Execute floating(Decoder& decoder, std::array<std::uint32_t, sizeof...(S)> from, std::uint32_t d,
                 F f) {
  const Modifiers modifiers = modifiers_of(decoder);
  using wide = wide_of<T>;
  if (!modifiers.ftz && !modifiers.saturate && modifiers.rounding == FE_TONEAREST)
    return lanewise<T, S...>(d, from,
                             [f](S... in) { return narrow<T>(f(static_cast<wide>(in)...)); });
  return lanewise<T, S...>(d, from, [f, modifiers](S... in) {
    const auto flush = [&](wide value) { return modifiers.ftz ? flushed(value) : value; };
    const bool is_nearest = modifiers.rounding == FE_TONEAREST;
    if (!is_nearest) std::fesetround(modifiers.rounding);
    volatile wide value = f(flush(static_cast<wide>(in))...);
    if (!is_nearest) std::fesetround(FE_TONEAREST);
    wide result = flush(value);
    if (modifiers.saturate) result = result > 0 ? std::min(result, wide{1}) : wide{0};
    return narrow<T>(result);
  });
}

template <class T>
T least(T a, T b) {
  if constexpr (is_float<T>) {
    if (std::isnan(static_cast<float>(a))) return b;
    if (std::isnan(static_cast<float>(b))) return a;
    return a < b || (a == b && std::signbit(static_cast<float>(a))) ? a : b;
  } else {
    return std::min(a, b);
  }
}
template <class T>
T most(T a, T b) {
  if constexpr (is_float<T>) {
    if (std::isnan(static_cast<float>(a))) return b;
    if (std::isnan(static_cast<float>(b))) return a;
    return a > b || (a == b && !std::signbit(static_cast<float>(a))) ? a : b;
  } else {
    return std::max(a, b);
  }
}

template <class T, class F>
Execute binary(Decoder& decoder, F f) {
  return lanewise<T, T, T>(decoder.target(0, sizeof(T)),
                           {decoder.source(1, sizeof(T)), decoder.source(2, sizeof(T))}, f);
}
template <class T, class F>
Execute unary(Decoder& decoder, F f) {
  return lanewise<T, T>(decoder.target(0, sizeof(T)), {decoder.source(1, sizeof(T))}, f);
}

/// Instructions of a pair of 16-bit floats: `f` of each half.
template <class F>
Execute of_pairs(Decoder& decoder, F f) {
  const auto with = [&](auto element) -> Execute {
    using T = decltype(element);
    const std::uint32_t d = decoder.target(0, 4);
    const auto from = [&](std::size_t i) { return decoder.source(i, 4); };
    if (decoder.operands() == 2)
      return lanewise<two<T>, two<T>>(d, {from(1)}, [f](two<T> a) {
        return two<T>{f(a.low, a.low, a.low), f(a.high, a.high, a.high)};
      });
    if (decoder.operands() == 3)
      return lanewise<two<T>, two<T>, two<T>>(d, {from(1), from(2)}, [f](two<T> a, two<T> b) {
        return two<T>{f(a.low, b.low, b.low), f(a.high, b.high, b.high)};
      });
    return lanewise<two<T>, two<T>, two<T>, two<T>>(
        d, {from(1), from(2), from(3)}, [f](two<T> a, two<T> b, two<T> c) {
          return two<T>{f(a.low, b.low, c.low), f(a.high, b.high, c.high)};
        });
  };
  return decoder.type() == "bf16x2" ? with(bfloat()) : with(half());
}

Execute decode_pairs(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  const bool relu = decoder.has("relu"), nan = decoder.has("NaN");
  const auto f = [&](auto operation) {
    return of_pairs(decoder, [operation, relu](auto a, auto b, auto c) {
      using T = decltype(a);
      const T value =
          narrow<T>(operation(static_cast<double>(float(a)), static_cast<double>(float(b)),
                              static_cast<double>(float(c))));
      return relu && !(float(value) > 0) ? T(0.0f) : value;
    });
  };
  if (name == "add") return f([](double a, double b, double) { return a + b; });
  if (name == "sub") return f([](double a, double b, double) { return a - b; });
  if (name == "mul") return f([](double a, double b, double) { return a * b; });
  if (name == "fma") return f([](double a, double b, double c) { return a * b + c; });
  if (name == "neg") return f([](double a, double, double) { return -a; });
  if (name == "abs") return f([](double a, double, double) { return std::fabs(a); });
  if (name == "ex2") return f([](double a, double, double) { return std::exp2(a); });
  if (name == "tanh") return f([](double a, double, double) { return std::tanh(a); });
  const auto of_nan = [nan](double a, double b) { return nan && (std::isnan(a) || std::isnan(b)); };
  if (name == "min")
    return f([of_nan](double a, double b, double) { return of_nan(a, b) ? a + b : least(a, b); });
  if (name == "max")
    return f([of_nan](double a, double b, double) { return of_nan(a, b) ? a + b : most(a, b); });
  return {};
}

Execute decode_float(Decoder& decoder, const std::string& name) {
  return for_float(decoder.type(), [&](auto element) -> Execute {
    using T = decltype(element);
    using wide = wide_of<T>;
    constexpr std::size_t bytes = sizeof(T);
    const auto one = [&](auto f) {
      return floating<T, T>(decoder, {decoder.source(1, bytes)}, decoder.target(0, bytes), f);
    };
    const auto both = [&](auto f) {
      return floating<T, T, T>(decoder, {decoder.source(1, bytes), decoder.source(2, bytes)},
                               decoder.target(0, bytes), f);
    };
    if (name == "add") return both([](wide a, wide b) { return a + b; });
    if (name == "sub") return both([](wide a, wide b) { return a - b; });
    if (name == "mul") return both([](wide a, wide b) { return a * b; });
    if (name == "div") return both([](wide a, wide b) { return a / b; });
    if (name == "fma" || name == "mad")
      return floating<T, T, T, T>(
          decoder, {decoder.source(1, bytes), decoder.source(2, bytes), decoder.source(3, bytes)},
          decoder.target(0, bytes), [](wide a, wide b, wide c) { return std::fma(a, b, c); });
    if (name == "min" || name == "max") {
      const bool is_min = name == "min", nan = decoder.has("NaN");
      return both([=](wide a, wide b) {
        if (nan && (std::isnan(a) || std::isnan(b))) return std::numeric_limits<wide>::quiet_NaN();
        return is_min ? least(a, b) : most(a, b);
      });
    }
    if (name == "abs") return one([](wide a) { return std::fabs(a); });
    if (name == "neg") return one([](wide a) { return -a; });
    if (name == "sqrt") return one([](wide a) { return std::sqrt(a); });
    if (name == "rcp") return one([](wide a) { return 1 / a; });
    if (name == "rsqrt")
      return one([](wide a) { return static_cast<wide>(1 / std::sqrt(static_cast<double>(a))); });
    if (name == "ex2") return one([](wide a) { return std::exp2(a); });
    if (name == "lg2") return one([](wide a) { return std::log2(a); });
    if (name == "sin") return one([](wide a) { return std::sin(a); });
    if (name == "cos") return one([](wide a) { return std::cos(a); });
    if (name == "tanh") return one([](wide a) { return std::tanh(a); });
    if (name == "copysign") return both([](wide a, wide b) { return std::copysign(b, a); });
    return {};
  });
}

__extension__ using int128 = __int128;
__extension__ using uint128 = unsigned __int128;

/// The upper half of a product.
template <class T>
T high_product(T a, T b) {
  using wide = std::conditional_t<std::is_signed_v<T>, int128, uint128>;
  return static_cast<T>(static_cast<wide>(a) * static_cast<wide>(b) >> 8 * sizeof(T));
}

template <class T>
Execute decode_product(Decoder& decoder, bool adds) {
  using bits = unsigned_of<T>;
  constexpr std::size_t bytes = sizeof(T);
  const std::uint32_t a = decoder.source(1, bytes), b = decoder.source(2, bytes);
  if (decoder.has("wide")) {
    if constexpr (sizeof(T) < 8) {
      using wide =
          std::conditional_t<sizeof(T) == 2,
                             std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
                             std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
      const std::uint32_t d = decoder.target(0, 2 * bytes);
      if (!adds)
        return lanewise<wide, T, T>(d, {a, b}, [](T x, T y) {
          return static_cast<wide>(static_cast<wide>(x) * static_cast<wide>(y));
        });
      return lanewise<wide, T, T, wide>(
          d, {a, b, decoder.source(3, 2 * bytes)}, [](T x, T y, wide z) {
            using raw = unsigned_of<wide>;
            return static_cast<wide>(static_cast<raw>(static_cast<wide>(x) * static_cast<wide>(y)) +
                                     static_cast<raw>(z));
          });
    }
    return {};
  }
  const bool high = decoder.has("hi");
  const std::uint32_t d = decoder.target(0, bytes);
  const auto product = [high](T x, T y) {
    return high ? static_cast<bits>(high_product(x, y))
                : static_cast<bits>(std::uint64_t{static_cast<bits>(x)} * static_cast<bits>(y));
  };
  if (!adds)
    return lanewise<T, T, T>(d, {a, b},
                             [product](T x, T y) { return static_cast<T>(product(x, y)); });
  return lanewise<T, T, T, T>(d, {a, b, decoder.source(3, bytes)}, [product](T x, T y, T z) {
    return static_cast<T>(product(x, y) + static_cast<bits>(z));
  });
}

Execute decode_integer(Decoder& decoder, const std::string& name) {
  return for_integer(decoder.type(), [&](auto element) -> Execute {
    using T = decltype(element);
    using bits = unsigned_of<T>;
    constexpr int width = 8 * sizeof(T);
    const auto raw = [&](auto f) {
      return binary<T>(decoder, [f](T a, T b) {
        return static_cast<T>(f(static_cast<bits>(a), static_cast<bits>(b)));
      });
    };
    if (name == "add" && !decoder.has("cc") && !decoder.has("sat"))
      return raw([](bits a, bits b) { return a + b; });
    if (name == "sub" && !decoder.has("cc") && !decoder.has("sat"))
      return raw([](bits a, bits b) { return a - b; });
    if (name == "and") return raw([](bits a, bits b) { return a & b; });
    if (name == "or") return raw([](bits a, bits b) { return a | b; });
    if (name == "xor") return raw([](bits a, bits b) { return a ^ b; });
    if (name == "mul") return decode_product<T>(decoder, false);
    if (name == "mad") return decode_product<T>(decoder, true);
    if (name == "min") return binary<T>(decoder, [](T a, T b) { return std::min(a, b); });
    if (name == "max") return binary<T>(decoder, [](T a, T b) { return std::max(a, b); });
    // A quotient by zero is all ones.
    if (name == "div")
      return binary<T>(decoder, [](T a, T b) {
        if (b == 0) return static_cast<T>(~bits{0});
        if (std::is_signed_v<T> && b == static_cast<T>(-1))
          return static_cast<T>(bits{0} - static_cast<bits>(a));
        return static_cast<T>(a / b);
      });
    if (name == "rem")
      return binary<T>(decoder, [](T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
        return static_cast<T>(a % b);
      });
    if (name == "not") return unary<T>(decoder, [](T a) { return static_cast<T>(~a); });
    if (name == "neg")
      return unary<T>(decoder, [](T a) { return static_cast<T>(bits{0} - static_cast<bits>(a)); });
    if (name == "abs")
      return unary<T>(
          decoder, [](T a) { return a < 0 ? static_cast<T>(bits{0} - static_cast<bits>(a)) : a; });
    if (name == "shl")
      return lanewise<T, T, std::uint32_t>(
          decoder.target(0, sizeof(T)), {decoder.source(1, sizeof(T)), decoder.source(2, 4)},
          [](T a, std::uint32_t by) {
            return by >= width ? T{0} : static_cast<T>(std::uint64_t{static_cast<bits>(a)} << by);
          });
    if (name == "shr")
      return lanewise<T, T, std::uint32_t>(decoder.target(0, sizeof(T)),
                                           {decoder.source(1, sizeof(T)), decoder.source(2, 4)},
                                           [](T a, std::uint32_t by) {
                                             if (by >= width)
                                               return a < 0 ? static_cast<T>(-1) : T{0};
                                             return static_cast<T>(a >> by);
                                           });
    if (name == "popc")
      return lanewise<std::uint32_t, bits>(
          decoder.target(0, 4), {decoder.source(1, sizeof(T))},
          [](bits a) { return static_cast<std::uint32_t>(std::popcount(a)); });
    if (name == "clz")
      return lanewise<std::uint32_t, bits>(
          decoder.target(0, 4), {decoder.source(1, sizeof(T))},
          [](bits a) { return static_cast<std::uint32_t>(std::countl_zero(a)); });
    if (name == "bfind") {
      const bool shift_amount = decoder.has("shiftamt");
      return lanewise<std::uint32_t, T>(
          decoder.target(0, 4), {decoder.source(1, sizeof(T))}, [shift_amount](T a) {
            const auto value = static_cast<bits>(a < 0 ? ~a : a);
            if (value == 0) return ~std::uint32_t{0};
            const int zeros = std::countl_zero(value);
            return static_cast<std::uint32_t>(shift_amount ? zeros : width - 1 - zeros);
          });
    }
    if (name == "brev")
      return unary<T>(decoder, [](T a) {
        bits reversed = 0;
        for (int i = 0; i < width; ++i)
          reversed = static_cast<bits>(reversed << 1 | (static_cast<bits>(a) >> i & 1));
        return static_cast<T>(reversed);
      });
    if (name == "bfe")
      return lanewise<T, T, std::uint32_t, std::uint32_t>(
          decoder.target(0, sizeof(T)),
          {decoder.source(1, sizeof(T)), decoder.source(2, 4), decoder.source(3, 4)},
          [](T a, std::uint32_t from, std::uint32_t count) {
            from &= 255;
            count &= 255;
            if (count == 0) return T{0};
            // Past the end is the sign of the field.
            const std::uint32_t last = std::min<std::uint32_t>(from + count - 1, width - 1);
            const bits field =
                from >= width ? bits{0} : static_cast<bits>(static_cast<bits>(a) >> from);
            const std::uint32_t own =
                from >= width ? 0 : std::min<std::uint32_t>(count, width - from);
            const bits mask = own >= width ? ~bits{0} : static_cast<bits>((bits{1} << own) - 1);
            const bool negative = std::is_signed_v<T> && (static_cast<bits>(a) >> last & 1) != 0;
            return static_cast<T>(negative ? static_cast<bits>(field | static_cast<bits>(~mask))
                                           : static_cast<bits>(field & mask));
          });
    if (name == "bfi")
      return lanewise<T, T, T, std::uint32_t, std::uint32_t>(
          decoder.target(0, sizeof(T)),
          {decoder.source(1, sizeof(T)), decoder.source(2, sizeof(T)), decoder.source(3, 4),
           decoder.source(4, 4)},
          [](T a, T b, std::uint32_t from, std::uint32_t count) {
            from &= 255;
            count = std::min<std::uint32_t>(count & 255, width);
            if (from >= width || count == 0) return b;
            const bits ones = count >= width ? ~bits{0} : static_cast<bits>((bits{1} << count) - 1);
            const auto mask = static_cast<bits>(ones << from);
            return static_cast<T>((static_cast<bits>(static_cast<bits>(a) << from) & mask) |
                                  (static_cast<bits>(b) & static_cast<bits>(~mask)));
          });
    return {};
  });
}

/// A comparison's name: "ltu" is true of NaN too.
template <class T, class Use>
Execute with_comparison(std::string name, Use use) {
  if constexpr (is_float<T>) {
    const auto ordered = [](T a, T b) { return !std::isnan(float(a)) && !std::isnan(float(b)); };
    if (name == "num") return use([ordered](T a, T b) { return ordered(a, b); });
    if (name == "nan") return use([ordered](T a, T b) { return !ordered(a, b); });
    if (name == "equ") return use([ordered](T a, T b) { return !ordered(a, b) || a == b; });
    if (name == "neu") return use([ordered](T a, T b) { return !ordered(a, b) || a != b; });
    if (name == "ltu") return use([](T a, T b) { return !(a >= b); });
    if (name == "leu") return use([](T a, T b) { return !(a > b); });
    if (name == "gtu") return use([](T a, T b) { return !(a <= b); });
    if (name == "geu") return use([](T a, T b) { return !(a < b); });
    if (name == "ne") return use([ordered](T a, T b) { return ordered(a, b) && a != b; });
  }
  if (name == "eq") return use([](T a, T b) { return a == b; });
  if (name == "ne") return use([](T a, T b) { return a != b; });
  if (name == "lt" || name == "lo") return use([](T a, T b) { return a < b; });
  if (name == "le" || name == "ls") return use([](T a, T b) { return a <= b; });
  if (name == "gt" || name == "hi") return use([](T a, T b) { return a > b; });
  if (name == "ge" || name == "hs") return use([](T a, T b) { return a >= b; });
  return {};
}

/// setp.lt{.and}.f32 p{|q}, a, b{, c}
Execute decode_setp(Decoder& decoder) {
  const auto with = [&](auto element) -> Execute {
    using T = decltype(element);
    const Operand& to = decoder.operand(0);
    const bool has_both = to.kind == Operand::Kind::pair;
    const std::uint32_t p = decoder.target_predicate(has_both ? to.elements[0] : to);
    const std::optional<std::uint32_t> q =
        has_both ? std::optional(decoder.target_predicate(to.elements[1])) : std::nullopt;
    const std::uint32_t a = decoder.source(1, sizeof(T)), b = decoder.source(2, sizeof(T));
    std::optional<Predicate> c;
    if (decoder.operands() == 4) c = decoder.predicate(decoder.operand(3));
    const char combines = decoder.has("and") ? 'a' : decoder.has("or") ? 'o' : 'x';
    return with_comparison<T>(decoder.statement().opcode[1], [=](auto compare) -> Execute {
      return [=](Warp& warp, Mask mask) {
        const T* const left = warp.at<T>(a);
        const T* const right = warp.at<T>(b);
        Mask values = 0;
        for_lanes(mask,
                  [&](int lane) { values |= Mask{compare(left[lane], right[lane])} << lane; });
        const auto combined = [&](Mask value) {
          if (!c) return value;
          const Mask other = c->of(warp);
          return combines == 'a' ? value & other : combines == 'o' ? value | other : value ^ other;
        };
        const Mask first = combined(values), second = combined(~values);
        write_predicate(warp, p, first, mask);
        if (q) write_predicate(warp, *q, second, mask);
        return Outcome::next;
      };
    });
  };
  if (auto execute = for_integer(decoder.type(), with)) return execute;
  return for_float(decoder.type(), with);
}

template <class F>
Execute of_predicates(Decoder& decoder, F f) {
  const std::uint32_t d = decoder.target_predicate(decoder.operand(0));
  const Predicate a = decoder.predicate(decoder.operand(1));
  const Predicate b = decoder.predicate(decoder.operand(decoder.operands() - 1));
  return [=](Warp& warp, Mask mask) {
    write_predicate(warp, d, f(a.of(warp), b.of(warp)), mask);
    return Outcome::next;
  };
}

Execute decode_predicates(Decoder& decoder, const std::string& name) {
  if (name == "and") return of_predicates(decoder, [](Mask a, Mask b) { return a & b; });
  if (name == "or") return of_predicates(decoder, [](Mask a, Mask b) { return a | b; });
  if (name == "xor") return of_predicates(decoder, [](Mask a, Mask b) { return a ^ b; });
  if (name == "not") return of_predicates(decoder, [](Mask a, Mask) { return ~a; });
  if (name == "mov") return of_predicates(decoder, [](Mask a, Mask) { return a; });
  return {};
}

template <class T>
Execute select(Decoder& decoder) {
  const std::uint32_t d = decoder.target(0, sizeof(T)), a = decoder.source(1, sizeof(T)),
                      b = decoder.source(2, sizeof(T));
  const Predicate p = decoder.predicate(decoder.operand(3));
  return [=](Warp& warp, Mask mask) {
    const Mask chosen = p.of(warp);
    T* const to = warp.at<T>(d);
    const T* const yes = warp.at<T>(a);
    const T* const no = warp.at<T>(b);
    for_lanes(mask, [&](int lane) { to[lane] = (chosen >> lane & 1) != 0 ? yes[lane] : no[lane]; });
    return Outcome::next;
  };
}

std::uint32_t permuted(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t both = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t choice = selector >> 4 * i & 15;
    auto byte = static_cast<std::uint32_t>(both >> 8 * (choice & 7) & 255);
    if ((choice & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

using u32 = std::uint32_t;

/// min.u16x2, max.s16x2 and the like.
template <class T>
Execute decode_integer_pairs(Decoder& decoder, const std::string& name) {
  const auto with = [&](auto f) {
    return binary<two<T>>(decoder, [f](two<T> a, two<T> b) {
      return two<T>{static_cast<T>(f(a.low, b.low)), static_cast<T>(f(a.high, b.high))};
    });
  };
  if (name == "min") return with([](T a, T b) { return std::min(a, b); });
  if (name == "max") return with([](T a, T b) { return std::max(a, b); });
  if (name == "add") return with([](T a, T b) { return a + b; });
  return {};
}

Execute of_words(Decoder& decoder, u32 (*f)(u32, u32, u32)) {
  return lanewise<u32, u32, u32, u32>(
      decoder.target(0, 4), {decoder.source(1, 4), decoder.source(2, 4), decoder.source(3, 4)}, f);
}

Execute decode_bits(Decoder& decoder, const std::string& name) {
  if (name == "lop3") {
    const auto table = static_cast<u32>(decoder.number(decoder.operand(4)));
    return lanewise<u32, u32, u32, u32>(
        decoder.target(0, 4), {decoder.source(1, 4), decoder.source(2, 4), decoder.source(3, 4)},
        [table](u32 a, u32 b, u32 c) {
          u32 result = 0;
          for (u32 i = 0; i < 8; ++i)
            if ((table >> i & 1) != 0)
              result |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
          return result;
        });
  }
  if (name == "prmt" && decoder.type() == "b32") return of_words(decoder, permuted);
  if (name == "shf") {
    const bool wraps = decoder.has("wrap");
    const auto by = [wraps](u32 count) { return wraps ? count & 31 : std::min(count, u32{32}); };
    const std::array from{decoder.source(1, 4), decoder.source(2, 4), decoder.source(3, 4)};
    if (decoder.has("l"))
      return lanewise<u32, u32, u32, u32>(decoder.target(0, 4), from, [by](u32 a, u32 b, u32 c) {
        return static_cast<u32>((std::uint64_t{b} << 32 | a) << by(c) >> 32);
      });
    return lanewise<u32, u32, u32, u32>(decoder.target(0, 4), from, [by](u32 a, u32 b, u32 c) {
      return static_cast<u32>((std::uint64_t{b} << 32 | a) >> by(c));
    });
  }
  if (name == "dp4a") {
    const auto& opcode = decoder.statement().opcode;
    if (opcode.at(1) == "s32" && opcode.at(2) == "s32")
      return of_words(decoder, [](u32 a, u32 b, u32 c) {
        for (int i = 0; i < 32; i += 8)
          c +=
              static_cast<u32>(static_cast<std::int8_t>(a >> i) * static_cast<std::int8_t>(b >> i));
        return c;
      });
  }
  return {};
}

}  // namespace

Execute decode_arithmetic(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  const std::string& type = decoder.type();
  if (name == "setp") return decode_setp(decoder);
  if (name == "selp") {
    const std::size_t bytes = type_bytes(type);
    return bytes == 2   ? select<std::uint16_t>(decoder)
           : bytes == 4 ? select<std::uint32_t>(decoder)
                        : select<std::uint64_t>(decoder);
  }
  if (type == "pred" && decoder.statement().opcode.size() == 2)
    if (auto execute = decode_predicates(decoder, name)) return execute;
  if (type == "u16x2") return decode_integer_pairs<std::uint16_t>(decoder, name);
  if (type == "s16x2") return decode_integer_pairs<std::int16_t>(decoder, name);
  if (type == "f16x2" || type == "bf16x2")
    if (auto execute = decode_pairs(decoder)) return execute;
  if (name == "lop3" || name == "prmt" || name == "shf" || name == "dp4a")
    return decode_bits(decoder, name);
  // Instructions of other subjects, whose last modifier is a type too.
  if (name == "atom" || name == "red" || name == "ld" || name == "st" || name == "cvt" ||
      name == "mov")
    return {};
  if (auto execute = decode_integer(decoder, name)) return execute;
  return decode_float(decoder, name);
}

}  // namespace fftune::emulator
