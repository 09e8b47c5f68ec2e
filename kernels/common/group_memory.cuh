// The memory that each rank of a group shares with its peers. Plain C++, for the host too;
// lib/group lays it out (group/layout.hpp), and kernels/all_reduce/op.cpp checks that both agree.
//
//   0           group_table     written once, when the group is made
//   128         group_control   the rank's own counters, and its peers' greetings
//   512         arrival flags   u32 [most_ranks][most_chunks]: the epoch whose chunk a peer has
//   sent packets     [2][ranks][packet_bytes]   words of 8 bytes: 4 of data, 4 of the epoch data
//   [2][ranks][data_bytes]     plain data, announced by arrival flags
//
// The two areas have a half for each parity of the epoch, and in it a slot for each sender. Packets
// have an area of their own because their reader takes any word that holds the epoch for data.
#pragma once

#include "common/types.cuh"

namespace fftune {

constexpr int most_ranks = 8;
constexpr int most_chunks = 4096;

struct group_table {
  u64 base[most_ranks];  // each rank's memory, in this rank's address space
  u32 rank, ranks;
  u64 timeout;                // of a wait, nanoseconds
  u64 packets, packet_bytes;  // the area's offset, and the bytes of a slot
  u64 data, data_bytes;
  u64 status;  // two u32 that the host has too: the first error, and its notice; 0: there are none
};

struct group_control {
  u32 epoch;                    // collectives that are complete
  u32 ticket;                   // blocks of the current launch that are done
  u32 error;                    // the first error; further launches do nothing
  u32 looked;                   // when a thread last read the host's notice, in units of 65 us
  u64 greeting[2][most_ranks];  // by the epoch's parity and the peer: its epoch, and its tag above
};

constexpr u64 control_offset = 128;
constexpr u64 arrivals_offset = 512;
constexpr u64 group_header_bytes = arrivals_offset + u64{4} * most_ranks * most_chunks;
static_assert(sizeof(group_table) <= control_offset);
static_assert(control_offset + sizeof(group_control) <= arrivals_offset);

// An error has the rank that it is about in the bits from 8 on.
enum class group_error : u32 { none, timeout, other_problem, too_large, lost, left };

constexpr u32 error_code(group_error error, u32 rank) {
  return static_cast<u32>(error) | rank << 8;
}

}  // namespace fftune
