// Peers of a group: finding their memory, sending to it, and waits that end.
//
// A launch is one collective. Its epoch is one more than that of the launch before, counted in the
// rank's own memory, so that a replayed CUDA graph counts too. docs/distributed.md has the argument
// for the order of memory accesses.
#pragma once

#include "common/async.cuh"
#include "common/group_memory.cuh"

namespace fftune {

// --- System-scope accesses ---

__device__ __forceinline__ u32 load_relaxed_system(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_system(u32* address, u32 value) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire_system(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ u64 load_acquire_system(const u64* address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(u64* address, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Two packets of 8 bytes, each one memory operation.
__device__ __forceinline__ void store_packets(void* address, u32 first, u32 second, u32 epoch) {
  asm volatile(
      "{.reg .b64 one, two;\n"
      "mov.b64 one, {%1, %3};\n"
      "mov.b64 two, {%2, %3};\n"
      "st.relaxed.sys.global.v2.b64 [%0], {one, two};}" ::"l"(address),
      "r"(first), "r"(second), "r"(epoch)
      : "memory");
}

// Whether both packets are of the epoch.
__device__ __forceinline__ bool load_packets(const void* address, u32 epoch, u32& first,
                                             u32& second) {
  u32 first_epoch, second_epoch;
  asm volatile(
      "{.reg .b64 one, two;\n"
      "ld.relaxed.sys.global.v2.b64 {one, two}, [%4];\n"
      "mov.b64 {%0, %1}, one;\n"
      "mov.b64 {%2, %3}, two;}"
      : "=r"(first), "=r"(first_epoch), "=r"(second), "=r"(second_epoch)
      : "l"(address)
      : "memory");
  return first_epoch == epoch && second_epoch == epoch;
}

__device__ __forceinline__ u64 global_nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// One packet.
__device__ __forceinline__ void store_packet(void* address, float value, u32 epoch) {
  asm volatile(
      "{.reg .b64 one;\n"
      "mov.b64 one, {%1, %2};\n"
      "st.relaxed.sys.global.b64 [%0], one;}" ::"l"(address),
      "r"(__float_as_uint(value)), "r"(epoch)
      : "memory");
}
__device__ __forceinline__ bool load_packet(const void* address, u32 epoch, float& value) {
  u32 bits, own_epoch;
  asm volatile(
      "{.reg .b64 one;\n"
      "ld.relaxed.sys.global.b64 one, [%2];\n"
      "mov.b64 {%0, %1}, one;}"
      : "=r"(bits), "=r"(own_epoch)
      : "l"(address)
      : "memory");
  value = __uint_as_float(bits);
  return own_epoch == epoch;
}

// --- The group as a thread sees it ---

// Without a table (loopback) a rank is alone and plays its peers: it sends itself their data, which
// are its own, through every slot.
template <int ranks>
struct peer_group {
  char* own;
  char* base[ranks];
  u32 rank, epoch, tag;
  bool alone, failed;
  u64 packets, packet_bytes, data, data_bytes, timeout, status;

  __device__ __forceinline__ peer_group(const group_table* given, const group_table& loopback,
                                        u32 tag)
      : tag(tag), alone(given == nullptr) {
    own = alone ? reinterpret_cast<char*>(loopback.base[0])
                : const_cast<char*>(reinterpret_cast<const char*>(given));
    epoch = load_relaxed_system(&control()->epoch) + 1;
    failed = load_relaxed_system(&control()->error) != 0;
    const group_table& table = alone ? loopback : *given;
    rank = table.rank;
#pragma unroll
    for (int p = 0; p < ranks; ++p) base[p] = reinterpret_cast<char*>(table.base[p]);
    packets = table.packets;
    packet_bytes = table.packet_bytes;
    data = table.data;
    data_bytes = table.data_bytes;
    timeout = table.timeout;
    status = table.status;
    if (table.ranks != ranks) {
      fail(error_code(group_error::other_problem, rank));
      return;
    }
    // The table may be a copy, which has an old epoch behind it: the memory is elsewhere.
    char* there = own;
#pragma unroll
    for (int p = 0; p < ranks; ++p)
      if (!is_peer(p)) there = base[p];
    if (there != own) {
      own = there;
      epoch = load_relaxed_system(&control()->epoch) + 1;
      failed = load_relaxed_system(&control()->error) != 0;
    }
  }

  __device__ __forceinline__ group_control* control(const char* memory) const {
    return reinterpret_cast<group_control*>(const_cast<char*>(memory) + control_offset);
  }
  __device__ __forceinline__ group_control* control() const {
    return control(own);
  }

  __device__ __forceinline__ bool is_peer(int p) const {
    return static_cast<u32>(p) != rank;
  }
  // The slot in which rank p finds this rank's data.
  __device__ __forceinline__ u32 slot_at(int p) const {
    return alone ? p : rank;
  }

  __device__ __forceinline__ u64 slot_offset(u64 area, u64 slot_bytes, u32 slot) const {
    return area + ((epoch & 1) * ranks + slot) * slot_bytes;
  }
  __device__ __forceinline__ u32* arrival(const char* memory, u32 slot, i64 chunk) const {
    return reinterpret_cast<u32*>(const_cast<char*>(memory) + arrivals_offset) +
           slot * most_chunks + chunk;
  }

  // Ends the collective, and those after it, with the first error.
  __device__ __forceinline__ void fail(u32 code) {
    failed = true;
    if (atomicCAS(&control()->error, 0u, code) == 0 && status != 0)
      store_relaxed_system(reinterpret_cast<u32*>(status), code);
  }

  __device__ __forceinline__ void require_room(u64 needed, u64 there) {
    if (needed > there) fail(error_code(group_error::too_large, rank));
  }

  // Whether this thread is the one that reads the host's notice, once in 65 us. All threads that
  // wait would queue up at PCIe, for longer than their peers poll before they do the same.
  __device__ __forceinline__ bool may_look(u64 now) const {
    const u32 unit = static_cast<u32>(now >> 16), before = load_relaxed_system(&control()->looked);
    return unit != before && atomicCAS(&control()->looked, before, unit) == before;
  }

  // Waits until ready() is true. False: rank p did not come in time, or there was an error. `ready`
  // is asked once more behind the time, because an error may be younger than the data.
  template <class Ready>
  __device__ __forceinline__ bool wait(int p, const Ready& ready) {
    if (failed) return false;
    u64 start = 0;
    for (u32 spins = 1; !ready(); ++spins) {
      if (spins % 256 != 0) continue;
      const u64 now = global_nanoseconds();
      if (start == 0) start = now;
      u32 code = load_relaxed_system(&control()->error);
      if (code == 0 && status != 0 && may_look(now))
        code = load_relaxed_system(reinterpret_cast<u32*>(status) + 1);
      if (code == 0 && now - start > timeout) code = error_code(group_error::timeout, p);
      if (code == 0 || ready()) continue;
      fail(code);
      return false;
    }
    return true;
  }

  // Where this rank's packets for rank p are in p's memory, and p's in this rank's.
  __device__ __forceinline__ char* packets_for(int p) const {
    return base[p] + slot_offset(packets, packet_bytes, slot_at(p));
  }
  __device__ __forceinline__ const char* packets_of(int p) const {
    return own + slot_offset(packets, packet_bytes, p);
  }

  // The sum of a value over the ranks, in their order: one exchange by one thread of each rank,
  // whose place in the message is `at`. It uses the epoch up.
  __device__ __forceinline__ float sum_of_ranks(float value, i64 at) {
    float total = 0;
    if (!failed) {
#pragma unroll
      for (int p = 0; p < ranks; ++p)
        if (is_peer(p)) store_packet(packets_for(p) + at * 8, value, epoch);
    }
#pragma unroll
    for (int p = 0; p < ranks; ++p) {
      float summand = value;
      if (is_peer(p)) {
        const char* const from = packets_of(p) + at * 8;
        wait(p, [&] { return load_packet(from, epoch, summand); });
      }
      total = p == 0 ? summand : total + summand;
    }
    ++epoch;
    return total;
  }

  // One thread of each block, when all of the block have read the epoch: the last block ends it.
  __device__ __forceinline__ void finish() {
    const u32 last = gridDim.x - 1;
    if (atomicInc(&control()->ticket, last) == last) control()->epoch = epoch;
  }

  // Exchanges greetings, a lane for each peer. A peer's greeting of this epoch says that its
  // earlier launches are complete, so that nothing of the epoch before is still read there.
  __device__ __forceinline__ void greet(int p) {
    send_greeting(p);
    await_greeting(p);
  }
  __device__ __forceinline__ void send_greeting(int p) {
    if (p >= ranks || !is_peer(p) || failed) return;
    char* theirs = nullptr;
#pragma unroll
    for (int q = 0; q < ranks; ++q)
      if (q == p) theirs = base[q];
    store_release_system(&control(theirs)->greeting[epoch & 1][slot_at(p)],
                         static_cast<u64>(tag) << 32 | epoch);
  }
  __device__ __forceinline__ void await_greeting(int p) {
    if (p >= ranks || !is_peer(p) || failed) return;
    u64 word = 0;
    const bool came = wait(p, [&] {
      word = load_acquire_system(&control()->greeting[epoch & 1][p]);
      // A launch of many epochs may have ended there, and the next one's greeting be here.
      return static_cast<int>(static_cast<u32>(word) - epoch) >= 0;
    });
    if (came && static_cast<u32>(word) == epoch && static_cast<u32>(word >> 32) != tag)
      fail(error_code(group_error::other_problem, p));
  }
};

}  // namespace fftune
