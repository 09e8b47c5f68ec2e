// all-reduce on the CPU: each rank copies its x into the memory of every peer, greets it, waits for
// its greeting, and adds the rows in rank order. The memory is shared between processes.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::all_reduce {
namespace {

using Clock = std::chrono::steady_clock;

/// The group as one collective on the CPU sees it.
class Peers {
 public:
  /// `memory`: the rank's own. A rank that is alone gives `loopback`, and plays its peers.
  Peers(std::byte* memory, const group_table* loopback)
      : own_(memory),
        alone_(loopback != nullptr),
        table_(alone_ ? *loopback : *reinterpret_cast<const group_table*>(memory)),
        epoch_(0) {
    // The table that is given may be a copy of the memory's first bytes.
    if (!alone_ && table_.ranks > 0) own_ = reinterpret_cast<std::byte*>(table_.base[table_.rank]);
    epoch_ = control(own_).epoch + 1;
  }

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

  /// Throws if a collective before failed.
  void require_none() const {
    if (const u32 code = error_word().load()) report(code);
  }

  [[noreturn]] void fail(u32 code) const {
    u32 none = 0;
    error_word().compare_exchange_strong(none, code);
    code = error_word().load();
    if (table_.status != 0) std::atomic_ref<u32>(notices()[0]).store(code);
    report(code);
  }

 private:
  u32* notices() const { return reinterpret_cast<u32*>(table_.status); }
  u32 notice() const { return table_.status != 0 ? std::atomic_ref<u32>(notices()[1]).load() : 0; }

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
  u32 epoch_;
};

std::vector<float> floats_of(DType dtype, const std::byte* row, std::int64_t d) {
  std::vector<float> values(static_cast<std::size_t>(d));
  decode(dtype, row, std::span<float>(values));
  return values;
}

/// Makes each value one of the dtype.
void round_all(DType dtype, std::vector<float>& values, std::byte* out) {
  encode(dtype, std::span<const float>(values), out);
  decode(dtype, out, std::span<float>(values));
}

RowWork work(const Problem& problem) {
  const Form form = form_of(problem);
  return {.rows = form.m, .row_bytes = form.row_bytes(), .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts&, const Config& config) {
  const Form form = form_of(problem);
  const RowTasks tasks(work(problem), config);
  const TensorPlaces at(all_reduce_op().tensors(problem));
  Program program;
  program.host_tensors = at.count();
  group_table loopback{};
  if (form.loopback) {
    loopback = loopback_table(form);
    program.scratch = {{loopback_bytes(loopback), true}};
  }
  program.steps.emplace_back(HostFunction(
      [=, tag = tag_of(problem, ""), x = at.at("x"), residual = at.at("residual"), w = at.at("w"),
       group = at.at("group"), y = at.at("y"), sum = at.at("sum")](const HostCall& call) {
        const auto place = [&](std::size_t tensor) {
          return static_cast<std::byte*>(address_of(call, tensor));
        };
        const Peers peers(form.loopback ? call.scratch[0] : place(group),
                          form.loopback ? &loopback : nullptr);
        peers.require_none();
        const auto bytes = static_cast<std::size_t>(form.bytes());
        const int rank = static_cast<int>(peers.table().rank);
        if (peers.table().ranks != static_cast<u32>(form.ranks))
          peers.fail(group_error::other_problem, rank);
        if (peers.table().data_bytes < bytes) peers.fail(group_error::too_large, rank);
        for (int p = 0; p < form.ranks; ++p)
          if (peers.is_peer(p)) std::memcpy(peers.sent_to(p), place(x), bytes);
        peers.greet(tag);
        peers.await(tag);
        const auto weights =
            form.normalises ? floats_of(form.dtype, place(w), form.d) : std::vector<float>();
        tasks.run(call.parallel, nullptr, [&](std::int64_t row) {
          const auto offset = static_cast<std::size_t>(row * form.row_bytes());
          const auto row_of = [&](const std::byte* matrix) {
            return floats_of(form.dtype, matrix + offset, form.d);
          };
          const auto part = [&](int p) {
            return row_of(peers.is_peer(p) ? peers.sent_by(p) : place(x));
          };
          auto total = part(0);
          const auto add = [&](const std::vector<float>& other) {
            for (std::size_t i = 0; i < total.size(); ++i) total[i] += other[i];
          };
          for (int p = 1; p < form.ranks; ++p) add(part(p));
          if (form.adds) add(row_of(place(residual)));
          std::byte* const out = place(y) + offset;
          round_all(form.dtype, total, form.normalises && form.adds ? place(sum) + offset : out);
          if (!form.normalises) return;
          double squares = 0;
          for (const float value : total) squares += double{value} * value;
          const auto r = static_cast<float>(
              1 / std::sqrt(squares / static_cast<double>(form.d) + double{form.eps}));
          for (float& value : total) value *= r;
          if (form.convention == "llama") round_all(form.dtype, total, out);
          for (std::size_t i = 0; i < total.size(); ++i)
            total[i] *= form.convention == "gemma" ? 1 + weights[i] : weights[i];
          encode(form.dtype, std::span<const float>(total), out);
        });
        peers.finish();
      }));
  return program;
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily family({.name = "cpu_all_reduce",
                                    .summary = "rows of all ranks, added on several threads",
                                    .device_kind = DeviceKind::cpu,
                                    .pass = "fwd",
                                    .sources = {"all_reduce/cpu_families.cpp"},
                                    .is_fallback = true,
                                    .program = program},
                                   work);
  return {&family};
}

}  // namespace fftune::all_reduce
