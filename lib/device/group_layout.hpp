// How the memory that a rank shares with its peers is laid out. Device code has the same layout
// (kernels/common/group_memory.cuh); kernels/all_reduce/op.cpp checks that both agree.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "core/fork.hpp"

namespace fftune {

/// The first bytes of a rank's memory, which are written once.
struct GroupTable {
  static constexpr int most_ranks = 8;
  static constexpr std::int64_t words = 18;  // of 8 bytes: the table, and the epoch behind it
  static constexpr std::uint64_t header_bytes = 512 + 4 * most_ranks * 4096;

  std::uint64_t base[most_ranks] = {};  // each rank's memory, in this rank's address space
  std::uint32_t rank = 0, ranks = 1;
  std::uint64_t timeout = 0;  // of a wait, nanoseconds
  std::uint64_t packets = 0,
                packet_bytes = 0;          // the area of packets, and the bytes of a slot in it
  std::uint64_t data = 0, data_bytes = 0;  // the area of plain data, and of its slots
  /// Address of two u32: the first error, for the host; and its notice that a peer is gone.
  std::uint64_t status = 0;
};

/// Messages up to this size may go as packets, which take twice their bytes on the link: larger
/// ones are slower than as plain data.
constexpr std::uint64_t most_packet_message = std::uint64_t{512} << 10;

/// Messages up to this size may go as words that are empty until data come
/// (kernels/all_reduce/words.cuh): each slot of their area takes this much of the memory.
constexpr std::uint64_t most_word_message = std::uint64_t{64} << 20;

/// The areas for messages of up to `bytes` between `ranks` ranks.
inline GroupTable group_layout(int ranks, std::uint64_t bytes) {
  constexpr std::uint64_t line = 256;
  const auto rounded = [](std::uint64_t size) { return (size + line - 1) / line * line; };
  GroupTable table;
  table.ranks = static_cast<std::uint32_t>(ranks);
  table.packets = rounded(GroupTable::header_bytes);
  table.packet_bytes = rounded(2 * std::min(bytes, most_packet_message));
  table.data = table.packets + 2 * table.ranks * table.packet_bytes;
  table.data_bytes = rounded(bytes);
  return table;
}

/// Bytes of a rank's memory: the areas of packets, of data, and of words.
inline std::uint64_t group_bytes(const GroupTable& table) {
  return table.data +
         2 * table.ranks * (table.data_bytes + std::min(table.data_bytes, most_word_message));
}

constexpr std::string_view of_the_parent =
    "the group is of the process before fork(), and a child has no part in it: make a group there";

/// On a CPU `status` is the address of this, which is the process's own.
struct HostNotices {
  std::uint32_t error = 0, notice = 0;
  std::uint32_t users = 0;   // collectives that run in this process, or wait for their turn
  std::mutex turn;           // threads of a process run them one at a time
  int forks = fork_count();  // a child of fork() has a copy, and no part in the group
};

/// The codes of errors: group_error of the device's header, with the rank in the bits from 8 on.
enum class GroupFault : std::uint32_t { none, timeout, other_problem, too_large, lost, left };

constexpr std::uint32_t fault_code(GroupFault fault, int rank) {
  return static_cast<std::uint32_t>(fault) | static_cast<std::uint32_t>(rank) << 8;
}

/// The line that tells a user of an error, of a group whose waits end after `timeout`.
std::string fault_text(std::uint32_t code, std::chrono::nanoseconds timeout);

}  // namespace fftune
