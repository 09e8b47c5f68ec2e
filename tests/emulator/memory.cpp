// Loads, stores and atomics, with every address checked; and addresses of one space in another.
#include <algorithm>

#include "emulator/decoder.hpp"
#include "emulator/numerics.hpp"

namespace fftune::emulator {
namespace {

std::uint64_t& events(Warp& warp) {
  return warp.cta->cluster->launch->events;
}

/// Whether other threads may be waited for by reading this again and again.
bool may_poll(const Decoder& decoder) {
  return decoder.has("volatile") || decoder.has("relaxed") || decoder.has("acquire") ||
         decoder.has("mmio");
}

struct Elements {
  std::size_t bytes = 0;
  bool is_signed = false;
  std::vector<std::uint32_t> slots;
  std::vector<std::size_t> widths;  // of their registers
};

Elements elements_of(Decoder& decoder, const Operand& operand, bool writes) {
  Elements elements;
  elements.bytes = type_bytes(decoder.type());
  elements.is_signed = decoder.type()[0] == 's';
  const std::vector<Operand> one{operand};
  for (const Operand& each : operand.kind == Operand::Kind::vector ? operand.elements : one) {
    const std::size_t own = decoder.width(each);
    const std::size_t bytes = own != 0           ? own
                              : each.text == "_" ? 16
                                                 : std::max<std::size_t>(elements.bytes, 2);
    if (bytes < elements.bytes) decoder.unknown();
    elements.slots.push_back(writes ? decoder.target(each, bytes) : decoder.source(each, bytes));
    elements.widths.push_back(bytes);
  }
  return elements;
}

Execute decode_load(Decoder& decoder) {
  const Elements to = elements_of(decoder, decoder.operand(0), true);
  const Address address = decoder.address(decoder.operand(1));
  const Outcome outcome = may_poll(decoder) ? Outcome::yield : Outcome::next;
  const std::size_t all = to.bytes * to.slots.size();
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      const std::byte* const from = address.bytes(warp, all, lane);
      // Registers of the address may be written.
      std::array<std::byte, 32> copy;
      std::memcpy(copy.data(), from, all);
      for (std::size_t i = 0; i < to.slots.size(); ++i) {
        std::byte* const at =
            warp.at<std::byte>(to.slots[i]) + to.widths[i] * static_cast<unsigned>(lane);
        const bool negative =
            to.is_signed && (copy[(i + 1) * to.bytes - 1] & std::byte{128}) != std::byte{0};
        if (to.widths[i] > to.bytes) std::memset(at, negative ? 0xff : 0, to.widths[i]);
        std::memcpy(at, copy.data() + i * to.bytes, to.bytes);
      }
    });
    return outcome;
  };
}

Execute decode_store(Decoder& decoder) {
  const Address address = decoder.address(decoder.operand(0));
  const Elements from = elements_of(decoder, decoder.operand(1), false);
  const std::size_t all = from.bytes * from.slots.size();
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      std::byte* const to = address.bytes(warp, all, lane);
      for (std::size_t i = 0; i < from.slots.size(); ++i)
        std::memcpy(
            to + i * from.bytes,
            warp.at<std::byte>(from.slots[i]) + from.widths[i] * static_cast<unsigned>(lane),
            from.bytes);
    });
    ++events(warp);
    return Outcome::next;
  };
}

template <class T, class F>
Execute atomic(Decoder& decoder, bool returns, F f) {
  const Operand& at = decoder.operand(returns ? 1 : 0);
  const std::size_t first = returns ? 2 : 1;
  const Address address = decoder.address(at);
  const Operand& value = decoder.operand(first);
  const bool is_vector = value.kind == Operand::Kind::vector;
  const std::vector<std::uint32_t> b =
      is_vector ? decoder.sources(value, sizeof(T)) : std::vector{decoder.source(value, sizeof(T))};
  const bool has_third = decoder.statement().has("cas");
  const std::uint32_t c = has_third ? decoder.source(first + 1, sizeof(T)) : b[0];
  std::vector<std::uint32_t> d;
  if (returns && is_vector)
    for (const Operand& each : decoder.operand(0).elements)
      d.push_back(decoder.target(each, sizeof(T)));
  else if (returns)
    d.push_back(decoder.target(0, sizeof(T)));
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      std::byte* const bytes = address.bytes(warp, sizeof(T) * b.size(), lane);
      for (std::size_t i = 0; i < b.size(); ++i) {
        T old;
        std::memcpy(&old, bytes + i * sizeof(T), sizeof(T));
        const T now = f(old, warp.at<T>(b[i])[lane], warp.at<T>(c)[lane]);
        std::memcpy(bytes + i * sizeof(T), &now, sizeof(T));
        if (std::memcmp(&old, &now, sizeof(T)) != 0) ++events(warp);
        if (returns) warp.at<T>(d[i])[lane] = old;
      }
    });
    return Outcome::yield;
  };
}

template <class T>
Execute atomic_integer(Decoder& decoder, bool returns) {
  using bits = std::make_unsigned_t<T>;
  const auto with = [&](auto f) { return atomic<T>(decoder, returns, f); };
  if (decoder.has("add"))
    return with(
        [](T a, T b, T) { return static_cast<T>(static_cast<bits>(a) + static_cast<bits>(b)); });
  if (decoder.has("min")) return with([](T a, T b, T) { return std::min(a, b); });
  if (decoder.has("max")) return with([](T a, T b, T) { return std::max(a, b); });
  if (decoder.has("and")) return with([](T a, T b, T) { return static_cast<T>(a & b); });
  if (decoder.has("or")) return with([](T a, T b, T) { return static_cast<T>(a | b); });
  if (decoder.has("xor")) return with([](T a, T b, T) { return static_cast<T>(a ^ b); });
  if (decoder.has("exch")) return with([](T, T b, T) { return b; });
  if (decoder.has("cas")) return with([](T a, T b, T c) { return a == b ? c : a; });
  if (decoder.has("inc"))
    return with([](T a, T b, T) { return a >= b ? T{0} : static_cast<T>(a + 1); });
  if (decoder.has("dec"))
    return with([](T a, T b, T) { return a == 0 || a > b ? b : static_cast<T>(a - 1); });
  return {};
}

template <class T>
Execute atomic_float(Decoder& decoder, bool returns) {
  if (decoder.has("add")) return atomic<T>(decoder, returns, [](T a, T b, T) { return T(a + b); });
  return {};
}

template <class T>
Execute atomic_pair(Decoder& decoder, bool returns) {
  if (!decoder.has("add")) return {};
  return atomic<two<T>>(decoder, returns, [](two<T> a, two<T> b, two<T>) {
    return two<T>{T(a.low + b.low), T(a.high + b.high)};
  });
}

Execute decode_atomic(Decoder& decoder, bool returns) {
  const std::string& type = decoder.type();
  if (type == "u32" || type == "b32") return atomic_integer<std::uint32_t>(decoder, returns);
  if (type == "s32") return atomic_integer<std::int32_t>(decoder, returns);
  if (type == "u64" || type == "b64") return atomic_integer<std::uint64_t>(decoder, returns);
  if (type == "s64") return atomic_integer<std::int64_t>(decoder, returns);
  if (type == "b16") return atomic_integer<std::uint16_t>(decoder, returns);
  if (type == "f32") return atomic_float<float>(decoder, returns);
  if (type == "f64") return atomic_float<double>(decoder, returns);
  if (type == "f16") return atomic_float<half>(decoder, returns);
  if (type == "bf16") return atomic_float<bfloat>(decoder, returns);
  if (type == "f16x2") return atomic_pair<half>(decoder, returns);
  if (type == "bf16x2") return atomic_pair<bfloat>(decoder, returns);
  return {};
}

/// cvta{.to}.space.u64, mapa
Execute decode_address(Decoder& decoder, const std::string& name) {
  if (name == "mapa") {
    const std::size_t bytes = type_bytes(decoder.type());
    if (bytes != 4 || decoder.space() != Space::cluster) return {};
    return lanewise<std::uint32_t, std::uint32_t, std::uint32_t>(
        decoder.target(0, 4), {decoder.source(1, 4), decoder.source(2, 4)},
        [](std::uint32_t address, std::uint32_t rank) {
          return (address & ((1u << rank_shift) - 1)) | (rank + 1) << rank_shift;
        });
  }
  const std::uint32_t d = decoder.target(0, 8), a = decoder.source(1, 8);
  // Other spaces have the addresses of the host.
  const bool is_shared = decoder.space() == Space::shared || decoder.space() == Space::cluster;
  const bool to_shared = decoder.has("to");
  return [=](Warp& warp, Mask mask) {
    const std::uint64_t shared =
        is_shared ? reinterpret_cast<std::uint64_t>(warp.cta->shared.data()) - shared_begin : 0;
    for_lanes(mask, [&](int lane) {
      const std::uint64_t from = warp.at<std::uint64_t>(a)[lane];
      warp.at<std::uint64_t>(d)[lane] = to_shared ? from - shared : from + shared;
    });
    return Outcome::next;
  };
}

}  // namespace

Execute decode_memory(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  if (name == "ld" || name == "ldu") return decode_load(decoder);
  if (name == "st" && !decoder.has("async")) return decode_store(decoder);
  if (name == "atom") return decode_atomic(decoder, true);
  if (name == "red" && !decoder.has("async")) return decode_atomic(decoder, false);
  if (name == "cvta" || name == "mapa") return decode_address(decoder, name);
  if (name == "prefetch" || name == "prefetchu" || name == "applypriority" || name == "discard")
    return nothing();
  if (name == "createpolicy") {
    const std::uint32_t d = decoder.target(0, 8);
    return lanewise<std::uint64_t>(d, {}, [] { return std::uint64_t{0}; });
  }
  return {};
}

}  // namespace fftune::emulator
