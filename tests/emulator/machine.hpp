// A GPU's execution of one kernel after another.
//
//   Launch    the grid: its clusters that have begun, each with its CTAs. CTAs run in turns
//   whenever
//             one can only wait for another.
//   Warp      32 lanes, in splits of lanes that have the same program counter. The split that is
//             furthest behind runs, so that lanes meet again behind a branch.
//   register  an array of one value per lane, so that an instruction is a loop over lanes.
//   queue     TMA loads complete when no warp of the cluster can go on: as late as they may.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/ptx.hpp"

namespace fftune::emulator {

using Mask = std::uint32_t;
constexpr int warp_lanes = 32;
constexpr Mask all_lanes = ~Mask{0};
/// Where shared memory begins, as on sm_90: the system has the KiB before it.
constexpr std::uint32_t shared_begin = 1024;
/// A shared::cluster address has the rank of its CTA, plus one, above this bit; with 0 it is the
/// own CTA's.
constexpr int rank_shift = 24;
constexpr std::uint32_t named_barriers = 16;

/// An error that a GPU would stop the context for; the text says where and why.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
  int lane = -1;  // where one is known
};

/// Addresses that kernels may access: device memory, and pinned memory of the host.
class Allocations {
 public:
  std::byte* allocate(std::size_t bytes);
  bool free(std::uint64_t address);
  /// Throws Fault unless all bytes lie in one allocation.
  std::byte* check(std::uint64_t address, std::size_t bytes);
  std::size_t allocated_bytes() const { return allocated_; }

 private:
  struct Range {
    std::uint64_t begin = 0, end = 0;
  };
  std::map<std::uint64_t, std::uint64_t> ends_;  // by begin
  Range last_;
  std::size_t allocated_ = 0;
};

struct Warp;
enum class Outcome : std::uint8_t {
  next,   // to the next instruction
  moved,  // the program counter or the lanes were changed
  wait,   // again later: the split's `wait` says when
  yield,  // to the next instruction, but others first: perhaps this polls
};
using Execute = std::function<Outcome(Warp&, Mask)>;

struct Instruction {
  Execute execute;
  std::int32_t guard = -1;  // a predicate's slot
  bool guard_negated = false;
  const Statement* statement = nullptr;
};

/// A register that is written when its warp begins: a number, an identifier, an address.
struct Preset {
  std::uint32_t slot = 0;
  std::size_t bytes = 0;
  std::uint64_t number = 0;
  std::uint64_t (*value)(const Warp&, int lane, std::uint64_t number) = nullptr;
};

struct Kernel {
  const KernelText* text = nullptr;
  std::vector<Instruction> code;
  std::vector<Preset> presets;
  std::size_t register_bytes = 0;  // of a warp
  std::size_t shared_bytes = 0;    // static
  std::size_t dynamic_begin = 0;   // of shared memory, after the static
  std::size_t local_bytes = 0;     // of a thread
  int registers = 64;              // as ptxas allocated them
  std::size_t dynamic_limit = 48 << 10;
};

struct Module {
  ModuleText text;
  std::map<std::string, std::byte*> variables;  // those that lie in device memory
  std::map<std::string, Kernel> kernels;
};

/// Translates a kernel. Throws std::runtime_error, which quotes an instruction that is not known.
Kernel decode(const KernelText& text, const Module& module);

struct Wait {
  enum class Kind : std::uint8_t { none, lanes, barrier, cluster } kind = Kind::none;
  std::uint32_t barrier = 0;
  std::uint64_t generation = 0;
};

struct Split {
  std::uint32_t pc = 0;
  Mask mask = 0;
  Wait wait;
  bool yielded = false;
};

struct Barrier {
  std::uint32_t arrived = 0, expected = 0;  // expected: 0 for all threads
  std::uint64_t generation = 0;
  std::uint32_t conjunction = 1, count = 0;  // of the predicates that have arrived
  std::uint32_t last_conjunction = 1, last_count = 0;
};

/// Work that a lane has begun and not waited for, in groups.
template <class Work>
struct Pending {
  std::vector<Work> work;
  std::vector<std::size_t> group_ends;

  void commit() { group_ends.push_back(work.size()); }
  /// Completes all but the last `left` groups.
  void complete(std::size_t left) {
    if (group_ends.size() <= left) return;
    const auto groups = static_cast<std::ptrdiff_t>(group_ends.size() - left);
    const std::size_t end = group_ends[static_cast<std::size_t>(groups - 1)];
    for (std::size_t i = 0; i < end; ++i) work[i]();
    work.erase(work.begin(), work.begin() + static_cast<std::ptrdiff_t>(end));
    group_ends.erase(group_ends.begin(), group_ends.begin() + groups);
    for (std::size_t& each : group_ends) each -= end;
  }
};

/// cp.async of some bytes; those that it does not read become zero.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint32_t bytes = 0, read = 0;

  void operator()() const {
    std::memcpy(to, from, read);
    std::memset(to + read, 0, bytes - read);
  }
};

struct Cta;
struct Launch;
struct Device;

struct Warp {
  Cta* cta = nullptr;
  const Kernel* kernel = nullptr;
  std::uint32_t index = 0;
  std::unique_ptr<std::byte[]> registers;
  std::array<Split, warp_lanes> splits;
  int split_count = 0, current = 0;
  Mask live = 0;
  std::array<Pending<Copy>, warp_lanes> copies;
  std::array<Pending<std::function<void()>>, warp_lanes> bulk_copies;
  Pending<std::function<void()>> products;  // wgmma: what to check when it is waited for
  std::array<std::uint64_t, warp_lanes> cluster_arrival{};

  template <class T>
  T* at(std::uint32_t slot) const {
    return reinterpret_cast<T*>(registers.get() + slot);
  }
  Split& split() { return splits[static_cast<std::size_t>(current)]; }
  /// Whether the lanes of `members` that still run are all in the current split; else it waits.
  bool together(Mask members);
  void jump(std::uint32_t target, Mask lanes);
  void exit(Mask lanes);
  /// Runs until no split can go on without others; whether it was stopped while it could.
  bool run();

 private:
  bool ready(const Split& split) const;
  int choose();
};

struct Cluster;

struct Cta {
  Cluster* cluster = nullptr;
  std::array<std::uint32_t, 3> index{};
  std::uint32_t rank = 0;  // in its cluster
  std::vector<std::byte> shared, local;
  std::vector<Warp> warps;
  std::vector<Barrier> barriers;  // those that PTX numbers, then one a warpgroup for wgmma
  std::uint32_t live = 0;         // threads

  /// Bytes at an address of this CTA's own shared memory. Throws Fault outside of it.
  std::byte* shared_bytes(std::uint64_t address, std::size_t bytes);
  /// The same for a shared::cluster address.
  std::byte* cluster_bytes(std::uint64_t address, std::size_t bytes);
  Cta& of_cluster_address(std::uint64_t address);
  /// An arrival of `threads`; whether it completed the barrier.
  bool arrive(std::uint32_t barrier, std::uint32_t threads, std::uint32_t expected,
              std::uint32_t true_predicates = 0);
  void complete_if_all_arrived();
};

struct Cluster {
  Launch* launch = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::uint32_t arrived = 0, live = 0;  // threads
  std::uint64_t generation = 0;
  std::deque<std::function<void()>> queue;

  void complete_if_all_arrived();
};

struct Dimensions {
  std::array<std::uint32_t, 3> grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  std::size_t shared_bytes = 0;  // dynamic
};

/// A part of the parameters, aligned as a tensor map among them has to be.
struct alignas(128) ParameterLine {
  std::array<std::byte, 128> bytes{};
};

struct Launch {
  const Kernel& kernel;
  Dimensions dimensions;
  Device& device;
  std::vector<ParameterLine> parameters;
  std::uint64_t events = 0;  // changes that other warps may wait for
  std::vector<std::unique_ptr<std::byte[]>> free_registers;

  Launch(const Kernel& kernel, const Dimensions& dimensions, Device& device,
         std::vector<ParameterLine> parameters);
  /// Throws Fault.
  void run();

 private:
  std::unique_ptr<Cluster> begin(std::uint32_t number);
  void end(Cluster& cluster);
  bool step(Cluster& cluster);
  [[noreturn]] void report_deadlock(const std::vector<std::unique_ptr<Cluster>>& clusters) const;
};

/// Facts of the device, and its memory.
struct Device {
  int compute_capability = 90;
  int multiprocessors = 132;
  bool copies_late = true;
  Allocations memory;

  int ctas_per_multiprocessor(const Kernel& kernel, std::size_t threads,
                              std::size_t shared_bytes) const;
};

/// "thread 33 of CTA (0, 1, 0)"
std::string place_of(const Warp& warp, int lane);

enum class Space : std::uint8_t { generic, global, shared, cluster, local };
/// Bytes that a lane accesses at an address, aligned to their number.
std::byte* access(Warp& warp, Space space, std::uint64_t address, std::size_t bytes, int lane);

template <class F>
inline void for_lanes(Mask mask, F&& f) {
  if (mask == all_lanes) {
    for (int lane = 0; lane < warp_lanes; ++lane) f(lane);
  } else {
    for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
  }
}

}  // namespace fftune::emulator
