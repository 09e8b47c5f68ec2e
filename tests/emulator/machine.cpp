#include "emulator/machine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>

namespace fftune::emulator {
namespace {

constexpr int instructions_of_slice = 20000;
constexpr int steps_of_turn = 1000;

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds idle_of_deadlock{3};

std::uint32_t volume(const std::array<std::uint32_t, 3>& dimensions) {
  return dimensions[0] * dimensions[1] * dimensions[2];
}

std::string text_of(const std::array<std::uint32_t, 3>& index) {
  return fmt::format("({}, {}, {})", index[0], index[1], index[2]);
}

}  // namespace

// --- Memory ---

std::byte* Allocations::allocate(std::size_t bytes) {
  auto* const memory =
      static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256));
  if (memory == nullptr) return nullptr;
  const auto begin = reinterpret_cast<std::uint64_t>(memory);
  ends_[begin] = begin + bytes;
  allocated_ += bytes;
  return memory;
}

bool Allocations::free(std::uint64_t address) {
  const auto found = ends_.find(address);
  if (found == ends_.end()) return false;
  allocated_ -= found->second - found->first;
  std::free(reinterpret_cast<void*>(address));
  ends_.erase(found);
  last_ = {};
  return true;
}

std::byte* Allocations::check(std::uint64_t address, std::size_t bytes) {
  if (address < last_.begin || address + bytes > last_.end) {
    auto found = ends_.upper_bound(address);
    if (found == ends_.begin())
      throw Fault(fmt::format("{} bytes at {:#x}, where no memory is", bytes, address));
    --found;
    if (address + bytes > found->second)
      throw Fault(fmt::format(
          "{} bytes at {:#x}, which is {} bytes {} an allocation of {} bytes", bytes, address,
          address >= found->second ? address - found->second : found->second - address,
          address >= found->second ? "past the end of" : "before the end of",
          found->second - found->first));
    last_ = {found->first, found->second};
  }
  return reinterpret_cast<std::byte*>(address);
}

std::byte* Cta::shared_bytes(std::uint64_t address, std::size_t bytes) {
  if (address < shared_begin || address + bytes > shared_begin + shared.size())
    throw Fault(fmt::format("{} bytes at {} of {} bytes of shared memory", bytes,
                            static_cast<std::int64_t>(address) - shared_begin, shared.size()));
  return shared.data() + (address - shared_begin);
}

Cta& Cta::of_cluster_address(std::uint64_t address) {
  const std::uint64_t of = address >> rank_shift;
  if (of == 0) return *this;
  if (of > cluster->ctas.size()) throw Fault(fmt::format("no CTA has address {:#x}", address));
  Cta& cta = *cluster->ctas[of - 1];
  if (cta.live == 0) throw Fault("shared memory of a CTA that has ended");
  return cta;
}

std::byte* Cta::cluster_bytes(std::uint64_t address, std::size_t bytes) {
  return of_cluster_address(address).shared_bytes(address & ((1u << rank_shift) - 1), bytes);
}

namespace {

std::byte* checked(Warp& warp, Space space, std::uint64_t address, std::size_t bytes) {
  if (address % bytes != 0)
    throw Fault(
        fmt::format("{} bytes at {:#x}, which is no multiple of {}", bytes, address, bytes));
  Cta& cta = *warp.cta;
  switch (space) {
    case Space::shared:
      return cta.shared_bytes(address, bytes);
    case Space::cluster:
      return cta.cluster_bytes(address, bytes);
    default:
      break;
  }
  const auto inside = [&](const auto& memory) {
    const auto begin = reinterpret_cast<std::uint64_t>(memory.data());
    return address >= begin && address + bytes <= begin + memory.size() * sizeof memory[0];
  };
  if (space != Space::global && (inside(cta.local) || inside(cta.cluster->launch->parameters)))
    return reinterpret_cast<std::byte*>(address);
  if (space == Space::generic)
    for (const auto& each : cta.cluster->ctas)
      if (inside(each->shared)) return reinterpret_cast<std::byte*>(address);
  return cta.cluster->launch->device.memory.check(address, bytes);
}

}  // namespace

std::byte* access(Warp& warp, Space space, std::uint64_t address, std::size_t bytes, int lane) {
  try {
    return checked(warp, space, address, bytes);
  } catch (Fault& fault) {
    fault.lane = lane;
    throw;
  }
}

// --- Barriers ---

bool Cta::arrive(std::uint32_t number, std::uint32_t threads, std::uint32_t expected,
                 std::uint32_t true_predicates) {
  Barrier& barrier = barriers.at(number);
  if (barrier.arrived > 0 && barrier.expected != expected)
    throw Fault(fmt::format("barrier {} is waited for with {} and with {} threads", number,
                            barrier.expected, expected));
  ++cluster->launch->events;
  barrier.expected = expected;
  barrier.arrived += threads;
  barrier.count += true_predicates;
  if (true_predicates < threads) barrier.conjunction = 0;
  const std::uint32_t all = expected == 0 ? live : expected;
  if (barrier.arrived < all) return false;
  if (barrier.arrived > all)
    throw Fault(fmt::format("{} threads arrive at barrier {} of {}", barrier.arrived, number, all));
  barrier.last_conjunction = barrier.conjunction;
  barrier.last_count = barrier.count;
  barrier.arrived = barrier.count = 0;
  barrier.conjunction = 1;
  ++barrier.generation;
  return true;
}

void Cta::complete_if_all_arrived() {
  for (std::uint32_t i = 0; i < named_barriers; ++i)
    if (barriers[i].arrived > 0 && barriers[i].expected == 0 && barriers[i].arrived >= live)
      arrive(i, 0, 0);
}

void Cluster::complete_if_all_arrived() {
  if (arrived == 0 || arrived < live) return;
  arrived = 0;
  ++generation;
  ++launch->events;
}

// --- Warps ---

bool Warp::together(Mask members) {
  members &= live;
  if ((split().mask & members) == members) return true;
  split().wait = {Wait::Kind::lanes, 0, 0};
  return false;
}

void Warp::jump(std::uint32_t target, Mask lanes) {
  if (lanes == split().mask) {
    split().pc = target;
    return;
  }
  splits[static_cast<std::size_t>(split_count++)] = {target, lanes, {}, false};
  split().mask &= ~lanes;
  ++split().pc;
}

void Warp::exit(Mask lanes) {
  for_lanes(lanes, [&](int lane) {
    copies[static_cast<std::size_t>(lane)] = {};
    auto& bulk = bulk_copies[static_cast<std::size_t>(lane)];
    bulk.commit();
    bulk.complete(0);
  });
  live &= ~lanes;
  split().mask &= ~lanes;
  ++split().pc;
  if (split().mask == 0) split() = splits[static_cast<std::size_t>(--split_count)];
  for (int i = 0; i < split_count; ++i)
    if (auto& wait = splits[static_cast<std::size_t>(i)].wait; wait.kind == Wait::Kind::lanes)
      wait = {};
  const auto count = static_cast<std::uint32_t>(std::popcount(lanes));
  cta->live -= count;
  cta->cluster->live -= count;
  ++cta->cluster->launch->events;
  cta->complete_if_all_arrived();
  cta->cluster->complete_if_all_arrived();
}

bool Warp::ready(const Split& split) const {
  switch (split.wait.kind) {
    case Wait::Kind::none:
      return true;
    case Wait::Kind::lanes:
      return false;
    case Wait::Kind::barrier:
      return cta->barriers[split.wait.barrier].generation > split.wait.generation;
    case Wait::Kind::cluster:
      return cta->cluster->generation > split.wait.generation;
  }
  return false;
}

int Warp::choose() {
  // Splits at the same place are one again, unless they have arrived at a barrier there.
  const auto can_merge = [](const Split& split) {
    return split.wait.kind == Wait::Kind::none || split.wait.kind == Wait::Kind::lanes;
  };
  for (int i = 0; i < split_count; ++i)
    for (int j = split_count - 1; j > i; --j) {
      auto& a = splits[static_cast<std::size_t>(i)];
      auto& b = splits[static_cast<std::size_t>(j)];
      if (a.pc != b.pc || !can_merge(a) || !can_merge(b)) continue;
      a = {a.pc, a.mask | b.mask, {}, a.yielded && b.yielded};
      b = splits[static_cast<std::size_t>(--split_count)];
    }
  int chosen = -1;
  for (int i = 0; i < split_count; ++i) {
    const auto& split = splits[static_cast<std::size_t>(i)];
    if (split.yielded || !ready(split)) continue;
    if (chosen < 0 || split.pc < splits[static_cast<std::size_t>(chosen)].pc) chosen = i;
  }
  return chosen;
}

bool Warp::run() {
  const Instruction* const code = kernel->code.data();
  int left = instructions_of_slice;
  while (left > 0 && live != 0) {
    current = choose();
    if (current < 0) {
      for (Split& split : splits) split.yielded = false;
      return false;
    }
    std::uint32_t limit = std::numeric_limits<std::uint32_t>::max();
    for (int i = 0; i < split_count; ++i)
      if (const auto& other = splits[static_cast<std::size_t>(i)];
          i != current && other.pc > split().pc)
        limit = std::min(limit, other.pc);
    while (--left > 0) {
      Split& now = split();
      const Instruction& instruction = code[now.pc];
      Mask active = now.mask;
      if (instruction.guard >= 0) {
        const Mask predicate = *at<Mask>(static_cast<std::uint32_t>(instruction.guard));
        active &= instruction.guard_negated ? ~predicate : predicate;
      }
      Outcome outcome = Outcome::next;
      if (active != 0) try {
          outcome = instruction.execute(*this, active);
        } catch (const Fault& fault) {
          throw Fault(
              fmt::format("{}: {}: {}: {}", kernel->text->name,
                          place_of(*this, fault.lane >= 0 ? fault.lane : std::countr_zero(active)),
                          instruction.statement->text, fault.what()));
        }
      if (outcome == Outcome::next) {
        if (++now.pc >= limit) break;
        continue;
      }
      if (outcome == Outcome::yield) {
        ++now.pc;
        now.yielded = true;
      }
      if (outcome == Outcome::moved && split_count == 1 && live != 0) {
        limit = std::numeric_limits<std::uint32_t>::max();
        current = 0;
        continue;
      }
      break;
    }
  }
  return live != 0;
}

// --- Launches ---

Launch::Launch(const Kernel& kernel_, const Dimensions& dimensions_, Device& device_,
               std::vector<ParameterLine> parameters_)
    : kernel(kernel_),
      dimensions(dimensions_),
      device(device_),
      parameters(std::move(parameters_)) {}

std::unique_ptr<Cluster> Launch::begin(std::uint32_t number) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = this;
  const auto& [grid, block, shape, dynamic_bytes] = dimensions;
  const std::uint32_t threads = volume(block);
  const std::array<std::uint32_t, 2> across{grid[0] / shape[0], grid[1] / shape[1]};
  const std::array<std::uint32_t, 3> first{number % across[0] * shape[0],
                                           number / across[0] % across[1] * shape[1],
                                           number / across[0] / across[1] * shape[2]};
  for (std::uint32_t rank = 0; rank < volume(shape); ++rank) {
    auto& cta = *cluster->ctas.emplace_back(std::make_unique<Cta>());
    cta.cluster = cluster.get();
    cta.rank = rank;
    cta.index = {first[0] + rank % shape[0], first[1] + rank / shape[0] % shape[1],
                 first[2] + rank / shape[0] / shape[1]};
    // NaN of every type: what was never written is seen in results.
    cta.shared.assign(kernel.dynamic_begin + dynamic_bytes, std::byte{0xff});
    cta.local.resize(kernel.local_bytes * threads);
    cta.live = threads;
    cluster->live += threads;
    cta.warps.resize((threads + warp_lanes - 1) / warp_lanes);
    cta.barriers.resize(named_barriers + (cta.warps.size() + 3) / 4);
    for (std::uint32_t i = 0; i < cta.warps.size(); ++i) {
      Warp& warp = cta.warps[i];
      warp.cta = &cta;
      warp.kernel = &kernel;
      warp.index = i;
      const std::uint32_t own = std::min<std::uint32_t>(threads - i * warp_lanes, warp_lanes);
      warp.live = own == warp_lanes ? all_lanes : (Mask{1} << own) - 1;
      warp.splits[0] = {0, warp.live, {}, false};
      warp.split_count = 1;
      if (!free_registers.empty()) {
        warp.registers = std::move(free_registers.back());
        free_registers.pop_back();
      } else {
        warp.registers = std::make_unique<std::byte[]>(kernel.register_bytes);
      }
      for (const Preset& preset : kernel.presets)
        for (int lane = 0; lane < warp_lanes; ++lane) {
          const std::uint64_t value =
              preset.value ? preset.value(warp, lane, preset.number) : preset.number;
          std::memcpy(warp.at<std::byte>(preset.slot) + preset.bytes * static_cast<unsigned>(lane),
                      &value, std::min<std::size_t>(preset.bytes, 8));
        }
    }
  }
  return cluster;
}

void Launch::end(Cluster& cluster) {
  while (!cluster.queue.empty()) {
    cluster.queue.front()();
    cluster.queue.pop_front();
  }
  for (const auto& cta : cluster.ctas)
    for (Warp& warp : cta->warps) free_registers.push_back(std::move(warp.registers));
}

bool Launch::step(Cluster& cluster) {
  const std::uint64_t before = events;
  bool stopped = false;
  for (const auto& cta : cluster.ctas)
    for (Warp& warp : cta->warps)
      if (warp.live != 0) stopped |= warp.run();
  if (stopped || events != before) return true;
  if (cluster.queue.empty()) return false;
  auto copy = std::move(cluster.queue.front());
  cluster.queue.pop_front();
  copy();
  return true;
}

void Launch::run() {
  const std::uint32_t of_cluster = volume(dimensions.cluster);
  const std::uint32_t clusters = volume(dimensions.grid) / of_cluster;
  const int per_multiprocessor = device.ctas_per_multiprocessor(
      kernel, volume(dimensions.block), kernel.dynamic_begin + dimensions.shared_bytes);
  const std::size_t most = std::max<std::size_t>(
      1, static_cast<std::size_t>(device.multiprocessors * per_multiprocessor) / of_cluster);
  std::vector<std::unique_ptr<Cluster>> resident;
  auto last_progress = Clock::now();
  for (std::uint32_t begun = 0; begun < clusters || !resident.empty();) {
    bool progressed = false;
    for (std::size_t i = 0; i < resident.size();) {
      Cluster& cluster = *resident[i];
      for (int steps = 0; steps < steps_of_turn && cluster.live > 0 && step(cluster); ++steps)
        progressed = true;
      if (cluster.live > 0) {
        ++i;
        continue;
      }
      end(cluster);
      resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
    }
    // Those that have begun all wait: maybe for one that has not.
    if (begun < clusters && (resident.empty() || (!progressed && resident.size() < most))) {
      resident.push_back(begin(begun++));
      progressed = true;
    }
    if (progressed)
      last_progress = Clock::now();
    else if (Clock::now() - last_progress > idle_of_deadlock)
      report_deadlock(resident);
  }
}

void Launch::report_deadlock(const std::vector<std::unique_ptr<Cluster>>& clusters) const {
  std::string text = fmt::format("{}: no warp can go on", kernel.text->name);
  int lines = 0;
  for (const auto& cluster : clusters)
    for (const auto& cta : cluster->ctas)
      for (const Warp& warp : cta->warps)
        for (int i = 0; i < warp.split_count && lines < 40; ++i, ++lines) {
          const Split& split = warp.splits[static_cast<std::size_t>(i)];
          text += fmt::format("\n  {}, lanes {:#010x}: {}",
                              place_of(warp, std::countr_zero(split.mask)), split.mask,
                              kernel.code[split.pc].statement->text);
        }
  throw Fault(text);
}

int Device::ctas_per_multiprocessor(const Kernel& kernel, std::size_t threads,
                                    std::size_t shared_bytes) const {
  const std::size_t warps = (threads + warp_lanes - 1) / warp_lanes;
  const std::size_t registers =
      (static_cast<std::size_t>(kernel.registers) * warp_lanes + 255) / 256 * 256 * warps;
  const std::size_t by_shared =
      (compute_capability == 90 ? 228u << 10 : 164u << 10) / (shared_bytes + 1024);
  return static_cast<int>(std::min({std::size_t{32}, 64 / warps, 65536 / registers, by_shared}));
}

std::string place_of(const Warp& warp, int lane) {
  return fmt::format("thread {} of CTA {}", warp.index * warp_lanes + static_cast<unsigned>(lane),
                     text_of(warp.cta->index));
}

}  // namespace fftune::emulator
