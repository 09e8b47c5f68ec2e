// Copies that a thread starts and waits for later, and mbarriers.
//
// With `copies_late` each copy happens as late as it may, so that a missing wait shows: cp.async
// and bulk stores when their group is waited for, TMA loads when no warp of the cluster can go on.
#include <algorithm>

#include "emulator/decoder.hpp"
#include "emulator/tensor_map.hpp"

namespace fftune::emulator {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

bool is_late(const Warp& warp) {
  return warp.cta->cluster->launch->device.copies_late;
}

// --- mbarriers ---

struct Mbarrier {
  std::int32_t bytes = 0;                   // that are still to come
  std::uint16_t pending = 0, expected = 0;  // arrivals; the highest bit of `expected` is the phase

  bool phase() const { return (expected & 0x8000) != 0; }
};
static_assert(sizeof(Mbarrier) == 8);

/// Changes the mbarrier at a shared memory address of a CTA, and completes its phase.
template <class F>
void change_mbarrier(Cta& cta, u64 address, F f) {
  std::byte* const at = cta.shared_bytes(address, sizeof(Mbarrier));
  Mbarrier barrier;
  std::memcpy(&barrier, at, sizeof barrier);
  if (barrier.expected == 0xffff) throw Fault("an mbarrier that was not initialised");
  f(barrier);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.expected ^= 0x8000;
    barrier.pending = barrier.expected & 0x7fff;
  }
  std::memcpy(at, &barrier, sizeof barrier);
  ++cta.cluster->launch->events;
}

void complete_bytes(Cta& cta, u64 address, std::size_t bytes) {
  change_mbarrier(cta, address,
                  [&](Mbarrier& barrier) { barrier.bytes -= static_cast<std::int32_t>(bytes); });
}

void arrive(Cta& cta, u64 address, u32 count, u32 bytes) {
  change_mbarrier(cta, address, [&](Mbarrier& barrier) {
    if (count > barrier.pending) throw Fault("more arrivals than the mbarrier was initialised for");
    barrier.pending = static_cast<std::uint16_t>(barrier.pending - count);
    barrier.bytes += static_cast<std::int32_t>(bytes);
  });
}

constexpr u64 own_address(u64 address) {
  return address & ((1u << rank_shift) - 1);
}

Execute decode_mbarrier(Decoder& decoder) {
  const std::string& what = decoder.statement().opcode.at(1);
  if (what == "init") {
    const Address address = decoder.address(decoder.operand(0));
    const u32 count = decoder.source(1, 4);
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        const auto expected = static_cast<std::uint16_t>(warp.at<u32>(count)[lane]);
        const Mbarrier barrier{0, expected, expected};
        std::memcpy(address.bytes(warp, sizeof barrier, lane), &barrier, sizeof barrier);
      });
      return Outcome::next;
    };
  }
  if (what == "inval") return nothing();
  if (what == "expect_tx" || what == "complete_tx") {
    const Address address = decoder.address(decoder.operand(0));
    const u32 bytes = decoder.source(1, 4);
    const bool expects = what == "expect_tx";
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        const u64 at = address.of(warp, lane);
        const u32 count = warp.at<u32>(bytes)[lane];
        change_mbarrier(warp.cta->of_cluster_address(at), own_address(at), [&](Mbarrier& barrier) {
          barrier.bytes += static_cast<std::int32_t>(expects ? count : ~count + 1);
        });
      });
      return Outcome::next;
    };
  }
  if (what == "arrive") {
    const u32 state = decoder.target(0, 8);
    const Address address = decoder.address(decoder.operand(1));
    const bool expects = decoder.has("expect_tx");
    const std::optional<u32> number =
        decoder.operands() > 2 ? std::optional(decoder.source(2, 4)) : std::nullopt;
    const bool is_remote = address.space == Space::cluster;
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        const u64 at = address.of(warp, lane);
        Cta& cta = warp.cta->of_cluster_address(at);
        const u32 value = number ? warp.at<u32>(*number)[lane] : 1;
        if (!is_remote) {
          Mbarrier before;
          std::memcpy(&before, cta.shared_bytes(own_address(at), sizeof before), sizeof before);
          warp.at<u64>(state)[lane] = before.phase() ? 1 : 0;
        }
        arrive(cta, own_address(at), expects ? 1 : value, expects ? value : 0);
      });
      return Outcome::next;
    };
  }
  if (what == "try_wait" || what == "test_wait") {
    const u32 p = decoder.target_predicate(decoder.operand(0));
    const Address address = decoder.address(decoder.operand(1));
    const bool by_parity = decoder.has("parity");
    const u32 phase = decoder.source(2, by_parity ? 4 : 8);
    return [=](Warp& warp, Mask mask) {
      Mask complete = 0;
      for_lanes(mask, [&](int lane) {
        Mbarrier barrier;
        std::memcpy(&barrier, address.bytes(warp, sizeof barrier, lane), sizeof barrier);
        if (barrier.expected == 0xffff) throw Fault("an mbarrier that was not initialised");
        const u64 waited = by_parity ? warp.at<u32>(phase)[lane] : warp.at<u64>(phase)[lane];
        complete |= Mask{barrier.phase() != ((waited & 1) != 0)} << lane;
      });
      write_predicate(warp, p, complete, mask);
      return complete == mask ? Outcome::next : Outcome::yield;
    };
  }
  return {};
}

// --- cp.async ---

Execute decode_copy(Decoder& decoder) {
  if (decoder.has("commit_group"))
    return [](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) { warp.copies[static_cast<std::size_t>(lane)].commit(); });
      return Outcome::next;
    };
  if (decoder.has("wait_group") || decoder.has("wait_all")) {
    const bool all = decoder.has("wait_all");
    const auto left = static_cast<std::size_t>(all ? 0 : decoder.number(decoder.operand(0)));
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        auto& copies = warp.copies[static_cast<std::size_t>(lane)];
        if (all) copies.commit();
        copies.complete(left);
      });
      return Outcome::next;
    };
  }
  if (decoder.has("arrive")) {
    // With the copies so far, when the cluster waits.
    if (!decoder.has("noinc")) return {};
    const Address address = decoder.address(decoder.operand(0));
    return [=](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) {
        auto& copies = warp.copies[static_cast<std::size_t>(lane)];
        auto finish = [cta = warp.cta, at = address.of(warp, lane), work = std::move(copies.work)] {
          for (const Copy& copy : work) copy();
          arrive(*cta, at, 1, 0);
        };
        copies = {};
        if (is_late(warp))
          warp.cta->cluster->queue.push_back(std::move(finish));
        else
          finish();
      });
      return Outcome::next;
    };
  }
  const Address to = decoder.address(decoder.operand(0), Space::shared);
  const Address from = decoder.address(decoder.operand(1), Space::global);
  const auto bytes = static_cast<u32>(decoder.number(decoder.operand(2)));
  // A fourth operand is the bytes to read, or, of 64 bits, a cache policy.
  const bool has_read = decoder.operands() > 3 && decoder.width(decoder.operand(3)) != 8;
  const std::optional<u32> read = has_read ? std::optional(decoder.source(3, 4)) : std::nullopt;
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      Copy copy{to.bytes(warp, bytes, lane), nullptr, bytes,
                read ? warp.at<u32>(*read)[lane] : bytes};
      if (from.of(warp, lane) % bytes != 0)
        throw Fault("an address that the copy is not aligned to");
      if (copy.read > 0)
        copy.from = warp.cta->cluster->launch->device.memory.check(from.of(warp, lane), copy.read);
      if (is_late(warp))
        warp.copies[static_cast<std::size_t>(lane)].work.push_back(copy);
      else
        copy();
    });
    return Outcome::next;
  };
}

// --- Bulk copies ---

struct Tile {
  TensorMap map;
  std::array<std::int32_t, 5> corner{};

  std::size_t row_bytes() const { return std::size_t{map.box[0]} * map.element_bytes; }
  std::size_t bytes() const {
    std::size_t bytes = row_bytes();
    for (int i = 1; i < map.rank; ++i) bytes *= map.box[i];
    return bytes;
  }

  /// f(address in shared memory, bytes within it, address in memory or 0, number of bytes) of each
  /// run of elements that lie in one piece of 16 bytes, and inside or outside of the tensor.
  template <class F>
  void for_pieces(u64 shared, F f) const {
    const std::size_t rows = bytes() / row_bytes();
    const u64 mask = map.swizzle_bytes == 128  ? 7
                     : map.swizzle_bytes == 64 ? 3
                                               : map.swizzle_bytes == 32;
    for (std::size_t row = 0; row < rows; ++row) {
      u64 address = map.address;
      bool inside = true;
      std::size_t rest = row;
      for (int i = 1; i < map.rank; ++i) {
        const std::int64_t at = corner[i] + static_cast<std::int64_t>(rest % map.box[i]);
        rest /= map.box[i];
        inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.sizes[i]);
        address += static_cast<u64>(at) * map.strides[i];
      }
      for (std::size_t byte = 0; byte < row_bytes(); byte += 16) {
        u64 piece = shared + row * row_bytes() + byte;
        piece ^= (piece >> 7 & mask) << 4;
        const std::int64_t first = corner[0] + static_cast<std::int64_t>(byte / map.element_bytes);
        const std::int64_t count = 16 / map.element_bytes;
        const auto clamp = [&](std::int64_t element) {
          return static_cast<std::size_t>(std::clamp(element - first, std::int64_t{0}, count)) *
                 map.element_bytes;
        };
        const std::size_t begin = inside ? clamp(0) : 16;
        const std::size_t end = inside ? clamp(static_cast<std::int64_t>(map.sizes[0])) : 16;
        if (begin > 0) f(piece, std::size_t{0}, u64{0}, begin);
        if (end > begin)
          f(piece, begin, address + static_cast<u64>(first) * map.element_bytes + begin,
            end - begin);
        if (end < 16) f(piece, end, u64{0}, 16 - end);
      }
    }
  }
};

/// Where a bulk copy is in memory: bytes there, or a tile of a tensor.
struct Place {
  Address address;
  std::vector<u32> coordinates;  // of a tile
  u32 bytes = 0;                 // a source, of bytes

  Place(Decoder& decoder, const Operand& operand, Space space)
      : address(decoder.address(operand, space)) {
    if (operand.elements.size() > 1) coordinates = decoder.sources(operand.elements[1], 4);
  }
  Tile tile(Warp& warp, int lane) const {
    Tile tile;
    const u64 at = address.of(warp, lane);
    const std::byte* const map = access(warp, Space::generic, at, 64, lane);
    access(warp, Space::generic, at + 64, 64, lane);
    std::memcpy(&tile.map, map, sizeof tile.map);
    if (coordinates.size() != tile.map.rank) throw Fault("a tensor map of another rank");
    for (std::size_t i = 0; i < coordinates.size(); ++i)
      tile.corner[i] = warp.at<std::int32_t>(coordinates[i])[lane];
    return tile;
  }
};

void require_bulk(u64 shared, u64 global, std::size_t bytes) {
  if (shared % 16 != 0 || global % 16 != 0 || bytes % 16 != 0)
    throw Fault("a bulk copy whose addresses or bytes are no multiples of 16");
}

/// A copy that happens later, with faults that name its instruction.
std::function<void()> named(const Warp& warp, int lane, std::string_view text,
                            std::function<void()> work) {
  return [=, name = warp.kernel->text->name, place = place_of(warp, lane)] {
    try {
      work();
    } catch (const Fault& fault) {
      throw Fault(name + ": " + place + ": " + std::string(text) + ": " + fault.what());
    }
  };
}

/// [shared], [global or tile], {bytes,} [mbarrier]{, mask}{, policy}
Execute decode_bulk_load(Decoder& decoder, bool is_tensor) {
  const Address to = decoder.address(decoder.operand(0), Space::cluster);
  const Place from(decoder, decoder.operand(1), Space::global);
  const u32 bytes = is_tensor ? 0 : decoder.source(2, 4);
  const std::size_t next = is_tensor ? 2 : 3;
  const Address barrier = decoder.address(decoder.operand(next), Space::cluster);
  const std::optional<u32> targets =
      decoder.has("multicast::cluster") ? std::optional(decoder.source(next + 1, 2)) : std::nullopt;
  const std::string_view text = decoder.statement().text;
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      const u64 shared = to.of(warp, lane), full = barrier.of(warp, lane);
      std::vector<Cta*> ctas{&warp.cta->of_cluster_address(shared)};
      if (targets) {
        ctas.clear();
        auto& all = warp.cta->cluster->ctas;
        for (std::size_t i = 0; i < all.size(); ++i)
          if ((warp.at<std::uint16_t>(*targets)[lane] >> i & 1) != 0) ctas.push_back(all[i].get());
      } else if (&warp.cta->of_cluster_address(full) != ctas[0]) {
        throw Fault("a bulk copy whose mbarrier is another CTA's");
      }
      std::function<void()> work;
      if (is_tensor) {
        if (shared % 128 != 0)
          throw Fault("a tile that is not aligned to 128 bytes of shared memory");
        work = [=, &memory = warp.cta->cluster->launch->device.memory,
                tile = from.tile(warp, lane)] {
          for (Cta* const cta : ctas) {
            tile.for_pieces(own_address(shared),
                            [&](u64 piece, std::size_t at, u64 address, std::size_t count) {
                              std::byte* const place = cta->shared_bytes(piece, 16) + at;
                              if (address != 0)
                                std::memcpy(place, memory.check(address, count), count);
                              else
                                std::memset(place, 0, count);
                            });
            complete_bytes(*cta, own_address(full), tile.bytes());
          }
        };
      } else {
        const std::size_t count = warp.at<u32>(bytes)[lane];
        const u64 address = from.address.of(warp, lane);
        require_bulk(shared, address, count);
        work = [=, &memory = warp.cta->cluster->launch->device.memory] {
          for (Cta* const cta : ctas) {
            if (count > 0)
              std::memcpy(cta->shared_bytes(own_address(shared), count),
                          memory.check(address, count), count);
            complete_bytes(*cta, own_address(full), count);
          }
        };
      }
      work = named(warp, lane, text, std::move(work));
      if (is_late(warp))
        warp.cta->cluster->queue.push_back(std::move(work));
      else
        work();
    });
    return Outcome::next;
  };
}

/// [global or tile], [shared]{, bytes}; with `adds` floats to floats.
Execute decode_bulk_store(Decoder& decoder, bool is_tensor, bool adds) {
  if (adds && (!decoder.has("add") || decoder.type() != "f32" || is_tensor)) return {};
  const Place to(decoder, decoder.operand(0), Space::global);
  const Address from = decoder.address(decoder.operand(1), Space::shared);
  const u32 bytes = is_tensor ? 0 : decoder.source(2, 4);
  const std::string_view text = decoder.statement().text;
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      const u64 shared = from.of(warp, lane);
      std::function<void()> work;
      if (is_tensor) {
        work = [=, cta = warp.cta, &memory = warp.cta->cluster->launch->device.memory,
                tile = to.tile(warp, lane)] {
          tile.for_pieces(shared, [&](u64 piece, std::size_t at, u64 address, std::size_t count) {
            const std::byte* const place = cta->shared_bytes(piece, 16) + at;
            if (address != 0) std::memcpy(memory.check(address, count), place, count);
          });
          ++cta->cluster->launch->events;
        };
      } else {
        const std::size_t count = warp.at<u32>(bytes)[lane];
        const u64 address = to.address.of(warp, lane);
        require_bulk(shared, address, count);
        work = [=, cta = warp.cta, &memory = warp.cta->cluster->launch->device.memory] {
          if (count == 0) return;
          const std::byte* const source = cta->shared_bytes(shared, count);
          std::byte* const target = memory.check(address, count);
          if (adds)
            for (std::size_t i = 0; i < count / 4; ++i)
              reinterpret_cast<float*>(target)[i] += reinterpret_cast<const float*>(source)[i];
          else
            std::memcpy(target, source, count);
          ++cta->cluster->launch->events;
        };
      }
      work = named(warp, lane, text, std::move(work));
      if (is_late(warp))
        warp.bulk_copies[static_cast<std::size_t>(lane)].work.push_back(std::move(work));
      else
        work();
    });
    return Outcome::next;
  };
}

Execute decode_bulk(Decoder& decoder) {
  if (decoder.has("commit_group"))
    return [](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) { warp.bulk_copies[static_cast<std::size_t>(lane)].commit(); });
      return Outcome::next;
    };
  if (decoder.has("wait_group")) {
    const auto left = static_cast<std::size_t>(decoder.number(decoder.operand(0)));
    return [left](Warp& warp, Mask mask) {
      for_lanes(mask,
                [&](int lane) { warp.bulk_copies[static_cast<std::size_t>(lane)].complete(left); });
      return Outcome::next;
    };
  }
  if (decoder.has("prefetch")) return nothing();
  const auto& opcode = decoder.statement().opcode;
  const auto place = [&](std::string_view word) {
    return std::find(opcode.begin(), opcode.end(), word) - opcode.begin();
  };
  const bool is_tensor = decoder.has("tensor"), adds = opcode[1] == "reduce";
  const bool to_global = place("global") < std::min(place("shared::cta"), place("shared::cluster"));
  if (to_global) return decode_bulk_store(decoder, is_tensor, adds);
  if (adds || !decoder.has("global")) return {};
  return decode_bulk_load(decoder, is_tensor);
}

/// st.async [shared::cluster], value, [mbarrier]
Execute decode_async_store(Decoder& decoder) {
  const std::size_t bytes = type_bytes(decoder.type());
  const Address to = decoder.address(decoder.operand(0), Space::cluster);
  const Operand& value = decoder.operand(1);
  const std::vector<u32> from = value.kind == Operand::Kind::vector
                                    ? decoder.sources(value, bytes)
                                    : std::vector{decoder.source(value, bytes)};
  const Address barrier = decoder.address(decoder.operand(2), Space::cluster);
  return [=](Warp& warp, Mask mask) {
    for_lanes(mask, [&](int lane) {
      std::byte* const at = to.bytes(warp, bytes * from.size(), lane);
      for (std::size_t i = 0; i < from.size(); ++i)
        std::memcpy(at + i * bytes,
                    warp.at<std::byte>(from[i]) + bytes * static_cast<unsigned>(lane), bytes);
      const u64 full = barrier.of(warp, lane);
      complete_bytes(warp.cta->of_cluster_address(full), own_address(full), bytes * from.size());
    });
    return Outcome::next;
  };
}

}  // namespace

Execute decode_async(Decoder& decoder) {
  const auto& opcode = decoder.statement().opcode;
  if (opcode[0] == "mbarrier") return decode_mbarrier(decoder);
  if (opcode[0] == "cp" && decoder.has("bulk")) return decode_bulk(decoder);
  if (opcode[0] == "cp") return decode_copy(decoder);
  if (opcode[0] == "st" && decoder.has("async")) return decode_async_store(decoder);
  return {};
}

}  // namespace fftune::emulator
