#include "cpu/limits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "cpu/blas.hpp"

namespace fftune {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double infinity = std::numeric_limits<double>::infinity();

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The shortest of the runs body(0), body(1), ... There are at least `least` of them. More follow
/// until two agree within 1%, which shows that both were undisturbed, or `most_seconds` are over.
template <typename Body>
double shortest(std::size_t least, double most_seconds, const Body& body) {
  double best = infinity, second = infinity;
  const auto start = Clock::now();
  for (std::size_t run = 0;
       run < least || (second > 1.01 * best && seconds_since(start) < most_seconds); ++run) {
    const auto begin = Clock::now();
    body(run);
    const double own = seconds_since(begin);
    second = std::min(second, std::max(best, own));
    best = std::min(best, own);
  }
  return best;
}

struct MemoryRates {
  double copy = 0;  // bytes read and written a second
  double read = 0;  // bytes read a second
};

/// The sum of the 64-bit words of `bytes` (a multiple of 64) at `data`: a stream of reads alone.
std::uint64_t sum_of(const std::byte* data, std::size_t bytes) {
  std::array<std::uint64_t, 8> sums{};
  for (std::size_t at = 0; at < bytes; at += sizeof sums) {
    std::array<std::uint64_t, 8> words;
    std::memcpy(words.data(), data + at, sizeof words);
    for (std::size_t i = 0; i < words.size(); ++i) sums[i] += words[i];
  }
  return std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
}

/// By all threads, over memory that no cache holds; a copy is from one half of it to the other. The
/// rates are those of the fastest piece: a piece takes a few milliseconds, so that some run
/// undisturbed on a busy machine too, and before it comes again all the others have been through
/// the cache.
MemoryRates memory_rates(Parallel& pool, std::span<std::byte> memory) {
  constexpr std::size_t small_page = 4096;
  const int threads = pool.max_threads();
  const auto parts = static_cast<std::size_t>(threads);
  const std::size_t pieces = std::max<std::size_t>(memory.size() / (std::size_t{32} << 20), 2);
  const std::size_t part = memory.size() / pieces / parts / 64 * 64;
  const auto on_parts = [&](std::size_t piece, const auto& body) {
    pool.run(threads, threads,
             [&](int i) { body(&memory[(piece * parts + static_cast<std::size_t>(i)) * part]); });
  };
  // Pages are made by the threads that use them.
  for (std::size_t piece = 0; piece < pieces; ++piece)
    on_parts(piece, [&](std::byte* first) {
      for (std::size_t at = 0; at < part; at += small_page) first[at] = std::byte{1};
    });
  const auto rate = [&](std::size_t count, const auto& body) {
    const double seconds =
        shortest(count, 0.3, [&](std::size_t run) { on_parts(run % count, body); });
    return static_cast<double>(part * parts) / seconds;
  };
  MemoryRates rates;
  const std::size_t half = pieces / 2;
  rates.copy =
      2 * rate(half, [&](std::byte* from) { std::memcpy(from + half * parts * part, from, part); });
  std::atomic<std::uint64_t> sink{0};  // so that the reads are not optimised away
  rates.read = rate(pieces, [&](const std::byte* from) { sink += sum_of(from, part); });
  return rates;
}

/// Floating-point operations a second of OpenBLAS's product of n x n matrices.
double gemm_rate(int threads, std::int64_t n) {
  const auto elements = static_cast<std::size_t>(n * n);
  std::vector<float> a(elements), b(elements), c(elements);
  // Neither zeros nor equal numbers: some processors draw less power and run faster on those.
  for (std::size_t i = 0; i < elements; ++i) {
    a[i] = static_cast<float>(i * 2654435761u % 2048) / 1024 - 1;
    b[i] = static_cast<float>(i * 2246822519u % 2048) / 1024 - 1;
  }
  const BlasThreads hold(threads);
  const double seconds = shortest(3, 0.4, [&](std::size_t) {
    sgemm(n, n, n, {a.data(), n}, {b.data(), n}, 0, c.data(), n);
  });
  const auto size = static_cast<double>(n);
  return 2 * size * size * size / seconds;
}

}  // namespace

std::size_t cpu_limits_bytes(std::int64_t cache_bytes, std::size_t free_bytes) {
  const std::size_t wanted =
      std::max<std::size_t>(static_cast<std::size_t>(cache_bytes) * 5 / 2, std::size_t{64} << 20);
  return std::min(wanted, free_bytes / 4);
}

Limits measure_cpu_limits(Parallel& pool, std::span<std::byte> memory) {
  const std::int64_t n = 1536;
  Limits limits;
  // At few tokens nearly all traffic is reading weights, which many CPUs do faster than they copy.
  const MemoryRates rates = memory_rates(pool, memory);
  limits.bytes_per_second = std::max(rates.copy, rates.read);
  const bool blas = !blas_version().starts_with(no_blas);
  if (blas) limits.flops_per_second = gemm_rate(pool.max_threads(), n);
  limits.method =
      fmt::format("{} of {} MiB by {} thread{}; {}", rates.read > rates.copy ? "read" : "copy",
                  memory.size() >> 20, pool.max_threads(), pool.max_threads() == 1 ? "" : "s",
                  blas ? fmt::format("{} sgemm of {}^3 (bf16 too)", blas_version(), n)
                       : "no limit of arithmetic: " + blas_version());
  return limits;
}

}  // namespace fftune
