// All-reduce through plain data and arrival flags, in one shot or in two, for messages of any size
// and rows of any width.
//
// A chunk is `chunk_rows` rows, sent in `parts` parts; a block has every gridDim.x - 1st chunk.
//
//   sending warps    a part each: copy it to the peers, fence, set the arrival flag there
//   summing warps    wait for a chunk's flags, add the ranks' rows in rank order, add the residual,
//                    normalise
//
// One shot: every chunk goes to every peer, and every rank adds all of them. Two shots: a chunk
// goes to its owner alone, which adds it and sends the rounded sum to the peers; each byte crosses
// a link 2 (ranks - 1) / ranks times instead of ranks - 1 times. The last block exchanges
// greetings.
//
// The kernel is long: its two roles and the two shots share the group, the owner of a chunk and a
// row's vectors in registers.
#include "all_reduce/normed_rows.cuh"
#include "common/peers.cuh"

namespace fftune {

struct chunk_config {
  bool two_shots;
  int vector;   // bytes of an access
  int senders;  // warps
  int summers;  // threads
  int vectors;  // of a thread in a row, in registers; 0: the row is read again from its output
  int parts;
};

// A reduction over the summing threads; `memory` has two halves that alternate.
template <int threads, class Join = addition>
__device__ __forceinline__ float join_summers(float value, float* memory) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = Join::join(value, __shfl_xor_sync(~0u, value, distance));
  if constexpr (threads > 32) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 == 0) memory[warp] = value;
    named_barrier_sync(1, threads);
    value = memory[0];
#pragma unroll
    for (int i = 1; i < threads / 32; ++i) value = Join::join(value, memory[i]);
  }
  return value;
}

template <class T, int count>
__device__ __forceinline__ aligned_vector<T, count> load_arrived(const char* address) {
  aligned_vector<T, count> value;
  constexpr int bytes = aligned_vector<T, count>::bytes;
  if constexpr (bytes == 2) {
    u16 half;
    asm volatile("ld.global.cg.b16 %0, [%1];" : "=h"(half) : "l"(address) : "memory");
    value.word[0] = half;
  } else if constexpr (bytes == 4) {
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value.word[0]) : "l"(address) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];"
                 : "=r"(value.word[0]), "=r"(value.word[1])
                 : "l"(address)
                 : "memory");
  } else {
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(address)
                 : "memory");
  }
  return value;
}

// The rank that adds a chunk in two shots. Blocks have chunks of all owners.
template <int ranks>
__device__ __forceinline__ u32 owner_of(i64 chunk, i64 blocks) {
  return static_cast<u32>((chunk + chunk / blocks) % ranks);
}

template <class T, class Convention, bool normalises, bool adds, norm_output output, int ranks,
          chunk_config config>
__global__ void __launch_bounds__(config.summers + 32 * config.senders)
    all_reduce_chunks(const __grid_constant__ all_reduce_params params) {
  constexpr int count = config.vector / static_cast<int>(sizeof(T));
  constexpr int parts = config.parts, summers = config.summers;
  __shared__ float memory[2][summers / 32], memory_of_largest[2][summers / 32];
  wait_and_launch_dependents();

  const i64 rows = params.rows, chunk_rows = params.chunk_rows;
  const int d = params.d;
  const i64 chunks = (rows + chunk_rows - 1) / chunk_rows;
  const i64 blocks = gridDim.x - 1;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const u64 policy = l2_eviction_policy<false>();
  const T* const x = static_cast<const T*>(params.x);
  peer_group<ranks> group(params.table, params.loopback, params.tag);
  group.require_room(static_cast<u64>(rows) * d * sizeof(T), group.data_bytes);
  // A rank that is alone owns all chunks.
  const auto owner = [&](i64 chunk) {
    return group.alone ? group.rank : owner_of<ranks>(chunk, blocks);
  };

  if (blockIdx.x == blocks) {
    if (thread < 32) group.greet(thread);
  } else if (thread >= summers) {
    const i64 own_parts = (chunks - blockIdx.x + blocks - 1) / blocks * parts;
    for (i64 index = thread / 32 - summers / 32; index < own_parts; index += config.senders) {
      const i64 chunk = blockIdx.x + index / parts * blocks;
      if (config.two_shots && owner(chunk) == group.rank && !group.alone) continue;
      const int part = static_cast<int>(index % parts);
      const i64 begin = chunk * chunk_rows * d;
      const i64 elements =
          (chunk * chunk_rows + chunk_rows < rows ? chunk_rows : rows - chunk * chunk_rows) * d;
      const i64 vectors = elements / count;
      const i64 first = vectors * part / parts, last = vectors * (part + 1) / parts;
      if (group.failed) break;
      constexpr int unroll = 4;
      for (i64 v = first + lane; v < last; v += 32 * unroll) {
        aligned_vector<T, count> values[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u)
          values[u] =
              load_once<T, count>(x + begin + (v + 32 * u) * count, v + 32 * u < last, policy);
#pragma unroll
        for (int p = 0; p < ranks; ++p) {
          if (!group.is_peer(p)) continue;
          if (config.two_shots && !group.alone && owner(chunk) != static_cast<u32>(p)) continue;
          char* const to =
              group.base[p] + group.slot_offset(group.data, group.data_bytes, group.slot_at(p));
#pragma unroll
          for (int u = 0; u < unroll; ++u)
            if (v + 32 * u < last)
              store_once(reinterpret_cast<T*>(to) + begin + (v + 32 * u) * count, values[u],
                         policy);
        }
      }
      __syncwarp();
      if (lane == 0) {
        fence_system();
#pragma unroll
        for (int p = 0; p < ranks; ++p) {
          if (!group.is_peer(p)) continue;
          if (config.two_shots && !group.alone && owner(chunk) != static_cast<u32>(p)) continue;
          store_relaxed_system(group.arrival(group.base[p], group.slot_at(p), chunk * parts + part),
                               group.epoch);
        }
      }
    }
  } else {
    const auto arrived = [&](int p, i64 flag) {
      group.wait(p, [&] {
        return static_cast<int>(load_acquire_system(group.arrival(group.own, p, flag)) -
                                group.epoch) >= 0;
      });
    };
    const T* const residual = static_cast<const T*>(params.residual);
    const T* const w = static_cast<const T*>(params.w);
    T* const y = static_cast<T*>(params.y);
    // A sum that is read again has memory of its own where y is of another type.
    constexpr bool has_sum = normalises && (adds || output != norm_output::same);
    T* const kept_sum = has_sum ? static_cast<T*>(params.sum) : y;
    int buffer = 0;
    // Two shots: first the chunks that this rank adds for its peers, then those that they add.
    for (int shot = 0; shot < (config.two_shots ? 2 : 1); ++shot) {
      for (i64 chunk = blockIdx.x; chunk < chunks; chunk += blocks) {
        const u32 adder = config.two_shots ? owner(chunk) : group.rank;
        const bool adds_here = adder == group.rank;
        if (adds_here != (shot == 0)) continue;
        const i64 first_row = chunk * chunk_rows;
        const i64 end = first_row + chunk_rows < rows ? first_row + chunk_rows : rows;
        for (i64 row = first_row; row < end; ++row, buffer ^= 1) {
          // All loads of a row are in flight together; those of the rank's own data do not wait.
          constexpr int held = config.vectors > 0 ? config.vectors : 1;
          aligned_vector<T, count> kept[held], others[held],
              values[held][ranks > 1 ? ranks - 1 : 1];
          const auto load_own = [&](int i, int place) {
            const i64 at = row * d + (i * summers + thread) * count;
            const bool valid = (i * summers + thread) * count < d;
            if (adds_here) kept[place] = load_once<T, count>(x + at, valid, policy);
            if constexpr (adds) others[place] = load_once<T, count>(residual + at, valid, policy);
          };
          const auto load_sent = [&](int i, int place) {
            if ((i * summers + thread) * count >= d) return;
            const auto slot = [&](u32 p) {
              return group.own + group.slot_offset(group.data, group.data_bytes, p) +
                     (row * d + (i * summers + thread) * count) * static_cast<i64>(sizeof(T));
            };
            if (!adds_here) {
              values[place][0] = load_arrived<T, count>(slot(adder));
              return;
            }
#pragma unroll
            for (u32 peer = 0; peer < ranks - 1; ++peer)
              values[place][peer] =
                  load_arrived<T, count>(slot(peer + (peer >= group.rank ? 1 : 0)));
          };
          if constexpr (config.vectors > 0) {
#pragma unroll
            for (int i = 0; i < config.vectors; ++i) load_own(i, i);
          }
          if (row == first_row) {
            if (adds_here) {
              for (int i = thread; i < ranks * parts; i += summers)
                if (group.is_peer(i / parts)) arrived(i / parts, chunk * parts + i % parts);
            } else if (thread == 0) {
              arrived(static_cast<int>(adder), chunk * parts);
            }
            named_barrier_sync(1, summers);
          }
          if constexpr (config.vectors > 0) {
#pragma unroll
            for (int i = 0; i < config.vectors; ++i) load_sent(i, i);
          }
          float squares = 0.0f;
          const int steps =
              config.vectors > 0 ? config.vectors : (d + summers * count - 1) / (summers * count);
#pragma unroll
          for (int i = 0; i < steps; ++i) {
            const int column = (i * summers + thread) * count;
            if (column >= d) continue;
            const i64 at = row * d + column;
            const int place = config.vectors > 0 ? i : 0;
            if constexpr (config.vectors == 0) {
              load_own(i, 0);
              load_sent(i, 0);
            }
            float total[count], summand[count];
            if (adds_here) {
#pragma unroll
              for (int p = 0; p < ranks; ++p) {
                aligned_vector<T, count> value = kept[place];
                if (p > 0 && static_cast<u32>(p) > group.rank)
                  value = values[place][larger(p - 1, 0)];
                if (p < ranks - 1 && static_cast<u32>(p) < group.rank) value = values[place][p];
                to_floats(value, summand);
#pragma unroll
                for (int e = 0; e < count; ++e)
                  total[e] = p == 0 ? summand[e] : total[e] + summand[e];
              }
              if constexpr (config.two_shots) {
                const auto rounded = from_floats<T>(total);
#pragma unroll
                for (int p = 0; p < ranks; ++p) {
                  if (!group.is_peer(p) || group.failed) continue;
                  char* const to = group.base[p] + group.slot_offset(group.data, group.data_bytes,
                                                                     group.slot_at(p));
                  store_once(reinterpret_cast<T*>(to) + at, rounded, policy);
                }
                to_floats(rounded, total);
              }
            } else {
              to_floats(values[place][0], total);
            }
            if constexpr (adds) {
              to_floats(others[place], summand);
#pragma unroll
              for (int e = 0; e < count; ++e) total[e] += summand[e];
            }
            kept[place] = from_floats<T>(total);
            if (!group.failed && (!normalises || adds || config.vectors == 0))
              store_once(kept_sum + at, kept[place], policy);
            to_floats(kept[place], total);
#pragma unroll
            for (int e = 0; e < count; ++e) squares += total[e] * total[e];
          }
          if constexpr (normalises) {
            const normed_rows<T, Convention, output> normed(
                join_summers<summers>(squares, memory[buffer]), params);
            // body(column, sum, weights) for each vector of this thread.
            const auto for_each_vector = [&](const auto& body) {
#pragma unroll
              for (int i = 0; i < steps; ++i) {
                const int column = (i * summers + thread) * count;
                if (column >= d || group.failed) continue;
                aligned_vector<T, count> sum = kept[config.vectors > 0 ? i : 0];
                if constexpr (config.vectors == 0)
                  sum = load_arrived<T, count>(
                      reinterpret_cast<const char*>(kept_sum + row * d + column));
                body(column, sum, load_through_l1<T, count>(w + column, true));
              }
            };
            float largest = 0;
            if constexpr (output == norm_output::fp8) {
              for_each_vector([&](int, const auto& sum, const auto& weights) {
                normed.join_largest(largest, sum, weights);
              });
              largest = join_summers<summers, larger_magnitude>(largest, memory_of_largest[buffer]);
              if (thread == 0 && !group.failed) params.scales[row] = normed.scale(largest);
            }
            const float scale = normed.scale(largest);
            for_each_vector([&](int column, const auto& sum, const auto& weights) {
              normed.store(row * d + column, sum, weights, scale, policy);
            });
          }
        }
        if constexpr (config.two_shots) {
          if (!adds_here || group.alone) continue;
          named_barrier_sync(1, summers);
          if (thread < ranks && !group.failed) {
            fence_system();
#pragma unroll
            for (int p = 0; p < ranks; ++p)
              if (p == thread && group.is_peer(p))
                store_relaxed_system(group.arrival(group.base[p], group.slot_at(p), chunk * parts),
                                     group.epoch);
          }
        }
      }
    }
  }
  __syncthreads();
  if (thread == 0) group.finish();
}

}  // namespace fftune
