// Branches, barriers and what lanes of a warp do together.
#include <algorithm>

#include "emulator/decoder.hpp"

namespace fftune::emulator {
namespace {

using u32 = std::uint32_t;

Execute decode_branch(Decoder& decoder, const std::string& name) {
  if (name == "bra") {
    const std::uint32_t target = decoder.label(decoder.operand(0).text);
    return [target](Warp& warp, Mask mask) {
      warp.jump(target, mask);
      return Outcome::moved;
    };
  }
  if (name == "ret" || name == "exit")
    return [](Warp& warp, Mask mask) {
      warp.exit(mask);
      return Outcome::moved;
    };
  if (name == "trap") return [](Warp&, Mask) -> Outcome { throw Fault("the kernel stops itself"); };
  return {};
}

/// Waits until the barrier's phase that `arrive` takes part in is complete; then `finish`.
template <class Arrive, class Finish>
Execute waits(std::uint32_t slot, Arrive arrive, Finish finish) {
  return [=](Warp& warp, Mask mask) {
    Split& split = warp.split();
    const auto lane = std::countr_zero(mask);
    const u32 id = warp.at<u32>(slot)[lane];
    if (id >= named_barriers) throw Fault("a barrier past number 15");
    if (split.wait.kind == Wait::Kind::none) {
      const std::uint64_t generation = warp.cta->barriers[id].generation;
      if (!arrive(warp, mask, id)) {
        split.wait = {Wait::Kind::barrier, id, generation};
        return Outcome::wait;
      }
    }
    split.wait = {};
    finish(warp, mask, warp.cta->barriers[id]);
    return Outcome::next;
  };
}

/// bar.sync a{, b}; bar.arrive a, b; bar.red.and.pred p, a{, b}, q
Execute decode_barrier(Decoder& decoder) {
  const bool reduces = decoder.has("red");
  const std::size_t first = reduces ? 1 : 0, last = decoder.operands() - (reduces ? 1 : 0);
  const u32 id = decoder.source(first, 4);
  const std::optional<u32> threads =
      last > first + 1 ? std::optional(decoder.source(first + 1, 4)) : std::nullopt;
  const auto arrive = [threads](Warp& warp, Mask mask, u32 barrier, Mask predicate) {
    const u32 expected = threads ? warp.at<u32>(*threads)[std::countr_zero(mask)] : 0;
    // Counted by warps, also where a warp has fewer threads.
    const bool is_warp = mask == warp.live && expected != 0;
    const auto count = static_cast<u32>(is_warp ? warp_lanes : std::popcount(mask));
    return warp.cta->arrive(
        barrier, count, expected,
        is_warp && predicate == mask ? count : static_cast<u32>(std::popcount(predicate)));
  };
  if (decoder.has("arrive"))
    return [id, arrive](Warp& warp, Mask mask) {
      arrive(warp, mask, warp.at<u32>(id)[std::countr_zero(mask)], mask);
      return Outcome::next;
    };
  if (!reduces)
    return waits(
        id,
        [arrive](Warp& warp, Mask mask, u32 barrier) { return arrive(warp, mask, barrier, mask); },
        [](Warp&, Mask, const Barrier&) {});
  const Predicate q = decoder.predicate(decoder.operand(last));
  const auto arrive_with = [arrive, q](Warp& warp, Mask mask, u32 barrier) {
    return arrive(warp, mask, barrier, mask & q.of(warp));
  };
  if (decoder.has("popc")) {
    const u32 d = decoder.target(0, 4);
    return waits(id, arrive_with, [d](Warp& warp, Mask mask, const Barrier& barrier) {
      for_lanes(mask, [&](int lane) { warp.at<u32>(d)[lane] = barrier.last_count; });
    });
  }
  const u32 p = decoder.target_predicate(decoder.operand(0));
  const bool is_and = decoder.has("and");
  return waits(id, arrive_with, [p, is_and](Warp& warp, Mask mask, const Barrier& barrier) {
    const bool value = is_and ? barrier.last_conjunction != 0 : barrier.last_count != 0;
    write_predicate(warp, p, value ? all_lanes : 0, mask);
  });
}

/// barrier.cluster.arrive, barrier.cluster.wait
Execute decode_cluster_barrier(Decoder& decoder) {
  if (decoder.has("arrive"))
    return [](Warp& warp, Mask mask) {
      Cluster& cluster = *warp.cta->cluster;
      for_lanes(mask, [&](int lane) {
        warp.cluster_arrival[static_cast<std::size_t>(lane)] = cluster.generation;
      });
      cluster.arrived += static_cast<u32>(std::popcount(mask));
      ++cluster.launch->events;
      cluster.complete_if_all_arrived();
      return Outcome::next;
    };
  return [](Warp& warp, Mask mask) {
    const std::uint64_t generation =
        warp.cluster_arrival[static_cast<std::size_t>(std::countr_zero(mask))];
    if (warp.cta->cluster->generation <= generation) {
      warp.split().wait = {Wait::Kind::cluster, 0, generation};
      return Outcome::wait;
    }
    warp.split().wait = {};
    return Outcome::next;
  };
}

/// `f` of the lanes of the operand `members`, once all of them are here; of each group of lanes,
/// where they name different ones.
template <class F>
Execute with_members(u32 members, F f) {
  return [=](Warp& warp, Mask mask) {
    const u32* const of_lane = warp.at<u32>(members);
    Mask all = 0;
    for_lanes(mask, [&](int lane) { all |= of_lane[lane]; });
    if (!warp.together(all)) return Outcome::wait;
    for (Mask left = mask; left != 0;) {
      const int first = std::countr_zero(left);
      const Mask own = (of_lane[first] & mask) | Mask{1} << first;
      f(warp, own, own);
      left &= ~own;
    }
    return Outcome::next;
  };
}

Execute decode_shuffle(Decoder& decoder) {
  const Operand& to = decoder.operand(0);
  const bool has_predicate = to.kind == Operand::Kind::pair;
  const u32 d = decoder.target(has_predicate ? to.elements[0] : to, 4);
  const std::optional<u32> p =
      has_predicate ? std::optional(decoder.target_predicate(to.elements[1])) : std::nullopt;
  const u32 a = decoder.source(1, 4), b = decoder.source(2, 4), c = decoder.source(3, 4);
  const char mode = decoder.statement().opcode[2][0];  // up, down, bfly, idx
  return with_members(decoder.source(4, 4), [=](Warp& warp, Mask mask, Mask) {
    std::array<u32, warp_lanes> from;
    std::copy_n(warp.at<u32>(a), warp_lanes, from.begin());
    Mask valid = 0;
    for_lanes(mask, [&](int own) {
      const u32 lane = static_cast<u32>(own), by = warp.at<u32>(b)[own] & 31;
      const u32 segment = warp.at<u32>(c)[own] >> 8 & 31, clamp = warp.at<u32>(c)[own] & 31;
      const u32 most = (lane & segment) | (clamp & ~segment & 31), least = lane & segment;
      const u32 source = mode == 'u'   ? lane - by
                         : mode == 'd' ? lane + by
                         : mode == 'b' ? lane ^ by
                                       : least | (by & ~segment & 31);
      const bool is_valid =
          mode == 'u' ? static_cast<std::int32_t>(source) >= static_cast<std::int32_t>(most)
                      : source <= most;
      valid |= Mask{is_valid} << own;
      warp.at<u32>(d)[own] = from[is_valid ? source : lane];
    });
    if (p) write_predicate(warp, *p, valid, mask);
  });
}

Execute decode_vote(Decoder& decoder) {
  const Predicate a = decoder.predicate(decoder.operand(1));
  const u32 members = decoder.source(2, 4);
  if (decoder.has("ballot")) {
    const u32 d = decoder.target(0, 4);
    return with_members(members, [=](Warp& warp, Mask mask, Mask) {
      const Mask votes = a.of(warp) & mask;
      for_lanes(mask,
                [&](int lane) { warp.at<u32>(d)[lane] = votes & warp.at<u32>(members)[lane]; });
    });
  }
  const u32 p = decoder.target_predicate(decoder.operand(0));
  const bool all = decoder.has("all"), any = decoder.has("any");
  return with_members(members, [=](Warp& warp, Mask mask, Mask own) {
    const Mask votes = a.of(warp) & own;
    const bool value = any ? votes != 0 : votes == own || (!all && votes == 0);
    write_predicate(warp, p, value ? all_lanes : 0, mask);
  });
}

Execute decode_match(Decoder& decoder) {
  if (!decoder.has("any") || decoder.type() != "b32") return {};
  const u32 d = decoder.target(0, 4), a = decoder.source(1, 4);
  return with_members(decoder.source(2, 4), [=](Warp& warp, Mask mask, Mask own) {
    std::array<u32, warp_lanes> equal{};
    for_lanes(mask, [&](int lane) {
      for_lanes(own, [&](int other) {
        if (warp.at<u32>(a)[lane] == warp.at<u32>(a)[other])
          equal[static_cast<std::size_t>(lane)] |= Mask{1} << other;
      });
    });
    for_lanes(mask,
              [&](int lane) { warp.at<u32>(d)[lane] = equal[static_cast<std::size_t>(lane)]; });
  });
}

template <class T, class F>
Execute reduce(Decoder& decoder, F f) {
  const u32 d = decoder.target(0, 4), a = decoder.source(1, 4);
  return with_members(decoder.source(2, 4), [=](Warp& warp, Mask mask, Mask own) {
    T value = warp.at<T>(a)[std::countr_zero(own)];
    for_lanes(own & (own - 1), [&](int lane) { value = f(value, warp.at<T>(a)[lane]); });
    for_lanes(mask, [&](int lane) { warp.at<T>(d)[lane] = value; });
  });
}

template <class T>
Execute decode_reduction(Decoder& decoder) {
  if (decoder.has("add"))
    return reduce<T>(decoder, [](T a, T b) {
      return static_cast<T>(static_cast<u32>(a) + static_cast<u32>(b));
    });
  if (decoder.has("min")) return reduce<T>(decoder, [](T a, T b) { return std::min(a, b); });
  if (decoder.has("max")) return reduce<T>(decoder, [](T a, T b) { return std::max(a, b); });
  if (decoder.has("and")) return reduce<T>(decoder, [](T a, T b) { return a & b; });
  if (decoder.has("or")) return reduce<T>(decoder, [](T a, T b) { return a | b; });
  if (decoder.has("xor")) return reduce<T>(decoder, [](T a, T b) { return a ^ b; });
  return {};
}

Execute decode_elect(Decoder& decoder) {
  const Operand& to = decoder.operand(0);
  const u32 d = decoder.target(to.elements.at(0), 4);
  const u32 p = decoder.target_predicate(to.elements.at(1));
  return with_members(decoder.source(1, 4), [=](Warp& warp, Mask mask, Mask own) {
    const auto leader = static_cast<u32>(std::countr_zero(own));
    for_lanes(mask, [&](int lane) { warp.at<u32>(d)[lane] = leader; });
    write_predicate(warp, p, Mask{1} << leader, mask);
  });
}

}  // namespace

Execute decode_control(Decoder& decoder) {
  const std::string& name = decoder.statement().opcode[0];
  if (name == "bra" || name == "ret" || name == "exit" || name == "trap")
    return decode_branch(decoder, name);
  if (name == "bar" && decoder.has("warp"))
    return with_members(decoder.source(0, 4), [](Warp&, Mask, Mask) {});
  if (name == "barrier" && decoder.has("cluster")) return decode_cluster_barrier(decoder);
  if (name == "bar" || name == "barrier") return decode_barrier(decoder);
  if (name == "shfl") return decode_shuffle(decoder);
  if (name == "vote") return decode_vote(decoder);
  if (name == "match") return decode_match(decoder);
  if (name == "redux")
    return decoder.type() == "s32" ? decode_reduction<std::int32_t>(decoder)
                                   : decode_reduction<u32>(decoder);
  if (name == "elect") return decode_elect(decoder);
  if (name == "activemask") {
    const u32 d = decoder.target(0, 4);
    return [d](Warp& warp, Mask mask) {
      for_lanes(mask, [&](int lane) { warp.at<u32>(d)[lane] = mask; });
      return Outcome::next;
    };
  }
  if (name == "nanosleep") return [](Warp&, Mask) { return Outcome::yield; };
  if (name == "fence" || name == "membar" || name == "griddepcontrol" || name == "setmaxnreg")
    return nothing();
  return {};
}

}  // namespace fftune::emulator
