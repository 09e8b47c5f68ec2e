// Data that say by themselves that they are there: words of 4 bytes that are not 0. So no fence and
// no flag is on the way, and one trip over the link is all that a message takes.
//
// The reader clears words when it has read them, and they are written again two epochs later
// (docs/distributed.md). Data are sent inverted; a word of ones, which then were 0, goes as another
// NaN. Vector i of a message, of 16 bytes, is at the same place for both ranks.
#pragma once

#include "common/peers.cuh"
#include "common/vectors.cuh"

namespace fftune {

// Messages up to this size may go as words. lib/device/group_layout.hpp has it too.
constexpr u64 most_word_message = u64{64} << 20;

struct sent_words {
  template <int ranks>
  __device__ __forceinline__ static u64 slot_bytes(const peer_group<ranks>& group) {
    return group.data_bytes < most_word_message ? group.data_bytes : most_word_message;
  }
  // The area behind that of plain data.
  template <int ranks>
  __device__ __forceinline__ static u64 slot_offset(const peer_group<ranks>& group, u32 slot) {
    return group.slot_offset(group.data + 2 * ranks * group.data_bytes, slot_bytes(group), slot);
  }
  template <int ranks>
  __device__ __forceinline__ static void require_room(peer_group<ranks>& group, i64 vectors) {
    group.require_room(static_cast<u64>(vectors) * 16, slot_bytes(group));
  }
  template <int ranks>
  __device__ __forceinline__ static char* at_peer(const peer_group<ranks>& group, int p) {
    return group.base[p] + slot_offset(group, group.slot_at(p));
  }
  template <int ranks>
  __device__ __forceinline__ static char* here(const peer_group<ranks>& group, int p) {
    return group.own + slot_offset(group, static_cast<u32>(p));
  }
  template <class Vector>
  __device__ __forceinline__ static void send(char* slot, i64 vector, const Vector& value) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = value.word[i] == ~0u ? 1u : ~value.word[i];
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(slot + vector * 16),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  template <class Vector>
  __device__ __forceinline__ static bool arrived(const char* slot, i64 vector, Vector& value) {
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(slot + vector * 16)
                 : "memory");
    return value.word[0] != 0 && value.word[1] != 0 && value.word[2] != 0 && value.word[3] != 0;
  }
  // Turns what has arrived into what was sent, and frees its place for the epoch after the next.
  template <class Vector>
  __device__ __forceinline__ static void take(char* slot, i64 vector, Vector& value) {
    store(slot + vector * 16, vector16{});
#pragma unroll
    for (int i = 0; i < 4; ++i) value.word[i] = ~value.word[i];
  }

  // Sends vectors to all peers: number(i) of a message, where valid(i).
  template <int ranks, class Vector, int vectors, class Valid, class Number>
  __device__ __forceinline__ static void send_all(const peer_group<ranks>& group,
                                                  const Vector (&own)[vectors], const Valid& valid,
                                                  const Number& number) {
    if (group.failed) return;
#pragma unroll
    for (int p = 0; p < ranks; ++p) {
      if (!group.is_peer(p)) continue;
      char* const slot = at_peer(group, p);
#pragma unroll
      for (int i = 0; i < vectors; ++i)
        if (valid(i)) send(slot, number(i), own[i]);
    }
  }
  // The sums of vectors of all ranks, in the ranks' order: number(i) of a message, where valid(i).
  // `own`: this rank's. The loads of all vectors of a peer are in flight together.
  template <int ranks, class Vector, int vectors, int count, class Valid, class Number>
  __device__ __forceinline__ static void add_up(peer_group<ranks>& group,
                                                const Vector (&own)[vectors],
                                                float (&total)[vectors][count], const Valid& valid,
                                                const Number& number) {
#pragma unroll
    for (int p = 0; p < ranks; ++p) {
      Vector values[vectors];
#pragma unroll
      for (int i = 0; i < vectors; ++i) values[i] = own[i];
      if (group.is_peer(p)) {
        char* const slot = here(group, p);
        group.wait(p, [&] {
          bool there = true;
#pragma unroll
          for (int i = 0; i < vectors; ++i) {
            if (!valid(i)) continue;
            const bool own_there = arrived(slot, number(i), values[i]);
            there = there && own_there;
          }
          return there;
        });
#pragma unroll
        for (int i = 0; i < vectors; ++i)
          if (valid(i)) take(slot, number(i), values[i]);
      }
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        float summand[count];
        to_floats(values[i], summand);
#pragma unroll
        for (int e = 0; e < count; ++e)
          total[i][e] = p == 0 ? summand[e] : total[i][e] + summand[e];
      }
    }
  }
};

}  // namespace fftune
