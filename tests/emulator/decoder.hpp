// The decoder that all translations of instructions share: operands become places in a warp's
// registers.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/machine.hpp"

namespace fftune::emulator {

/// An address operand: a register, maybe none, and what is added to it.
struct Address {
  std::uint32_t slot = 0;
  bool is_wide = false;
  std::int64_t offset = 0;
  Space space = Space::generic;

  std::uint64_t of(const Warp& warp, int lane) const {
    const std::uint64_t base =
        is_wide ? warp.at<std::uint64_t>(slot)[lane] : warp.at<std::uint32_t>(slot)[lane];
    return base + static_cast<std::uint64_t>(offset);
  }
  std::byte* bytes(Warp& warp, std::size_t count, int lane) const {
    return access(warp, space, of(warp, lane), count, lane);
  }
};

struct Predicate {
  std::uint32_t slot = 0;
  bool negated = false;

  Mask of(const Warp& warp) const { return negated ? ~*warp.at<Mask>(slot) : *warp.at<Mask>(slot); }
};

inline void write_predicate(Warp& warp, std::uint32_t slot, Mask values, Mask lanes) {
  Mask& predicate = *warp.at<Mask>(slot);
  predicate = (predicate & ~lanes) | (values & lanes);
}

class Decoder {
 public:
  Decoder(const KernelText& text, const Module& module);
  Kernel run();

  const Statement& statement() const { return *statement_; }
  bool has(std::string_view modifier) const { return statement_->has(modifier); }
  const std::string& type() const { return statement_->opcode.back(); }
  const Operand& operand(std::size_t index) const { return statement_->operands.at(index); }
  std::size_t operands() const { return statement_->operands.size(); }

  /// A source of so many bytes: a register, a number, an identifier or an address.
  std::uint32_t source(const Operand& operand, std::size_t bytes);
  std::uint32_t source(std::size_t index, std::size_t bytes) {
    return source(operand(index), bytes);
  }
  /// A register to write, of so many bytes; `_` is one that is never read.
  std::uint32_t target(const Operand& operand, std::size_t bytes);
  std::uint32_t target(std::size_t index, std::size_t bytes) {
    return target(operand(index), bytes);
  }
  /// Bytes of the register that is named.
  std::size_t width(const Operand& operand) const;
  std::vector<std::uint32_t> sources(const Operand& vector, std::size_t bytes);
  Predicate predicate(const Operand& operand);
  std::uint32_t target_predicate(const Operand& operand);
  Address address(const Operand& operand);
  Address address(const Operand& operand, Space space);
  Space space() const;
  std::int64_t number(const Operand& operand) const;
  std::uint32_t label(const std::string& name) const;
  [[noreturn]] void unknown() const;

 private:
  std::uint32_t allocate(std::size_t bytes);
  std::uint32_t preset(const std::string& key, Preset preset);
  std::optional<Preset> symbol(const std::string& name);
  std::optional<std::uint32_t> find(const Operand& operand, std::size_t* bytes);

  const KernelText& text_;
  const Module& module_;
  Kernel kernel_;
  const Statement* statement_ = nullptr;
  std::unordered_map<std::string, std::uint32_t> slots_;
  std::map<std::string, std::uint64_t> shared_offsets_, local_offsets_;
  std::size_t dynamic_alignment_ = 16;
};

/// Each translates the instructions of its subject; an empty function for any other.
Execute decode_arithmetic(Decoder& decoder);
Execute decode_conversion(Decoder& decoder);
Execute decode_memory(Decoder& decoder);
Execute decode_control(Decoder& decoder);
Execute decode_async(Decoder& decoder);
Execute decode_tensor(Decoder& decoder);

/// d = f(a...) in every active lane.
template <class D, class... S, class F, std::size_t... index>
Execute lanewise_of(std::uint32_t d, std::array<std::uint32_t, sizeof...(S)> from, F f,
                    std::index_sequence<index...>) {
  return [=](Warp& warp, Mask mask) {
    D* const to = warp.at<D>(d);
    const std::tuple<const S*...> in{warp.at<S>(from[index])...};
    if (mask == all_lanes) {
#ifndef __clang__
#pragma GCC ivdep
#endif
      for (int lane = 0; lane < warp_lanes; ++lane) to[lane] = f(std::get<index>(in)[lane]...);
    } else {
      for_lanes(mask, [&](int lane) { to[lane] = f(std::get<index>(in)[lane]...); });
    }
    return Outcome::next;
  };
}
template <class D, class... S, class F>
Execute lanewise(std::uint32_t d, std::array<std::uint32_t, sizeof...(S)> from, F f) {
  return lanewise_of<D, S...>(d, from, f, std::index_sequence_for<S...>());
}

inline Execute nothing() {
  return [](Warp&, Mask) { return Outcome::next; };
}

}  // namespace fftune::emulator
