// Fixed-width integers, the integer arithmetic of layouts, and tensor maps. NVRTC compiles device
// sources without any toolkit header. Included by host and device code: a function without an
// attribute is a device function for NVRTC (--device-as-default-execution-space).
#pragma once

namespace fftune {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

template <class First, class Second>
inline constexpr bool is_same = false;
template <class Type>
inline constexpr bool is_same<Type, Type> = true;

template <bool condition, class Then, class Else>
struct choose_type {
  using type = Then;
};
template <class Then, class Else>
struct choose_type<false, Then, Else> {
  using type = Else;
};

template <int index, class First, class... Rest>
struct type_at {
  using type = typename type_at<index - 1, Rest...>::type;
};
template <class First, class... Rest>
struct type_at<0, First, Rest...> {
  using type = First;
};

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

template <class Integer>
constexpr Integer ceil_div(Integer value, Integer divisor) {
  return (value + divisor - 1) / divisor;
}

constexpr int larger(int first, int second) {
  return first > second ? first : second;
}
constexpr int smaller(int first, int second) {
  return first < second ? first : second;
}

// A tensor map (TMA descriptor) as a kernel receives it, by value in a __grid_constant__ parameter:
// the 128 bytes that cuTensorMapEncodeTiled writes.
struct alignas(64) tensor_map {
  unsigned long long opaque[16];
};

}  // namespace fftune
