// A collective on the CPU: a rank's data go into the memory of every peer, then its greeting, and
// it waits for theirs. The memory is shared between processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"

namespace fftune::all_reduce {

/// The group as one collective on the CPU sees it.
class Peers {
  using Clock = std::chrono::steady_clock;

 public:
  /// `memory`: the rank's own. A rank that is alone gives `loopback`, and plays its peers.
  Peers(std::byte* memory, const group_table* loopback)
      : own_(memory),
        alone_(loopback != nullptr),
        table_(alone_ ? *loopback : *reinterpret_cast<const group_table*>(memory)),
        epoch_(0) {
    // A child would take the place of its parent, whose epochs are in memory that both have.
    if (table_.status != 0 && notices().forks != fork_count())
      throw Error(ErrorKind::invalid_input, std::string(of_the_parent));
    if (table_.status != 0) {
      ++users();
      turn_ = std::unique_lock(notices().turn);
    }
    // The table that is given may be a copy of the memory's first bytes.
    if (!alone_ && table_.ranks > 0) own_ = reinterpret_cast<std::byte*>(table_.base[table_.rank]);
    epoch_ = control(own_).epoch + 1;
  }

  ~Peers() {
    if (table_.status == 0) return;
    turn_.unlock();
    --users();
  }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  const group_table& table() const { return table_; }
  bool is_peer(int p) const { return static_cast<u32>(p) != table_.rank; }

  /// Where rank p finds this rank's data, and where this rank finds p's.
  std::byte* sent_to(int p) const { return slot(base(p), slot_at(p)); }
  const std::byte* sent_by(int p) const { return slot(own_, p); }

  void greet(u32 tag) const {
    for (int p = 0; p < static_cast<int>(table_.ranks); ++p)
      if (is_peer(p))
        greeting(base(p), slot_at(p)).store(u64{tag} << 32 | epoch_, std::memory_order_release);
  }

  /// Waits for the peers' greetings. Throws Error, once there is one in the group for good.
  void await(u32 tag) const {
    for (int p = 0; p < static_cast<int>(table_.ranks); ++p)
      if (is_peer(p)) await(p, tag);
  }

  void finish() const { control(own_).epoch = epoch_; }

  [[noreturn]] void fail(group_error error, int rank) const {
    fail(error_code(error, static_cast<u32>(rank)));
  }

  /// Throws if a collective before failed, the group has other ranks, or the message is too large.
  void require(int ranks, std::size_t bytes) const {
    if (const u32 code = error_word().load()) report(code);
    const int own = static_cast<int>(table_.rank);
    if (table_.ranks != static_cast<u32>(ranks)) fail(group_error::other_problem, own);
    if (table_.data_bytes < bytes) fail(group_error::too_large, own);
  }

  [[noreturn]] void fail(u32 code) const {
    u32 none = 0;
    error_word().compare_exchange_strong(none, code);
    code = error_word().load();
    if (table_.status != 0) std::atomic_ref<u32>(notices().error).store(code);
    report(code);
  }

 private:
  HostNotices& notices() const { return *reinterpret_cast<HostNotices*>(table_.status); }
  std::atomic_ref<u32> users() const { return std::atomic_ref<u32>(notices().users); }
  u32 notice() const {
    return table_.status != 0 ? std::atomic_ref<u32>(notices().notice).load() : 0;
  }

  static group_control& control(std::byte* memory) {
    return *reinterpret_cast<group_control*>(memory + control_offset);
  }
  std::byte* base(int p) const {
    return alone_ ? own_ : reinterpret_cast<std::byte*>(table_.base[p]);
  }
  int slot_at(int p) const { return alone_ ? p : static_cast<int>(table_.rank); }
  std::byte* slot(std::byte* memory, int sender) const {
    return memory + table_.data +
           ((epoch_ & 1) * table_.ranks + static_cast<u32>(sender)) * table_.data_bytes;
  }
  std::atomic_ref<u64> greeting(std::byte* memory, int sender) const {
    return std::atomic_ref<u64>(control(memory).greeting[epoch_ & 1][sender]);
  }
  std::atomic_ref<u32> error_word() const { return std::atomic_ref<u32>(control(own_).error); }

  void await(int p, u32 tag) const {
    const auto start = Clock::now();
    const auto came = [&] {
      return static_cast<u32>(greeting(own_, p).load(std::memory_order_acquire)) == epoch_;
    };
    for (int spins = 0; !came(); ++spins) {
      if (spins < 1000) continue;
      if (const u32 code = notice(); code != 0 && !came()) fail(code);
      if (Clock::now() - start > std::chrono::nanoseconds(table_.timeout) && !came())
        fail(group_error::timeout, p);
      if (spins < 2000)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (static_cast<u32>(greeting(own_, p).load() >> 32) != tag)
      fail(group_error::other_problem, p);
  }

  [[noreturn]] void report(u32 code) const {
    throw Error(ErrorKind::device_fault,
                fault_text(code, std::chrono::nanoseconds(table_.timeout)));
  }

  std::byte* own_;
  bool alone_;
  group_table table_;
  std::unique_lock<std::mutex> turn_;
  u32 epoch_;
};

/// A program of one host function, run(call, peers), of the group at tensor `group`.
template <class Run>
Program peers_program(const Form& form, std::size_t tensors, std::size_t group, Run run) {
  const group_table loopback = form.loopback ? loopback_table(form) : group_table{};
  std::vector<Scratch> scratch;
  if (form.loopback) scratch = {{loopback_bytes(form), true}};
  return host_program(
      tensors, std::move(scratch),
      [=, alone = form.loopback, run = std::move(run)](const HostCall& call) {
        run(call, Peers(alone ? call.scratch[0] : static_cast<std::byte*>(address_of(call, group)),
                        alone ? &loopback : nullptr));
      });
}

}  // namespace fftune::all_reduce
