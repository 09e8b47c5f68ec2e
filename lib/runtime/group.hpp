// A group: ranks that are processes or threads of one host and reach each other's memory, or
// processes of several hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "device/backend.hpp"
#include "device/group_layout.hpp"

namespace fftune {

struct GroupOptions {
  /// The same on all ranks, and no other group's: a word, or the path of the socket's file where
  /// the ranks do not share a network namespace, or "tcp://host:port/word" for ranks of several
  /// hosts, where rank 0 listens. Those share no memory: they have NCCL alone.
  std::string name;
  int rank = 0;
  int ranks = 1;
  std::uint64_t max_bytes = 0;               // of a message
  std::chrono::milliseconds timeout{60000};  // of the meeting, and of each wait
  bool nccl = false;                         // a communicator too, for plans of link=nccl
};

/// Ranks meet through a socket of Linux's abstract namespace, at which rank 0 listens: the kernel
/// removes the name with the last process that has it. Rank 0 keeps a connection to each other
/// rank, so the end of any is known to all at once. Ranks are processes, or threads of one.
class Group {
 public:
  /// Returns when all ranks are there and their memory is mapped and clear. Throws
  /// Error(invalid_input) for options that are wrong or differ between ranks, and
  /// Error(unavailable) where a rank does not come in time or its memory is out of reach: then on
  /// every rank.
  Group(Backend& backend, const GroupOptions& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// The rank's own memory, which begins with its GroupTable: the tensor `group` of collectives.
  void* memory() const;
  int rank() const;
  int ranks() const;
  /// The largest of the ranks' values, the same on all. Every rank calls it as often as the others.
  /// Throws Error(device_fault) if a rank is gone, or does not come in time.
  double largest(double value) const;
  /// Throws Error(device_fault) if a collective failed or a rank died. Waits for nothing.
  void check() const;

 private:
  class Members;
  std::unique_ptr<Members> members_;
};

}  // namespace fftune
