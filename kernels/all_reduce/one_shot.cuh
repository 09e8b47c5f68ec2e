// How a vector of 16 bytes goes to a peer, so that its reader knows from the data alone that they
// are there: no fence and no flag is on the way.
//
//   packets   words of 8 bytes, 4 of data and 4 of the epoch: twice the bytes on the link
//   words     words of 4 bytes that are not 0. The reader clears them when it has read them, and
//             they are written again two epochs later (docs/distributed.md). Data are sent
//             inverted; a word of ones, which then were 0, goes as another NaN of both its halves.
//
// Vector i of a message is at the same place for both ranks, which run the same kernel.
#pragma once

#include "common/peers.cuh"
#include "common/vectors.cuh"

namespace fftune {

enum class sent_as { packets, words };

// Messages up to this size may go as words. lib/device/group_layout.hpp has it too.
constexpr u64 most_word_message = u64{64} << 20;

template <sent_as kind>
struct one_shot;

// A warp's vectors are two runs of 512 bytes, so that each of its stores fills whole lines.
template <>
struct one_shot<sent_as::packets> {
  template <int ranks>
  __device__ __forceinline__ static void require_room(peer_group<ranks>& group, i64 vectors) {
    group.require_room(static_cast<u64>((vectors + 31) / 32 * 1024), group.packet_bytes);
  }
  __device__ __forceinline__ static i64 place(i64 vector) {
    return vector / 32 * 1024 + vector % 32 * 16;
  }
  // Where rank p finds this rank's vectors, and this rank those of p.
  template <int ranks>
  __device__ __forceinline__ static char* at_peer(const peer_group<ranks>& group, int p) {
    return group.packets_for(p);
  }
  template <int ranks>
  __device__ __forceinline__ static char* here(const peer_group<ranks>& group, int p) {
    return const_cast<char*>(group.packets_of(p));
  }
  template <class Vector>
  __device__ __forceinline__ static void send(char* slot, i64 vector, const Vector& value,
                                              u32 epoch) {
    store_packets(slot + place(vector), value.word[0], value.word[1], epoch);
    store_packets(slot + place(vector) + 512, value.word[2], value.word[3], epoch);
  }
  template <class Vector>
  __device__ __forceinline__ static bool arrived(const char* slot, i64 vector, Vector& value,
                                                 u32 epoch) {
    const bool first = load_packets(slot + place(vector), epoch, value.word[0], value.word[1]);
    const bool second =
        load_packets(slot + place(vector) + 512, epoch, value.word[2], value.word[3]);
    return first && second;
  }
  template <class Vector>
  __device__ __forceinline__ static void take(char*, i64, Vector&) {}
};

template <>
struct one_shot<sent_as::words> {
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
  __device__ __forceinline__ static void send(char* slot, i64 vector, const Vector& value, u32) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = value.word[i] == ~0u ? 1u : ~value.word[i];
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(slot + vector * 16),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  template <class Vector>
  __device__ __forceinline__ static bool arrived(const char* slot, i64 vector, Vector& value, u32) {
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
};

}  // namespace fftune
