// Fixed-width integers, element types by name, the integer arithmetic of layouts and of the order
// of tiles, and tensor maps. NVRTC compiles device sources without any toolkit header. Included by
// host and device code: a function without an attribute is a device function for NVRTC
// (--device-as-default-execution-space).
#pragma once

namespace fftune {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

enum class element { f32, bf16, fp16, fp8 };  // numerics.cuh has their types (element_type)

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

// The raster order of output tiles. Blocks start roughly in the order of their index, so neighbours
// in this order run together and share operands in L2. A band of `group_m` tile rows is walked
// column by column, so that a wave covers a rectangle instead of a strip.
struct tile_position {
  u32 m, n;
};

// Division by the same number many times: by a multiplication, whose result is one too low at most.
class divider {
  u32 by_, inverse_;

 public:
  constexpr explicit divider(u32 by) : by_(by), inverse_(0xffffffffu / by) {}

  constexpr u32 quotient(u32 of) const {
    const u32 low = static_cast<u32>(static_cast<u64>(of) * inverse_ >> 32);
    return of - low * by_ >= by_ ? low + 1 : low;
  }
};

constexpr tile_position grouped_tile(u32 index, u32 tiles_m, u32 tiles_n, u32 group_m) {
  const u32 band_tiles = group_m * tiles_n;
  const u32 band = index / band_tiles;
  const u32 in_band = index - band * band_tiles;
  const u32 first_m = band * group_m;
  const u32 rows_left = tiles_m - first_m;
  const u32 height = rows_left < group_m ? rows_left : group_m;  // the last band may be lower
  const u32 column = in_band / height;
  return {first_m + in_band - column * height, column};
}

// A tensor map (TMA descriptor) as a kernel receives it, by value in a __grid_constant__ parameter:
// the 128 bytes that cuTensorMapEncodeTiled writes.
struct alignas(64) tensor_map {
  unsigned long long opaque[16];
};

}  // namespace fftune
